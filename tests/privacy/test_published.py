"""The account of published procedures: the figures of the design's table, and bounds that really bound."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedflat.core.checks import InputError
from fedflat.core.cohorts import FromRound
from fedflat.methods.published import (
    PAPER_OF,
    PAPERS,
    Published,
    paper_of,
    published_plan,
    reproduced_paper,
    with_tensors,
)
from fedflat.privacy.accounting.curves import gaussian_epsilon
from fedflat.privacy.plan import Plan
from fedflat.privacy.statement import TEXTS


def plan(paper: str = "000", tensors: int = 62, **changes: object) -> Plan:
    given = {"clients": 500, "cohort": 50, "rounds": 300, "noise_multiplier": 0.95, "delta": 1 / 500, "clip": 0.2}
    return with_tensors(published_plan(paper, **{**given, "epochs": True, **changes}), tensors)  # type: ignore[arg-type]


def mechanism(made: Plan) -> Published:
    assert isinstance(made.mechanism, Published)
    return made.mechanism


def test_the_released_schedule_has_clients_that_take_part_12_to_50_times() -> None:
    counts = np.zeros(500, dtype=int)
    for number in range(300):  # the released code seeds numpy's old generator with the round number
        counts[np.random.RandomState(number).choice(500, 50, replace=False)] += 1
    assert (counts.min(), counts.max()) == (12, 50)


def test_proven_composes_the_busiest_clients_messages() -> None:
    made = plan(tensors=8, rounds=20)
    sampler = made.sampler
    assert isinstance(sampler, FromRound)
    reach = 2 * math.sqrt(sampler.busiest(20) * 50 * 8) / 0.95
    assert made.epsilon(20) == gaussian_epsilon(reach, 1 / 500)
    assert mechanism(made).proven(made, 20, 1.0) == gaussian_epsilon(reach / 2, 1 / 500)
    assert made.epsilon(0) == 0 and made.epsilon(5) < made.epsilon(20)
    (found,) = made.guarantees(20)
    assert (found.relation, found.delta, found.epsilon) == ("replace-one", 1 / 500, made.epsilon(20))


def test_proven_exceeds_the_claim_wherever_both_are_finite() -> None:
    for paper in ("000", "003", "004"):
        made = plan(paper, rounds=30)
        assert mechanism(made).claimed(made, 30) < mechanism(made).proven(made, 30, 1.0) < made.epsilon(30) < math.inf


def test_median_clipping_proves_nothing() -> None:
    made = plan("002")
    assert made.epsilon(1) == math.inf and made.epsilon(0) == 0
    assert mechanism(made).record(made)["std"] is None
    text = " ".join(mechanism(made).reasons(made, 300))
    assert "no finite ε is proven" in text and "13.46" not in text and "Item 2" in text and "Item 1:" not in text


def test_004_counts_secret_cohorts_and_their_largest_size() -> None:
    made = plan("004", rounds=100)
    found = mechanism(made)
    assert 50 < found.shares(made) < 110 and found.tensors == 1 and found.record(made)["tensors"] == 1
    lower = gaussian_epsilon(2 * math.sqrt(10 * 50) / 0.95, 1 / 500)  # the expected count, the expected cohort
    assert lower < made.epsilon(100) < math.inf
    assert plan("004", clients=60, cohort=59).mechanism.shares(plan("004", clients=60, cohort=59)) == 60  # type: ignore[union-attr]
    assert any("realised cohort" in reason for reason in found.reasons(made, 100))


def test_the_ledgers_line_gives_the_message_multiplier_back() -> None:
    made = plan(tensors=8)
    line = made.record(4, 0.2 * math.sqrt(8))
    assert line["mechanism"] == "published-000" and line["sampling"] == "round-number"
    assert line["std"] / line["clip"] == pytest.approx(line["noise_multiplier"])
    assert line["std"] / line["sensitivity"] == pytest.approx(mechanism(made).message_multiplier(made) / 2)
    assert line["std"] == pytest.approx(0.95 * 0.2 / math.sqrt(50))
    assert line["epsilon"] == made.epsilon(5)


def test_every_reason_names_its_item() -> None:
    for paper, items in PAPERS.items():
        made = plan(paper)
        found = mechanism(made)
        assert found.items == items and set(items) <= set(TEXTS["paper_items"])
        said = " ".join(found.reasons(made, 300))
        for item in set(items) - {1} if paper == "002" else items:
            assert f"Item {item}:" in said, (paper, item)
    assert "1,46" in " ".join(mechanism(plan()).reasons(plan(), 300))


def test_the_statement_says_what_each_procedure_does() -> None:
    for paper in PAPERS:
        made = mechanism(plan(paper))
        assert made.facts["paper_items"] == list(made.items)
        assert ("then masks it" in made.facts["mechanism"]) == (3 in made.items)
        assert ("realised cohort" in made.facts["mechanism"]) == (paper == "004")
        assert made.settled(None)["local"] == {} and made.settled(5)["local"] == {"steps": None, "epochs": 5}
        assert made.stated(plan(paper), 3)["claimed"] == made.claimed(plan(paper), 3)


def test_a_paper_is_found_by_its_number_or_as_it_is_cited() -> None:
    assert [reproduced_paper(name, PAPERS) for name in ("0", "003", "shi et al. 2023B")] == ["000", "003", "003"]
    with pytest.raises(InputError, match=r"reproduce PAPER: found Zhang.*000 \(Shi et al. 2023a\), 002"):
        reproduced_paper("Zhang et al. 2024", PAPERS)


def test_items_six_and_nine_apply_only_where_the_recipe_has_them() -> None:
    assert mechanism(plan(epochs=False, delta=1e-5)).items == (1, 4, 5, 7, 10)
    assert mechanism(plan(delta=None)).items == PAPERS["000"] and plan(delta=None).delta == 1 / 500


def test_without_noise_the_claim_is_infinite_too() -> None:
    made = plan(noise_multiplier=0)
    assert mechanism(made).claimed(made, 1) == mechanism(made).proven(made, 1) == math.inf
    assert mechanism(made).claimed(made, 0) == 0
    assert any("noise_multiplier is 0" in warning for warning in made.warnings)
    assert any("0.1/M" in warning for warning in made.warnings)
    assert "none" in " ".join(mechanism(made).reasons(made, 3))


def test_a_target_is_a_target_for_the_claim() -> None:
    made = plan(noise_multiplier=None, epsilon=10.83)
    assert mechanism(made).claimed(made, 300) == pytest.approx(10.83, rel=1e-3)
    assert mechanism(made).claimed(made, 300, "pld") == pytest.approx(9.37, rel=1e-3)
    assert made.noise_multiplier == pytest.approx(0.95, rel=1e-3) and made.budget is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"noise_multiplier": None}, "privacy: found neither noise_multiplier nor epsilon; allowed: exactly"),
        ({"epsilon": 3.0}, "privacy: found both"),
        ({"cohort": 50.5}, "cohort.size: found 50.5"),
        ({"noise_multiplier": -1}, "privacy.noise_multiplier: found -1"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        plan(**changes)


def test_papers_by_name_and_by_algorithm() -> None:
    assert paper_of("dp-fedsam", None) == "000" and paper_of("dp-fedsam", "003") == "003"
    assert set(PAPER_OF.values()) <= set(PAPERS)
    with pytest.raises(InputError, match=r"privacy.published: found 005; allowed: 000, 002, 003, 004"):
        paper_of("dp-fedsam", "005")
    with pytest.raises(InputError, match=r"found published for dp2-fedsam; allowed: sound, or privacy.published"):
        paper_of("dp2-fedsam", None)


def test_tensors_matter_only_to_a_clip_of_each() -> None:
    assert mechanism(with_tensors(plan("004"), 9)).tensors == 1
    sound = replace(plan(), mechanism=None, protocol="sound")
    assert with_tensors(sound, 9) is sound


def test_the_public_schedule() -> None:
    sampler = FromRound(40, 8)
    drawn = [sampler.select_at(number, None) for number in range(12)]
    assert all(len(set(ids.tolist())) == 8 for ids in drawn) and not np.array_equal(drawn[0], drawn[1])
    busiest = [int(np.bincount(np.concatenate(drawn[:rounds])).max()) for rounds in range(1, 13)]
    assert [sampler.busiest(rounds) for rounds in range(13)] == [0, *busiest]
    assert sampler.q == 0.2 and sampler.event(2.0).noise_multiplier == 2.0
    with pytest.raises(InputError, match="whole number"):
        FromRound(40, 8.5)
