"""Partitions: disjoint, seeded, the right number, with the heterogeneity their kind promises."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.config.sections import Partition
from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.data.partition import partition

LABELS = stream(0, "labels").integers(0, 10, 3000)
IID, NATURAL = Partition(), Partition(kind="natural", by="w")
SPECS = [IID, Partition(kind="dirichlet", alpha=0.6), Partition(kind="classes", per_client=2), NATURAL]
WRITERS = np.array([f"writer {i}" for i in stream(0, "writers").integers(0, 40, 3000)])


def check(parts: tuple[np.ndarray, ...], total: int, clients: int) -> None:
    """Disjoint sorted rows, one array per client."""
    assert len(parts) == clients
    used = np.concatenate(parts)
    assert len(np.unique(used)) == len(used) <= total and set(used) <= set(range(total))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
def test_at_most_once_sorted_seeded(spec: Partition) -> None:
    parts = partition(LABELS, spec, 25, 1, WRITERS)
    check(parts, len(LABELS), 25)
    again, other = partition(LABELS, spec, 25, 1, WRITERS), partition(LABELS, spec, 25, 2, WRITERS)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other))
    if spec.kind != "natural":
        assert sum(map(len, parts)) == len(LABELS), "nothing is left over"


def test_check_has_a_broken_twin() -> None:
    rows = np.arange(6)
    for broken in ((rows, rows), (rows[::-1],), (rows, rows[:0]), (np.array([7]),)):
        with pytest.raises(AssertionError):
            check(broken, 6, 1 if len(broken) == 1 else 3)
    with pytest.raises(AssertionError):
        check((rows, rows), 6, 2)


@given(
    total=st.integers(1, 60), clients=st.integers(1, 70), classes=st.integers(1, 6),
    alpha=st.sampled_from([1e-9, 0.05, 0.6, 100.0, 1e9]), kind=st.sampled_from(["iid", "dirichlet", "classes"]),
    seed=st.integers(0, 3),
)  # fmt: skip
@settings(deadline=None, max_examples=120)
def test_any_size_is_a_partition_or_one_sentence(
    total: int, clients: int, classes: int, alpha: float, kind: str, seed: int
) -> None:
    labels = stream(seed, "any", total).integers(0, classes, total)
    spec = Partition(kind=kind, alpha=alpha, per_client=2)  # type: ignore[arg-type]
    try:
        parts = partition(labels, spec, clients, seed)
    except InputError as error:
        assert "\n" not in str(error) and (clients > total or kind == "classes"), error
        return
    check(parts, total, clients)


def test_iid_sizes_differ_by_one_and_mix_a_sorted_file() -> None:
    parts = partition(np.sort(LABELS), IID, 7, 0)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(len(np.unique(np.sort(LABELS)[part])) == 10 for part in parts)


def test_dirichlet_shares_have_the_variance_of_the_distribution() -> None:
    clients, alpha = 50, 0.6
    labels = np.repeat(np.arange(20), 5000)
    parts = partition(labels, Partition(kind="dirichlet", alpha=alpha), clients, 3)
    shares = np.array([np.bincount(labels[part], minlength=20) / 5000 for part in parts])
    # one share of a symmetric Dirichlet over M clients is Beta(α, (M−1)α)
    assert shares.var() == pytest.approx(((1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)), rel=0.2)


def test_small_alpha_leaves_empty_clients() -> None:
    parts = partition(LABELS, Partition(kind="dirichlet", alpha=0.001), 40, 0)
    check(parts, len(LABELS), 40)
    assert min(map(len, parts)) == 0 and sum(map(len, parts)) == len(LABELS)


def test_classes_per_client() -> None:
    parts = partition(LABELS, Partition(kind="classes", per_client=3), 20, 0)
    assert all(len(np.unique(LABELS[part])) == 3 for part in parts)
    few = partition(LABELS, Partition(kind="classes", per_client=2), 2, 0)  # four of ten classes are used
    check(few, len(LABELS), 2)


def test_natural_parts_are_the_column() -> None:
    parts = partition(LABELS, NATURAL, None, 0, WRITERS)
    check(parts, len(LABELS), 40)
    assert sum(map(len, parts)) == len(LABELS) and all(len(set(WRITERS[part])) == 1 for part in parts)
    for part in partition(LABELS, NATURAL, 5, 0, WRITERS):
        assert np.array_equal(part, np.flatnonzero(np.isin(WRITERS, WRITERS[part[0]]))), "a chosen client is whole"
    gaps = np.array(["b", None, "b", 3], dtype=object)
    assert sorted(len(part) for part in partition(LABELS[:4], Partition(kind="natural"), None, 0, gaps)) == [1, 1, 2]


@pytest.mark.parametrize(
    ("spec", "clients", "natural", "says"),
    [
        (Partition(kind="classes", per_client=11), 5, None, "found 11; allowed: a whole number ≥ 1 and ≤ 10"),
        (IID, 3001, None, "data.clients: found 3001; allowed: at most 3000"),
        (IID, None, None, "data.clients: found nothing"),
        (NATURAL, 41, WRITERS, "data.clients: found 41; allowed: at most 40"),
        (NATURAL, 4, None, "data.partition.by: found w"),
        (Partition(kind="classes", per_client=2), 3000, None, "cannot be split among 3000 clients"),
    ],
)  # fmt: skip
def test_error_sentences(spec: Partition, clients: int | None, natural: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        partition(LABELS, spec, clients, 0, natural)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_partitioners_say_nothing(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    for spec in SPECS:
        partition(LABELS, spec, 4, 0, WRITERS)
    out = capfd.readouterr()
    assert out.out == "" and out.err == "" and not [w for w in recwarn if "flwr" in str(w.filename)]
