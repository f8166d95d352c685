"""``fedflat pretrain``: a frozen body's network, trained on images of a random process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from fedflat.cli.training import Json


def pretrain(
    out: Annotated[Path, typer.Option(help="The file to write. Its card lies beside it.")] = Path("body.safetensors"),
    seed: Annotated[int, typer.Option(help="Of the random process and of all draws.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 1000,
    images: Annotated[int, typer.Option(help="Synthetic images to choose from.")] = 10_000,
    batch: Annotated[int, typer.Option(help="Images a step, two views each.")] = 256,
    side: Annotated[int, typer.Option(help="A view's height and width in pixels.")] = 32,
    precision: Annotated[str, typer.Option(help="fp32, or bf16: faster where the processor has it.")] = "fp32",
    as_json: Json = False,
) -> None:
    """Train a small network without labels on random-process images, for model.body.kind=contrastive.

    No photograph and nobody's data are met. After Ctrl-C or a failure the
    same command goes on.

    Example: fedflat pretrain --steps 1000 --out network.safetensors
    """
    from fedflat.models.representation.pretraining import Pretraining
    from fedflat.models.representation.pretraining import pretrain as train
    from fedflat.report.progress import Progress

    options = Pretraining(seed, steps, images, batch, side, precision)
    with Progress(SimpleNamespace(name="pretrain", rounds=steps), as_json, "images of a random process"):
        card = train(options, out)
    if as_json:
        print(json.dumps(card, indent=2))
        return
    print(f"{out}: sha256 {card['sha256']}")
    print(f"loss {card['loss']} after {steps} steps, {card['minutes']} minutes; card: {out.with_suffix('.json')}")
