"""What choosing settings costs, before anything is run: one run, a plain grid, and private selections beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedflat.assembly.plans import algorithm_of, plan_of
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, wrong
from fedflat.privacy.accounting.epsilon import calibrate
from fedflat.privacy.accounting.selection import LAWS, Trials
from fedflat.privacy.plan import Plan
from fedflat.privacy.tuning import Selection, check
from fedflat.simulation.tuning_settings import axes, law_classes


@dataclass(frozen=True)
class Cost:
    """One way of choosing. epsilon: of all of it, with ``noise_multiplier`` in each run. needed: the noise with which
    all of it stays within what one run may spend (None: no noise does)."""

    what: str
    epsilon: float
    needed: float | None
    chance_of_one: float | None = None


def costs(plan: Plan, count: int) -> list[Cost]:
    """Ways of trying about ``count`` settings with runs of ``plan``, the ε of each, and the noise that each needs.

    plan: of one run, without a selection; its ε is the target.
    """
    target = plan.epsilon()
    found = [Cost("one run, settings fixed", target, plan.noise_multiplier)]
    grid = replace(plan, rounds=plan.rounds * count, budget=None)
    found.append(Cost(f"a grid of {count} runs, all counted", grid.epsilon(), _needed(grid, target)))
    for name, eta in LAWS.items():
        trials = Trials(float(count), eta)
        chosen = replace(plan, selection=Selection(trials), accountant="rdp")
        first = next(chance for number, chance in trials.chances() if number == 1)
        what = f"private selection, {name}, {count} in the mean"
        found.append(Cost(what, chosen.epsilon(), _needed(chosen, target), first))
    return found


def _needed(plan: Plan, target: float) -> float | None:
    try:
        return calibrate(lambda sigma: plan.at(sigma).epsilon(), target, 2 * plan.event_multiplier)
    except InputError:
        return None


def costs_of(recipe: Recipe, varied: Sequence[str], count: int, clients: int) -> list[Cost]:
    """The costs for the dearest run that settings may make of a recipe; nothing is read and nothing drawn.

    Raises InputError: a recipe or a setting that has no proof.
    """
    classes = law_classes(recipe, axes(varied)) if varied else [recipe]
    plans = [replace(plan_of(each, algorithm_of(each), clients), accountant="rdp", budget=None) for each in classes]
    for plan in plans:
        if not plan.private:
            raise wrong(
                "algorithm.name", recipe.algorithm.name, "a private method: others cost nothing and prove nothing"
            )
        check(plan)
    dearest = max(plans, key=lambda plan: plan.epsilon())
    return costs(replace(dearest, accountant=recipe.privacy.accountant), count)
