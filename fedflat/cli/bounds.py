"""``fedflat bounds``: what the papers prove and state, evaluated for a recipe or a run."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.training import Json, Overrides
from fedflat.core.checks import wrong

if TYPE_CHECKING:
    from fedflat.analysis.statements import Setting, Statement
    from fedflat.config.recipe import Recipe

WIDTH = 80


def bounds(
    recipe: Annotated[str | None, typer.Argument(help="A packaged recipe's name or a YAML file.")] = None,
    override: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A finished run: its recipe, its ᾱ and α̃, its first recorded test loss."),
    ] = None,
    smoothness: Annotated[float, typer.Option(help="L of the gradients.")] = 1.0,
    gap: Annotated[
        float | None, typer.Option(help="f(w¹) − f*. Default: a run's first recorded test loss, or 1.")
    ] = None,
    local_std: Annotated[float, typer.Option(help="σ_l, standard deviation of a minibatch gradient.")] = 1.0,
    global_std: Annotated[float, typer.Option(help="σ_g, how far clients' gradients are from the mean's.")] = 1.0,
    steps: Annotated[int | None, typer.Option(min=1, help="K. Default: the recipe's.")] = None,
    dimension: Annotated[
        int | None, typer.Option(min=1, help="d, shared parameters. Default: the recipe's model on its data.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What the papers prove and state, evaluated: sensitivity, noise, generalisation, convergence.

    None of it enters a privacy statement. A convergence theorem gives an order: its terms are shown as they stand in
    its 𝒪(·), so they compare with each other and with another setting's, not with a gradient.

    Example: fedflat bounds cifar10-dp-fedsam --dimension 11173962 --smoothness 10

    Example: fedflat bounds --run runs/quick-start
    """
    from fedflat.analysis.statements import statements
    from fedflat.config.reading import QUICK_START
    from fedflat.config.recipe import Recipe

    if run is not None and recipe is not None:
        raise wrong("--run", "a recipe as well", "one of both: a run has its recipe")
    if run is not None and (override or steps):
        raise wrong("--run", "-o" if override else "--steps", "a run alone: its recipe is what was measured")
    if run is not None and not (run / "recipe.yaml").is_file():
        raise wrong("--run", str(run), "the folder of a run that fedflat run wrote")
    parsed = Recipe.load(run if run is not None else (recipe or QUICK_START), override or [])
    measured = {} if run is None else _measured(run)
    given = {"smoothness": smoothness, "local_std": local_std, "global_std": global_std}
    first = measured.pop("gap", None)
    given["gap"] = gap if gap is not None else 1.0 if first is None else first[1]
    setting = _setting(parsed, steps, dimension, {**measured, **given})
    found = statements(setting)
    if as_json:
        from fedflat.report.metrics import plain

        print(json.dumps(plain({"setting": asdict(setting), "statements": [asdict(each) for each in found]})))
    else:
        after = first[0] if first is not None and gap is None else None
        print("\n".join(lines(setting, found, measured, after)))


def _measured(folder: Path) -> dict[str, Any]:
    """ᾱ, α̃ of every round and, as ``gap``, the first test loss with its round, where the run has them.

    A loss is recorded after a round: it stands for f(w¹) − f* and bounds it from neither side.
    """
    from fedflat.report import metrics

    run = metrics.read_run(folder)
    found: dict[str, Any] = {}
    for key in ("alpha_mean", "alpha_spread"):
        values = [value for _, value in metrics.column(run.private, key)]
        found |= {key: tuple(values)} if values else {}
    losses = metrics.column(run.metrics, "test_loss")
    return found | ({"gap": losses[0]} if losses else {})


def _setting(recipe: Recipe, steps: int | None, dimension: int | None, constants: dict[str, Any]) -> Setting:
    from fedflat.analysis.convergence import Facts
    from fedflat.analysis.statements import Setting
    from fedflat.assembly.plans import algorithm_of, plan_of, server_of
    from fedflat.engine.cost import cost_of

    method = algorithm_of(recipe)
    if method.kind != "update" or not method.private:
        raise wrong("algorithm.name", recipe.algorithm.name, "a method whose clients send private updates")
    if recipe.privacy.protocol != "sound":
        raise wrong(
            "privacy.protocol", recipe.privacy.protocol, "sound",
            hint="What a released procedure proves: fedflat plan, fedflat reproduce --protocol published.",
        )  # fmt: skip
    size, count = dimension, steps or recipe.local.steps
    samples = recipe.data.max_examples
    clients = recipe.data.clients
    if size is None or count is None or clients is None:
        size, count, clients, samples = _looked_up(recipe, size, count)
    if recipe.start is not None:
        raise wrong("start", recipe.start.kind, "nothing", hint="The theorems take all rounds to be the method's.")
    plan = plan_of(recipe, method, clients, size)
    local = recipe.local
    facts = Facts(
        lr=local.lr, steps=count, rounds=recipe.rounds, clients=clients, cohort=plan.divisor, clip=_clip(recipe),
        noise_multiplier=plan.event_multiplier, dimension=size, server_lr=server_of(recipe, method).lr or 1.0,
        **constants,
    )  # fmt: skip
    batches = math.ceil((samples or local.batch_size * clients) / clients / local.batch_size)
    options = recipe.algorithm.options
    numbers = {key: options.get(key, _default(recipe.algorithm.name, key)) for key in ("rho", "lam", "beta", "keep")}
    return Setting(
        facts, q=plan.sampler.q, delta=plan.delta, epsilon=plan.epsilon(), relation=plan.relation, samples=samples,
        cost=cost_of(method, size, count, batches), **numbers,
    )  # fmt: skip


def _default(name: str, key: str) -> Any:
    """A named method's default for one of its keys; None where it has no such key."""
    import inspect

    from fedflat.algorithms import ALGORITHMS

    found = inspect.signature(ALGORITHMS[name]).parameters.get(key) if name in ALGORITHMS else None
    return None if found is None else found.default


def _looked_up(recipe: Recipe, size: int | None, count: int | None) -> tuple[int, int, int, int]:
    """d, K, M and the number of training examples, from the recipe's model and data."""
    from fedflat.assembly.jobs import prepare

    job = prepare(recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "sequential"})}))
    examples = sum(map(len, job.data.parts))
    return size or job.parts.layout.dimension, count or job.parts.local.steps, job.data.clients, examples


def _clip(recipe: Recipe) -> float:
    clip = recipe.privacy.clip
    found = clip if isinstance(clip, (int, float)) else clip.value or clip.initial
    if found is None:
        raise wrong("privacy.clip", clip.kind if not isinstance(clip, (int, float)) else clip, "one number C")
    return float(found)


def lines(setting: Setting, found: list[Statement], measured: dict[str, Any], after: int | None = None) -> list[str]:
    """The statements as text of at most 80 columns, by section and reference.

    after: the round whose test loss stands for f(w¹) − f*.
    """
    facts = setting.facts
    epsilon = "∞" if math.isinf(setting.epsilon) else f"{setting.epsilon:.4g}"
    known = (
        f"M = {facts.clients:,}, m = {facts.cohort:g} (q = {setting.q:.4g}), T = {facts.rounds}, K = {facts.steps}, "
        f"η = {facts.lr:g}, C = {facts.clip:g}, σ = {facts.noise_multiplier:.4g}, d = {facts.dimension:,}; "
        f"ε = {epsilon} is proven at δ = {setting.delta:.2g}"
    )
    loss = "" if after is None else f" (the test loss after round {after}, no bound)"
    of = "measured" if "alpha_mean" in measured else "nothing clipped"
    given = (
        f"Constants: L = {facts.smoothness:g}, f(w¹) − f* = {facts.gap:.4g}{loss}, σ_l = {facts.local_std:g}, "
        f"σ_g = {facts.global_std:g}; ᾱ = {_mean(facts.alpha_mean):.3g}, α̃ = {_mean(facts.alpha_spread):.3g} ({of})."
    )
    shown = [*_wrapped(known), *_wrapped(given)]
    section = reference = ""
    for each in found:
        if each.section != section:
            section = each.section
            shown += ["", section]
        if each.reference != reference:
            reference = each.reference
            shown.append(f"  {reference}")
        value = "–" if each.value is None else f"{each.value:,}" if isinstance(each.value, int) else f"{each.value:.4g}"
        shown.append(f"    {each.what:<58} {value:>13}".rstrip())
        shown += [f"      {text}" for text in textwrap.wrap(each.said, WIDTH - 6)]
    return [*shown, "", "None of this enters a privacy statement; equations: docs/bounds.md."]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
