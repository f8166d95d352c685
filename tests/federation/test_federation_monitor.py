"""What a server shows of itself: metrics that tell nothing of a cohort, readiness, and structured log lines."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("prometheus_client")

from ports import free_port
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from stand_in import Grid, after_rounds, deployed, grid_of, honest, settings, small

from fedflat.core.checks import InputError
from fedflat.federation import server
from fedflat.federation.events import JsonLines, Monitor, log_fields, log_to_stderr, serve_metrics
from fedflat.federation.replies import DATA_FAULTS, PROTOCOL_FAULTS
from fedflat.federation.transport import note_refusals

SHOWN = {
    "fedflat_rounds_finished", "fedflat_rounds_planned", "fedflat_epsilon", "fedflat_epsilon_budget", "fedflat_delta",
    "fedflat_connected_clients", "fedflat_seconds_since_round", "fedflat_ready",
    "fedflat_aborted_rounds", "fedflat_refused_replies",
}  # fmt: skip


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def asked(address: str, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://{address}/{path}", timeout=5) as page:
            return page.status, page.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found[one.name + "".join(one.labels.values())] = one.value
    return found


def test_a_run_shows_rounds_and_epsilon_and_nothing_of_its_cohorts(tmp_path: Path, address: str) -> None:
    """The same pages whether clients answer or not, but for the seconds: nobody learns who or how many took part."""
    pages = []
    for answer in (True, False):
        folder = tmp_path / str(answer)
        task, clients = deployed(folder, small(cohort={"size": 2}, privacy={"noise_multiplier": 1.0}))
        grid = grid_of(task, clients) if answer else Grid(task, dict.fromkeys(range(4), lambda message: None))
        seen: list[dict[str, tuple[int, str]]] = []

        def look(_: int, seen: list[dict[str, tuple[int, str]]] = seen) -> None:
            seen.append({path: asked(address, path) for path in ("metrics", "ready", "live", "elsewhere")})

        with after_rounds(look):
            facts = server.serve(grid, task, settings(folder, metrics=address))
        assert [page["ready"][0] for page in seen] == [200, 200] and seen[0]["live"][0] == 200
        assert seen[0]["elsewhere"][0] == 404
        found = [samples(page["metrics"][1]) for page in seen]
        assert [one["fedflat_rounds_finished"] for one in found] == [1, 2] and found[0]["fedflat_rounds_planned"] == 2
        assert found[-1]["fedflat_epsilon"] == pytest.approx(facts["epsilon"], rel=1e-12)
        pages.append([{k: v for k, v in one.items() if "seconds" not in k and "_created" not in k} for one in found])
        with pytest.raises(URLError):
            asked(address, "live")
    assert str(pages[0]) == str(pages[1])
    families = {family.name for family in text_string_to_metric_families(seen[0]["metrics"][1])}
    assert {name.removesuffix("_created") for name in families} == SHOWN


def test_refused_replies_are_those_that_may_be_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor()
    logger = logging.getLogger("fedflat.server")
    logger.addHandler(monitor)
    try:
        note_refusals(tmp_path / "operator.jsonl", 0, Counter(dict.fromkeys([*PROTOCOL_FAULTS, *DATA_FAULTS], 3)))
    finally:
        logger.removeHandler(monitor)
    text = generate_latest(monitor.registry).decode()
    kinds = {k.removeprefix("fedflat_refused_replies_total") for k in samples(text) if "replies_total" in k}
    assert kinds == set(PROTOCOL_FAULTS)


def test_a_server_is_ready_only_when_its_clients_are_there(tmp_path: Path, address: str) -> None:
    task, clients = deployed(tmp_path, small())
    asked_while_waiting: list[int] = []

    class Waiting(Grid):
        def get_nodes(self) -> list[Any]:
            asked_while_waiting.append(asked(address, "ready")[0])
            self.connected = set(range(4)) if len(asked_while_waiting) > 1 else set()
            return super().get_nodes()

    grid = Waiting(task, {client.number: honest(client) for client in clients})
    server.serve(grid, task, settings(tmp_path, metrics=address, wait_for_nodes=4, start_seconds=20.0))
    assert asked_while_waiting[:2] == [503, 503] and asked_while_waiting[-1] == 200


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "192.0.2.1:9464", "[::]:9464", "9464", "127.0.0.1:0", "host:1"])
def test_only_this_machine_is_served_unless_more_is_asked_for(address: str) -> None:
    with pytest.raises(InputError, match=r"^metrics: found "), serve_metrics(address, False):
        pass


def test_beyond_this_machine_when_asked_for(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with serve_metrics(f"0.0.0.0:{address.rpartition(':')[2]}", True):
        assert asked(address, "ready")[0] == 503
        with serve_metrics(address, False):  # taken: said, and the run goes on
            assert "cannot be served" in caplog.text


def test_nothing_is_served_by_default(tmp_path: Path) -> None:
    assert settings(tmp_path).metrics == "" and not settings(tmp_path).metrics_beyond_this_machine
    before = logging.getLogger("fedflat.server").handlers[:]
    with serve_metrics("", False):
        assert logging.getLogger("fedflat.server").handlers == before


@contextmanager
def lines_of(logger: logging.Logger) -> Iterator[list[dict[str, Any]]]:
    """What a logger says meanwhile, as JSON."""
    lines: list[dict[str, Any]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonLines().format(record)))

    handler = Kept(logging.INFO)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_the_servers_log_as_json(tmp_path: Path) -> None:
    """Events with their round; no count of clients or replies, no norm, no key."""
    task, clients = deployed(tmp_path, small(privacy={"noise_multiplier": 1.0}))
    with lines_of(logging.getLogger("fedflat.server")) as lines:
        server.serve(grid_of(task, clients), task, settings(tmp_path))
    (drowned,) = [line for line in lines if line["level"] == "warning"]
    assert "The noise drowns the signal" in drowned["message"]
    lines.remove(drowned)
    assert [line["event"] for line in lines] == ["start", "ready", "round", "round", "complete"]
    assert [line["round"] for line in lines if line["event"] == "round"] == [0, 1]
    assert all(line["level"] == "info" and line["time"].endswith("+00:00") for line in lines)
    assert set().union(*lines) == {
        "time", "level", "logger", "event", "message", "finished", "rounds", "epsilon", "budget", "delta", "round",
        "aborted", "test_accuracy",
    }  # fmt: skip


def test_a_traceback_in_json_has_no_words_of_the_exception() -> None:
    logger = logging.getLogger("fedflat.client")
    with lines_of(logger) as lines:
        try:
            raise ValueError("example 17 of the patient")
        except ValueError:
            logger.exception("local training failed")
    assert lines[0]["error"] == "ValueError" and "patient" not in json.dumps(lines)
    assert lines[0]["at"][0].startswith("test_federation_monitor.py:")


def test_the_form_of_the_log_is_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="log: found xml"):
        log_to_stderr("xml")
    logger, before = logging.getLogger("fedflat"), logging.getLogger("fedflat").handlers[:]
    try:
        logger.handlers[:] = []
        log_to_stderr("json")
        log_to_stderr("json")
        logging.getLogger("fedflat.server").info("here", extra=log_fields("round", round=3, epsilon=float("inf")))
    finally:
        logger.handlers[:] = before
        logger.setLevel(logging.NOTSET)
    line = json.loads(capsys.readouterr().err)
    assert line["event"] == "round" and line["round"] == 3 and line["epsilon"] is None
