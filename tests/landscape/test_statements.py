"""The papers' statements, convergence terms by hand, and ``fedflat bounds``."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedflat.core.checks import InputError
from fedflat.landscape import bounds
from fedflat.landscape.bounds import Facts
from fedflat.landscape.statements import Setting, Statement, statements

FACTS = Facts(
    lr=0.1, steps=4, rounds=25, clients=500, cohort=50, clip=0.2, noise_multiplier=0.95, dimension=1000,
    smoothness=2.0, gap=3.0, local_std=0.5, global_std=0.7, alpha_mean=(0.6, 0.8), alpha_spread=(0.1, 0.3),
)  # fmt: skip


def test_convergence_terms_by_hand() -> None:
    terms, ratios = bounds.dp_fedsam(FACTS, rho=0.5)
    assert terms == pytest.approx({
        "optimisation": 2 * 2 * 3 / 10, "local variance": 4 * 0.25 / (4 * 625),
        "clipping": 25 * (0.7 * 0.49 + 0.2 * 4) / 625, "noise": 4 * 5 * (0.19**2) * 1000 / (2500 * 2),
    })  # fmt: skip
    assert list(ratios.values()) == pytest.approx([0.1 * 2 * 10, 0.5 * 5])
    assert bounds.dp_fedsam(FACTS, keep=0.4)[0]["noise"] == pytest.approx(0.4 * terms["noise"])
    with pytest.raises(InputError, match="smoothness"):
        Facts(lr=0.1, steps=1, rounds=1, clients=1, cohort=1, clip=0, noise_multiplier=0, dimension=1, smoothness=0)


def by_reference(setting: Setting) -> dict[str, Statement]:
    return {each.reference: each for each in statements(setting)}


def test_a_setting_with_everything_and_one_with_little() -> None:
    full = Setting(FACTS, 0.1, 2e-3, 2.9, rho=0.05, keep=0.4, samples=50_000)
    found = by_reference(full)
    for reference in (
        "Shi et al. 2023a, Eq. 10, Shi et al. 2023b, Eq. 13", "Zhang et al. 2024, Lemma 6",
        "Zhang et al. 2024, Theorem 2", "Shi et al. 2023b, Theorem 4", "Shi et al. 2023b, Theorem 5",
        "Shi et al. 2023a, Theorem 3 (DP-FedSAM)", "Shi et al. 2023b, Theorem 3 (top_k)",
        "Liu et al. 2025, Theorem 1 (DP-FedPGN)", "Cheng et al. 2022, Theorem 2 (BLUR, LUS)",
    ):  # fmt: skip
        assert reference in found, reference
    none = Setting(Facts(**{**vars(FACTS), "noise_multiplier": 0.0}), 0.1, 2e-3, math.inf, relation="replace-one")
    found = by_reference(none)
    assert found["Zhang et al. 2024, Lemma 6"].value == 0.4 and "void" in found["Zhang et al. 2024, Theorem 2"].said
    assert "Shi et al. 2023b, Theorem 4" not in found
    loose = Setting(FACTS, 0.1, 2e-3, 50.0, rho=0.05, samples=500)  # ε over 2ln(1/δ), too few samples
    found = by_reference(loose)
    assert found["Zhang et al. 2024, Theorem 2"].value is None and "void" in found["Zhang et al. 2024, Theorem 2"].said


def test_the_command(command: Any) -> None:
    said = command("bounds", "cifar10-dp-fedsam", "--dimension", "11173962")
    assert said.status == 0 and max(map(len, said.out.splitlines())) <= 80
    assert "Lemma 4's condition FAILS" in said.out and "Zhang et al. 2024, Theorem 1 (DP2-FedSAM)" in said.out
    found = json.loads(command("bounds", "cifar10-dp-fedsam", "--dimension", "9", "--json").out)
    assert found["setting"]["facts"]["dimension"] == 9 and found["setting"]["rho"] == 0.5
    assert "N, the number of training examples, is not known" in " ".join(said.out.split())


def test_the_command_with_a_run_measures_what_it_can(command: Any) -> None:
    tiny = ["data.clients=20", "data.max_examples=200", "rounds=2", "model.name=mlp", "model.hidden=4", "local.steps=2"]
    asked = [part for text in tiny for part in ("-o", text)]
    assert command("run", "quick-start-dp-fedavg", "--out", "here", *asked, "-o", "cohort.size=8").status == 0
    said = command("bounds", "--run", "here")
    assert said.status == 0 and "(measured)" in said.out and "K = 2" in said.out
    losses = [json.loads(line)["test_loss"] for line in Path("here/metrics.jsonl").read_text().splitlines()]
    assert f"f(w¹) − f* = {losses[0]:.4g} (the test loss after round 0, no bound)" in " ".join(said.out.split())
    for more in (["-o", "privacy.clip=9"], ["--steps", "7"]):
        said = command("bounds", "--run", "here", *more)
        assert said.status == 2 and f"--run: found {more[0]}; allowed: a run alone" in said.err


def test_what_cannot_be_evaluated_is_one_line(command: Any) -> None:
    for asked, words in (
        (["quick-start-fedavg"], "private updates"), (["quick-start", "--run", "here"], "one of both"),
        (["--run", "nowhere"], "folder of a run"),
        (["cifar10-dp-fedsam", "--dimension", "9", "-o", "privacy.clip={kind: per-tensor}"], "one number C"),
        (["cifar10-dp-fedsam", "--dimension", "9", "--smoothness", "1e200"], "smoothness: found 1e+200; allowed: "),
        (["cifar10-dp-fedsam-published", "--dimension", "9"], "privacy.protocol: found published; allowed: sound"),
    ):  # fmt: skip
        said = command("bounds", *asked)
        assert said.status == 2 and words in said.err, asked
