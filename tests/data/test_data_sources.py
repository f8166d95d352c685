"""From a recipe's data section to a federation: tiny parquet files, and the real sets where FEDFLAT_DATA has them."""

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedflat.config.sections import DataSection
from fedflat.core.checks import InputError, RunError
from fedflat.core.rng import stream
from fedflat.data import decoding
from fedflat.data.decoding import tokenize
from fedflat.data.locate import Written, locate
from fedflat.data.preparation import DATASETS, Source
from fedflat.data.sources import load

REAL = Path(os.environ.get("FEDFLAT_DATA", "/nonexistent"))
PIXELS = stream(0, "source pixels").integers(0, 256, (30, 4, 4, 3)).astype(np.uint8)
LABELS = stream(0, "source labels").integers(0, 3, 30)
IID = {"kind": "iid"}


def has(name: str) -> Any:
    return pytest.mark.skipif(not (REAL / name).is_dir(), reason=f"FEDFLAT_DATA has no {name}")


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, no data folder, no hub."""
    monkeypatch.setenv("FEDFLAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("FEDFLAT_DATA", raising=False)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))


def write(file: Path, columns: dict[str, list[Any]], features: dict[str, Any] | None = None) -> Path:
    import datasets

    file.parent.mkdir(parents=True, exist_ok=True)
    kinds = datasets.Features(features) if features else None
    datasets.Dataset.from_dict(columns, features=kinds).to_parquet(str(file))
    return file


def image_rows(rows: slice, column: str = "img", **more: list[Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    import datasets

    pictures = [Image.fromarray(p) for p in PIXELS[rows]]
    columns: dict[str, list[Any]] = {column: pictures, "label": LABELS[rows].tolist(), **more}
    return columns, {column: datasets.Image(), "label": datasets.ClassLabel(num_classes=3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "own" / "train.parquet", *image_rows(slice(0, 20)))
    write(tmp_path / "own" / "test.parquet", *image_rows(slice(20, 30)))
    return tmp_path / "own"


def test_images_from_a_folder(folder: Path) -> None:
    data = load({"dataset": str(folder), "partition": IID, "clients": 4, "client_test_fraction": 0.2}, 3)
    expected = (PIXELS.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
    assert np.allclose(data.inputs.numpy(), expected[:20], atol=1e-6) and data.inputs.dtype == torch.float32
    assert data.inputs.is_contiguous() and data.input_shape == (3, 4, 4) and data.classes == 3
    assert np.array_equal(data.targets.numpy(), LABELS[:20])
    assert data.test_inputs is not None and np.allclose(data.test_inputs.numpy(), expected[20:], atol=1e-6)
    assert data.sizes.tolist() == [4] * 4 and [len(rows) for rows in data.held_back] == [1] * 4
    assert np.array_equal(np.sort(np.concatenate([*data.parts, *data.held_back])), np.arange(20))


def test_a_file_or_a_section_will_do_and_seeds_decide(folder: Path) -> None:
    spec = DataSection(dataset=str(folder / "train.parquet"), clients=2)
    data, again, other = load(spec, 0), load(spec, 0), load(spec, 1)
    assert data.fingerprint() == again.fingerprint() != other.fingerprint()
    assert data.test_inputs is None and len(data.inputs) == 20, "no row becomes public unasked"
    asked = load({"dataset": spec.dataset, "partition": "iid", "clients": 2, "test_fraction": 0.2})
    assert len(asked.inputs) == 16 and asked.test_inputs is not None and len(asked.test_inputs) == 4
    rows = {tuple(row.flatten().tolist()) for row in torch.cat([asked.inputs, asked.test_inputs])}
    assert len(rows) == 20, "train and test share nothing"


def test_limits(folder: Path) -> None:
    spec = {"dataset": str(folder), "partition": IID, "clients": 2, "max_examples": 7, "max_test": 3}
    data = load(spec, 0)
    assert len(data.inputs) == 7 and data.sizes.sum() == 7 and data.examples_per_client == 4
    assert data.test_targets is not None and np.array_equal(data.test_targets.numpy(), LABELS[20:23])
    assert not torch.equal(load(spec, 1).inputs, data.inputs), "the choice is seeded"


def test_second_load_reads_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = {"dataset": str(folder), "partition": IID, "clients": 2}
    first = load(spec).fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode", lambda *_: pytest.fail("decoded again"))
        assert load(spec).fingerprint() == first
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(file.read_bytes()[:-5])
    assert load(spec).fingerprint() == first, "a damaged cache is only slower"


def test_columns_by_type_by_word_and_short_name_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    columns, features = image_rows(slice(0, 20), "photo", digit=[0] * 20, writer=["a", "b"] * 10)
    features |= {"digit": datasets.ClassLabel(num_classes=10), "writer": datasets.Value("string")}
    file = write(tmp_path / "data" / "mnist" / "train-00000-of-00001.parquet", columns, features)
    spec = {"dataset": str(file), "partition": {"kind": "natural", "by": "writer"}, "test_fraction": 0.0}
    with pytest.raises(
        InputError, match=r"data.target: .* 2 candidates \(label, digit\) .* photo, label, digit, writer"
    ):
        load(spec)
    assert load({**spec, "target": "digit"}).classes == 10
    data = load({**spec, "target": "label"})
    assert data.clients == 2 and sorted(data.sizes) == [10, 10] and {len(set(part % 2)) for part in data.parts} == {1}
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "data"))
    with pytest.raises(InputError, match="3 channels"):  # the folder is named mnist, its images are not grey
        named = {"dataset": "ylecun/mnist", "partition": IID, "clients": 2}
        monkeypatch.setitem(
            DATASETS, "mnist", Source("", "image", "ylecun/mnist", 10, ("image",), mean=(0.1, 0.2), std=(1.0, 1.0))
        )
        load(named)


def test_features_need_not_be_stored(tmp_path: Path) -> None:
    import io

    out = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(out, "PNG")
    file = write(tmp_path / "plain.parquet", {"x": [out.getvalue()] * 5, "y": [0, 1, 2, 3, 3]})
    data = load({"dataset": str(file), "partition": IID, "clients": 2})
    assert data.input_shape == (3, 4, 4) and data.classes == 4


def test_sentences(tmp_path: Path) -> None:
    rows = {"sentence": ["good film", "bad film", "good", "bad"] * 5, "label": [1, 0, 1, 0] * 5}
    write(tmp_path / "sst2" / "train.parquet", rows)
    write(tmp_path / "sst2" / "validation.parquet", {"sentence": ["good film"], "label": [1]})
    data = load({"dataset": str(tmp_path / "sst2"), "partition": IID, "clients": 2, "max_length": 5, "vocabulary": 99})
    assert data.inputs.shape == (20, 5) and data.vocabulary == 99 and data.classes == 2 and data.padding == 0
    assert data.test_inputs is not None and torch.equal(data.test_inputs[0], data.inputs[0])
    alone = load(
        {"dataset": str(tmp_path / "sst2" / "validation.parquet"), "partition": IID, "clients": 1, "inputs": "sentence"}
    )
    assert alone.inputs.shape == (1, 64)


def test_sentence_pairs_by_name(tmp_path: Path) -> None:
    rows = {"a": ["p"] * 4, "b": ["q"] * 4, "label": [0, 1] * 2}
    spec = {"dataset": str(write(tmp_path / "pairs.parquet", rows)), "partition": IID, "clients": 1}
    both, listed, one = (load({**spec, "inputs": value}).inputs for value in ("a, b", ["a", "b"], "a"))
    assert torch.equal(both, listed) and (both > 0).sum(1).tolist() == [3] * 4 and (one > 0).sum(1).tolist() == [1] * 4


def test_shakespeare_windows_have_natural_clients(tmp_path: Path) -> None:
    speech = {"A": "x" * 330, "B": "y" * 170, "C": "short"}
    write(tmp_path / "shakespeare" / "train.parquet", {"character_id": list(speech), "text": list(speech.values())})
    data = load({"dataset": str(tmp_path / "shakespeare"), "partition": {"kind": "natural"}, "test_fraction": 0.0})
    assert data.inputs.shape == data.targets.shape == (6, 80) and data.classes == data.vocabulary == 81
    assert sorted(data.sizes) == [2, 4], "C says less than one window"
    ready = {"character_id": ["A", "B"], "x": ["ab" * 40] * 2, "y": ["a", "b"]}
    write(tmp_path / "hub" / "shakespeare" / "train.parquet", ready)
    hub = load({"dataset": str(tmp_path / "hub/shakespeare"), "partition": {"kind": "natural"}, "test_fraction": 0.0})
    assert hub.clients == 2 and torch.equal(hub.inputs[0, 1:], hub.targets[0, :-1])


def test_digits_need_no_file() -> None:
    data = load({"dataset": "digits", "partition": {"kind": "dirichlet", "alpha": 0.5}, "clients": 20})
    assert data.inputs.shape == (1438, 1, 8, 8) and data.test_inputs is not None and len(data.test_inputs) == 359
    both = torch.cat([data.inputs, data.test_inputs])
    assert abs(float(both.mean())) < 1e-3 and abs(float(both.std()) - 1) < 1e-3, "the table's constants are digits' own"
    levels = (both * 0.3760 + 0.3053) * 16
    assert torch.allclose(levels, levels.round(), atol=1e-4), "no pixel lost to rounding"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"dataset": "cifar1"}, "Did you mean cifar10?"),
        ({"dataset": "./nowhere"}, "no such file or folder"),
        ({"dataset": ""}, "data.dataset"),
        ({"dataset": "digits", "clients": 5000}, "data.clients: found 5000; allowed: at most 1438"),
        ({"dataset": "digits", "partition": {"kind": "natural", "by": "who"}}, "data.partition.by"),
    ],
)
def test_error_sentences(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        load(spec)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_unreachable_hub_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path))
    for name, hub in (("cifar100", "uoft-cs/cifar100"), ("who/what", "who/what"), ("sst2", "nyu-mll/glue (sst2)")):
        with pytest.raises(RunError) as error:
            load({"dataset": name, "clients": 2})
        text = str(error.value)
        assert str(tmp_path) in text and hub in text and "data.dataset=PATH" in text and "\n" not in text


def test_hub_answers_are_read_like_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def answer(hub: str, config: str | None) -> Any:
        asked.append((hub, config))
        rows = {split: image_rows(part) for split, part in (("train", slice(0, 20)), ("test", slice(20, 30)))}
        return {split: datasets.Dataset.from_dict(c, features=datasets.Features(f)) for split, (c, f) in rows.items()}

    monkeypatch.setattr(datasets, "load_dataset", answer)
    data = load({"dataset": "who/pictures", "partition": IID, "clients": 2})
    assert asked == [("who/pictures", None)] and data.name == "pictures"
    assert data.test_inputs is not None and len(data.inputs) == 20 and len(data.test_inputs) == 10
    assert not torch.equal(data.inputs[:10], data.test_inputs), "splits without files are not mistaken for each other"


def test_only_an_evaluation_split_is_split_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "qnli" / "validation.parquet", {"question": ["q"] * 10, "sentence": ["s"] * 10, "label": [0, 1] * 5}
    )
    own = load({"dataset": str(tmp_path / "qnli"), "partition": IID, "clients": 2})
    assert own.test_inputs is None and len(own.inputs) == 10, "a path is one's own data, whatever its name"
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path))
    data = load({"dataset": "qnli", "partition": IID, "clients": 2})
    assert len(data.inputs) == 8 and "no training split" in caplog.text


def test_a_short_name_is_not_a_folder_nearby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar100").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="on the hub for uoft-cs/cifar100"):
        load({"dataset": "cifar100", "clients": 2})
    with pytest.raises(InputError, match=r"without train\*\.parquet or train\*\.csv"):
        load({"dataset": "./cifar100", "clients": 2})


def test_texts_from_a_csv_file_by_user(tmp_path: Path) -> None:
    rows = ["user,text,label", 'ann,"good, and\nlong",1', "bob,,0", "ann,NA,1", "bob,a 🎉,0"]
    (tmp_path / "texts.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    spec = {"dataset": str(tmp_path / "texts.csv"), "by": "user", "vocabulary": 100}
    for more in ({}, {"inputs": "text", "target": "label"}, {"input": "text", "label": "label"}):
        data = load({**spec, **more})
        assert data.clients == 2 and data.vocabulary == 100 and data.inputs.dtype == torch.int64
        assert torch.equal(data.inputs, tokenize(["good, and long", "", "NA", "a 🎉"], vocabulary=100))


@pytest.mark.parametrize("encoding", [None, "latin-1"])
def test_an_empty_line_of_a_file_with_one_column_is_a_row(tmp_path: Path, encoding: str | None) -> None:
    (tmp_path / "new.csv").write_text("text\ngood\n\nbad\n")
    split = locate(str(tmp_path / "new.csv"), Written(None, encoding), "FILE", owned=False)[2].popitem()[1]
    assert split.values("text") == ["good", "", "bad"]


def test_names_of_classes_beside_texts(tmp_path: Path) -> None:
    frame = pd.DataFrame({"user": [0, 0, 1], "text": ["good", "bad", "fine"], "label": ["pos", "neg", "pos"]})
    frame.to_parquet(tmp_path / "texts.parquet")
    spec = {"dataset": str(tmp_path / "texts.parquet"), "by": "user", "vocabulary": 100}
    found = load({**spec, "categories": {"label": ["neg", "zero", "pos"]}})
    assert found.targets.tolist() == [2, 0, 2] and found.classes == 3
    for changes, says in (
        ({}, "categories={label: [neg, pos]}"),
        ({"categories": {"label": ["neg", "zero"]}}, "found 'pos'; allowed: neg, zero"),
        ({"categories": {"lable": ["neg", "pos"]}}, "data.categories: found lable; allowed: text, label."),
    ):
        with pytest.raises(InputError) as error:
            load({**spec, **changes})
        assert says in str(error.value)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_text_without_a_user_is_refused(tmp_path: Path, ending: str) -> None:
    frame = pd.DataFrame({"user": ["ann", None, "bob"], "text": list("abc"), "label": [0, 1, 0]})
    file = tmp_path / f"texts.{ending}"
    frame.to_csv(file, index=False) if ending == "csv" else frame.to_parquet(file)
    with pytest.raises(
        InputError, match="row 1, column user: found a missing value; allowed: the client that the row belongs to"
    ):
        load({"dataset": str(file), "by": "user", "inputs": "text", "target": "label"})


BAD_FILES: list[tuple[dict[str, list[Any]], dict[str, Any], str]] = [
    ({"a": [1.0], "b": [2.0]}, {}, "data.target: a label column is needed and none found"),
    ({"t": ["x"], "u": ["y"], "label": [0]}, {}, "data.inputs: a text column is needed and 2 candidates (t, u)"),
    (
        {"t": [7], "label": [0]},
        {"inputs": "t", "vocabulary": 9, "target": "label"},
        "column t: found 7; allowed: a te",
    ),
    ({"t": ["x"], "label": [-1]}, {}, "found label -1"),
    ({"t": ["x", "y"], "label": [0, None]}, {}, "row 1 of"),
    ({"t": ["x"], "label": [0]}, {"inputs": "tt"}, "data.inputs: found tt; allowed: t, label. Did you mean t"),
    ({"t": ["x"], "label": [0]}, {"target": "lable"}, "Did you mean label?"),
    (
        {"t": ["x"], "label": [0]},
        {"partition": {"kind": "natural", "by": "who"}},
        "data.partition.by: found who; allowed: t",
    ),
    ({"t": ["x"], "label": [0]}, {"partition": {"kind": "natural"}}, "data.partition.by: found nothing"),
]


@pytest.mark.parametrize(("columns", "more", "says"), BAD_FILES, ids=[says[:30] for *_, says in BAD_FILES])
def test_files_that_do_not_fit(tmp_path: Path, columns: dict[str, list[Any]], more: dict[str, Any], says: str) -> None:
    file = write(tmp_path / "set.parquet", columns)
    with pytest.raises(InputError) as error:
        load({"dataset": str(file), "partition": IID, "clients": 1, **more})
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("inputs", ["image"]), ("target", "target"), ("tokenizer", "x"), ("max_length", 5), ("vocabulary", 100)],
)
def test_a_key_that_digits_has_no_use_for_is_refused(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^data\.{key}: found .*; allowed: nothing: digits does not use it"):
        load({"dataset": "digits", "partition": IID, "clients": 2, key: value})


def test_keys_that_cannot_both_count_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "set" / "train.parquet", {"t": ["x", "y"], "label": [0, 1]})
    write(tmp_path / "set" / "test.parquet", {"t": ["x", "y"], "label": [0, 1]})
    with pytest.raises(InputError, match=r"^data\.test_fraction: found 0.1; allowed: nothing: set has test data"):
        load({"dataset": str(file.parent), "partition": IID, "clients": 1, "test_fraction": 0.1})


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "junk.parquet").write_bytes(b"junk")
    for dataset, says in (
        (tmp_path / "junk.parquet", "a readable file: a parquet, CSV"),
        (tmp_path, r"without train\*\.parquet or train\*\.csv"),
    ):
        with pytest.raises(InputError, match=says):
            load({"dataset": str(dataset), "clients": 1})


def test_table_is_complete() -> None:
    for name, source in DATASETS.items():
        assert source.hub or name == "digits"
        assert source.classes >= 2 and source.about and len(source.mean) == len(source.std)
        assert all(0 < s < 1 for s in source.std) and all(0 < m < 1 for m in source.mean)


@pytest.mark.slow
@has("cifar10")
def test_real_cifar10(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDFLAT_DATA", str(REAL))
    spec = {"dataset": "cifar10", "partition": {"kind": "dirichlet", "alpha": 0.6}, "clients": 500, "max_test": 2000}
    data = load({**spec})
    assert data.inputs.shape == (50000, 3, 32, 32) and data.examples_per_client == 100 and data.sizes.sum() == 50000
    mean, std = data.inputs.mean((0, 2, 3)), data.inputs.std((0, 2, 3))
    assert mean.abs().max() < 0.01 and (std - 1).abs().max() < 0.02, "the public constants fit"
    assert (torch.bincount(data.targets) == 5000).all()


@has("shakespeare")
def test_real_shakespeare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDFLAT_DATA", str(REAL))
    data = load({"dataset": "shakespeare", "partition": {"kind": "natural", "by": "character_id"}, "clients": 100})
    assert data.clients == 100 and data.inputs.shape[1] == 80 and int(data.targets.max()) <= 80
    assert torch.equal(data.inputs[:, 1:], data.targets[:, :-1])
    assert (data.targets == 0).float().mean() < 1e-4, "the public vocabulary covers the plays"


@has("mrpc")
@pytest.mark.parametrize(("name", "rows"), [("mrpc", 3668), ("cola", 8551), ("rte", 2490)])
def test_real_sentences(monkeypatch: pytest.MonkeyPatch, name: str, rows: int) -> None:
    monkeypatch.setenv("FEDFLAT_DATA", str(REAL))
    data = load({"dataset": name, "partition": IID, "clients": 10})
    assert data.inputs.shape == (rows, 64) and data.classes == 2 and data.test_inputs is not None
    assert (data.inputs[:, 0] > 0).all()
