"""What the terminal shows: narrow, short without a terminal, silent when quiet, and never a claimed ε alone."""

import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import fedflat
from fedflat.report import progress
from fedflat.report.progress import ExperimentProgress, Progress, RunEvent
from fedflat.report.summary import print_comparison, print_summary

RECIPE = SimpleNamespace(
    name="a-recipe-with-a-name-that-is-really-quite-long-for-a-terminal", rounds=300, seed=0,
    cohort=SimpleNamespace(size=50.0), privacy=SimpleNamespace(randomness="secret"),
    algorithm=SimpleNamespace(name="dp-fedsam"), evaluation=SimpleNamespace(keep="last"),
)  # fmt: skip


def job(last: int = 300, *, private: bool = True, protocol: str = "sound", budget: float | None = 8.0) -> Any:
    plan = SimpleNamespace(private=private, delta=0.002, budget=budget, protocol=protocol, noise_cohort=None)
    parts = SimpleNamespace(plan=plan, algorithm=SimpleNamespace(name="dp-fedsam"))
    return SimpleNamespace(parts=parts, last_round=last, data=SimpleNamespace(clients=500))


def record(turn: int, **more: Any) -> dict[str, Any]:
    return {"round": turn, "epsilon": 0.01 * (turn + 1), "test_accuracy": 0.5, **more}


def run(shown: Progress, rounds: int, start: int = 0, **more: Any) -> None:
    for turn in range(start, rounds):
        shown.round(record(turn, **more), {"cohort": 48, "personal_accuracy": 0.7, "seconds": 0.25})


def shown_after(rounds: int, job: Any, recipe: Any = RECIPE, quiet: bool = False, **more: Any) -> Progress:
    """The progress of a whole run."""
    with Progress(recipe, quiet=quiet) as shown:
        shown.start(job)
        run(shown, rounds, **more)
    return shown


def drawn(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """An 80-column terminal whose output is kept."""
    out = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(
        progress, "console_now", lambda *_: Console(file=out, force_terminal=True, width=80, highlight=False)
    )
    return out


def on_screen(shown: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(shown._bars.get_renderable())
    return [line.rstrip() for line in out.getvalue().splitlines()]


def clocked(shown: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that this progress goes by, in a list whose first number a test moves on."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown._bars.get_time = lambda: now[0]
    return now


@pytest.mark.parametrize("rounds", [1, 2, 17, 19, 40, 300, 1001])
def test_a_run_without_a_terminal_prints_a_few_narrow_lines(capsys: pytest.CaptureFixture[str], rounds: int) -> None:
    shown_after(rounds, job(rounds), SimpleNamespace(**{**vars(RECIPE), "rounds": rounds, "name": "quick-start"}))
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 21
    assert max(map(len, lines)) <= 80
    assert f"{rounds}/{rounds}" in lines[-1]
    assert "accuracy 50.00 %" in lines[-1] and "personal 70.00 %" in lines[-1]
    assert f"ε {0.01 * rounds:.3g}"[:4] in lines[-1] and "of 8.00" in lines[-1] and "0 s left" in lines[-1]


def test_quiet_prints_nothing_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    shown_after(300, job(), quiet=True)
    with ExperimentProgress(quiet=True) as experiment:
        experiment.update(RunEvent("a/seed-0", "failed", 0, 3, note="no"))
    found = capsys.readouterr()
    assert found.out == found.err == ""


def test_time_left_counts_only_this_sessions_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Progress(RECIPE, quiet=True)
    now = clocked(shown, monkeypatch)
    shown.start(job(200))  # the budget allows 200 of the 300 rounds
    assert shown._bars.left() == ""
    for turn in range(100, 110):  # resumed at round 100: a round each second
        now[0] += 1.0
        run(shown, turn + 1, start=turn)
    assert shown._bars.left() == "1 min 30 s left"


def test_the_live_view_fits_80_columns() -> None:
    lines = on_screen(shown_after(299, job(), quiet=True, epsilon=12345.678))
    assert len(lines) == 3 and max(map(len, lines)) <= 80
    assert "round 299/300" in lines[1] and "clients/s" in lines[2]


def test_a_terminal_gets_a_live_view_and_no_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = drawn(monkeypatch)
    shown_after(20, job())
    assert "round  20/300" in out.getvalue() and "round   1/300\n" not in out.getvalue()


def test_a_terminal_that_cannot_redraw_gets_the_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = drawn(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    shown_after(300, job())
    assert out.getvalue() == "" and "300/300" in capsys.readouterr().out


def test_a_published_protocol_shows_no_epsilon_while_it_runs() -> None:
    assert "ε" not in "\n".join(on_screen(shown_after(5, job(protocol="published"), quiet=True)))


def test_work_before_the_first_round_is_told_without_a_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, name = ExperimentProgress(), "a/seed-0"
    clocked(experiment, monkeypatch)
    with Progress(RECIPE, stderr=True) as shown:
        now = clocked(shown, monkeypatch)
        experiment._bars.get_time, experiment._bars.spoke = shown._bars.get_time, now[0]
        for client in range(1, 101):
            now[0] += 1.0
            shown.waiting("making features, client", client, 500)
            experiment.update(RunEvent(name, "waiting", 0, 300, note=f"making features, client {client} of 500"))
        for screen in ("".join(on_screen(shown)), "".join(on_screen(experiment))):
            assert "100 of 500" in screen and "left" not in screen
        shown.start(job())
        for turn in range(2):
            now[0] += 2.0
            run(shown, turn + 1, start=turn)
            experiment.update(RunEvent(name, "running", turn + 1, 300))
        assert shown._bars.left() == experiment._bars.left() == "9 min 56 s left"  # of rounds alone
    found = capsys.readouterr()
    assert "making features, client 11 of 500" in found.err and found.err.count("making") == 9
    assert "left" not in found.err.split("round ")[0] and "making features, client 10 of 500" in found.out


@pytest.mark.parametrize(
    ("asked", "terminal", "shows"), [(None, False, 0), (None, True, 1), (True, False, 1), (False, True, 0)]
)
def test_a_run_in_python_shows_its_progress_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: bool | None, terminal: bool, shows: int
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "dumb")
    pairs = [(torch.randn(4, 3), torch.zeros(4).long()) for _ in range(4)]
    recipe = {"name": "mine", "rounds": 3, "algorithm": "dp-fedavg", "local": {"steps": 1, "lr": 0.1}}
    recipe |= {"cohort": {"size": 2}, "privacy": {"clip": 0.5, "noise_multiplier": 1.0}}
    seen: list[int] = []
    result = fedflat.run(
        recipe, nn.Linear(3, 2), pairs, progress=asked,
        on_round=lambda released, state: seen.append(0) or len(seen) == 2,
    )  # fmt: skip
    found = capsys.readouterr()
    assert len(result.history) == 2 and math.isfinite(result.privacy["proven_epsilon"])  # nothing private was looked at
    assert found.out == "" and found.err.count("round 1/3") == found.err.count("mine · dp-fedavg") == shows
    with pytest.raises(fedflat.InputError, match="progress: found 1;"):
        fedflat.run(recipe, nn.Linear(3, 2), pairs, progress=1)  # type: ignore[arg-type]


def test_the_epsilon_of_a_seeded_run_is_called_the_mechanisms(capsys: pytest.CaptureFixture[str]) -> None:
    shown_after(1, job(), SimpleNamespace(**{**vars(RECIPE), "privacy": SimpleNamespace(randomness="seeded")}))
    assert "ε of the mechanism 0.0" in capsys.readouterr().out


def test_an_infinite_epsilon_is_called_infinite() -> None:
    assert "ε ∞" in on_screen(shown_after(2, job(budget=None), quiet=True, epsilon=math.inf))[2]


def result(stopped: str = "", **privacy: Any) -> Any:
    facts = {
        "proven_epsilon": 7.9, "claimed_epsilon": 7.9, "delta": 0.002, "trust": "central", "reasons": [], **privacy,
    }  # fmt: skip
    history = [record(0, test_accuracy=0.9), record(1, test_accuracy=0.81), record(2, test_accuracy=None)]
    hidden = [{"personal_accuracy": 0.95}, {}, {}]
    return SimpleNamespace(recipe=RECIPE, privacy=facts, history=history, private_history=hidden, stopped=stopped)


def test_the_summary_says_which_accuracy_is_which(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(result(), Path("runs/x"), Path("runs/x/report.html"))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "81.00 % final; best 90.00 % after round 1" in text and "3 of 300" in text
    personal = next(line for line in text.splitlines() if line.startswith("personal accuracy"))
    assert "95.00 %" in personal and "not covered" in text
    assert "7.90 at δ = 0.002" in text and "Report: runs/x/report.html" in text
    assert "claimed" not in text and "resume" not in text


def test_the_summary_of_a_stopped_run_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(result("stopped as asked after 3 rounds"), Path("my runs/x"), Path("p"))
    assert "fedflat run --resume 'my runs/x'" in capsys.readouterr().out
    print_summary(result("stopped before round 3: it would exceed the budget ε = 2"), Path("x"), Path("p"))
    text = capsys.readouterr().out
    assert "exceed the budget" in text and "--resume" not in text


@pytest.mark.parametrize("proven", [None, 947.0])
def test_a_claimed_epsilon_is_beside_the_proven_one(capsys: pytest.CaptureFixture[str], proven: float | None) -> None:
    found = result(proven_epsilon=proven, claimed_epsilon=9.4, reasons=["Nothing bounds it."])
    print_summary(found, Path("x"), Path("p"))
    lines = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("claimed ε"))
    assert "9.40" in lines[place] and lines[place - 1].startswith("proven ε")
    assert ("none: Nothing bounds it." if proven is None else "947") in lines[place - 1]


def test_an_experiment_tells_of_each_run_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with ExperimentProgress() as shown:
        shown.update(RunEvent("a/seed-0", "skipped", 3, 3))
        for name in ("b/seed-0", "c/seed-0", "d/seed-0"):
            shown.update(RunEvent(name, "waiting", 0, 3))
        for turn in range(4):
            shown.update(RunEvent("b/seed-0", "running", turn, 3, 0.5))
        shown.update(RunEvent("b/seed-0", "done", 3, 3, 0.5))
        shown.update(RunEvent("c/seed-0", "failed", 1, 3, note="disk full"))
        shown.update(RunEvent("d/seed-0", "stopped", 2, 3))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a/seed-0: done before, kept"
    assert lines[1].startswith("[2/4] b/seed-0: done, accuracy 50.00 %")
    assert lines[2] == "[3/4] c/seed-0: failed. disk full"
    assert lines[3] == "[4/4] d/seed-0: stopped after 2 of 3 rounds"


def test_what_is_done_besides_runs_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with ExperimentProgress() as shown:
        shown.say("landscape of dp-fedavg, seed 0, global: 441 points, then its curvature")
    assert capsys.readouterr().out.startswith("landscape of dp-fedavg")
    quiet = ExperimentProgress(quiet=True)
    quiet.say("landscape of dp-fedavg")
    assert on_screen(quiet)[-1] == "landscape of dp-fedavg" and not capsys.readouterr().out


def test_the_experiments_live_view_fits_80_columns_whatever_the_names() -> None:
    shown = ExperimentProgress(quiet=True)
    names = [f"{'long-' * 30}{place}/seed-{place}" for place in range(12)]
    for name in [*names, "last/seed-0"]:
        shown.update(RunEvent(name, "waiting", 0, 300))
    for turn in (0, 7):
        for name in names:
            shown.update(RunEvent(name, "running", turn, 300, 0.5))
    lines = on_screen(shown)
    assert max(map(len, lines)) <= 80
    assert "0 of 13 runs" in lines[0] and "left" in lines[0]
    assert "…" in lines[1] and "/seed-0" in lines[1] and "round 7 of 300, accuracy 50.00 %" in lines[1]


def test_a_comparison_without_any_run_still_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    found = SimpleNamespace(
        table=None, notes=("Missing runs: a (1 of 1).",), failed={"a/seed-0": "disk full"}, page=None, left=1, total=3
    )
    print_comparison(found, 61.0)
    text = capsys.readouterr().out
    for said in ("Failed: a/seed-0: disk full", "the same command goes on", "1 run done, 1 min 01 s"):
        assert said in text


def test_a_pipe_hears_of_a_long_run_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = ExperimentProgress()
    name = "a-setting-with-a-long-name_dp-fedavg-and-some-keys-that-differ-from-the-others/seed-0"
    for turn in range(30):
        now[0] += 4.0
        shown.update(RunEvent(name, "running", turn, 300))
    lines = capsys.readouterr().out.splitlines()
    assert sum("round" in line for line in lines) == 10 and max(map(len, lines)) <= 80
