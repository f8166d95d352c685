"""Go on with a run that ended: its released model as initial weights, one budget for both runs.

The second run is a run of its own, with its own ledger and statement. What both cost a client who is in each is their
composition, from both ledgers (``privacy.together``); ``privacy.epsilon`` of the second is that total.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from fedflat.config.recipe import Recipe
from fedflat.core.checks import require, wrong
from fedflat.core.params import put
from fedflat.privacy.accounting.epsilon import calibrate
from fedflat.privacy.ledger import read
from fedflat.privacy.plan import Plan
from fedflat.privacy.statement import rounds_charged
from fedflat.privacy.together import Published, Total, curve, total
from fedflat.records import checkpoint
from fedflat.records.folder import LEDGER, RECIPE, STATEMENT

MOST = 1e4  # multipliers above are no way to reach a total: what is left of it is too little


def earlier(recipe: Recipe) -> list[Published]:
    """Return the runs that a recipe goes on from, the nearest first, each as its folder states it.

    Raises:
        InputError: ``after`` is no folder of a run that ended, goes on since its statement was written, has no proven
            ε, or comes after itself.
    """
    found: list[Published] = []
    folder = recipe.after
    while folder is not None:
        path = Path(folder)
        # Two names may lead to one folder, so files are compared and not names.
        if any(run.folder is not None and path.samefile(run.folder) for run in found):
            raise wrong("after", f"{folder}, which goes on from itself", "a run that began before this one")
        run, folder = _stated(path)
        found.append(run)
    return found


def _stated(path: Path) -> tuple[Published, str | None]:
    """Return one run as its folder states it, and the folder of the one before it."""
    allowed = "the folder of a run that ended"
    require(all((path / name).is_file() for name in (STATEMENT, LEDGER, RECIPE)), "after", path, allowed)
    entries = read(path / LEDGER)
    try:
        stated, recipe = json.loads((path / STATEMENT).read_bytes()), yaml.safe_load((path / RECIPE).read_bytes())
        epsilon, delta, charged = stated["proven_epsilon"], float(stated["delta"]), stated["rounds_charged"]
        known, before = rounds_charged(stated["rounds"], entries), recipe.get("after")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise wrong("after", f"{path} with a damaged {STATEMENT} or {RECIPE}", allowed) from error
    if epsilon is None:
        raise wrong("after", f"{path}, of which no ε is proven", "a run with a proven ε")
    if known != charged:
        found = f"{path}, which charged {known} rounds and states {charged}"
        raise wrong("after", found, allowed, hint="It went on since: let it end first, with --resume.")
    return Published(path.name, epsilon, delta, entries, path), before


def put_weights(folder: str, module: nn.Module) -> None:
    """Set the module's parameters to those that the run in ``folder`` released.

    Raises:
        InputError: it has no sound checkpoint, or the module is another.
    """
    newest = checkpoint.newest(Path(folder) / "checkpoints")
    if newest is None:
        raise wrong("after", f"{folder} without a sound checkpoint", "the folder of a run that ended")
    put(module, checkpoint.named(newest), "after: model", folder)


def calibrated(recipe: Recipe, plan_at: Callable[[Recipe], Plan]) -> Plan:
    """Return the plan whose noise makes all runs together cost ``privacy.epsilon``, the least that does.

    Raises:
        InputError: the runs before cost as much already; or a mechanism with an account of its own.
    """
    target = float(recipe.privacy.epsilon or 0.0)
    alone = recipe.model_copy(
        update={"after": None, "privacy": recipe.privacy.model_copy(update={"epsilon": None, "noise_multiplier": 1.0})}
    )
    # A plan with noise 1 stands for the law of a round; only its multiplier is searched for.
    plan, before = plan_at(alone), earlier(recipe)
    own = plan.mechanism is not None or plan.noise_cohort is not None or plan.selection is not None
    if own or not plan.private:
        raise wrong("after", "a plan with an account of its own", "a private method with independent Gaussian noise")
    counts = ("count_std", "update_multiplier")  # an adaptive clip's count is in the event's multiplier
    line = {name: value for name, value in plan.record(0, 1.0).items() if name not in counts}
    spent, bound = together(before, []).epsilon, line["sensitivity"] / plan.params.factor
    if curve([Published("this run", 0.0, plan.delta, [line])]) is None:
        raise wrong("after", f"cohort.sampling {plan.sampler.name}", "a law that composes with other runs")
    hint = f"{', '.join(run.name for run in before)} cost{'s' if len(before) == 1 else ''} ε = {spent:.4g} already."

    def costs(multiplier: float) -> float:
        scaled = {**line, "noise_multiplier": multiplier, "std": multiplier * bound}
        found = together(before, [{**scaled, "round": turn} for turn in range(plan.rounds)]).epsilon
        return math.inf if found is None else found

    if costs(MOST) > target:  # first, since each cost takes a while
        raise wrong("privacy.epsilon", target, "more than the runs before cost", hint=hint)
    found = plan.at(calibrate(costs, target))
    found.effective_multiplier  # noqa: B018  (refuses what the count's noise does not allow)
    # What it costs by itself, so that a round that is charged twice takes the place of another, as in any run.
    return replace(found, budget=min(found.epsilon(), recipe.privacy.budget or math.inf))


def together(before: Sequence[Published], entries: Sequence[Mapping[str, Any]], epsilon: float = 0.0) -> Total:
    """Return what the runs before cost with one more of these ledger lines. epsilon: its own, where its law is only
    added.
    """
    delta = float(entries[0]["delta"]) if entries else 0.0
    return total([*before, *([Published("this run", epsilon, delta, list(entries))] if entries else [])])


def warning(recipe: Recipe, entries: Sequence[Mapping[str, Any]], epsilon: float | None) -> list[str]:
    """Return what must be said beside the statement of a run that went on from others; nothing of one that did not."""
    if recipe.after is None:
        return []
    if epsilon is None:
        return ["This run goes on from another on the same clients; of both together no ε is proven."]
    found = together(earlier(recipe), entries, epsilon)
    number = len(found.runs) - 1
    others = "the run it goes on from" if number == 1 else f"the {number} runs it goes on from"
    return [f"With {others}, ε = {found.epsilon:.4g} at δ = {found.delta:.3g} ({found.relation}): the figure to state."]
