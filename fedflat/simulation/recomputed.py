"""A run's records, each read once, and what is made again from them: statement, metrics' figures, pages, digests; and
how the two differ. A damaged record counts as missing here.
"""

import calendar
import contextlib
import dataclasses
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from fedflat.assembly.stating import Terms, plan_again, restated, tested
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.core import InputError, RunError, contents_of, digest_of, plain, read_about, require, versions, wrong
from fedflat.data.encoding import clean
from fedflat.engine.job import SEEN
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.ledger import CHAIN, REASONS, RUN, Entry, Scan, is_open, run_of, scan
from fedflat.privacy.plan import Plan
from fedflat.privacy.verify import ROUNDING, Verification, verify
from fedflat.records import checkpoint
from fedflat.records import folder as files
from fedflat.records.folder import LEDGER, METRICS, OPENING, RECIPE, REPORT, SEALED, STATEMENT, locked, read_lines
from fedflat.records.opening import Opening, refuse_older
from fedflat.records.signing import tips_of
from fedflat.report.metrics import read_run

HERE = versions(("fedflat",))["fedflat"]
PREPARATION = "preparation.json"
MOST = 10**6
"""Rounds of a run: a damaged record that names more would fill the memory."""
MODEL = "model.safetensors"
SAYS = {"format": "pt", "fedflat": "shared weights as released"}
"""What an exported model says of itself besides its round and what it was made for."""
UNREADABLE = (
    InputError, OSError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
    yaml.YAMLError,
)  # fmt: skip
"""What reading a damaged recipe or statement may raise."""
Verdict = Literal["ok", "wrong", "unchecked"]


class Check(NamedTuple):
    """One record: what was checked, the outcome, and a sentence about it."""

    record: str
    verdict: Verdict
    about: str


def _parsed(source: Path | str) -> Any:
    """Return what a file of JSON holds, or a text of it; None where it is missing or damaged, or has a key twice."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        text = source.read_bytes() if isinstance(source, Path) else source
        return json.loads(text, object_pairs_hook=files.single_keys)
    return None


@dataclasses.dataclass(frozen=True)
class Records:
    """What a run's folder says of the run, each record read once; a damaged one counts as one that is not there."""

    folder: Path

    @cached_property
    def locked(self) -> bool:
        """Whether this account may not read all of private/."""
        return locked(self.folder)

    @cached_property
    def exported(self) -> bool:
        """Whether this is an exported folder, whose files have a list of checksums."""
        return (self.folder / SEALED).is_file()

    @cached_property
    def going(self) -> bool:
        """Whether a process has the run's ledger open for writing."""
        return is_open(self.folder / LEDGER)

    def refuse_older(self) -> None:
        """Refuse a run of before 1.0, or whose terms somebody took out of its ledger or private/run.json, and records
        of more rounds than ``MOST``.

        A run that charges nothing, as of a method without privacy, has them in private/run.json alone.
        """
        if self.entries:
            found, hint = f"{self.folder}, with a ledger of a Guard", "docs/card.md says how a Guard's is checked."
            require("given_key" not in (self.first or {}), "ledger", found, "a run's folder", hint=hint)
            refuse_older("ledger", self.folder, (self.first or {}).get("terms"))
        elif self.opening is not None:
            refuse_older(OPENING, self.folder, self.opening.terms)
        last = max([self.finished_rounds, self.stated_rounds, *(entry["round"] for entry in self.entries)])
        require(last <= MOST, str(self.folder), f"a record of a round after the {MOST:,}th", "those of a run's rounds")

    @cached_property
    def opening(self) -> Opening | None:
        """private/run.json."""
        with contextlib.suppress(InputError):
            return Opening.read(self.folder)
        return None

    @cached_property
    def ledger(self) -> Scan:
        """The ledger's lines, what a crash tore of the last one, and its tip; or why it cannot be read."""
        path = self.folder / LEDGER
        try:
            return scan(path, path.read_bytes())
        except (OSError, InputError) as error:
            return Scan([], b"", "", str(error))

    @property
    def entries(self) -> list[Entry]:
        """The ledger's events."""
        return self.ledger.entries

    @cached_property
    def first(self) -> Entry | None:
        """What the ledger's first line says of the run; None without one."""
        return run_of(self.entries)

    @cached_property
    def statement(self) -> dict[str, Any] | None:
        """privacy.json."""
        body = _parsed(self.folder / STATEMENT)
        return body if isinstance(body, dict) else None

    @cached_property
    def recipe(self) -> Any:
        """recipe.yaml."""
        with contextlib.suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            return yaml.safe_load((self.folder / RECIPE).read_bytes())
        return None

    def setting(self, *keys: str) -> Any:
        """Return a value of the recipe by its keys; None where there is none."""
        value = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that are records of a round."""
        return read_lines(self.folder / METRICS)

    @cached_property
    def tips(self) -> dict[int, dict[str, Any]]:
        """The lines of tips.jsonl by round."""
        return tips_of(self.folder)

    @cached_property
    def files(self) -> list[str]:
        """The paths in the folder of all that is no folder; a link to one is none."""
        paths = [file for file in sorted(self.folder.rglob("*")) if file.is_symlink() or not file.is_dir()]
        return [str(file.relative_to(self.folder)) for file in paths]

    @cached_property
    def id(self) -> str:
        """The run's id, by its ledger or else by private/run.json."""
        if self.first is not None:
            return str(self.first.get("id"))
        return "" if self.opening is None else self.opening.run

    @cached_property
    def terms(self) -> Mapping[str, Any]:
        """The terms that the run began with; empty of an exported run that charges nothing."""
        if self.first is not None:
            return dict(self.first.get("terms") or {})
        return {} if self.opening is None else self.opening.terms

    def _saved_rounds(self) -> list[int]:
        return [checkpoint.round_of(file) for file in (self.folder / "checkpoints").glob("round-*.safetensors")]

    @cached_property
    def finished_rounds(self) -> int:
        """How many rounds metrics and checkpoints say were finished."""
        return max([0, *(int(row["round"]) + 1 for row in self.metrics), *self._saved_rounds()])

    @cached_property
    def stated_rounds(self) -> int:
        """How many rounds checkpoints and the statement say were finished: against these, metrics are checked."""
        stated = (self.statement or {}).get("rounds")
        return max([stated if isinstance(stated, int) else 0, *self._saved_rounds()])

    def tip_at(self, events: Any) -> str | None:
        """Return the ledger's tip after its first ``events`` lines; None where it has fewer."""
        if not isinstance(events, int) or not 0 <= events <= len(self.entries):
            return None
        return self.ledger.tip if events == len(self.entries) else str(self.entries[events]["previous"])

    @cached_property
    def parsed(self) -> Recipe:
        """The recipe as a run reads it; InputError where it is none."""
        return Recipe.load(self.folder / RECIPE)

    @cached_property
    def plan(self) -> Plan:
        """The plan of recipe and terms; InputError where none follows."""
        return plan_again(self.parsed, self.all_terms)

    @property
    def ours(self) -> bool:
        """Whether this version of fedflat began the run."""
        return self.terms.get("fedflat") == HERE

    @cached_property
    def all_terms(self) -> Terms:
        """The terms; of a run that charges nothing as far as its statement tells them (one of ``UNREADABLE`` else)."""
        return Terms.read(self.parsed, self.terms or _terms_stated(self.statement or {}))


# ------------------------------------------------------------------------------------------- statement and metrics


class Difference(NamedTuple):
    """Where a statement differs, and what it says there and should say."""

    field: str
    stated: Any
    expected: Any

    def __str__(self) -> str:
        return f"{self.field} says {_short(self.stated)}, and the run gives {_short(self.expected)}"

    @property
    def worded(self) -> bool:
        """Whether only words differ, in a field that versions word differently."""
        # A number is never a matter of wording, whatever field it stands in.
        numbers = any(isinstance(value, (int, float)) for value in (self.stated, self.expected))
        return self.field.partition(".")[0].partition("[")[0] in WORDS and not numbers


APART = ("run", "weights", "checksum")
"""Fields that say whose statement it is; each has a check of its own."""
CLOSE = 1e-6
"""By how much of itself a number may differ: what another machine's arithmetic changes."""
WORDS = (
    "trust_model", "mechanism", "prior", "reasons", "not_covered", "noise_source", "floating_point", "warnings",
    "paper_items", "checklist", "facts",
)  # fmt: skip
"""Fields whose sentences another version of fedflat may word otherwise; their numbers are compared all the same."""


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def differences(
    stated: Any, expected: Any, place: str = "", close: float = CLOSE, missing: Any = "nothing"
) -> Iterator[Difference]:
    """Yield every place where a stated figure or sentence is not the expected one.

    close: by how much of itself a number may differ (0: not at all). missing: what a key that is not there counts as.
    """
    if isinstance(stated, Mapping) and isinstance(expected, Mapping):
        for key in [key for key in dict.fromkeys((*stated, *expected)) if place or key not in APART]:
            where = f"{place}.{key}" if place else str(key)
            yield from differences(stated.get(key, missing), expected.get(key, missing), where, close, missing)
    elif isinstance(stated, list) and isinstance(expected, list) and len(stated) == len(expected):
        for number, (one, other) in enumerate(zip(stated, expected)):
            yield from differences(one, other, f"{place}[{number}]", close, missing)
    elif not _same(stated, expected, close):
        yield Difference(place, stated, expected)


def _same(stated: Any, expected: Any, close: float) -> bool:
    if not close:
        return bool(stated == expected)
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (stated, expected)):
        return math.isclose(stated, expected, rel_tol=close, abs_tol=1e-12)
    return type(stated) is type(expected) and bool(stated == expected)


def remade(run: Records) -> tuple[list[Difference], list[str]]:
    """Make the statement again from recipe, ledger, metrics and code, and compare it field by field.

    Return where it differs from the one that is there, and what could not be compared.

    Raises:
        InputError: the recipe is none from which a statement follows.
    """
    stated, recipe, terms = run.statement or {}, run.parsed, run.all_terms
    facts: dict[str, Any] = {"rounds": run.finished_rounds, "entries": run.entries, "public_data": tested(run.metrics)}
    try:
        expected = restated(recipe, run.recipe, terms, **facts)
    except RunError as error:
        return [], [str(error)]
    unchecked = []
    expected["warnings"] += [SEEN] if SEEN in stated["warnings"] else []
    different = list(differences(stated, expected))
    words = [difference for difference in different if not run.ours and difference.worded]
    if words:
        named = ", ".join(dict.fromkeys(difference.field.partition("[")[0] for difference in words))
        unchecked.append(f"the wording of {named}: fedflat {terms.fedflat} wrote it, and compares it; this is {HERE}")
    return [difference for difference in different if difference not in words], unchecked


def second_account(run: Records) -> Verification:
    """Compare the statement's ε with what a second accountant finds in the ledger, and with what the metrics show.

    Raises:
        InputError: statement or metrics are damaged, or name an ε or a δ that is no number.
    """
    body, rows = run.statement, files.whole_lines(run.folder / METRICS)
    if body is None or rows is None:
        damaged = run.folder / (METRICS if body else STATEMENT)
        raise wrong(str(damaged), "a damaged record", "the file as it was written")
    stated, epsilons = body.get("proven_epsilon"), [row.get("epsilon") for row in rows]
    for name, value in [(STATEMENT, stated), (STATEMENT, body.get("delta")), *((METRICS, one) for one in epsilons)]:
        number = isinstance(value, float | int) and type(value) is not bool and abs(value) < 1e300
        require(value is None or number, str(run.folder / name), value, "an ε or a δ that is a number, or null")
    if run.ledger.fault and (stated is not None or (run.folder / LEDGER).exists()):
        return Verification(math.inf if stated is None else stated, math.inf, "none", False, (run.ledger.fault,))
    account = verify(run.entries, stated, delta=body.get("delta"), released=[row["round"] for row in rows])
    # The statement may count more than the metrics (rounds charged again), never less.
    if stated is None or not epsilons or epsilons[-1] is None or stated >= epsilons[-1] * (1 - ROUNDING):
        return account
    less = f"stated ε = {stated:.6g}, but {METRICS} ends at {epsilons[-1]:.6g}"
    return dataclasses.replace(account, ok=False, notes=(*account.notes, less))


SLOWLY = 8
"""Lines whose ε is computed again where that takes seconds each; those between them must not fall."""


def _every(plan: Plan, lines: Sequence[object]) -> int:
    """Return of how many lines one has its ε computed again, counted from the last."""
    fast = plan.accountant == "pld" and plan.mechanism is None and plan.sampler.name != "fixed"
    return 1 if fast else -(-len(lines) // SLOWLY)


def metrics_faults(run: Records) -> Iterator[str]:
    """Yield where metrics.jsonl shows another ε, or another clip, than recipe, ledger and code give.

    Raises:
        InputError: the recipe is none from which a plan follows.
    """
    plan = run.plan
    every = _every(plan, run.metrics)
    for place, row in enumerate(reversed(run.metrics)):
        number = row["round"]
        odd = {name for name in row.keys() - ROUND if not name.startswith(("test_", "class_accuracy"))}
        odd |= {name for name, value in row.items() if '"' in json.dumps(value)}
        if run.ours and odd:
            yield f"round {number}: {', '.join(sorted(odd))}, which no line of this run has"
        before, now, more = _plan_then(plan, run, number)
        expected: dict[str, Any] = {"epsilon": None}
        if place % every == 0 or more or not before:
            expected["epsilon"] = plain(now.epsilon(number + 1 + more)) if plan.private else None
            expected["claimed_epsilon"] = now.account.claimed(now, number + 1 + more)
        elif plan.private:
            expected["epsilon"] = before[-1].get("epsilon")
        if before:
            expected["clip"] = before[-1].get("clip")
            row = {"clip": row.get("clip"), **row, **plan.account.record(plan)}  # a procedure may name another clip
        yield from _contrary(f"round {number}", row, expected)


ROUND = {"round", "epsilon", "claimed_epsilon", "clip", "aborted", "private_accuracy", "private_accuracy_sd"}
"""A round's figures beside those on test data, whose names begin with test_ or class_."""


def ledger_faults(run: Records) -> Iterator[str]:
    """Yield where a ledger line says something else of its round than the plan that recipe and terms give.

    A line that was charged again, as after a restore, may have the ε of the one that it repeats.

    Raises:
        InputError: the recipe is none from which a plan follows.
    """
    plan, entries, before = run.plan, run.entries, 0.0
    mechanism, rounds = plan.mechanism, {entry["round"] for entry in entries}
    if not plan.private:
        return
    if isinstance(mechanism, ScheduledPlan) and entries[0].get("factor") != mechanism.factor.digest:
        return  # another machine's factorisation: ``remade`` says so
    yield from (f"no line for round {number}" for number in sorted(set(range(max(rounds))) - rounds))
    for place, entry in enumerate(entries):
        clip = math.inf if entry.get("clip") is None else float(entry["clip"])
        planned = plan.record(0, clip)  # all rounds are alike but for the clip
        expected = {name: planned.get(name) for name in LINE}
        epsilon, first = float(math.inf if entry.get("epsilon") is None else entry["epsilon"]), "reason" not in entry
        if (len(entries) - 1 - place) % _every(plan, entries) == 0 and (first or plan.standing(entries) is plan):
            expected["epsilon"] = plain(plan.standing(entries[: place + 1]).epsilon(entry["round"] + 1))
        yield from _contrary(f"line {entry['line']}", entry, expected)
        if first and epsilon < before * (1 - CLOSE):
            yield f"line {entry['line']}: epsilon falls from {before:.6g} to {epsilon:.6g}"
        before = epsilon if first else before
        if run.ours and (strange := entry.keys() - planned.keys() - BESIDE):
            yield f"line {entry['line']}: {', '.join(sorted(strange))}, which no line of this run has"


def _contrary(where: str, record: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    stated = {name: record.get(name) for name in expected}
    yield from (f"{where}: {difference}" for difference in differences(stated, expected))


LINE = (
    "mechanism", "sampling", "relation", "trust", "clients", "cohort", "q", "noise_multiplier", "delta", "accountant",
    "max_participations", "colluders", "count_std", "separation", "sensitivity", "std", "rounding",
)  # fmt: skip
"""Fields of a ledger line that follow from recipe, terms and the line's clip."""
BESIDE = {*CHAIN, *REASONS, RUN, "key_id", "draw", "column", "row_norm"}
"""Fields of a line beside those that every round of its run has."""


def _plan_then(plan: Plan, run: Records, round: int) -> tuple[list[Entry], Plan, int]:
    """Return the ledger's lines up to a round's last one, the plan as it stood then, and what counted beyond it.

    A round can be charged again after its record was written; its ε is that of before, where tips.jsonl says that the
    lines ended. Rounds that another key drew before it, and that are yet to be drawn again, are counted twice already.
    """
    places = [place for place, entry in enumerate(run.entries) if entry["round"] == round]
    before, events = run.entries[: places[-1] + 1] if places else [], run.tips.get(round + 1, {}).get("events")
    if isinstance(events, int) and places and places[0] < events <= places[-1]:
        before = run.entries[:events]
    now, keys = plan.standing(before), {entry["round"]: entry.get("key_id") for entry in before}
    return before, now, now.again(before, round, keys.get(round))


def _terms_stated(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms of a run that charges nothing, as far as its own statement tells them."""
    facts = dict(stated["facts"])
    names = ("personal", "finetuned", "client_state", "prior", "held_out")
    terms = {name: facts[name] for name in names if name in facts}
    terms |= {"algorithm": stated["algorithm"], "private": facts.get("clip") is not None}
    return terms | {"identified": not facts.get("unidentified"), "deployment": bool(facts.get("deployment"))}


# -------------------------------------------------------------------------------------------------------- weights


def released(run: Records, rounds: int) -> tuple[str, Any] | None:
    """Return the SHA-256 of an export's weights, or of the checkpoint's after ``rounds``, and what they were made for;
    None without weights, and no digest ("") of damaged ones.
    """
    exported, file = run.folder / MODEL, checkpoint.path_of(run.folder / "checkpoints", rounds)
    with contextlib.suppress(ValueError):
        if exported.is_file():
            tensors, metadata = contents_of(exported)
            return digest_of(tensors), _parsed(metadata.get("made_for", "{}"))
        if not file.is_file():
            return None
        state, _, facts = checkpoint.load(file, hidden=False)
        return digest_of(checkpoint.released(state, facts)), facts.get("made_for") or {}
    return "", None


def metadata_faults(run: Records) -> Iterator[Difference | str]:
    """Yield where an exported model says something else of itself than statement, preparation.json and recipe."""
    metadata, rounds = read_about(run.folder / MODEL), (run.statement or {}).get("rounds")
    stated = _parsed(metadata.pop("made_for", "{}"))
    yield from differences(metadata, {**SAYS, "round": str(rounds)}, "metadata")
    if not isinstance(stated, dict) or not {"input_shape", "dtype"} <= stated.keys():
        yield "made_for does not say which inputs the model takes"
        return
    prepared = stated.get("preparation")
    yield from differences(_parsed(run.folder / PREPARATION), prepared, PREPARATION)
    if isinstance(prepared, dict):
        yield from _other_constants(run, prepared)


def _other_constants(run: Records, prepared: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield where the steps from a row to an input have other constants than the recipe, if it names any."""
    encoding, data = prepared.get("encoding") or {}, run.setting("data") or {}
    target = encoding.get("target") or [data.get("target") or data.get("label")]
    named = dict(encoding.get("categories") or {})
    if data.get("dataset") != GIVEN:  # else the constants were given in Python too, and the recipe names none
        keys = ("categories", "scale", "fill")
        wanted = {key: {clean(name): value for name, value in (data.get(key) or {}).items()} for key in keys}
        named |= wanted["categories"]
        if prepared.get("kind") == "text" and encoding.get("words"):
            del wanted["categories"]  # rows to predict have no labels, whose names stand apart
        for key, value in wanted.items() if encoding else ():
            yield from differences(encoding.get(key) or {}, value, f"made_for.preparation.encoding.{key}")
    if len(target) == 1 and target[0] in named:
        yield from differences(prepared.get("names"), named[target[0]], "made_for.preparation.names")


# ---------------------------------------------------------------------------------------------------------- pages


SHOWN = re.compile(r"(?:ε|\beps(?:ilon)?)\W{0,4}(?:of the mechanism\W{0,4})?(\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)
"""A figure that a text calls ε."""
OTHER = "shows something else than the records; fedflat report or card makes it again"


def check_page(run: Records) -> tuple[Verdict, str]:
    """Compare report.html with the page that these records give, whatever the folder is called."""
    from fedflat.report.html import public, render

    text, released = (run.folder / REPORT).read_text("utf-8", "replace"), public(read_run(run.folder))
    names = {released.name, str(released.recipe.get("name") or released.algorithm)}
    title = html.unescape("".join(re.findall(r"<h1>([^<]*)<", text)[-1:]))
    if title not in names and (run.exported or not re.fullmatch(NAME, title)):  # a run's folder may have been renamed
        title = released.name
    again = render([dataclasses.replace(released, name=title)])
    alike = _of_any_folder(again) == _of_any_folder(text)
    if alike and not _figures(title):  # a title may be no figure
        return "ok", "shows what the records say"
    # Another version words its page in its own way, and has the same figures.
    if alike or run.ours or not _figures(text) <= _figures(again):
        return "wrong", OTHER
    return "unchecked", "of another version: only its ε was compared"


def _figures(text: str) -> set[str]:
    """Return the figures that a text, or a page of HTML, calls ε."""
    return {figure.replace(",", "") for figure in SHOWN.findall(html.unescape(re.sub(r"<[^>]*>", " ", text)))}


NAME = r"(?![^<&]*ε)[\w.+ -]{1,60}"
"""The name of a folder: no sentence about the guarantee."""


def _of_any_folder(text: str) -> str:
    """Return a page without the folder's name in its commands, and without the day of its files: copies differ."""
    text = re.sub(rf"(?<=fedflat\.load\(&#34;){NAME}(?=&#34;\))", "", text)
    text = re.sub(r"<code>fedflat (export|predict) [\w.+-]{1,60} (FOLDER|FILE)</code>", r"\1", text)
    return re.sub(rf" · \d{{1,2}} (?:{'|'.join(calendar.month_name[1:])}) (?:19|20)\d\d(?=<)", "", text)


def check_card(run: Records, name: str) -> tuple[Verdict, str]:
    """Compare a card with the one that these records give; what ``--with`` added is not covered."""
    from fedflat.report import card as making

    card, text = making.card(read_run(run.folder)), (run.folder / name).read_text("utf-8", "replace")
    again = making.html(card) if name.endswith(".html") else making.markdown(card)
    if again == text:
        return "ok", "shows what the records say"
    if making.settled(text) != making.settled(again):
        return "wrong", OTHER
    return "unchecked", "made with --with; what it added is not covered here"
