"""The named methods: compositions of pieces and nothing else (docs/specification.md, "The named methods").

A factory's keyword arguments are the recipe's ``algorithm`` keys with their defaults; it returns an ``Algorithm``. A
method of your own is one more such function in a file of yours: ``algorithm: {name: my_file.py:my_method}``.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from fedflat.core import Algorithm, ClientState, Factory, Phase, in_range, whole, wrong
from fedflat.pieces import server, state
from fedflat.pieces.clipping import SmoothedNormalisation
from fedflat.pieces.gradients import HoldBias, blur, compose, label_prior, look_ahead, pgn, proximal, sam
from fedflat.pieces.transforms import AddBackDirection, ClassSums, Rescale, lus, random_mask, top_k, top_mask

__all__ = ["ALGORITHMS", "Algorithm", "Factory", "Phase"]


def fedavg() -> Algorithm:
    """FedAvg: local SGD and a plain mean; no clip, no noise, no privacy (McMahan et al. 2017).

    >>> fedavg().private
    False
    """
    return Algorithm("fedavg", private=False)


def fedsam(rho: float = 0.5) -> Algorithm:
    """FedSAM: local SAM and a plain mean; no clip, no noise, no privacy (Qu et al. 2022).

    rho: perturbation radius ρ ≥ 0, in units of weights.

    >>> fedsam(rho=0.05).phases[0].rule
    Sam(rho=0.05)
    """
    return Algorithm("fedsam", phases=(Phase(rule=sam(rho)),), private=False)


def dp_fedavg() -> Algorithm:
    """DP-FedAvg: local SGD, clip of the whole vector, noise on the sum, constant divisor (McMahan et al. 2018).

    The baseline: the round of every private method, with no piece added to it.

    >>> dp_fedavg().private, dp_fedavg().transforms, dp_fedavg().server
    (True, (), ())
    """
    return Algorithm("dp-fedavg")


def dp_fedavg_blur(lam: float = 0.4) -> Algorithm:
    """DP-FedAvg with bounded local update regularisation (Cheng et al. 2022, Eq. 5).

    lam: weight λ ≥ 0 of the penalty on updates that grow longer than the clip.

    >>> dp_fedavg_blur(lam=0.1).phases[0].rule
    Blur(lam=0.1)
    """
    return Algorithm("dp-fedavg-blur", phases=(Phase(rule=blur(lam)),))


def dp_fedavg_lus(sparsity: float = 0.7) -> Algorithm:
    """DP-FedAvg with local update sparsification (Cheng et al. 2022, Eq. 11–13).

    sparsity: share of each tensor that is set to zero before the clip, in [0, 1).

    >>> dp_fedavg_lus(sparsity=0.5).transforms
    (Lus(sparsity=0.5),)
    """
    return Algorithm("dp-fedavg-lus", transforms=(lus(sparsity),))


def dp_fedavg_blurs(lam: float = 0.4, sparsity: float = 0.7) -> Algorithm:
    """DP-FedAvg with both BLUR and LUS (Cheng et al. 2022).

    >>> dp_fedavg_blurs().name
    'dp-fedavg-blurs'
    """
    return Algorithm("dp-fedavg-blurs", phases=(Phase(rule=blur(lam)),), transforms=(lus(sparsity),))


def fed_smp_randk(keep: float = 0.4, rescale: bool = False) -> Algorithm:
    """Fed-SMP with a random mask that all clients of a round share (Hu et al. 2022).

    keep: share of the coordinates that are trained on, clipped and noised in a round, in (0, 1]. rescale: multiply the
    update by 1/keep before the clip.

    >>> fed_smp_randk(keep=0.25).mask
    RandomMask(keep=0.25)
    """
    return Algorithm("fed-smp-randk", mask=random_mask(keep), transforms=(Rescale(1 / keep),) if rescale else ())


def fed_smp_topk(
    keep: float = 0.4, explore: float = 0.5, public: str | None = None, rescale: bool = False
) -> Algorithm:
    """Fed-SMP with a top-k mask that all clients of a round share (Hu et al. 2022).

    keep, rescale: as for ``fed_smp_randk``. public: where the update comes from whose largest entries are kept,
    ``held-out`` (a twentieth of the training set, taken from the clients before training) or a data set; those examples
    are not covered by the guarantee. Without it the mask takes the largest entries of |w^t − w^0|, which is released
    already, and a share ``explore`` of it at random.

    >>> fed_smp_topk(keep=0.25, explore=0.1).mask
    TopMask(keep=0.25, explore=0.1)
    """
    method, steps = fed_smp_randk(keep, rescale), (server.KeepInitial(),)
    return replace(method, name="fed-smp-topk", mask=top_mask(keep, explore), server=steps, options={"public": public})


def dp_fedsam(rho: float = 0.5, adaptive: bool = False) -> Algorithm:
    """DP-FedSAM: each client looks for a flat minimum by SAM (Shi et al. 2023a, Alg. 1).

    rho: perturbation radius ρ ≥ 0, in units of weights; try 0.05. 0.5 is the paper's, whose code means it of adaptive
    SAM. adaptive: ρ is a share of each weight's own size (Kwon et al. 2021).

    >>> dp_fedsam(rho=0.05).phases[0].rule
    Sam(rho=0.05)
    """
    return Algorithm("dp-fedsam", phases=(Phase(rule=sam(rho, adaptive)),))


def dp_fedsam_topk(rho: float = 0.5, keep: float = 0.4, adaptive: bool = False) -> Algorithm:
    """DP-FedSAM-top_k: SAM, and each client's own top-k mask before the clip (Shi et al. 2023b, Def. 5).

    rho, adaptive: as for ``dp_fedsam``. keep: share of each tensor's entries that a client sends. Noise is on all
    coordinates, since the masks depend on data.

    >>> dp_fedsam_topk(keep=0.1).transforms
    (TopK(keep=0.1),)
    """
    return Algorithm("dp-fedsam-topk", phases=(Phase(rule=sam(rho, adaptive)),), transforms=(top_k(keep),))


def dp_fedavg_la(strength: float = 1.0, absent: float = 0.01) -> Algorithm:
    """DP-FedAvg with logits adjusted by each client's own label shares (after Menon et al. 2021; Zhang et al. 2022).

    strength: τ ≥ 0 of τ·log π_i. absent: > 0, what a class counts that a client does not have. The last layer's bias
    stays at w^0. For label skew: less of a message, and of its clip, is then about which labels a client has.

    >>> dp_fedavg_la(strength=0.5).phases[0].rule
    LabelPrior(strength=0.5, absent=0.01)
    """
    return Algorithm("dp-fedavg-la", phases=(Phase(rule=label_prior(strength, absent)),), server=(HoldBias(),))


def dp_fedavg_ls(smoothing: float = 0.01, scope: str = "tensor") -> Algorithm:
    """DP-FedAvg with Laplacian smoothing of the noisy mean (Liang et al. 2024).

    smoothing: σ_ls ≥ 0. scope: ``tensor`` smooths each tensor by itself, ``vector`` the whole vector.

    >>> dp_fedavg_ls().server
    (LaplacianSmoothing(smoothing=0.01, scope='tensor'),)
    """
    return Algorithm("dp-fedavg-ls", server=(server.laplacian_smoothing(smoothing, scope),))


def dp_fedpgn(rho: float = 0.2, beta: float = 0.3) -> Algorithm:
    """DP-FedPGN: follow the last global direction g̃, and look along it for flat places (Liu et al. 2025, Alg. 1).

    rho: radius of the perturbation along g̃. beta: weight of the fresh gradient, in (0, 1]; the rest is g̃'s, which is
    added back before the clip, so that only what is new is clipped.

    >>> dp_fedpgn(beta=0.5).phases[0].rule
    Pgn(rho=0.2, beta=0.5)
    """
    return Algorithm(
        "dp-fedpgn", phases=(Phase(rule=pgn(rho, beta)),), transforms=(AddBackDirection(beta),),
        server=(server.PgnDirection(beta),), momentum=0.0,
        fixed_momentum="the message re-adds (1−β)·K·η·g̃, which is exact only without local momentum",
    )  # fmt: skip


def dp_fedpgn_ls(rho: float = 0.2, beta: float = 0.3, smoothing: float = 0.01, scope: str = "tensor") -> Algorithm:
    """DP-FedPGN with Laplacian smoothing of the global direction (Liu et al. 2025, Alg. 1, line 17).

    >>> dp_fedpgn_ls(smoothing=0.1).server[0].smoothing
    LaplacianSmoothing(smoothing=0.1, scope='tensor')
    """
    step = server.PgnDirection(beta, server.laplacian_smoothing(smoothing, scope))
    return replace(dp_fedpgn(rho, beta), name="dp-fedpgn-ls", server=(step,))


def dp_scaffold(scale: float = 1.0) -> Algorithm:
    """DP-SCAFFOLD at client level: update and control variate, clipped as one vector (Noble et al. 2022).

    scale: b of the message (Δw, Δc/b). The larger it is, the more of the clip is left for Δw, and the more noise is on
    c.

    >>> dp_scaffold().vectors  # a message is two vectors (d,)
    2
    """
    scale = in_range("algorithm.scale", scale, 0, open_low=True)
    return Algorithm(
        "dp-scaffold", phases=(Phase(rule=state.ScaffoldGradient()),), transforms=(state.ScaffoldMessage(scale),),
        client_state=(ClientState(state.CONTROL, state.ClientControl(scale)),), server=(state.ServerControl(scale),),
        vectors=2, momentum=0.0,
        fixed_momentum="Δw/(Kη) is the mean of the corrected gradients only without local momentum",
    )  # fmt: skip


def class_statistics() -> Algorithm:
    """Class statistics: one clipped release of sums of features by class, S_i = Σ_j φ_j(y_j − 1/K)ᵀ, is the head.

    The last linear layer starts at zero, and after a round it is ``server.lr``·ΣS_i/m: with features whitened by public
    numbers (``model: representation``), Fisher's discriminant under a public covariance. ``rounds: 1`` is the method;
    further rounds add the sums of what the head so far leaves unexplained, each with its share of the budget.

    >>> class_statistics().transforms, class_statistics().zero_head
    ((ClassSums(),), True)
    """
    return Algorithm(
        "class-statistics", phases=(Phase(steps=0),), transforms=(ClassSums(),), zero_head=True, momentum=0.0,
        fixed_momentum="there is no local step",
    )  # fmt: skip


def fed_normec(alpha: float = 0.1) -> Algorithm:
    """Fed-α-NormEC: smoothed normalisation in place of the clip, with error feedback (Shulgin et al. 2025b).

    alpha: α of C·e/(α + ‖e‖), > 0, in units of the message.

    >>> fed_normec(alpha=0.5).scale
    SmoothedNormalisation(alpha=0.5)
    """
    alpha = in_range("algorithm.alpha", alpha, 0, open_low=True)
    return Algorithm(
        "fed-normec", transforms=(state.Residual(),), server=(state.FeedbackDirection(),),
        client_state=(ClientState(state.MEMORY, state.ClientMemory()),), scale=SmoothedNormalisation(alpha),
    )  # fmt: skip


def dp_fedavg_ft(finetune_steps: int | None = None, finetune_lr: float | None = None) -> Algorithm:
    """DP-FedAvg whose global model each client fine-tunes for itself, for evaluation only (in Zhang et al. 2024).

    finetune_steps, finetune_lr: of that training; by default those of local training. What is fine-tuned is never sent.

    >>> dp_fedavg_ft(finetune_steps=5).finetune.steps
    5
    """
    return replace(dp_fedavg(), name="dp-fedavg-ft", finetune=_finetune(finetune_steps, finetune_lr))


def dp_fedsam_ft(rho: float = 0.5, finetune_steps: int | None = None, finetune_lr: float | None = None) -> Algorithm:
    """DP-FedSAM whose global model each client fine-tunes for itself by SAM, for evaluation (in Zhang et al. 2024).

    >>> dp_fedsam_ft(rho=0.1).finetune.rule
    Sam(rho=0.1)
    """
    tune = replace(_finetune(finetune_steps, finetune_lr), rule=sam(rho))
    return replace(dp_fedsam(rho), name="dp-fedsam-ft", finetune=tune)


def _finetune(steps: int | None, lr: float | None) -> Phase:
    if steps is not None:
        whole("algorithm.finetune_steps", steps, 1)
    if lr is not None:
        in_range("algorithm.finetune_lr", lr, 0)
    return Phase(steps=steps, lr=lr)


def centaur(
    head: str | Sequence[str] | None = None, head_steps: int | None = None, head_lr: float = 0.005
) -> Algorithm:
    """CENTAUR at client level: SGD on the personal head, then on the shared part (Shen et al. 2023, Zhang et al. 2024).

    head: patterns of parameter names that stay with the client; None: the last linear layer. head_steps (default: local
    steps), head_lr: of the head's training.

    >>> [phase.part for phase in centaur().phases]
    ['personal', 'shared']
    """
    if head_steps is not None:
        whole("algorithm.head_steps", head_steps, 0)
    in_range("algorithm.head_lr", head_lr, 0)
    personal = Phase(part="personal", steps=head_steps, lr=head_lr)
    patterns = () if head is None else ((head,) if isinstance(head, str) else tuple(head))
    return Algorithm("centaur", phases=(personal, Phase(part="shared")), head=patterns)


def dp2_fedsam(
    rho: float = 0.1, head: str | Sequence[str] | None = None, head_steps: int | None = None, head_lr: float = 0.005
) -> Algorithm:
    """DP2-FedSAM: SGD on the personal head, then SAM on the shared part (Zhang et al. 2024, Alg. 2).

    rho: perturbation radius of the shared part. Other keys as for ``centaur``.

    >>> dp2_fedsam(head="classifier.*").head
    ('classifier.*',)
    """
    method, shared = centaur(head, head_steps, head_lr), Phase(part="shared", rule=sam(rho))
    return replace(method, name="dp2-fedsam", phases=(method.phases[0], shared))


def p_fedsam(
    rho: float = 0.1, head: str | Sequence[str] | None = None, head_steps: int | None = None, head_lr: float = 0.005
) -> Algorithm:
    """P-FedSAM: DP2-FedSAM without clip and noise; no privacy (Zhang et al. 2024).

    >>> p_fedsam().private
    False
    """
    return replace(dp2_fedsam(rho, head, head_steps, head_lr), name="p-fedsam", private=False)


def ae_dpfl(
    queries: int | None = None, public: str | None = None, labels_per_draw: int = 1, student_epochs: int = 20
) -> Algorithm:
    """AE-DPFL: noisy votes of local models on public examples train a student (Zhu et al. 2020).

    queries: labels in all, spread over the rounds (default: one cohort draw a round). public: ``held-out`` (default:
    training examples never given to a client; published data sets only), ``test`` (default with data of one's own),
    or a data set's name, hub id or path. labels_per_draw: Q, labels that one draw of a cohort votes on.
    student_epochs: passes of the student over what is labelled.

    >>> ae_dpfl(labels_per_draw=5).options["labels_per_draw"]
    5
    """
    whole("algorithm.labels_per_draw", labels_per_draw, 1)
    whole("algorithm.student_epochs", student_epochs, 1)
    if queries is not None:
        whole("algorithm.queries", queries, 1)
    if public is not None and not (isinstance(public, str) and public):
        raise wrong("algorithm.public", public, "held-out, test, or the name, hub id or path of a data set")
    keys = {"queries": queries, "public": public, "labels_per_draw": labels_per_draw, "student_epochs": student_epochs}
    return Algorithm("ae-dpfl", kind="votes", options=keys)


def ae_fl(
    queries: int | None = None, public: str | None = None, labels_per_draw: int = 1, student_epochs: int = 20
) -> Algorithm:
    """AE-DPFL's votes without noise, to compare its accuracy with; no privacy.

    >>> ae_fl().private
    False
    """
    return replace(ae_dpfl(queries, public, labels_per_draw, student_epochs), name="ae-fl", private=False)


def ddgauss(bits: int = 16, granularity: float | None = None, beta: float = math.exp(-0.5)) -> Algorithm:
    """DDGauss: local SGD; noise shares are whole numbers, only their sum modulo 2^bits is seen (Kairouz et al. 2021).

    granularity: grid step γ in units of the update; None: as fine as ``bits`` leave room for. beta: of the conditional
    rounding, in [0, 1).

    >>> ddgauss(bits=20).options["bits"]
    20
    """
    return Algorithm("ddgauss", kind="ddgauss", options={"bits": bits, "granularity": granularity, "beta": beta})


def sam_over_blur(rho: float = 0.5, lam: float = 0.4) -> Algorithm:
    """DP-FedSAM with BLUR: both of SAM's gradients include BLUR's penalty, each at its own point.

    >>> sam_over_blur(rho=0.1).phases[0].rule
    Composed(outer=Sam(rho=0.1), inner=Blur(lam=0.4))
    """
    return Algorithm("dp-fedsam-blur", phases=(Phase(rule=compose(sam(rho), blur(lam))),))


def dp_fedprox(mu: float = 0.1) -> Algorithm:
    """DP-FedProx: a proximal term keeps local training near w^t (Li et al. 2020).

    mu: its weight μ ≥ 0.

    >>> dp_fedprox(mu=1.0).phases[0].rule
    Proximal(mu=1.0)
    """
    return Algorithm("dp-fedprox", phases=(Phase(rule=proximal(mu)),))


def dp_fedadam(beta1: float = 0.9, beta2: float = 0.99, floor: float | None = None) -> Algorithm:
    """DP-FedAdam: Adam on the server, the noise taken off its second moment (Reddi et al. 2021; Tang et al. 2024).

    beta1, beta2: in [0, 1). floor: least second moment that is divided by; None: the noise's own variance.

    >>> dp_fedadam(floor=1e-4).optimizer
    CorrectedAdam(beta1=0.9, beta2=0.99, floor=0.0001)
    """
    return Algorithm("dp-fedadam", optimizer=server.corrected_adam(beta1, beta2, floor), server_lr=0.03)


def dp_fednsam(rho: float = 0.05, gamma: float = 0.5) -> Algorithm:
    """DP-FedNSAM: SAM at the point that the server's Nesterov momentum looks ahead to (after Liu et al. 2026).

    v is the server's momentum, of released means only, and is broadcast. From w^t a client takes K steps
    y = w + γ·v^t, δ = ρ·g(y)/‖g(y)‖, w ← w − η·g(y + δ) (with local momentum as any method) and sends w − w^t.
    The server: v^{t+1} = γ·v^t + (1−γ)·mean, w^{t+1} = w^t + server.lr·v^{t+1}; γ = 0 is DP-FedSAM.

    Liu et al.'s clients start at w^t + γ·v^t, run SAM there and send the difference to that start: the same steps and
    the same message, w only being shifted by γ·v^t. Their server has v^{t+1} = γ·v^t + mean; see ``Velocity`` for 1−γ.

    >>> dp_fednsam(gamma=0.9).server
    (Velocity(gamma=0.9),)
    """
    rule = compose(look_ahead(gamma), sam(rho))
    return Algorithm("dp-fednsam", phases=(Phase(rule=rule),), server=(server.Velocity(gamma),))


def dp_disk(kappa: float = 0.7, ahead: float | None = None) -> Algorithm:
    """DiSK at client level: a Kalman filter of the noisy means, its prediction in the messages (Zhang et al. 2024b).

    >>> dp_disk(kappa=0.5).optimizer
    Filter(kappa=0.5)
    """
    rule, optimizer = state.disk(kappa, ahead)
    return Algorithm("dp-disk", phases=(Phase(rule=rule),), optimizer=optimizer)


_METHODS: tuple[Factory, ...] = (
    *(fedavg, fedsam, dp_fedavg, dp_fedavg_blur, dp_fedavg_lus, dp_fedavg_blurs, fed_smp_randk, fed_smp_topk),
    *(dp_fedsam, dp_fedsam_topk, sam_over_blur, dp_fedavg_la, dp_fedavg_ls, dp_fedpgn, dp_fedpgn_ls),
    *(dp_fedprox, dp_fedadam, dp_fednsam, dp_disk, dp_scaffold, fed_normec, class_statistics, dp_fedavg_ft),
    *(dp_fedsam_ft, centaur, dp2_fedsam, p_fedsam, ddgauss, ae_dpfl, ae_fl),
)
ALGORITHMS = {"dp-fedsam-blur" if make is sam_over_blur else make.__name__.replace("_", "-"): make for make in _METHODS}
"""Every method by the name that recipes know it by, in the order of ``fedflat list algorithms``."""
__all__ += [make.__name__ for make in _METHODS]
