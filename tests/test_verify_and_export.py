"""``fedflat verify`` notices every change of a run's records; ``fedflat export`` hands over only what is covered."""

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedflat
from fedflat.cli import wrapped
from fedflat.cli.catalogue import report
from fedflat.core.checks import InputError, RunError
from fedflat.federation.tips import ENVELOPE, tip_record
from fedflat.privacy.ledger import HEADER, Ledger, event, seal
from fedflat.privacy.statement import checksum, refuse_seeded
from fedflat.records import checkpoint, keys, signing
from fedflat.records.folder import RunFolder
from fedflat.records.opening import Opening
from fedflat.records.signing import read_public
from fedflat.report import card
from fedflat.report.html import public, render, write_report
from fedflat.report.metrics import read_run
from fedflat.simulation import inspection
from fedflat.simulation import run as simulation
from fedflat.simulation.export import attest
from fedflat.simulation.inspection import check_fields, check_pages, check_signed, check_strangers, inspect_run
from fedflat.simulation.recomputed import Records, differences, ledger_faults, metrics_faults
from fedflat.simulation.result import export, load

RECIPE = {
    "name": "tiny", "seed": 7654321, "rounds": 3,
    "data": {"dataset": "digits", "clients": 20, "client_test_fraction": 0.2},
    "model": {"name": "mlp", "hidden": 4}, "algorithm": "dp2-fedsam", "local": {"steps": 1, "batch_size": 4},
    "cohort": {"size": 10}, "privacy": {"clip": 0.5, "epsilon": 8}, "engine": {"backend": "sequential"},
}  # fmt: skip
PLAIN = {**RECIPE, "algorithm": "dp-fedavg"}
FILES = (
    "recipe.yaml", "metrics.jsonl", "metrics.seals", "ledger.jsonl", "privacy.json", "private/private.jsonl",
    "private/run.json", "checkpoints/round-000003.safetensors", "private/heads/round-000003.safetensors",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with personal heads."""
    folder = tmp_path_factory.mktemp("verify") / "seed-7654321"
    simulation.run(RECIPE, out=folder)
    return folder


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run of that recipe: its ε is the same, and its records are whole."""
    folder = tmp_path_factory.mktemp("another") / "seed-5"
    simulation.run({**RECIPE, "seed": 5}, out=folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "seed-7654321"))


def flip(place: float):
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(len(content) - 1, int(place * len(content)))] ^= 0x21
        path.write_bytes(content)

    return damage


def without_last_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


DAMAGES = {
    "first byte": flip(0.0), "a byte": flip(0.37), "last bytes": flip(0.999),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""), "zeros": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    "gone": Path.unlink, "more": lambda path: path.write_bytes(path.read_bytes() + b"{}\n"), "cut": without_last_line,
}  # fmt: skip


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
    """Change each line of a ledger, and redo checksums and chain, as whoever has no key to sign with would.

    Returns the new lines' tips.
    """
    tips, lines = [hashlib.sha256(HEADER).hexdigest()], []
    for number, text in enumerate((folder / "ledger.jsonl").read_text().splitlines()):
        body = {k: v for k, v in change(json.loads(text)).items() if k not in ("line", "previous", "checksum")}
        lines.append(json.dumps(seal(body, number, tips[-1]), separators=(",", ":")))
        tips.append(hashlib.sha256(lines[-1].encode()).hexdigest())
    (folder / "ledger.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tips[1:]


def wrong(folder: Path, checks: Any = inspection.CHECKS) -> list[str]:
    return [check.record for check in inspection.checked(Records(folder), checks) if check.verdict == "wrong"]


def test_a_sound_run_has_nothing_wrong(run: Path) -> None:
    assert wrong(run) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_noticed(run: Path, name: str, damage: str) -> None:
    DAMAGES[damage](run / name)
    assert wrong(run)


def test_the_checks_are_what_notices(run: Path) -> None:
    """The broken twin: with two checks only, nothing is noticed."""
    for name in FILES:
        DAMAGES["a byte"](run / name)
    assert wrong(run, {"private/": inspection.check_modes, "files": check_strangers}) == []


def test_a_seal_twice_lines_cut_with_theirs_and_other_terms_are_noticed(run: Path) -> None:
    seals = (run / "metrics.seals").read_bytes()
    (run / "metrics.seals").write_bytes(seals + seals.splitlines(keepends=True)[-1])
    assert wrong(run) == ["metrics.jsonl"]
    for name in ("metrics.jsonl", "metrics.seals"):
        without_last_line(run / name)
    reopened(run, terms={**Opening.read(run).terms, "clients": 3})
    assert {"metrics.jsonl", "private/run.json"} <= set(wrong(run))


@pytest.mark.parametrize("name", ["privacy.json", "checkpoints/round-000003.safetensors"])
def test_another_runs_record_is_noticed(run: Path, another: Path, name: str) -> None:
    shutil.copyfile(another / name, run / name)
    assert name in wrong(run)


def test_private_files_that_others_may_read_are_noticed(run: Path) -> None:
    (run / "private/private.jsonl").chmod(0o644)
    assert wrong(run) == ["private/"]


def test_no_run_and_a_record_of_a_round_without_end_are_one_line(run: Path, tmp_path: Path) -> None:
    (run / f"checkpoints/round-{'9' * 60}.safetensors").touch()
    for folder, said in ((tmp_path / "none", "verify: found"), (run, "a round after the 1,000,000th")):
        with pytest.raises(InputError, match=said):
            inspect_run(folder)


def test_an_export_holds_what_is_covered_and_nothing_else(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "handed-over"
    found = export(run, out)
    everything = b"".join(path.read_bytes() for path in sorted(out.iterdir()))
    secrets = [b"7654321", b"seed-", b"update_norm", b"personal_accuracy", b"train_loss", b'"seconds"']
    secrets.append(json.loads((run / "private/run.json").read_text())["secret"].encode())
    assert [word for word in secrets if word in everything] == []
    assert set(found.files) == {path.name for path in out.iterdir()}
    assert {"private", "recipe.yaml: seed", "checkpoints"} <= found.left.keys()
    assert wrong(out) == []


def test_exported_weights_are_the_released_ones_by_name(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    shared = load_file(run / "checkpoints/round-000003.safetensors")["shared"]
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in weights.values()]).sort()[0], shared.sort()[0])
    assert all("." in name for name in weights) and not any(name.startswith("heads") for name in weights)


@pytest.mark.parametrize("name", ["model.safetensors", "ledger.jsonl", "privacy.json", "recipe.yaml", "metrics.jsonl"])
def test_a_changed_export_is_noticed(run: Path, tmp_path: Path, name: str) -> None:
    export(run, tmp_path / "out")
    flip(0.5)(tmp_path / "out" / name)
    assert wrong(tmp_path / "out")


def test_half_an_export_goes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full leaves nothing in the way of the next try."""
    with monkeypatch.context() as patch:
        patch.setattr("fedflat.simulation.export.dumped", lambda recipe: os.write(-1, b""))
        with pytest.raises(OSError, match="Bad file"):
            export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists() and export(run, tmp_path / "out").files


def test_an_export_never_overwrites(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="allowed: a new folder"):
        export(run, run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match="the newest is of round 0"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_guarantee_says_so(tmp_path: Path) -> None:
    """Not "recomputed 0", which no run without noise has, and no export that looks covered."""
    simulation.run(RECIPE | {"algorithm": "fedavg", "privacy": {}}, out=tmp_path / "plain")
    (statement,) = [check for check in inspect_run(tmp_path / "plain") if check.record == "privacy.json"]
    assert statement.verdict == "ok" and statement.about == "no finite ε is stated, so there is none to check"
    assert not export(tmp_path / "plain", tmp_path / "out").guaranteed


def test_a_statement_without_its_checksum_and_an_epsilon_beyond_all_floats_are_noticed(run: Path) -> None:
    body = json.loads((run / "privacy.json").read_text())
    del body["checksum"]
    (run / "privacy.json").write_text(json.dumps({**body, "proven_epsilon": 10**400}))
    assert "privacy.json" in wrong(run)


@pytest.mark.parametrize("name", ["recipe.yaml", "ledger.lock", "private/run.json", "tips.jsonl", FILES[-2], FILES[-1]])
def test_a_pipe_where_a_file_belongs_is_not_waited_for(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(InputError, match="no file"):
        inspect_run(run)


def test_a_key_that_comes_twice_and_another_encoding_are_wrong(run: Path) -> None:
    (run / "signature.json").write_text('{"payload": "x", "payload": "y", "payloadType": "z", "signatures": []}')
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_text().encode("utf-16"))
    found = {check.record for check in inspect_run(run) if check.verdict == "wrong"}
    assert {"signature.json", "metrics.jsonl"} <= found


def test_a_run_without_private_is_no_export(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    assert wrong(tmp_path / "out") == []
    (tmp_path / "out" / "SHA256SUMS").unlink()
    shutil.rmtree(run / "private")
    assert wrong(tmp_path / "out") == ["private/run.json"] and "private/run.json" in wrong(run)


@pytest.mark.parametrize("word", ["report", "card"])
def test_no_page_is_written_into_an_export(run: Path, tmp_path: Path, command: Any, word: str) -> None:
    export(run, tmp_path / "out")
    said = command(word, str(tmp_path / "out"))
    assert said.status == 2 and "whose files are sealed; allowed: another folder" in said.err
    assert wrong(tmp_path / "out") == []
    (tmp_path / "own.html").write_text("mine")
    if word == "report":
        assert "which is no report of fedflat" in command(word, str(run), "--out", str(tmp_path / "own.html")).err
        assert not any(command(word, str(run), "--out", str(tmp_path / "new.html")).status for _ in range(2))


DEEP = b"[" * 100_000 + b"\n"


@pytest.mark.parametrize("name", ["privacy.json", "private/run.json", "metrics.jsonl", "ledger.jsonl"])
def test_json_of_any_depth_is_wrong_and_no_traceback(run: Path, name: str) -> None:
    (run / name).write_bytes(DEEP)
    assert name in wrong(run)
    with pytest.raises(InputError):
        fedflat.load(run)


def test_an_older_opening_put_back_is_refused(run: Path) -> None:
    """Its key has drawn these rounds before: the ledger's lines know of a later attempt."""
    opening = Opening.read(run)
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    with Ledger.open(run / "ledger.jsonl", key_id="a later key") as ledger:
        ledger.describe({**lines[0]["run"], "attempt": opening.attempt + 1})
        ledger.append(event(lines[-1]))
    assert "private/run.json" in wrong(run)
    with pytest.raises(InputError, match="found the one of attempt 1; allowed: that of attempt 2"):
        simulation.run(RECIPE, out=run, resume=True)


def test_another_runs_checkpoint_is_refused_without_noise_too(tmp_path: Path) -> None:
    plain = {**RECIPE, "algorithm": "p-fedsam", "privacy": {}}
    for seed in (1, 2):
        simulation.run({**plain, "seed": seed}, out=tmp_path / str(seed))
    for half in FILES[-2:]:
        shutil.copyfile(tmp_path / "1" / half, tmp_path / "2" / half)
    with pytest.raises(InputError, match="found a checkpoint of another run"):
        simulation.run({**plain, "seed": 2}, out=tmp_path / "2", resume=True)


def test_a_key_without_its_mark_is_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder was copied to another machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "here"))
    secure = {**RECIPE, "privacy": {**RECIPE["privacy"], "secure_rng": True}}  # type: ignore[dict-item]
    simulation.run(secure, out=tmp_path / "run")
    mark = [check for check in inspect_run(tmp_path / "run") if "mark" in check.record]
    assert [check.verdict for check in mark] == ["ok"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    mark = [check for check in inspect_run(tmp_path / "run") if "mark" in check.record]
    assert [check.verdict for check in mark] == ["unchecked"] and "not on this machine" in mark[0].about


@pytest.mark.parametrize("name", ["metrics.jsonl", "private/private.seals", "checkpoints"])
def test_a_folder_where_a_file_belongs_is_one_line(run: Path, name: str) -> None:
    if (run / name).is_dir():
        shutil.rmtree(run / name)
        (run / name).write_text("")
    else:
        (run / name).unlink()
        (run / name).mkdir()
    for refused in (lambda: inspect_run(run), lambda: simulation.run(RECIPE, out=run, resume=True)):
        with pytest.raises(InputError, match=f"{name}: found (a|no) folder"):
            refused()


@pytest.mark.parametrize(("name", "text"), [("privacy.json", b'{"delta": "x"}'), ("metrics.jsonl", b"\xff\xfe\n")])
def test_a_statement_or_metrics_of_other_types_are_wrong_and_no_traceback(run: Path, name: str, text: bytes) -> None:
    (run / "report.html").touch()  # whose figure is compared with the statement's
    (run / name).write_bytes(text)
    assert "privacy.json" in wrong(run)


def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedflat.records.checkpoint.save", full)
    with pytest.raises(RunError, match=r"checkpoints: cannot be written \(No space left on device\); the run stops"):
        simulation.run(RECIPE, out=tmp_path / "run")


def test_a_run_that_is_not_at_its_end_is_unchecked_and_not_wrong(tmp_path: Path) -> None:
    """Interrupted after two of three rounds, its statement not written; and while it goes on."""
    out = tmp_path / "run"
    simulation.run(RECIPE, out=out, should_stop=iter((False, False, True)).__next__)
    (out / "privacy.json").unlink()
    killed = shutil.copytree(out, tmp_path / "killed")  # before its second round had a tip and a checkpoint
    (killed / "checkpoints/round-000002.safetensors").unlink()
    without_last_line(killed / "tips.jsonl")
    assert not wrong(out) and not wrong(killed)
    said = {check.record: check for check in inspect_run(out)}["privacy.json"]
    assert said.verdict == "unchecked" and "interrupted (round 2 of 3)" in said.about
    with Ledger.open(out / "ledger.jsonl"):
        (out / "metrics.jsonl").open("ab", 0).write(b'{"rou')
        said = {check.record: check for check in inspect_run(out)}["metrics.jsonl"]
        assert not wrong(out) and "the run goes on" in said.about
    assert wrong(out) == ["metrics.jsonl"]
    without_last_line(out / "ledger.jsonl")
    assert "ledger.jsonl" in wrong(out)
    (out / "ledger.jsonl").unlink()
    assert "ledger.jsonl" in wrong(out)


def test_a_stopped_run_that_goes_on_has_no_statement_until_it_ends(tmp_path: Path) -> None:
    """Its first one would say less than the ledger charges, of a run that is killed then."""
    out, stopped, recipe = tmp_path / "run", tmp_path / "stopped", {**RECIPE, "rounds": 4}
    simulation.run(recipe, out=out, should_stop=iter((False, True)).__next__)
    write_report([out], out)
    shutil.copytree(out, stopped)
    with pytest.raises(InputError):  # before anything is charged, nothing goes
        simulation.run(RECIPE, out=out, resume=True)
    pages = [(out / "privacy.json").exists() and (out / "report.html").exists()]

    def round(*_: Any) -> None:
        pages.append((out / "report.html").exists())
        (out / "report.html").touch()  # one that is made while the run goes on stays
        assert len(pages) < 3

    with pytest.raises(AssertionError):
        simulation.run(recipe, out=out, resume=True, on_round=round)
    (out / "report.html").unlink()
    assert pages == [True, False, True] and not (out / "privacy.json").exists() and not wrong(out)
    shutil.copy(stopped / "privacy.json", out)  # as a power cut may leave it
    for number, use in enumerate((load, attest, export, lambda run, *_: report([run]))):
        places = [] if use is load else [tmp_path / f"handed-over-{number}"]
        with pytest.raises(InputError, match=r"fewer rounds than ledger\.jsonl charges"):
            use(out, *places)
        use(stopped, *places)


def test_a_run_that_began_no_round_is_unchecked(run: Path) -> None:
    for name in ("privacy.json", "ledger.jsonl", "ledger.lock", "metrics.jsonl", "metrics.seals", "tips.jsonl"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    for path in (run / "private").glob("private.*"):
        path.unlink()
    assert not wrong(run)


def test_a_file_that_nobody_exported_is_noticed(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    (tmp_path / "out" / "more").mkdir()
    (tmp_path / "out" / "more" / "extra.bin").write_bytes(b"x")
    assert wrong(tmp_path / "out") == ["more/extra.bin"]
    (tmp_path / "out" / "recipe.yaml").unlink()
    assert "recipe.yaml" in wrong(tmp_path / "out")


def restate(folder: Path, **changed: Any) -> None:
    """Change a statement and redo its checksum, as whoever edits it would."""
    found = json.loads((folder / "privacy.json").read_bytes()) | changed
    (folder / "privacy.json").write_text(json.dumps({**found, "checksum": checksum(found)}))


def test_every_difference_is_named_and_words_are_told_from_figures() -> None:
    stated = {
        "epsilon": 1.0, "same": [1, {"a": 2.0}], "reasons": ["x"], "noise_source": "y" * 80, "extra": True, "run": 1,
    }  # fmt: skip
    found = {"epsilon": 2.0, "same": [1, {"a": 2.0 + 1e-9}], "reasons": [], "noise_source": "z", "lost": "w"}
    said = {each.field: each for each in differences(stated, found)}
    assert set(said) == {"epsilon", "reasons", "noise_source", "extra", "lost"}
    assert [name for name in said if said[name].worded] == ["reasons", "noise_source"]
    assert str(said["epsilon"]) == "epsilon says 1, and the run gives 2"
    assert "1 entries" in str(said["reasons"]) and "…" in str(said["noise_source"])
    assert "True" in str(said["extra"]) and not list(differences(found, found))


def test_a_seeded_statement_that_does_not_say_whose_clients_they_were_is_refused() -> None:
    for said in ({"noise_source": "simulation: noise reproducible from the seed"}, {"caution": "seeded"}):
        with pytest.raises(InputError, match="seeded"):
            refuse_seeded("export", {"proven_epsilon": 3.0, "facts": {"data": {"dataset": "digits"}}, **said})
        refuse_seeded("export", {"proven_epsilon": 3.0, "facts": {"own_clients": False}, **said})


def reopened(folder: Path, **changed: Any) -> None:
    """Change private/run.json and redo its checksum."""
    replace(Opening.read(folder), **changed).write(folder)


def stripped(whole: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what takes a line's run, or that run's terms alone, out."""
    if whole:
        return lambda line: {key: value for key, value in line.items() if key != "run"}
    return lambda line: (
        line | {"run": {k: v for k, v in line["run"].items() if k != "terms"}} if "run" in line else line
    )


@pytest.mark.parametrize("what", ["terms", "run", "terms everywhere", "everything"])
def test_a_folder_whose_fields_were_taken_out_is_refused(run: Path, tmp_path: Path, what: str) -> None:
    """As if it were of 0.1 or 0.2, of which less could be checked; the twin is the folder as it was."""
    export(run, tmp_path / "out")
    assert not wrong(run) and not wrong(tmp_path / "out")
    for folder in (run, tmp_path / "out"):
        rewrite(folder, stripped(whole=what in ("run", "everything")))
        found = json.loads((folder / "privacy.json").read_bytes())
        if what == "everything":
            (folder / "tips.jsonl").unlink()
            (folder / "privacy.json").write_text(json.dumps({k: v for k, v in found.items() if k not in SEALS}))
    if what == "everything":
        (run / "private" / "run.json").unlink()
    elif what == "terms everywhere":
        reopened(run, terms={})
    for folder in (run, tmp_path / "out"):
        for use in (inspect_run, fedflat.load, lambda path: export(path, tmp_path / "again")):
            with pytest.raises(InputError, match=r"no terms: of fedflat 0\.1 or 0\.2"):
                use(folder)


SEALS = ("run", "weights", "checksum")


EDITS = {
    "epsilon_at_1e-5": 0.1, "unit": "one row of one client", "noise_source": "256 bits of operating-system entropy",
    "not_covered": [], "adversaries": [{"adversary": "recipients", "epsilon": 0.1}],
}  # fmt: skip


@pytest.mark.parametrize("field", EDITS)
def test_an_edited_statement_is_found_out(run: Path, tmp_path: Path, field: str) -> None:
    restate(run, **{field: EDITS[field]})
    found = {check.record for check in check_fields(Records(run)) if check.verdict == "wrong"}
    assert found and "privacy.json" not in found  # the twin: its checksum alone says nothing
    for use in (lambda: export(run, tmp_path / "out"), lambda: fedflat.load(run)):
        with pytest.raises(InputError, match=field.split("_")[0]):
            use()


def forge(target: Path, source: Path) -> None:
    """Put the weights of one checkpoint into another, with its facts, and redo the checksum."""
    with safe_open(target, framework="pt") as file:
        facts = json.loads(file.metadata()["state"])
    facts.pop("sha256")
    tensors = load_file(source)
    save_file(tensors, target, metadata={"state": json.dumps({**facts, "sha256": checkpoint._seal(tensors, facts)})})


def test_a_forged_checkpoint_of_another_round_is_found_out(tmp_path: Path) -> None:
    simulation.run(PLAIN, out=tmp_path / "run")
    forge(tmp_path / "run/checkpoints/round-000003.safetensors", tmp_path / "run/checkpoints/round-000002.safetensors")
    checkpoint.load(tmp_path / "run/checkpoints/round-000003.safetensors")  # the twin: sound by itself
    found = [
        check for each in (check_fields, inspection.check_checkpoints) for check in each(Records(tmp_path / "run"))
    ]
    assert {check.record for check in found if check.verdict == "wrong"} == {
        "the weights", "checkpoints/round-000003.safetensors",
    }  # fmt: skip


def test_torn_lines_and_strangers_are_named(run: Path) -> None:
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(b'{"line":3')
    (run / "private/more.bin").write_bytes(b"x")
    found = {check.record: check for check in check_strangers(Records(run))}
    assert found["private/more.bin"].verdict == "unchecked"
    assert any("torn" in check.about for check in inspection.check_ledger(Records(run)))


def write_pages(run: Path) -> None:
    write_report([run], run / "report.html")
    made = card.card(read_run(run))
    (run / "card.md").write_text(card.markdown(made))
    (run / "card.html").write_text(card.html(made))


def test_a_page_and_a_card_that_show_another_figure_are_found_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pages(run)
    (run / "report.html").write_text((run / "report.html").read_text().replace("Use this model", "Use it"))
    monkeypatch.setattr("fedflat.simulation.recomputed.HERE", "another version, with other words")
    assert next(check_pages(Records(run))).verdict == "unchecked"
    for name in ("report.html", "card.html", "card.md"):
        (run / name).write_text((run / name).read_text().replace("8.00", "0.01"))
    assert [check.verdict for check in check_pages(Records(run))] == ["wrong"] * 3


def test_signed_records_notice_that_all_was_rewritten(tmp_path: Path) -> None:
    """Less noise, with chain, statement, seals and checkpoints made anew: another run under the same name."""
    recipe = {**PLAIN, "privacy": {"clip": 0.5, "noise_multiplier": 1.0}}
    operator = signing.Operator.create(tmp_path / "operator.pem")
    simulation.run(recipe, out=tmp_path / "run", key=tmp_path / "operator.pem")
    public = signing.public_place(tmp_path / "operator.pem")
    assert not [check for check in check_signed(Records(tmp_path / "run"), operator.public) if check.verdict == "wrong"]
    run_id = json.loads((tmp_path / "run/privacy.json").read_bytes())["run"]
    (tmp_path / "client.tip").write_bytes(tip_record(tmp_path / "run", run_id, operator, 3)[ENVELOPE])
    seen = list(check_signed(Records(tmp_path / "run"), operator.public, tmp_path / "client.tip"))
    assert [check.verdict for check in seen] == ["ok", "ok", "ok"]

    simulation.run({**recipe, "privacy": {"clip": 0.5, "noise_multiplier": 4.0}}, out=tmp_path / "forged")
    assert {check.verdict for check in check_signed(Records(tmp_path / "forged"))} == {"unchecked"}  # the twin
    found = check_signed(Records(tmp_path / "forged"), read_public(public), tmp_path / "client.tip")
    assert [check.verdict for check in found] == ["wrong", "wrong", "wrong"]
    (tmp_path / "forged/charge.jsonl").write_text("")  # no folder of tune, whatever lies in it
    assert "wrong" in {check.verdict for check in inspect_run(tmp_path / "forged", public)}
    shutil.copyfile(tmp_path / "run/signature.json", tmp_path / "forged/signature.json")
    assert "wrong" in {check.verdict for check in check_signed(Records(tmp_path / "forged"), operator.public)}


@pytest.fixture
def attested(tmp_path: Path) -> Path:
    """A run, and beside it the folder that is handed over of it."""
    simulation.run(PLAIN, out=tmp_path / "run")
    attest(tmp_path / "run", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[int, str]]:
    """The exit status of a folder's check.py and its last words, in this process, which has loaded numpy."""

    def check(folder: Path) -> tuple[int, str]:
        capsys.readouterr()
        status = 0
        try:
            runpy.run_path(str(folder / "check.py"), run_name="__main__")
        except SystemExit as end:
            status = int(str(end.code))
        said = capsys.readouterr()
        return status, said.err if status else said.out

    return check


def test_a_reviewer_checks_an_attested_folder_alone(attested: Path, tmp_path: Path) -> None:
    """By a Python that has numpy and nothing else, in which fedflat cannot be imported."""
    venv.create(tmp_path / "venv", with_pip=False)
    installed = Path(np.__file__).parents[1]
    (tmp_path / "packages").mkdir()
    for found in (installed / "numpy", *installed.glob("numpy.libs")):
        (tmp_path / "packages" / found.name).symlink_to(found)
    alone = {"PYTHONPATH": str(tmp_path / "packages"), "PATH": os.environ["PATH"]}

    def said(*words: Any) -> subprocess.CompletedProcess[str]:
        command = [tmp_path / "venv/bin/python", *words]
        return subprocess.run(command, capture_output=True, text=True, env=alone, cwd=tmp_path, timeout=120)

    assert "ModuleNotFoundError" in said("-c", "import fedflat").stderr
    assert said(attested / "check.py").returncode == 0
    restate(attested, epsilon=1.0, proven_epsilon=1.0)
    assert said(attested / "check.py").returncode == 1


def test_damage_to_an_attested_folder_is_noticed(tmp_path: Path, checked: Any) -> None:
    out = tmp_path / "out"
    signing.Operator.create(tmp_path / "operator.pem")
    full = {**PLAIN, "cohort": {"size": 20, "sampling": "full"}}
    simulation.run(full, out=tmp_path / "run", key=tmp_path / "operator.pem")
    attest(tmp_path / "run", out)
    shutil.copyfile(tmp_path / "operator.pub", out / "operator.pub")
    assert checked(out)[0] == 0
    whole = {file.name: file.read_bytes() for file in out.glob("*.json*")}
    for name, changed in (("ledger.jsonl", b"\n".join(whole["ledger.jsonl"].split(b"\n")[:2]) + b"\n"),
                          ("signature.json", whole["signature.json"].replace(b'"sig": "', b'"sig": "AA')),
                          ("tips.jsonl", whole["tips.jsonl"].replace(b'"sig":"', b'"sig":"AA', 1)),
                          ("tips.jsonl", whole["tips.jsonl"].replace(b'"events":2', b'"events":1')),
                          ("tips.jsonl", whole["tips.jsonl"].split(b"\n")[0] + b"\n")):  # fmt: skip
        (out / name).write_bytes(changed)
        assert checked(out)[0] == 1, name
        (out / name).write_bytes(whole[name])
    assert checked(out)[0] == 0
    (out / "signature.json").unlink()
    assert checked(out)[0] == 1


def test_less_noise_in_an_unsigned_folder_is_noticed_and_nothing_else_is_said(attested: Path, checked: Any) -> None:
    ledger, stated = attested / "ledger.jsonl", attested / "privacy.json"
    whole, sound = ledger.read_bytes(), stated.read_text()
    rewrite(attested, lambda line: line)  # the twin: a chain that was redone is sound
    (attested / "tips.jsonl").unlink()  # whose tips are those of the lines before
    assert checked(attested)[0] == 0
    stated.write_text(sound.replace("{", '{"epsilon": 0.1, ', 1))
    assert "a key comes twice" in checked(attested)[1]
    stated.write_text(sound)
    restate(attested, rounds_charged=1)
    assert "rounds_charged is not the ledger's 3" in checked(attested)[1]
    stated.write_text(sound)
    rewrite(attested, lambda line: {**line, "sampling": "full"})
    assert "q is not 1" in checked(attested)[1]
    void = ({"q": 1e-9}, {"clip": -1}, {"clip": None}, {"rounding": -0.9}, {"std": 0})
    for odd in ({"separation": 1000}, {"trust": "local"}, {"run": None}, *void):
        ledger.write_bytes(whole)
        rewrite(attested, lambda line, odd=odd: {**line, **odd})  # type: ignore[misc]
        assert checked(attested)[0] == 1, odd
    less = ((("std",), "less noise than it says"), (("std", "noise_multiplier"), "is stated at δ"))
    for names, word in less:
        ledger.write_bytes(whole)
        rewrite(attested, lambda line, names=names: line | {name: 0.9 * line[name] for name in names})  # type: ignore[misc]
        status, said = checked(attested)
        assert status == 1 and word in said and said.count("\n") == 1


UNKNOWN: dict[str, dict[str, Any]] = {
    "cohorts: fixed": {"cohort": {"size": 10, "sampling": "fixed"}},
    "cohorts: truncated": {"cohort": {"size": 10, "sampling": "truncated", "max": 15}},
    "noise: tree": {
        "cohort": {"size": 5, "sampling": "min-separation", "separation": 3},
        "privacy": {"clip": 0.5, "noise_multiplier": 1.0, "noise": {"kind": "tree"}},
    },
    "mechanism: published-000": {
        "algorithm": "dp-fedsam", "privacy": {"clip": 0.5, "noise_multiplier": 1.0, "protocol": "published"},
    },
    "mechanism: ddgauss": {
        "algorithm": {"name": "ddgauss", "bits": 18}, "privacy": {"clip": 0.5, "noise_multiplier": 1.0}
    },
}  # fmt: skip


def test_a_schedule_that_was_ended_early_states_what_it_planned(tmp_path: Path, checked: Any) -> None:
    turns = {"algorithm": "dp-fedavg", "cohort": {"size": 5, "sampling": "min-separation", "separation": 3}}
    simulation.run(
        {**RECIPE, **turns}, out=tmp_path / "run", should_stop=lambda: (tmp_path / "run/tips.jsonl").exists()
    )
    assert len(Records(tmp_path / "run").entries) < 3 and not wrong(tmp_path / "run")
    attest(tmp_path / "run", tmp_path / "out")
    assert checked(tmp_path / "out")[0] == 0
    restate(tmp_path / "out", epsilon=1.0, proven_epsilon=1.0)
    assert checked(tmp_path / "out")[0] == 1  # the twin: less than the lines give


@pytest.mark.parametrize("law", UNKNOWN)
def test_what_the_checker_cannot_check_it_says_in_a_line(law: str, tmp_path: Path, checked: Any) -> None:
    simulation.run({**PLAIN, "rounds": 2, **UNKNOWN[law]}, out=tmp_path / "run")
    attest(tmp_path / "run", tmp_path / "out")
    assert checked(tmp_path / "out") == (1, f"NOT CHECKED: {law}\n")


def test_a_page_fits_wherever_its_folder_is_copied_and_whenever(run: Path, tmp_path: Path) -> None:
    write_report([run], run / "report.html")
    copy = Path(shutil.copytree(run, tmp_path / "moved", copy_function=shutil.copyfile))
    export(run, tmp_path / "out")
    for folder in (copy, tmp_path / "out"):
        os.utime(folder / "metrics.jsonl", (0, 0))
        assert [check.verdict for check in check_pages(Records(folder))] == ["ok"]
    page = copy / "report.html"
    page.write_text(page.read_text().replace("load(&#34;", "load(&#34;x&#34;); other(&#34;"))
    assert [check.verdict for check in check_pages(Records(copy))] == ["wrong"]


def as_reviewer(*words: str) -> subprocess.CompletedProcess[str]:
    """Run fedflat (or Python, after -c) without a superuser's right to read what is not permitted."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("setpriv takes the rights away")
    alone = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*alone, sys.executable, *([] if words[0] == "-c" else ["-m", "fedflat"]), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


LOAD = "import sys, fedflat; found = fedflat.load(sys.argv[1]); print(len(found.history), found.private_history)"


@pytest.mark.long
def test_a_reviewer_without_the_owners_rights_gets_what_can_be_had(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    os.chmod(run / "private", 0)
    try:
        verify = as_reviewer("verify", str(run))
        assert verify.returncode == 0 and "nothing is wrong" in verify.stdout, verify
        assert "not checked private/run.json: this account may not read private/" in verify.stdout
        loaded = as_reviewer("-c", LOAD, str(run))
        assert loaded.stdout == "3 []\n" and "this account may not read private/" in loaded.stderr
        os.chmod(run, 0o555)
        for words in (["report", str(run)], ["card", str(run)], ["export", str(run), str(tmp_path / "x")]):
            said = as_reviewer(*words)
            assert said.returncode == 2 and said.stderr.count("\n") == 1 and "found " in said.stderr, said
        sound = as_reviewer("verify", str(tmp_path / "out"))
        assert sound.returncode == 0 and "nothing is wrong" in sound.stdout
        os.chmod(run / "metrics.jsonl", 0)
        for words in (["report", str(run)], ["verify", str(run)]):
            said = as_reviewer(*words)
            assert said.returncode == 2 and said.stderr.count("\n") == 1 and "metrics.jsonl: found" in said.stderr, said
    finally:
        os.chmod(run, 0o755)
        os.chmod(run / "private", 0o700)


def resealed(folder: Path, page: bool = True) -> None:
    """Redo an export's page and checksums, as whoever edits it would."""
    if page:
        write_report([folder], folder / "report.html")
    names = [line.split("  ", 1)[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(sums))


def edit_metrics(folder: Path, **changed: Any) -> None:
    """Change the last line of a folder's metrics, with its seal and checksum where there are such."""
    *before, last = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    line = json.dumps(json.loads(last) | changed) + "\n"
    (folder / "metrics.jsonl").write_text("".join([*before, line]))
    if (folder / "SHA256SUMS").exists():
        resealed(folder)
        return
    seal_of = RunFolder(folder, run=json.loads((folder / "privacy.json").read_bytes())["run"])._seal
    *seals, _ = (folder / "metrics.seals").read_text().splitlines(keepends=True)
    (folder / "metrics.seals").write_text("".join([*seals, f"{len(before)} {seal_of('metrics.jsonl', line)}\n"]))


def said_of(folder: Path, record: str, key: Path | None = None) -> list[tuple[str, str]]:
    return [(check.verdict, check.about) for check in inspect_run(folder, key) if check.record == record]


@pytest.fixture(scope="module")
def both_exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two exports of one recipe: signed/, by operator.pem, and unsigned/."""
    place = tmp_path_factory.mktemp("exports")
    signing.Operator.create(place / "operator.pem")
    for name, key in (("signed", place / "operator.pem"), ("unsigned", None)):
        simulation.run(PLAIN, out=place / f"{name}-run", key=key)
        export(place / f"{name}-run", place / name)
    return place


@pytest.fixture
def exports(both_exports: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(both_exports, tmp_path / "exports"))


def test_metrics_of_a_signed_export_are_signed_and_of_an_unsigned_one_said_to_be_open(exports: Path) -> None:
    for name in ("signed", "unsigned"):
        assert not wrong(exports / name)
    covered = said_of(exports / "signed", "signature.json", exports / "operator.pub")[-1][1]
    assert "weights, metrics, made_for signed" in covered
    for name in ("signed", "unsigned"):
        edit_metrics(exports / name, test_accuracy=0.99)
    assert said_of(exports / "signed", "signature.json")[-1] == ("wrong", "it is about other metrics")
    # the twin without a key: nothing is wrong, and the record is named as open
    assert not [check for check in inspect_run(exports / "unsigned") if check.verdict == "wrong"]
    ((verdict, about),) = said_of(exports / "unsigned", "signature")
    assert verdict == "unchecked" and "nothing here is covered" in about


def test_a_key_that_comes_twice_or_was_added_is_seen_in_a_signed_export(exports: Path) -> None:
    """JSON readers differ on a doubled key: one shows the first value, another the last."""
    folder, path = exports / "signed", exports / "signed" / "metrics.jsonl"
    sound = path.read_text()
    for more in ('{"test_accuracy": 0.999, ', '{"seconds": "accuracy 99.9 %", '):
        path.write_text(sound.replace("{", more))
        resealed(folder)
        assert said_of(folder, "signature.json")[-1] == ("wrong", "it is about other metrics")
    stated = exports / "unsigned" / "privacy.json"
    stated.write_text(stated.read_text().replace("{", '{"epsilon": 0.1, ', 1))
    resealed(exports / "unsigned")
    assert wrong(exports / "unsigned")


def say(folder: Path, change: Callable[[dict[str, Any]], object], **about: str) -> None:
    """Change what an export's model says of itself, with preparation.json and checksums, as whoever edits it would."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        said = file.metadata()
    made_for = json.loads(said["made_for"])
    change(made_for)
    save_file(load_file(path), path, metadata={**said, "made_for": json.dumps(made_for), **about})
    if "preparation" in made_for:
        (folder / "preparation.json").write_text(json.dumps(made_for["preparation"]))
    resealed(folder)


def test_an_export_whose_inputs_classes_or_round_were_edited_is_found_out(exports: Path) -> None:
    record = "model.safetensors, metadata"
    for name in ("signed", "unsigned"):
        say(exports / name, lambda made: None)
        assert said_of(exports / name, record)[0][0] == "ok" and not wrong(exports / name)  # the twin
    say(exports / "signed", lambda made: made["preparation"].update(mean=[0.0]))
    assert said_of(exports / "signed", "signature.json")[-1] == ("wrong", "it is about other made_for")
    say(exports / "unsigned", lambda made: made["preparation"].update(encoding="none"))
    assert "cannot be read again" in said_of(exports / "unsigned", record)[0][1]
    say(exports / "unsigned", dict.clear)
    assert "does not say which inputs" in said_of(exports / "unsigned", record)[0][1]
    say(exports / "unsigned", lambda made: made.update(input_shape=[1, 8, 8], dtype="float32"), round="99")
    found = [about for _, about in said_of(exports / "unsigned", record)]
    says = "metadata.round says 99, and the run gives 3"
    assert found[0] == says and found[1].startswith("preparation.json")
    say(exports / "unsigned", lambda made: None, round="3", proven_epsilon="0.1")
    assert "proven_epsilon says 0.1, and the run gives nothing" in said_of(exports / "unsigned", record)[0][1]


@pytest.mark.parametrize("name", ["signed", "unsigned"])
def test_lines_of_tips_that_no_round_wrote_are_found_out(exports: Path, name: str) -> None:
    folder, key = exports / name, exports / "operator.pub" if name == "signed" else None
    lines = [json.loads(line) for line in (folder / "tips.jsonl").read_text().splitlines()]
    bare = [{word: value for word, value in line.items() if word != "signed"} for line in lines]

    def found(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
        (folder / "tips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        resealed(folder, page=False)
        return [pair for pair in said_of(folder, "tips.jsonl", key) if pair[0] != "ok"]

    assert not found(lines)  # the twin
    for rows in (
        [*lines, {**bare[-1], "round": 99}],
        [{**bare[0], "round": 0}, *lines],
        [{**bare[0], "epsilon": 0.1}, *lines[1:]],
        [{**bare[0], "events": 0, "tip": hashlib.sha256(HEADER).hexdigest()}, *lines[1:]],
        [{"round": 1}, *lines[1:]],
    ):
        assert found(rows)[0][0] == "wrong", rows
    assert found(bare) == ([("unchecked", "0 of 3 rounds signed by this key")] if key else [])


def test_the_page_of_an_export_has_the_title_that_it_was_exported_with(exports: Path) -> None:
    folder = exports / "unsigned"
    for title, verdict in (("tiny", "ok"), ("privacy loss 0.1", "wrong")):  # the twin first
        (folder / "report.html").write_text(render([replace(public(read_run(folder)), name=title)]))
        assert [check.verdict for check in check_pages(Records(folder))] == [verdict]


def test_the_list_of_checksums_names_files_of_the_export_and_no_others(exports: Path) -> None:
    folder, digest = exports / "unsigned", hashlib.sha256((exports / "operator.pub").read_bytes()).hexdigest()
    sums = (folder / "SHA256SUMS").read_text()
    for line in ("proven epsilon 0.1", f"{digest}  ../operator.pub"):
        (folder / "SHA256SUMS").write_text(f"{sums}{line}\n")
        assert wrong(folder), line
    (folder / "SHA256SUMS").write_text(sums)  # the twin's, in other tests
    (folder / "\x1b[1A").symlink_to(exports)
    assert "\x1b[1A" in wrong(folder) and wrapped("\x1b[1A") == ["\ufffd[1A"]  # no name moves the cursor


def test_swapped_names_of_classes_are_found_out(tmp_path: Path) -> None:
    """Without a key too, where the recipe names the categories and the scale."""
    table = "user,age,bought\n" + "".join(f"{n % 20},{20 + n},{'yes' if n > 30 else 'no'}\n" for n in range(60))
    (tmp_path / "table.csv").write_text(table)
    data = {"dataset": str(tmp_path / "table.csv"), "by": "user", "inputs": ["age"], "target": "bought"}
    data |= {"categories": {"bought": ["no", "yes"]}, "scale": {"age": [40, 15]}}
    simulation.run({**PLAIN, "model": "linear", "data": data}, out=tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    assert not wrong(tmp_path / "out")  # the twin
    sound = (tmp_path / "out/model.safetensors").read_bytes()

    def swap(made: dict[str, Any]) -> None:
        made["preparation"]["names"].reverse()

    def swap_both(made: dict[str, Any]) -> None:
        swap(made)
        made["preparation"]["encoding"]["categories"]["bought"].reverse()

    def shift(made: dict[str, Any]) -> None:
        made["preparation"]["encoding"]["scale"]["age"] = [80.0, 15.0]

    for change in (swap, swap_both, shift):
        (tmp_path / "out/model.safetensors").write_bytes(sound)
        say(tmp_path / "out", change)
        assert "model.safetensors, metadata" in wrong(tmp_path / "out"), change
        with pytest.raises(InputError, match=r"made_for\.preparation"):
            fedflat.load(tmp_path / "out")


def test_a_signature_that_leaves_something_out_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, made = signing.Operator.create(tmp_path / "operator.pem"), signing.statement_of

    def with_less(kind: str, subjects: Any, predicate: Any) -> Any:
        return made(kind, {name: each for name, each in subjects.items() if name != signing.MADE_FOR}, predicate)

    monkeypatch.setattr(signing, "statement_of", with_less)
    simulation.run(PLAIN, out=tmp_path / "run", key=tmp_path / "operator.pem")
    found = list(check_signed(Records(tmp_path / "run"), operator.public))
    assert found[0].verdict == "wrong" and "other made_for" in found[0].about


def test_a_file_that_somebody_added_to_an_export_is_named(exports: Path) -> None:
    folder = exports / "unsigned"
    (folder / "notes.txt").write_text("ε = 0.1")
    (folder / "recipe.yaml").write_text("# ε = 0.1\n" + (folder / "recipe.yaml").read_text())
    resealed(folder)
    assert said_of(folder, "notes.txt")[-1][1].startswith("unknown")
    assert said_of(folder, "recipe.yaml")[-1][1].startswith("has a comment")


@pytest.mark.parametrize("changed", [{"epsilon": 0.01}, {"epsilon": None}, {"clip": 0.25}, {"note": 1}])
def test_epsilon_and_clip_in_metrics_are_made_again(run: Path, changed: dict[str, Any]) -> None:
    edit_metrics(run, test_accuracy=0.99)
    assert not wrong(run)  # the twin: a seal that was redone tells nothing of a figure that nothing gives again
    edit_metrics(run, **changed)
    ((verdict, about),) = said_of(run, "metrics.jsonl, ε and clip")
    assert verdict == "wrong" and re.match(f"round 2: {next(iter(changed))}( says|, which no line)", about)


def test_the_metrics_of_a_run_that_drew_a_round_twice_are_made_again(tmp_path: Path) -> None:
    """Killed before its second checkpoint, and gone on with a key that is lost: that round is charged again."""
    recipe = {**PLAIN, "privacy": {"clip": 0.5, "noise_multiplier": 1.0}}
    done: list[int] = []
    simulation.run(recipe, out=tmp_path, on_round=lambda *_: done.append(1), should_stop=lambda: len(done) == 2)
    for name in ("checkpoints", "private/heads"):
        (tmp_path / name / "round-000002.safetensors").unlink(missing_ok=True)
    keys.forget(Opening.read(tmp_path).run)
    simulation.run(recipe, out=tmp_path, resume=True)
    assert len(Records(tmp_path).entries) == 4
    assert [verdict for verdict, _ in said_of(tmp_path, "metrics.jsonl, ε and clip")] == ["ok"]
    edit_metrics(tmp_path, epsilon=fedflat.epsilon(clients=20, cohort=10, rounds=3, noise_multiplier=1.0, delta=0.005))
    assert said_of(tmp_path, "metrics.jsonl, ε and clip")[0][0] == "wrong"  # the ε of three rounds where four count


def test_every_file_is_covered_or_named(run: Path) -> None:
    beside = ("registry.yaml", "audit.json", "ended.json", "ledger.torn", "server.lock")
    for name in (*beside, "notes.txt", "preparation.json"):
        (run / name).write_text("{}")
    found = {check.record: check for check in check_strangers(Records(run))}
    for name in (*beside, "ledger.lock"):
        assert found[name].about.startswith("known, not covered: "), name
    assert all(found[name].about.startswith("unknown") for name in ("notes.txt", "preparation.json"))
    assert found["files"].about.endswith("6 known and not covered, 2 unknown") and "metrics.seals" not in found
    named = {check.record for check in inspect_run(run)}
    for file in Records(run).files:  # the twin: each one is a record of its own, or of the file that it seals
        kept = [record for record in named if record.startswith(file.replace(".seals", ".jsonl"))]
        assert kept or file.startswith("private/heads/") or fnmatch(file, "checkpoints/*"), file


@pytest.mark.parametrize("name", ["report.html", "card.md", "card.html"])
def test_a_page_whose_title_or_data_show_another_epsilon_is_found(run: Path, name: str) -> None:
    write_pages(run)
    text = (run / name).read_text()
    edits = {"title": re.sub(r"seed-7654321|tiny", "ε = 0.01", text), "hidden": text + '<p id="runs">ε = 0.01</p>'}
    edits["data"] = text.replace("8.00", "0.01") + '<p id="runs">'
    for edit, changed in edits.items():
        assert changed != text, edit
        (run / name).write_text(changed)
        ((verdict, about),) = [(c.verdict, c.about) for c in check_pages(Records(run)) if c.record == name]
        assert verdict == "wrong" or "not covered here" in about, edit
        assert verdict == "wrong" or (edit, name) != ("title", "report.html")
    (run / name).write_text(text.replace("seed-7654321", "renamed"))  # the twin: a folder that was renamed
    assert [c.verdict for c in check_pages(Records(run)) if c.record == name] == ["ok"]


def test_without_a_key_a_ledger_that_is_chained_again_is_said_to_be_open(exports: Path) -> None:
    for name in ("signed", "unsigned"):
        # another noise key's name: the two runs' noise would count as shared
        new = rewrite(exports / name, lambda line: {**line, "key_id": "0" * 32})
        tips = [json.loads(line) for line in (exports / name / "tips.jsonl").read_text().splitlines()]
        (exports / name / "tips.jsonl").write_text(
            "".join(f"{json.dumps({**line, 'tip': tip})}\n" for line, tip in zip(tips, new))
        )
        resealed(exports / name)
    found = {name: inspect_run(exports / name) for name in ("signed", "unsigned")}
    assert {check.record for check in found["signed"] if check.verdict == "wrong"} >= {"signature.json"}
    assert not [check for check in found["unsigned"] if check.verdict == "wrong"]  # the twin
    ((verdict, about),) = said_of(exports / "unsigned", "signature")
    assert verdict == "unchecked" and "the ledger's lines" in about and "metrics" in about


def of_entries(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> list[str]:
    """Return what is said of a ledger whose lines were changed, as if chained again."""
    records = Records(folder)
    entries = [dict(entry) for entry in records.entries]
    change(entries)
    records.__dict__["ledger"] = records.ledger._replace(entries=entries)
    return list(ledger_faults(records))


LINES: list[tuple[Callable[[list[dict[str, Any]]], object], str]] = [
    (lambda lines: None, ""),  # the twin
    (lambda lines: lines[0].update(std=99.0), "line 0: std says "),
    (lambda lines: lines[0].update(q=0.01), "line 0: q says "),
    (lambda lines: lines[0].update(epsilon=0.1), "line 0: epsilon says "),
    (lambda lines: lines.pop(1), "no line for round 1"),
    (lambda lines: lines[1].update(note="ε = 0.1"), "line 1: note, which no line of this run has"),
]


@pytest.mark.parametrize(("change", "said"), LINES, ids=["twin", "std", "q", "epsilon", "too few", "more"])
def test_a_ledger_line_that_the_run_does_not_give_is_named(run: Path, change: Any, said: str) -> None:
    found = of_entries(run, change)
    assert len(found) == bool(said) and "".join(found).startswith(said)


def test_where_an_account_takes_long_lines_and_metrics_are_held_against_each_other(tmp_path: Path) -> None:
    fixed = {"rounds": 10, "cohort": {"size": 10, "sampling": "fixed"}, "privacy": {"clip": 0.5, "noise_multiplier": 3}}
    simulation.run({**PLAIN, **fixed}, out=tmp_path)
    records = Records(tmp_path)
    assert not list(metrics_faults(records)) and not of_entries(tmp_path, lambda lines: None)  # the twin
    for place in (0, 8):
        shown = records.metrics[place]["epsilon"]
        records.metrics[place]["epsilon"] = 0.9 * shown
        (fault,) = metrics_faults(records)
        assert fault.startswith(f"round {place}: epsilon says")
        records.metrics[place]["epsilon"] = shown
    for place, epsilon in ((8, 0.1), (8, 99.0), (9, 99.0), (4, 0.1)):
        found = of_entries(tmp_path, lambda lines, new=(place, epsilon): lines[new[0]].update(epsilon=new[1]))
        assert found and "epsilon" in found[0], (place, epsilon)


def test_lines_that_come_twice_in_an_export_are_seen(exports: Path) -> None:
    folder = exports / "unsigned"
    sound = (folder / "metrics.jsonl").read_text()
    for changed in (
        sound + sound.splitlines(keepends=True)[-1],
        sound.replace('"test_accuracy":', '"test_accuracy": 0.999, "test_accuracy":', 1),
    ):
        (folder / "metrics.jsonl").write_text(changed)
        resealed(folder)
        assert "metrics.jsonl" in wrong(folder), changed[:80]
    (folder / "metrics.jsonl").write_text(sound)
    resealed(folder)
    assert "metrics.jsonl" not in wrong(folder)  # the twin
