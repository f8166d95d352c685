"""The numbers that a budget needs, from options, a recipe, or both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fedflat.core.checks import in_range, whole, wrong

if TYPE_CHECKING:
    from fedflat.privacy.plan import Plan

KEYS = {
    "clients": "data.clients", "cohort": "cohort.size", "rounds": "rounds",
    "noise_multiplier": "privacy.noise_multiplier", "delta": "privacy.delta",
    "max_cohort": "cohort.max", "min_cohort": "cohort.min",
    "max_participations": "cohort.max_participations", "noise_cohort": "privacy.noise_cohort",
    "trust": "privacy.trust", "sampling": "cohort.sampling", "accountant": "privacy.accountant",
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """M, m, T, σ (std / clip), δ and the limits of the cohort laws and trust models; None where not given."""

    clients: int | None = None
    cohort: float | None = None
    rounds: int | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    max_cohort: int | None = None
    min_cohort: int | None = None
    max_participations: int | None = None
    noise_cohort: float | None = None
    colluders: int = 0
    source: str = ""

    def needs(self, *names: str) -> Setting:
        """This setting, if it has all of ``names``; δ gets its default.

        Raises:
            InputError: one of them is missing, or a number is out of range.
        """
        for name in names:
            if getattr(self, name) is None:
                option = "--" + name.replace("_", "-")
                raise wrong(option, "nothing", "a number, or a recipe that has it")
        if self.rounds is not None:
            whole("--rounds", self.rounds)
        if self.clients is not None:
            whole("--clients", self.clients, 1)
        if self.noise_cohort is not None and self.cohort is not None:
            in_range("--noise-cohort", self.noise_cohort, self.cohort)
        if self.delta is None and self.clients is not None:
            from fedflat.privacy.accounting.epsilon import default_delta

            return replace(self, delta=default_delta(self.clients))
        return self

    def common(self) -> dict[str, Any]:
        """Arguments for the tables, without σ."""
        names = ("clients", "cohort", "rounds", "delta", "max_cohort", "min_cohort", "max_participations", "colluders")
        return {name: getattr(self, name) for name in names}

    def with_value(self, name: str, value: float) -> Setting:
        """This setting with one number more."""
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)

    def of_this_run(self) -> Setting:
        """The noise that really is added: σ·size/noise_cohort."""
        if self.noise_cohort is None or self.noise_multiplier is None or self.cohort is None:
            return self
        return replace(
            self, noise_multiplier=self.noise_multiplier * self.cohort / self.noise_cohort, noise_cohort=None
        )

    def deployed(self) -> Setting | None:
        """The larger system that ``noise_cohort`` simulates: M' = M·noise_cohort/size, the same q, σ and δ."""
        if self.noise_cohort is None or self.clients is None or self.cohort is None:
            return None
        factor = self.noise_cohort / self.cohort
        clients = max(1, round(self.clients * factor))
        largest, least = (None if n is None else round(n * factor) for n in (self.max_cohort, self.min_cohort))
        cohort = self.cohort / self.clients * clients
        return replace(self, clients=clients, cohort=cohort, max_cohort=largest, min_cohort=least, noise_cohort=None)

    def as_dict(self, leave: str = "") -> dict[str, Any]:
        """The setting's numbers as plain values, for ``--json``."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "") and name != leave}

    def text(self, leave: str = "") -> str:
        """One line: M = 500, m = 50 (q = 0.1), T = 300, σ = 0.95, δ = 0.002."""
        shown = {
            "clients": f"M = {self.clients:,}" if self.clients else "",
            "cohort": f"m = {self.cohort:g}" if self.cohort else "",
            "rounds": f"T = {self.rounds:,}" if self.rounds is not None else "",
            "noise_multiplier": f"σ = {self.noise_multiplier:.5g}" if self.noise_multiplier is not None else "",
            "delta": f"δ = {self.delta:.4g}" if self.delta else "δ = 0.1/M",
        }
        if self.clients and self.cohort and leave not in ("clients", "cohort"):
            shown["cohort"] += f" (q = {self.cohort / self.clients:.4g})"
        return ", ".join(value for name, value in shown.items() if value and name != leave) + self.source


def setting_of(
    recipe: str | None,
    overrides: list[str],
    given: Mapping[str, Any],
    only: Mapping[str, str],
    target: float | None = None,
) -> Setting:
    """The numbers given as options, or a recipe's with the options in their place.

    target: an ε that takes the place of the recipe's own noise.

    Raises:
        InputError: ``-o`` without a recipe, whatever is wrong in the recipe, a method without a Gaussian account.
    """
    if recipe is None:
        if overrides:
            raise wrong("-o", overrides[0], "only with a recipe", hint="Use --clients, --cohort, --rounds and so on.")
        return Setting(**given)
    texts = _texts(overrides, given, only, target)
    return _of_recipe(recipe, texts, target is not None and given.get("noise_multiplier") is None)


def scheduled_plan_of(
    recipe: str | None,
    overrides: list[str],
    given: Mapping[str, Any],
    only: Mapping[str, str],
    target: float | None = None,
) -> Plan | None:
    """The plan of a recipe whose rounds are not alike: by a schedule, correlated noise or ``start``; else None.

    Raises:
        InputError: whatever is wrong in the recipe.
    """
    from fedflat.assembly import start
    from fedflat.assembly.plans import algorithm_of, plan_of
    from fedflat.config.recipe import Recipe
    from fedflat.privacy.correlated import ScheduledPlan

    if recipe is None:
        return None
    loaded = Recipe.load(recipe, _texts(overrides, given, only, target))
    known = loaded.start is not None or loaded.cohort.sampling in ("full", "min-separation", "cyclic-poisson")
    if loaded.data.clients is None or not known:
        return None
    method = algorithm_of(loaded)
    start.check(loaded, method)
    plan = plan_of(loaded, method, loaded.data.clients)
    return plan if isinstance(plan.mechanism, ScheduledPlan) or plan.first != 1 else None


def _texts(overrides: list[str], given: Mapping[str, Any], only: Mapping[str, str], target: float | None) -> list[str]:
    """What changes a recipe, as ``key=value``: overrides, then options, then the target."""
    changes = {**given, **only}
    texts = [f"{KEYS[name]}={value}" for name, value in changes.items() if value is not None and name in KEYS]
    if only.get("accountant") == "gdp":  # shows, but proves nothing: no recipe may name it
        texts = [text for text in texts if not text.startswith("privacy.accountant=")]
    if given.get("noise_multiplier") is not None:
        texts.append("privacy.epsilon=null")
    elif target is not None:
        texts += ["privacy.noise_multiplier=null", f"privacy.epsilon={target!r}"]
    return [*overrides, *texts]


def _of_recipe(name: str, overrides: list[str], noise_open: bool) -> Setting:
    from fedflat.assembly.plans import algorithm_of, plan_of
    from fedflat.config.recipe import Recipe

    recipe = Recipe.load(name, overrides)
    method = algorithm_of(recipe)
    if not method.private:
        raise wrong(name, method.name, "a method with privacy: this one neither clips nor adds noise")
    if method.kind == "ddgauss":
        raise wrong(name, method.name, "a method with Gaussian noise", hint="Its own account is in a run's statement.")
    if recipe.privacy.protocol != "sound":
        raise wrong(
            name, "privacy.protocol: published", "sound", hint="Its claimed and proven ε are in a run's statement."
        )
    if recipe.data.clients is None:
        raise wrong("--clients", "nothing", f"the number of clients: {name} takes it from its data")
    plan = plan_of(recipe, method, recipe.data.clients)
    found = Setting(
        plan.sampler.clients, plan.sampler.size, plan.rounds, None if noise_open else plan.noise_multiplier, plan.delta,
        recipe.cohort.max, recipe.cohort.min, recipe.cohort.max_participations, plan.noise_cohort, plan.colluders,
    )  # fmt: skip
    return _of_votes(found, plan) if method.kind == "votes" else found


def _of_votes(found: Setting, plan: Any) -> Setting:
    """Votes as Gaussian rounds: T counts cohort draws, and σ is per class, so σ/√Q is that of a draw."""
    labels = plan.mechanism.labels
    sigma = None if found.noise_multiplier is None else found.noise_multiplier / math.sqrt(labels)
    return replace(found, rounds=plan.mechanism.total, noise_multiplier=sigma, source=" (T: cohort draws, σ: per draw)")
