"""``fedflat.clients``: users' data in any form becomes the same federation, and what cannot be used is one sentence."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import fedflat
from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.data.clients import FederatedData, refuse_users
from fedflat.data.sources import load
from fedflat.report.summary import summary_rows

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")

COLOURS = ["red", "green", "blue"]
ROWS = 120


def table() -> pd.DataFrame:
    draw = stream(0, "a table")
    return pd.DataFrame(
        {
            "user": [f"u{i}" for i in draw.integers(0, 12, ROWS)],
            "age": draw.normal(40, 15, ROWS),
            "visits": draw.integers(0, 9, ROWS),
            "member": draw.random(ROWS) < 0.5,
            "colour": draw.choice(COLOURS, ROWS),
            "bought": draw.integers(0, 3, ROWS),
        }
    )


FORM: dict[str, Any] = {
    "inputs": ["age", "visits", "member", "colour"], "target": "bought", "categories": {"colour": COLOURS},
    "scale": {"age": (40, 15)},
}  # fmt: skip


def same(a: FederatedData, b: FederatedData) -> None:
    assert a.names == b.names and a.clients == b.clients
    for i in range(a.clients):
        for one, other in zip(a.client(i), b.client(i)):
            assert torch.equal(one, other) and one.dtype == other.dtype


def test_every_column_is_encoded_as_stated_and_every_user_is_a_client() -> None:
    frame = table()
    found = fedflat.clients(frame, by="user", **FORM)
    assert found.names == tuple(sorted(set(frame.user))) and found.clients == frame.user.nunique()
    for i, name in enumerate(found.names):
        own = frame[frame.user == name]
        x, y = found.client(i)
        wanted = np.column_stack(
            [(own.age - 40) / 15, own.visits, own.member, *[own.colour == colour for colour in COLOURS]]
        )
        assert np.array_equal(x.numpy(), wanted.astype(np.float32)) and x.dtype == torch.float32
        assert y.tolist() == own.bought.tolist() and y.dtype == torch.int64
    assert found.called(0) == f"client {found.names[0]}"


def test_every_form_gives_the_same_federation(tmp_path: Path) -> None:
    frame = table()
    expected = fedflat.clients(frame, by="user", **FORM)
    same(expected, fedflat.clients(datasets.Dataset.from_pandas(frame), by="user", **FORM))
    same(expected, fedflat.clients(dict(list(frame.groupby("user"))), **FORM))
    pairs = {name: expected.client(i) for i, name in enumerate(expected.names)}
    same(expected, fedflat.clients(pairs))
    same(expected, fedflat.clients({name: (x.numpy(), y.numpy()) for name, (x, y) in pairs.items()}))
    same(expected, fedflat.clients({name: TensorDataset(x, y) for name, (x, y) in pairs.items()}))
    same(expected, fedflat.clients({name: Examples(x, y) for name, (x, y) in pairs.items()}))
    owners = [name for name, (x, _) in pairs.items() for _ in range(len(x))]
    whole = tuple(torch.cat(side) for side in zip(*pairs.values()))
    same(expected, fedflat.clients(whole, by=owners))
    same(expected, fedflat.clients(TensorDataset(*whole), by=np.array(owners)))
    plain = fedflat.clients(list(pairs.values()))
    assert plain.names == () and torch.equal(plain.inputs, expected.inputs)
    assert torch.equal(fedflat.clients([rows for _, rows in frame.groupby("user")], **FORM).inputs, expected.inputs)


class Examples(Dataset):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.x[i], int(self.y[i])


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_file_of_the_same_table_gives_the_same_examples(tmp_path: Path, ending: str) -> None:
    frame = table()
    frame.to_parquet(tmp_path / "train.parquet") if ending == "parquet" else frame.to_csv(tmp_path / "train.csv")
    form = {**FORM, "dataset": str(tmp_path), "by": "user"}
    found, expected = load(form, seed=3), fedflat.clients(frame, by="user", **FORM)
    of = {tuple(sorted(map(tuple, expected.client(i)[0].tolist()))) for i in range(expected.clients)}
    assert {tuple(sorted(map(tuple, found.client(i)[0].tolist()))) for i in range(found.clients)} == of
    assert found.classes == expected.classes == 3
    whole = fedflat.Recipe.of({"rounds": 1, "algorithm": "fedavg", "cohort": {"size": 1}, "data": form})
    assert whole.data.partition.kind == "natural" and whole.data.partition.by == "user"
    assert fedflat.Recipe.of(whole.dump()) == whole


def test_a_file_with_names_and_no_rows_is_refused(tmp_path: Path) -> None:
    table().iloc[:0].to_csv(tmp_path / "people.csv", index=False)
    with pytest.raises(InputError, match=r"people\.csv: found 0 rows, with a header alone"):
        load({"dataset": str(tmp_path / "people.csv"), "by": "user", "inputs": ["age"], "target": "visits"})


def test_a_bound_keeps_the_first_of_a_draw_and_is_declared() -> None:
    frame = table()
    found = fedflat.clients(frame, by="user", max_examples=5, **FORM)
    assert found.most == 5 and found.sizes.max() == 5
    alone = fedflat.clients(frame[frame.user == found.names[0]], by="user", max_examples=5, **FORM)
    assert torch.equal(alone.client(0)[0], found.client(0)[0]), "a client's choice depends on no other client"
    other = fedflat.clients(frame, by="user", max_examples=5, seed=1, **FORM)
    assert not torch.equal(other.client(0)[0], found.client(0)[0])
    unbounded = fedflat.clients(frame, by="user", **FORM)
    assert len({found.fingerprint(), other.fingerprint(), unbounded.fingerprint()}) == 3


def test_lists_fractions_several_targets_and_named_classes() -> None:
    frame = pd.DataFrame(
        {"u": [1, 1, 2], "pixels": [np.ones((2, 3))] * 3, "ids": [[1, 2]] * 3, "y": [0.5, 1.5, 2.5], "z": [1, 0, 1]}
    )
    assert fedflat.clients(frame, "u", "pixels", "z").inputs.shape == (3, 2, 3)
    tokens = fedflat.clients(frame, "u", "ids", "z").inputs
    assert tokens.dtype == torch.int64 and tokens.shape == (3, 2)
    both = fedflat.clients(frame, "u", ["pixels", "ids"], ["y", "z"])
    assert both.inputs.shape == (3, 8) and both.targets.shape == (3, 2) and both.targets.dtype == torch.float32
    named = fedflat.clients(frame.assign(k=["b", "a", "b"]), "u", "y", "k", categories={"k": ["a", "b", "c"]})
    assert named.targets.tolist() == [1, 0, 1] and named.classes == 3


def test_a_list_among_lists_is_checked_too() -> None:
    frame = pd.DataFrame({"u": [1, 2, 3], "x": [[1.0], [2.0], 3.0], "y": [0, 1, 0]})
    with pytest.raises(InputError, match="row 2, client 3, column x: found 3"):
        fedflat.clients(frame, "u", "x", "y")


def test_whole_numbers_beyond_64_bits_are_refused_and_nullable_columns_read() -> None:
    frame = pd.DataFrame({"u": [1, 2], "x": pd.array([1, 2], dtype="Int64"), "y": [0, 1]})
    assert fedflat.clients(frame, "u", "x", "y").inputs.tolist() == [[1.0], [2.0]]
    huge = frame.assign(x=pd.array([1, 2**63], dtype="uint64"))
    with pytest.raises(InputError, match="column x: found a whole number beyond 64 bits"):
        fedflat.clients(huge, "u", "x", "y")
    with pytest.raises(InputError, match="column x: found a whole number beyond 64 bits"):
        fedflat.clients(frame.assign(x=pd.Series([1, 2**70], dtype=object)), "u", "x", "y")
    with pytest.raises(InputError, match=r"row 1, client 2, column x: found 'abc'; allowed: a number\. Other cells"):
        fedflat.clients(pd.DataFrame({"u": [1, 2, 3], "x": ["1", "abc", "2"], "y": [0, 1, 0]}), "u", "x", "y")
    with pytest.raises(InputError, match="row 0, client 1, column x: found a missing value"):
        fedflat.clients(frame.assign(x=pd.array([None, 2], dtype="Int64")), "u", "x", "y")


def test_public_test_data_is_encoded_alike() -> None:
    frame = table()
    found = fedflat.clients(frame, by="user", test=frame.drop(columns="user").assign(age=frame.age + 1), **FORM)
    assert found.test_inputs is not None and found.test_inputs.shape == (ROWS, 6)
    with pytest.raises(InputError, match="no column age"):
        fedflat.clients(frame, by="user", test=frame[["bought"]], **FORM)


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"age": [None]}, {}, "column age: found a missing value"),
    ({"age": ["abc"]}, {}, "column age: found 'abc'; allowed: a number. Other cells of the column are numbers"),
    ({"age": ["3,50"]}, {}, "column age: found '3,50'; allowed: a number. Decimal commas: read the file by pandas"),
    ({"age": ["24.11.2026"]}, {}, "column age: found '24.11.2026'; allowed: a number. A date is no number"),
    ({"age": [float("inf")]}, {}, "column age: found inf"),
    ({"visits": [1e300]}, {"scale": {}}, "column visits: found 1e+300"),
    ({"colour": ["pink"]}, {}, "column colour: found 'pink'; allowed: red, green, blue"),
    ({"colour": [None]}, {}, "column colour: found a missing value"),
    ({"visits": [[1, 2]]}, {}, "column visits: found [1, 2]; allowed: a number"),
    ({"bought": ["yes"]}, {}, "column bought: found 'yes'"),
    ({"bought": [None]}, {}, "column bought: found a missing value"),
]


@pytest.mark.parametrize(("cell", "more", "says"), BAD)
def test_a_wrong_cell_is_named_with_row_client_and_column(
    tmp_path: Path, cell: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    frame = table().astype(dict.fromkeys(cell, object))
    for name, values in cell.items():
        frame[name] = [*frame[name].tolist()[:7], *values, *frame[name].tolist()[8:]]
    with pytest.raises(InputError) as error:
        fedflat.clients(frame, by="user", **{**FORM, **more})
    text = str(error.value)
    assert says in text and text.startswith(f"row 7, client {frame.user[7]}") and "\n" not in text


@pytest.mark.parametrize(
    ("source", "asked", "says"),
    [
        (table(), {"by": None}, "clients: by: found nothing"),
        (table(), {"by": "usr"}, "Did you mean user?"),
        (table(), {"by": ["a"]}, "clients: by: found list; allowed: the column that names the client: "),
        (table(), {"inputs": ["agee"]}, "Did you mean age?"),
        (table(), {"inputs": None}, "clients: inputs: found nothing"),
        (table(), {"inputs": ["age", "age"]}, "age twice"),
        (table(), {"inputs": ["age", "bought"]}, "which is the target"),
        (table(), {"categories": {"colour": []}}, "a list of different values"),
        (table(), {"categories": {"colour": [["red"]]}}, "a list of different values"),
        (table(), {"categories": {"user": ["u1"]}}, "clients: categories: found user"),
        (table(), {"scale": {"age": (1, 0)}}, "std > 0"),
        (table(), {"scale": {"colour": (1, 1)}}, "scale.colour: found a column with categories"),
        (table(), {"max_examples": 0}, "max_examples: found 0"),
        (table().iloc[:0], {}, "a table of 0 rows"),
        (table().assign(user=None), {}, "row 0, column user: found a missing value"),
        (table().assign(colour=pd.Categorical(table().colour)), {"categories": {}}, "categories that come with"),
        (table().assign(age=pd.Timestamp("2026-01-01")), {}, "column age: found Timestamp"),
        (pd.concat([table(), table().age], axis=1), {}, "two columns called age"),
        ({"a": table(), "b": table()[["age"]]}, {"by": None}, "client b: found no column visits"),
        ({"a": table()}, {}, "a dict has its users for keys"),
        ("people.csv", {}, "clients: found str"),
        (datasets.DatasetDict(train=datasets.Dataset.from_pandas(table())), {}, "one split"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_sentence(source: Any, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        fedflat.clients(source, **{"by": "user", **FORM, **asked})
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "by", "says"),
    [
        ({"ann": (torch.tensor([[1.0], [torch.nan]]), [0, 1])}, None, "inputs[1]: found a NaN or infinite value"),
        ({"ann": (torch.zeros(2, 1), [0, 1]), "bob": (torch.zeros(2, 2), [0, 1])}, None, "client bob inputs: found"),
        ({"ann": [(1, 2, 3)]}, None, "client ann: found list"),
        ([Examples(torch.zeros(2, 1), torch.tensor([0, 1])), "b"], None, "clients[1]: found str"),
        ([[torch.zeros(2, 1)] * 3], None, "clients[0]: found list"),
        ((torch.zeros(3, 1), [0, 1, 0]), ["a", " ", "c"], "row 1, clients: by: found a missing value"),
        ((torch.zeros(3, 1), [0, 1, 0]), ["a", "b"], "found 3 inputs, 3 targets and 2 owners"),
        ((torch.zeros(3, 1), [0, 1]), ["a", "b", "c"], "3 inputs, 2 targets and 3 owners"),
        (5, ["a"], "clients: found int"),
        ((torch.zeros(0, 1), []), [], "at least one example"),
    ],
)  # fmt: skip
def test_wrong_pairs_are_named(source: Any, by: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        fedflat.clients(source, by=by)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_examples_of_a_dataset_must_agree() -> None:
    class Ragged(Examples):
        def __getitem__(self, i: int) -> Any:
            return torch.zeros(i + 1), 0

    class Odd(Examples):
        def __getitem__(self, i: int) -> Any:
            return torch.zeros(1)

    class Texts(Examples):
        def __getitem__(self, i: int) -> Any:
            return "abc", 0

    for kind, says in ((Ragged, "row 1: found shape (2,)"), (Odd, "row 0: found Tensor"), (Texts, "row 0: found str")):
        with pytest.raises(InputError) as error:
            fedflat.clients({"ann": kind(torch.zeros(3, 1), torch.zeros(3))})
        assert says in str(error.value) and "client ann" in str(error.value)
    empty = fedflat.clients([Examples(torch.zeros(0, 1), torch.zeros(0)), (torch.zeros(2, 1), [0, 1])])
    assert empty.sizes.tolist() == [0, 2]


def test_a_run_takes_them_with_its_test_data() -> None:
    recipe: dict[str, Any] = {"rounds": 1, "algorithm": "dp-fedavg", "cohort": {"size": 5}}
    recipe["local"], recipe["privacy"] = {"steps": 1, "batch_size": 10}, {"clip": 0.5, "noise_multiplier": 1.0}
    recipe["engine"] = {"backend": "sequential"}  # bit for bit
    data = fedflat.clients(table(), by="user", **FORM)
    test = (data.inputs[:10] + 1, data.targets[:10])
    first = fedflat.run(recipe, model=torch.nn.Linear(6, 3), clients=data, test=test)
    assert first.history[-1]["test_accuracy"] is not None and first.recipe.data.dataset == "given in Python"
    with pytest.raises(InputError, match="test inputs: found shape"):
        fedflat.run(recipe, model=torch.nn.Linear(6, 3), clients=data, test=(torch.zeros(2, 5), torch.zeros(2).long()))
    pairs = {name: data.client(i) for i, name in enumerate(data.names)}
    model = first.model
    again = [fedflat.run(recipe, model=model, clients=some, test=test) for some in (data, pairs)]
    assert torch.equal(*(torch.cat([p.flatten() for p in run.model.parameters()]) for run in again))


def test_rows_of_clients_are_never_public(tmp_path: Path) -> None:
    """Neither by a share of a file, nor as the same object, tensor, file or rows; whole clients may be left out."""
    frame = table()
    frame.to_csv(tmp_path / "a.csv", index=False)
    others = frame[:12].assign(age=frame.age[:12] + 1, user=None)
    frame.assign(user=" 0" + frame.user.str.upper()).to_csv(tmp_path / "b.csv", index=False)
    pd.concat([others, frame[30:31]]).drop(columns="user").to_csv(tmp_path / "c.csv", index=False)
    others.assign(user="new").to_csv(tmp_path / "d.csv", index=False)
    others.drop(columns="user").to_csv(tmp_path / "e.csv", index=False)
    spec = {"dataset": str(tmp_path / "a.csv"), "by": "user", **FORM}
    assert load(spec).test_inputs is None
    for more, says in (
        ({"test_fraction": 0.2}, "every row is a client's"),
        ({"test": str(tmp_path / "a.csv")}, "another file"),
        ({"test": str(tmp_path / "b.csv")}, "data.test: found rows of 12 clients, such as 0U0"),
        ({"test": str(tmp_path / "c.csv")}, "found 1 of 13 different rows that one client has and no other"),
        ({"test_clients": ["00u1"]}, r"found 00u1; allowed: names of clients\. Did you mean u1\?"),
        ({"test_clients": 12}, "found 12; allowed: fewer than all 12 clients"),
        ({"test_clients": 1.5}, "allowed: a share of the clients below 1, a whole number of them, or their names"),
        ({"test_clients": 3, "clients": 12}, "data.clients: found 12; allowed: 9"),
    ):
        with pytest.raises(InputError, match=says):
            load({**spec, **more})
    pairs = [fedflat.clients(frame, by="user", **FORM).client(i) for i in range(12)]
    for given in (
        lambda: fedflat.clients(frame, by="user", test=frame, **FORM),
        lambda: fedflat.clients(frame, by="user", test=frame.sample(60, random_state=1), **FORM),
        lambda: fedflat.clients(pairs, test=pairs[0]),
        lambda: fedflat.clients(pairs, test=tuple(side.clone() for side in pairs[0] + pairs[1])[:2], test_clients=1),
    ):
        with pytest.raises(InputError, match="test"):
            given()
    found = load({**spec, "test_clients": ["u1", "u3"]})
    own = frame[frame.user.isin(["u1", "u3"])]
    assert found.clients == 10 and found.left_out == 2 and len(found.test_targets) == len(own)
    assert sum(map(len, found.parts)) == ROWS - len(own)
    # Who is left out follows from the names alone: else a client would be protected under one seed and measured under
    # another.
    drawn = [load({**spec, "test_clients": 0.3}, seed).test_inputs for seed in (0, 1)]
    drawn += [fedflat.clients(frame, by="user", test_clients=0.3, seed=2, **FORM).test_inputs]
    assert all(torch.equal(rows.sort(0).values, drawn[0].sort(0).values) for rows in drawn)
    joined = pd.concat([frame, frame[frame.user == "u3"].assign(user="another")])
    found, more = (fedflat.clients(table, by="user", test_clients=0.3, **FORM) for table in (frame, joined))
    assert set(found.names) == set(more.names) - {"another"} and found.left_out + found.clients == 12
    assert fedflat.clients(frame, by="user", test_clients=4, **FORM).left_out == 4
    few: dict[str, Any] = {"rounds": 1, "model": "linear", "algorithm": "dp-fedavg", "cohort": {"size": 5}}
    few["privacy"] = {"noise_multiplier": 1.0}
    form = {**spec, "max_per_client": 9, "classes": 3}
    for more, said in (
        ({"test_clients": 4}, "The 4 clients left out of training"),
        ({"test": str(tmp_path / "d.csv")}, ""),
        ({"test": str(tmp_path / "e.csv")}, "The test data: they name no users"),
    ):
        result = fedflat.run({**few, "data": {**form, **more}})
        assert said in "".join(result.privacy["not_covered"])
        assert bool(said) == ("test data" in dict(summary_rows(result)))
    assert not refuse_users(["0", "7"], ["", "70"], "test")  # a blank is nobody's name, not user 0's
    with pytest.raises(InputError, match=r"clients: scale: found .*; allowed: nothing beside clients that are no"):
        fedflat.clients({"a": (torch.zeros(2, 3), torch.tensor([0, 1]))}, scale={"x": (0.0, 1.0)})
    forms = pd.DataFrame({"user": ["M\u00fc", "Mu\u0308"], "x": [1.0, 2.0], "y": [0, 1]})  # one name on the screen
    assert fedflat.clients(forms, by="user", inputs=["x"], target="y", categories={"y": [0, 1]}).names == ("M\u00fc",)


@pytest.mark.parametrize(
    ("name", "more", "write"),
    [
        ("a.tsv", {}, lambda t, p: t.to_csv(p, sep="\t", index=False)),
        ("a.csv.gz", {}, lambda t, p: t.to_csv(p, index=False)),
        ("a.xlsx", {}, lambda t, p: t.to_excel(p, index=False)),
        (
            "a.csv",
            {"separator": ";", "encoding": "utf-16"},
            lambda t, p: t.to_csv(p, sep=";", index=False, encoding="utf-16"),
        ),
        ("saved", {}, lambda t, p: datasets.Dataset.from_pandas(t).save_to_disk(p)),
    ],
)
def test_tables_in_other_coats(tmp_path: Path, name: str, more: dict[str, Any], write: Any) -> None:
    frame = table().rename(columns={"user": " user\u200b", "age": "age "})
    frame.iloc[::2, 0] += " "  # the same user still
    write(frame, str(tmp_path / name))
    found = load({"dataset": str(tmp_path / name), "by": "user ", **FORM, **more})
    assert found.clients == 12 and found.inputs.shape == (ROWS, 6)


def test_what_is_in_the_way_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = table().astype({"age": object})
    frame.loc[3, ["age", "colour"]] = ["old", "pink"]
    with pytest.raises(InputError, match=r"row 3, .*column age: found 'old'"):
        fedflat.clients(frame, by="user", **FORM)
    answer = frame.assign(bought=np.where(frame.bought > 1, "yes", "no"))
    with pytest.raises(InputError, match="YAML reads yes as true where it is not quoted: write 'yes'"):
        fedflat.clients(answer.assign(bought="yes"), "user", "visits", "bought", categories={"bought": [False, True]})
    table().to_csv(tmp_path / "semi.csv", sep=";", index=False)
    (tmp_path / "empty.csv").write_bytes(b"")
    for name in ("cut.xlsx", "zip.csv"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
    (tmp_path / "odd.csv").write_text("user,age\nann,1\nbob,SECRET,3\n", encoding="utf-8")
    (tmp_path / "latin.csv").write_text("user,age\nKöln,1\n", encoding="latin-1")
    (tmp_path / "utf16.csv").write_text("user,age\nann,1\n", encoding="utf-16")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)) * 9)
    for name, more, says in (
        ("semi.csv", {}, r"Set data\.separator=';'"),
        ("semi.csv", {"separator": "|"}, r"columns with '\|' between them. Set data\.separator=';'"),
        ("utf16.csv", {}, r"\(text in another encoding\)"),
        ("empty.csv", {}, "empty.csv, an empty file"),
        ("odd.csv", {}, r"odd\.csv \(line 3 has 3 values, the lines before it 2\)"),
        ("latin.csv", {}, r"\(text in another encoding\).*data\.encoding"),
        ("binary.csv", {}, r"binary\.csv \(line \d+ has \d+ values"),
        (__file__, {}, "a file of another kind"),
        ("cut.xlsx", {}, "File is not a zip file"),
        ("zip.csv", {}, "which is a ZIP archive, as Excel files are"),
    ):
        with pytest.raises(InputError, match=says) as error:
            load({"dataset": str(tmp_path / name), "by": "user", **FORM, **more})
        assert "SECRET" not in str(error.value)
    book = SimpleNamespace(sheet_names=["visits", "notes"], parse=lambda: frame)
    monkeypatch.setattr(pd, "ExcelFile", lambda file: book)  # openpyxl need not be there
    with (
        pytest.warns(UserWarning, match="its first sheet is read, visits, and not the 1 other"),
        pytest.raises(InputError, match=r"row 3, .*column age: found 'old'; allowed: a number"),
    ):
        load({"dataset": str(tmp_path / "cut.xlsx"), "by": "user", **FORM})


def test_texts_by_user_in_python() -> None:
    frame = pd.DataFrame({"u": [1, 1, 2], "text": ["good", None, "bad film"], "stars": [1, 0, 0]})
    found = fedflat.clients(frame, "u", "text", "stars", max_length=4, vocabulary=100)
    assert found.inputs.shape == (3, 4) and found.inputs.dtype == torch.int64 and found.vocabulary == 100


def test_a_folder_of_images_by_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    from fedflat.assembly.tasks import suited
    from fedflat.cli import catalogue as command
    from fedflat.data.locate import locate

    for user in ("ann", "bob"):
        for kind, grey in (("cat", 10), ("dog", 200)):
            (tmp_path / user / kind).mkdir(parents=True)
            Image.new("L", (4, 4), grey).save(tmp_path / user / kind / "1.png")
    spec = {"dataset": str(tmp_path), "by": "user"}
    with pytest.raises(InputError, match=r"categories=\{label: \[cat, dog\]\}"):
        load(spec)
    found = load({**spec, "categories": {"label": ["cat", "dog"]}})
    assert found.clients == 2 and found.inputs.shape == (4, 1, 4, 4) and found.targets.tolist() == [0, 1, 0, 1]
    with pytest.raises(InputError, match="task: found regression of the classes cat, dog; allowed: classification"):
        suited(found, "regression")

    def new(path: Path) -> list[str]:
        split = locate(str(path), owned=False)[2]["train"]
        assert list(split.features) == ["image"]
        return [value["path"] for value in split.values("image")]

    assert new(tmp_path)[:2] == ["ann/cat/1.png", "ann/dog/1.png"]
    assert new(tmp_path / "ann" / "cat") == new(tmp_path / "ann" / "cat" / "1.png") == ["1.png"]
    with pytest.raises(InputError, match=r"1\.png; allowed: images as USER/CLASS/FILE"):
        locate(str(tmp_path / "ann" / "cat"))
    Image.new("L", (5, 4)).save(tmp_path / "bob" / "cat" / "1.png")
    broken = tmp_path / "bob" / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])  # its head says 4 × 4
    command.data(tmp_path)
    shown = capsys.readouterr().out
    assert "row 2, bob/cat/1.png: found an image of 4 × 5 pixels; allowed: one size for all images, 4 × 4 as" in shown
    with pytest.raises(InputError, match=r"row 2, client bob, bob/cat/1\.png: found an image of 4 × 5 pixels"):
        load({**spec, "categories": {"label": ["cat", "dog"]}})


def test_a_look_at_a_table_gives_a_recipe_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedflat.cli import catalogue, finished

    look, alone = catalogue.data, f"column plan: one user alone has gold; {catalogue.ALONE}"
    words = (("free", "no"), ("pro", "yes"))
    rows = [";".join((str(i % 9), str(20 + i), *words[i % 2])) for i in range(90)]
    rows[4], rows[5] = "4;;free;no", "5;25;gold;yes"
    (tmp_path / "visits.csv").write_text("\n".join(["user;age;plan;bought", *rows]), encoding="utf-8")
    look(tmp_path / "visits.csv", target="bought", separator=";", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["users"], found["by"]) == (90, 9, "user") and "keep it to yourself" in found["note"]
    assert found["faults"] == ["column age: 1 missing value; data.fill.age, or leave the column out", alone]
    recipe = fedflat.Recipe.of(found["recipe"])
    assert recipe.data.categories == {"plan": ["free", "gold", "pro"], "bought": ["no", "yes"]}
    assert load(recipe.data).left_out == 1
    fedflat.run({**found["recipe"], "rounds": 1}, out=tmp_path / "run")
    finished.predict(tmp_path / "run", tmp_path / "visits.csv")
    assert capsys.readouterr().out.count("\n") == 91, "read with the run's own separator"
    with pytest.raises(InputError, match="one column, 'user;age;plan;bought'"):
        finished.predict(tmp_path / "run", tmp_path / "visits.csv", separator=",")
    found["recipe"]["data"]["test_clients"] = [3, "5"]
    assert load(fedflat.Recipe.of(found["recipe"]).data).left_out == 2
    with pytest.raises(InputError, match=r"--by: found usr; .* Did you mean user\?"):
        look(tmp_path / "visits.csv", by="usr", separator=";")
    lines = ("user,huge,in,late,row", *(f"{i % 9:0{1 + i % 2}},{i}e300,{'AaBb'[i % 4]},{i % 2},{i}" for i in range(90)))
    (tmp_path / "numbered.csv").write_text("\n".join(lines), encoding="utf-8")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.warns(UserWarning, match="column user has users who are written in two ways"),
    ):
        patch.setattr("sys.stdout.isatty", lambda: True)
        look(tmp_path / "numbered.csv", by="user")
    assert "--target late" in (shown := capsys.readouterr().out) and "huge: 89 infinite or huge values" in shown
    assert "'A', 'a' (the first of 2 such groups) differ" in shown
    assert all(len(line) <= 80 or "numbered.csv" in line for line in shown.splitlines())
    lists = {"user": [i % 9 for i in range(90)], "few": [[0.0] * (1 + i % 2) for i in range(90)], "y": [0, 1] * 45}
    pd.DataFrame({**lists, "day": pd.date_range("2026-01-01", periods=90)}).to_parquet(tmp_path / "lists.parquet")
    look(tmp_path / "lists.parquet", by="user", target="y", as_json=True)
    few, day = json.loads(capsys.readouterr().out)["faults"]
    assert "few: lists of 1 to 2 values" in few and "day: A date is no number" in day


def test_a_look_says_what_to_do_about_dates_decimal_commas_and_empty_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedflat.cli.catalogue import data as look

    rows = [f"u{i % 9};{i}{',5' * (i % 2)};2026-11-{i % 20 + 1:02d};{['free', 'pro', ''][i % 3]}" for i in range(90)]
    rows = [f"{row};;{i or 'lots'};{f'it is {i}' * (i % 3)};{i % 2}" for i, row in enumerate(rows)]
    (tmp_path / "visits.csv").write_text("\n".join(["user;price;day;plan;void;size;note;y", *rows]), encoding="utf-8")
    look(tmp_path / "visits.csv", separator=";", target="y")
    shown = capsys.readouterr().out
    assert "\n# Guessed: --by user\n#   price:" in shown and "\n# Filled below: column plan: 30 missing" in shown
    look(tmp_path / "visits.csv", separator=";", as_json=True)
    found = json.loads(capsys.readouterr().out)
    price, day, plan, *void, size = found["faults"]  # none of the column of texts: a missing one is empty
    assert len(void) == 2 and size == "column size: 'lots' is no number, as most others are"
    assert price.startswith("column price: Decimal commas: read the file by pandas.read_csv(")
    assert day.startswith("column day: A date is no number: put in its place the days since")
    assert plan == "column plan: 30 missing values; data.fill.plan, or leave the column out"
    assert found["recipe"]["data"]["inputs"] == ["plan"] and found["columns"]["plan"]["categories"] == ["free", "pro"]
    for fill in ({}, {"categories": {"plan": ["", "free", "pro"]}, "fill": None}):
        section = {**found["recipe"]["data"], **fill}
        assert load(fedflat.Recipe.of({**found["recipe"], "data": section}).data).classes == 2


@pytest.mark.parametrize("vision", [False, True])
def test_the_recipe_for_photos_is_a_head_on_a_frozen_body(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, vision: bool
) -> None:
    from PIL import Image

    from fedflat.cli import catalogue as command

    for user in range(10):
        for kind in ("cat", "dog"):
            (tmp_path / f"u{user}" / kind).mkdir(parents=True)
            Image.new("L", (9, 9), user).save(tmp_path / f"u{user}" / kind / "1.png")
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: vision or None)
    command.data(tmp_path, as_json=True)
    recipe = fedflat.Recipe.of(json.loads(capsys.readouterr().out)["recipe"])
    assert recipe.model.name == ("image-encoder" if vision else "representation")
    assert load(recipe.data).clients == recipe.cohort.size == 9


def test_one_clients_word_does_not_make_texts_of_everybodys_numbers(tmp_path: Path) -> None:
    table = pd.DataFrame({"who": ["ann", "bob", "cy"] * 2, "k": [1, 2, 3, 4, 5, "abc"], "y": [0, 1] * 3})
    table.to_csv(tmp_path / "t.csv", index=False)
    section = {"dataset": str(tmp_path / "t.csv"), "by": "who", "inputs": "k", "target": "y"}
    for read in (lambda **keys: load({**section, **keys}), lambda **keys: fedflat.clients(
        table.astype({"k": str}), by="who", inputs="k", target="y", **keys)):  # fmt: skip
        with pytest.raises(InputError, match=r"column k: found 'abc'; allowed: a number"):
            read()
        assert read(vocabulary=9).vocabulary == 9
