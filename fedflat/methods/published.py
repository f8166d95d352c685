"""Compute the ε that papers claim for their procedures, and what is proven of these.

The formula is the Poisson-subsampled Gaussian with one sensitivity C for the whole update (Shi et al. 2023a, Eq. 13).
What was released differs from it (docs/specification.md, "Where they leave the formula", items 1–7), so the formula
does not cover it. What is proven composes each client's own messages: whatever is done with a message after its noise
was added is post-processing.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fedflat.core import FromRound, Poisson, Sampler, nearest, one_of, whole, wrong
from fedflat.privacy.accounting.curves import compose_epsilon, gaussian_epsilon, schedule_epsilon
from fedflat.privacy.accounting.epsilon import calibrate
from fedflat.privacy.plan import Plan, check_target, warnings_of
from fedflat.privacy.trust import Accounted, Guarantee, accountable

_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
CITED: dict[str, str] = _DATA["cited"]
"""How each reproduced paper is cited, by the number that recipes and ``fedflat reproduce`` know it by."""
PAPERS: dict[str, tuple[int, ...]] = {paper: tuple(items) for paper, items in _DATA["papers"].items()}
"""Which items of ``privacy/statement.yaml`` a paper's procedure has; 6 and 9 only where the recipe has them too."""
PAPER_OF: dict[str, str] = _DATA["methods"]
"""The paper whose procedure a method follows when the recipe names none."""
REASONS: dict[int | str, str] = _DATA["reasons"]


@dataclass(frozen=True)
class Published(Accounted):
    """The account of a paper's released procedure.

    paper: a number of ``CITED``, but not 001. items: of ``privacy/statement.yaml``, those of this run.
    tensors: L, the tensors that are sent and clipped each on its own; 1 where the whole vector is clipped (Cheng
    et al. 2022). clip: C, or None where each client takes its own median (Liu et al. 2025).
    """

    paper: str
    items: tuple[int, ...]
    tensors: int = 1
    clip: float | None = None
    relation: str = "replace-one"
    rounding = 0.0  # the procedure's own figures are kept

    @property
    def name(self) -> str:
        """As the ledger shows it."""
        return f"published-{self.paper}"

    def claimed(self, plan: Plan, rounds: int, accountant: str = "rdp") -> float:
        """Return the paper's formula after ``rounds`` rounds: one sensitivity C, Poisson, amplified.

        accountant: rdp, the papers' conversion (Shi et al. 2023a, Eq. 13); pld, the tight account of the same formula.
        """
        return formula(plan.sampler, plan.noise_multiplier, plan.delta, rounds, accountant)

    def message_multiplier(self, plan: Plan) -> float:
        """σ/√(mL): the noise of one message over its bound C·√L; 0 where nothing bounds a message (item 2).

        Cheng et al. 2022 give each message a share of σ²C²/|P_t| of the realised cohort: m is then the largest cohort
        that any round exceeds with chance at most δ/100.
        """
        return 0.0 if 2 in self.items else plan.noise_multiplier / math.sqrt(self.shares(plan) * self.tensors)

    def shares(self, plan: Plan) -> float:
        """m, over which the noise is divided."""
        sampler = plan.sampler
        if isinstance(sampler, FromRound):
            return float(sampler.size)
        from fedflat.methods.plans import most_messages  # which loads what discrete noise needs

        most = most_messages(sampler.clients, sampler.q, plan.rounds, plan.delta / 100)
        return float(min(most, sampler.clients))

    def proven(self, plan: Plan, rounds: int, factor: float = 2.0) -> float:
        """ε of the busiest client's messages; inf where nothing bounds them.

        factor: 2 under replace-one (2C√L), 1 if the client's slot is zeroed instead.
        """
        multiplier = self.message_multiplier(plan) / factor
        if rounds == 0:
            return 0.0
        if multiplier == 0:
            return math.inf
        if isinstance(plan.sampler, FromRound):
            return gaussian_epsilon(math.sqrt(plan.sampler.busiest(rounds)) / multiplier, plan.delta)
        return schedule_epsilon(rounds, plan.sampler.q, multiplier, plan.delta * 0.99)

    def guarantees(self, plan: Plan, rounds: int) -> tuple[Guarantee, ...]:
        """Return one adversary: who sees every noised message and every cohort, as the server does."""
        text = "the server and everyone else: each client's noised message and every cohort are known"
        epsilon = self.proven(plan, rounds)
        return (Guarantee("server", text, self.relation, epsilon, plan.delta, "exact Gaussian composition"),)

    def record(self, plan: Plan) -> dict[str, Any]:
        """The line's numbers are those of one message, not of the sum; ``participations`` are the busiest client's."""
        bound = None if self.clip is None else self.clip * math.sqrt(self.tensors)
        std = None if self.clip is None else plan.noise_multiplier * self.clip / math.sqrt(self.shares(plan))
        return {
            "paper": self.paper, "tensors": self.tensors, "per": "message", "clip": bound,
            "sensitivity": None if bound is None else 2 * bound, "std": std,
            "noise_multiplier": self.message_multiplier(plan), "published_noise_multiplier": plan.noise_multiplier,
        }  # fmt: skip

    def reasons(self, plan: Plan, rounds: int) -> list[str]:
        """Return why the claimed ε does not hold and what the proven one is, one sentence each, by item."""
        sentences = [REASONS["claimed"].format(tight=_rounded(self.claimed(plan, rounds, "pld")))]
        for item in self.items:
            # Where each client clips at its own median there is no sensitivity, of a tensor or of all.
            if not (item == 1 and 2 in self.items) and not (item == 5 and not isinstance(plan.sampler, FromRound)):
                sentences.append(f"Item {item}: {REASONS[item].format(**self._figures(item, plan, rounds))}")
        if self.paper == "004":
            sentences.append(REASONS["realised"])
        return [*sentences, self._proof(plan, rounds)]

    def stated(self, plan: Plan, rounds: int) -> dict[str, Any]:
        """Return what the statement needs: the claimed and the proven ε after ``rounds`` rounds, and the reasons."""
        claimed, reasons = self.claimed(plan, rounds), self.reasons(plan, rounds)
        return {"claimed": claimed, "proven": plan.epsilon(rounds), "reasons": reasons}

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for the statement: which items apply, and the procedure in a sentence."""
        threshold = "its own median tensor norm" if 2 in self.items else "C"
        mean = "weights n_i/Σn_j" if 4 in self.items else "a constant denominator"
        masked = ", then masks it," if 3 in self.items else ""
        text = _DATA["procedures"]["realised" if self.paper == "004" else "shares"]
        sentence = text.format(paper=CITED[self.paper], own=threshold, mean=mean, masked=masked)
        return {"paper_items": list(self.items), "mechanism": sentence}

    def settled(self, epochs: int | None) -> dict[str, dict[str, Any]]:
        """Return what a settled recipe says differently: the paper, its cohorts, and epochs that clients count
        themselves."""
        local: dict[str, Any] = {} if epochs is None else {"steps": None, "epochs": epochs}
        cohort = {"sampling": "poisson" if self.paper == "004" else "fixed"}
        return {"privacy": {"published": self.paper}, "cohort": cohort, "local": local}

    def _figures(self, item: int, plan: Plan, rounds: int) -> dict[str, object]:
        """Return the numbers in the sentence on an item."""
        sigma, sampler = plan.noise_multiplier, plan.sampler
        if item == 1:
            epsilon = formula(sampler, sigma / math.sqrt(self.tensors), plan.delta, rounds, "pld")
            return {"tensors": self.tensors, "alone": _rounded(epsilon)}
        if item == 5 and isinstance(sampler, FromRound):
            most = sampler.busiest(rounds)
            reach = math.sqrt(most) / sigma if sigma else math.inf
            one, two = (_rounded(gaussian_epsilon(times * reach, plan.delta)) for times in (1, 2))
            return {"most": most, "rounds": rounds, "one": one, "two": two}
        return {"share": f"{sigma / math.sqrt(sampler.size):.3f}"}

    def _proof(self, plan: Plan, rounds: int) -> str:
        if 2 in self.items:
            return REASONS["unproven"]
        times = "over a client's messages, Bin(T, q) of them"
        if isinstance(plan.sampler, FromRound):
            times = f"over the busiest client's {plan.sampler.busiest(rounds)} messages"
        return REASONS["proven"].format(
            times=times, multiplier=f"{self.message_multiplier(plan):.3g}", shares=f"{self.shares(plan):g}",
            tensors=self.tensors, two=_rounded(self.proven(plan, rounds)), one=_rounded(self.proven(plan, rounds, 1.0)),
            sizes="; it takes data sizes to be public (items 4 and 6)" if 4 in self.items else "",
        )  # fmt: skip


def _rounded(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def formula(sampler: Sampler, multiplier: float, delta: float, rounds: int, accountant: str = "rdp") -> float:
    """ε of the papers' formula for a cohort share q = size/clients, as if cohorts were Poisson and secret.

    accountant: rdp (Shi et al. 2023a, Eq. 13–14, its orders) or pld (tight). Infinite for multiplier 0.
    """
    if multiplier == 0 or rounds == 0:
        return math.inf if rounds else 0.0
    return compose_epsilon(Poisson(sampler.clients, float(sampler.size)).event(multiplier), rounds, delta, accountant)


def reproduced_paper(paper: str, have: Iterable[str]) -> str:
    """Return the number of a paper that is among ``have``; else raise InputError, with how those are cited.

    paper: its number, or how it is cited, in any case and spacing.

    >>> reproduced_paper("shi et al. 2023b", ["003", "004"]), reproduced_paper("4", ["003", "004"])
    ('003', '004')
    """
    plain, names = "".join(paper.lower().split()), {one: CITED.get(one, one) for one in have}
    cited = {"".join(name.lower().split()): number for number, name in CITED.items()}
    number = cited.get(plain, plain.zfill(3) if plain.isdigit() else paper)
    if number not in names:
        allowed = ", ".join(f"{one} ({name})" for one, name in names.items())
        raise wrong("reproduce PAPER", paper, allowed, hint=nearest(paper, names.values()))
    return number


def paper_of(algorithm: str, named: str | None) -> str:
    """Return the paper whose procedure a recipe asks for: as given, or by the algorithm's name.

    Raises:
        InputError: no such paper, or none for this algorithm.
    """
    if named is not None:
        return str(one_of("privacy.published", named, PAPERS))
    if algorithm not in PAPER_OF:
        allowed = "sound, or privacy.published: " + ", ".join(PAPERS)
        raise wrong("privacy.protocol", f"published for {algorithm}", allowed)
    return PAPER_OF[algorithm]


def published_plan(
    paper: str, *, clients: int, cohort: float, rounds: int, noise_multiplier: float | None = None,
    epsilon: float | None = None, delta: float | None = None, clip: float | None = None, epochs: bool = False,
) -> Plan:  # fmt: skip
    """Return the plan of a published procedure; its ε is the proven one, and the claimed one is
    ``plan.mechanism.claimed``.

    clip: C (not for Liu et al. 2025). epochs: local steps follow each client's data size. With ``epsilon`` instead of
    ``noise_multiplier``, σ is what the paper's formula asks for, as the papers do it. δ defaults to the papers' 1/M.

    Raises:
        InputError: neither or both of noise_multiplier and epsilon; a cohort or a σ that has no account.
    """
    items = PAPERS[one_of("privacy.published", paper, PAPERS)]
    sampler: Sampler = Poisson(clients, cohort) if paper == "004" else FromRound(clients, cohort)
    whole("rounds", rounds, 1)
    # The papers' δ, though it is too large: the warning says so.
    spent = 1 / clients if delta is None else delta
    check_target(noise_multiplier, epsilon)
    if noise_multiplier is not None:
        sigma = accountable(noise_multiplier)
    else:
        sigma = calibrate(lambda s: formula(sampler, s, spent, rounds), epsilon or 0.0)
    applies = {6: epochs, 9: spent >= 1 / clients * (1 - 1e-9)}  # every other item applies always
    items = tuple(item for item in items if applies.get(item, True))
    mechanism = Published(paper, items, clip=None if paper == "002" else clip)
    plan = Plan(sampler, rounds, sigma, spent, protocol="published", mechanism=mechanism)
    source = f"the procedure released by {CITED[paper]}; the ε of that paper is claimed, not proven."
    return replace(plan, warnings=(f"protocol published: {source}", *warnings_of(plan)))


def with_tensors(plan: Plan, tensors: int) -> Plan:
    """Return the plan once the model is known: L tensors are sent, which matters where each is clipped by itself."""
    account = plan.mechanism
    if not isinstance(account, Published) or 1 not in account.items:
        return plan
    return replace(plan, mechanism=replace(account, tensors=whole("tensors", tensors, 1)))
