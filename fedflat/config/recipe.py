"""Recipes: YAML or a dict -> checked, frozen values. A mistake is one line: where, what, and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedflat.core.checks import InputError, nearest, wrong

SERVER_LR = {"sgd": 1.0, "adam": 0.03, "yogi": 0.03}
"""``server.lr`` where a recipe gives none."""
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: frozen, no unknown keys, and true is not the number 1."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false, which are numbers to Python, where a number is asked."""
        if isinstance(value, bool):
            asked = str(cls.model_fields[str(info.field_name)].annotation)
            if re.search("int|float", asked) and "bool" not in asked:
                raise PydanticCustomError("truth", "Input should be a number, not true or false")
        return value


def _named(value: Any) -> Any:
    """``model: cnn`` is short for ``model: {name: cnn}``."""
    return {"name": value} if isinstance(value, str) else value


class Partition(Section):
    """How examples are given to clients."""

    kind: Literal["iid", "dirichlet", "classes", "natural"] = "iid"
    """iid: shuffled. dirichlet: each class spread with weights from Dirichlet(alpha). classes: per_client classes each.
    natural: by a column of the data. Change it to the split that your clients really have."""
    alpha: Positive | None = None
    """Dirichlet concentration of kind dirichlet: 0.1 is very uneven, 0.6 uneven, 10 nearly iid. Example: 0.6"""
    per_client: Annotated[int, Field(ge=1)] | None = None
    """Classes each client holds, of kind classes. Example: 2"""
    by: str | None = None
    """Column that names the client, of kind natural. Example: writer_id"""


class DataSection(Section):
    """Which examples, and how they are spread over clients."""

    dataset: str = "digits"
    """What is trained on: a name of fedflat list datasets, any hub id, or a file or folder of parquet with the hub's
    columns or of a table (parquet or CSV; found under FEDFLAT_DATA too). Example: cifar10"""
    partition: Annotated[Partition, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)] = Partition()
    """How examples are given to clients. Example: {kind: dirichlet, alpha: 0.6}"""
    clients: Annotated[int, Field(ge=1)] | None = None
    """M, the number of clients, a public number. None: as many as the natural partition has. More clients buy more
    privacy for the same noise. Example: 500"""
    client_test_fraction: Share = 0.0
    """Share of each client's examples held back for personal accuracy; they are never trained on. Needed by personal
    methods. Example: 0.2"""
    input: str | list[str] | None = None
    """Column or columns of the inputs. None: the data set's own. Example: image"""
    label: str | None = None
    """Column of the targets. None: the data set's own. Example: fine_label"""
    test_fraction: Share | None = None
    """Share of the training data held out as public test data where the data set has no test split. None: 0.2.
    Example: 0.1"""
    max_examples: Annotated[int, Field(ge=1)] | None = None
    """Train on at most so many examples, drawn by the seed before the partition; for quick trials. Example: 5000"""
    max_test: Annotated[int, Field(ge=1)] | None = None
    """Evaluate on at most so many test examples, the first ones. Example: 2000"""
    validation_fraction: Share = 0.0
    """Share of the public test examples that is set apart, by a public draw, for choosing settings; accuracies are
    those on the rest. fedflat tune sets it to 0.5 where it is 0. Example: 0.5"""
    tokenizer: str | None = None
    """Folder or hub id of a transformers tokenizer. None: words hashed to numbers. Example: models/roberta-base"""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a text beyond which it is cut. Example: 64"""
    vocabulary: Annotated[int, Field(ge=3, le=2**20)] | None = None
    """Numbers that words are hashed to, where no tokenizer is named. Example: 5000"""
    inputs: str | list[str] | None = None
    """Columns of a table (parquet or CSV) that are read as numbers: numbers, true and false, lists of numbers of one
    length, or text with data.categories. Example: [age, income]"""
    target: str | list[str] | None = None
    """Column of a table with the target; several for several targets. Example: bought"""
    by: str | None = None
    """Column that names the client of each row: short for partition: {kind: natural, by: …}. Example: user"""
    categories: dict[str, list[Any]] | None = None
    """For columns of text or codes, all values in a public order; they are never learnt from the rows. An input becomes
    a 0/1 feature for each value; a target, or the labels of texts and images, class numbers.
    Example: {colour: [red, green, blue]}"""
    scale: dict[str, tuple[float, Positive]] | None = None
    """Public (mean, std) of columns: (x - mean) / std is trained on. Example: {age: [40, 15]}"""
    max_per_client: Annotated[int, Field(ge=1)] | None = None
    """Public bound on each client's examples: the first so many of a draw by the seed. None: all. Example: 100"""

    @model_validator(mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        """``by: user`` is the natural split by that column."""
        if not isinstance(given, Mapping) or given.get("by") is None:
            return given
        natural = {"kind": "natural", "by": given["by"]}
        asked = given.get("partition", natural)
        if asked not in (natural, {**natural, "alpha": None, "per_client": None}, "natural", {"kind": "natural"}):
            raise wrong("data.by", f"{given['by']} with another partition", "one of by and partition")
        return {**given, "partition": natural}


class NamedSection(Section):
    """A name and the options that its factory takes; they are checked by the factory's signature."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The section's keys other than the name: what its factory is called with."""
        return dict(self.model_extra or {})


class LocalSection(Section):
    """Local training; ``epochs`` becomes one public step count K = E·⌈n̄/batch⌉ for everybody."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """K, minibatch steps of every client in a round: one public number. None: one pass over the average client. Few
    steps drown less in noise a round, many move further. Example: 10"""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Instead of steps: E passes over the average client, turned into one public K = E·⌈n̄/batch⌉ for everybody.
    Example: 5"""
    batch_size: Annotated[int, Field(ge=1)] = 50
    """Examples of a minibatch. With at least a client's number of examples every step is a full-batch step.
    Example: 50"""
    lr: Positive = 0.1
    """Learning rate η of round 0. Change it first, together with the clip. Example: 0.1"""
    momentum: Share | None = None
    """Local momentum μ, starting at zero each round. None: the method's own (0.5; 0 for dp-fedpgn and dp-scaffold,
    which need it). Example: 0.5"""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Round t uses lr·lr_decay^t. Example: 0.998"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """What a local step does with its gradient. adam: Kingma and Ba 2015, with moments of the client's own that start
    at zero in each round (0.9, 0.999) and lr about a hundredth of what SGD takes; for transformers and adapters."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate over the planned rounds, besides lr_decay: constant, or down to zero after the last along half
    a cosine or a straight line."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """The learning rate grows in equal steps over this many first rounds. Example: 3"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Added to the loss gradient as weight_decay·w, before any mixing. Example: 0.0005"""
    max_grad_norm: Positive | None = None
    """Each minibatch gradient is scaled down to this L2 norm: a training aid, no privacy. Example: 10"""


class CohortSection(Section):
    """Who takes part in a round."""

    size: Annotated[float, Field(gt=0)]
    """m, the expected number of clients in a round, and the public constant that every sum is divided by. Larger
    cohorts drown less in noise; everybody in every round (size = clients) is often best. Example: 50"""
    sampling: Literal["poisson", "truncated", "fixed", "full", "min-separation", "cyclic-poisson"] = "poisson"
    """poisson: each client by its own secret coin. truncated: poisson with a largest cohort. fixed: exactly size
    clients, a much larger ε. Without a secret draw, best with correlated noise (privacy.noise): full: everybody in
    every round; min-separation: a public round-robin. cyclic-poisson: coins within groups that take turns."""
    separation: Annotated[int, Field(ge=1)] | None = None
    """b: rounds of one client are at least so many apart (min-separation), or so many groups take turns
    (cyclic-poisson). None: as many as clients/size allows. Example: 10"""
    max: Annotated[int, Field(ge=1)] | None = None
    """Largest cohort of sampling truncated. Example: 70"""
    min: Annotated[int, Field(ge=1)] | None = None
    """The minimum cohort of trust distributed: a round with fewer honest shares is aborted and stays charged. None:
    chosen so that aborts are rare. Example: 40"""
    max_participations: Annotated[int, Field(ge=1)] | None = None
    """Rounds that a client takes part in at most, of trust local. Example: 30"""
    colluders: Annotated[int, Field(ge=0)] = 0
    """f: that many clients may tell the server their noise shares (trust distributed). Example: 3"""


class ClipSection(Section):
    """A clip other than one constant."""

    kind: Literal["constant", "adaptive", "per-tensor", "median"]
    """constant: one C. adaptive: C follows a private quantile of the update norms. per-tensor: C_j for each tensor,
    counted as √ΣC_j². median: only in published procedures; it proves nothing."""
    value: Positive | None = None
    """C of kind constant. Example: 0.3"""
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of updates that kind adaptive aims to leave unclipped. Example: 0.5"""
    initial: Positive | None = None
    """First C of kind adaptive. Example: 0.2"""
    count_noise: Positive | None = None
    """σ_b, std of the noise on the adaptive clip's count. None: m/20. Example: 5"""
    values: float | list[float] | None = None
    """Thresholds of kind per-tensor: one number, or one for each shared tensor. Example: 0.1"""


class NoiseSection(Section):
    """How the noise of different rounds is related."""

    kind: Literal["independent", "tree", "banded", "toeplitz"] = "independent"
    """independent: every round has its own. The others take most of a round's noise back in later rounds, and need
    cohort.sampling min-separation, cyclic-poisson or full: banded (the least noise, up to 512 rounds), toeplitz (nearly
    as little, up to 2048), tree (the classic, for comparison)."""
    bands: Annotated[int, Field(ge=1)] | None = None
    """Rounds over which noise is related, of kinds banded and toeplitz. None (auto): those with the least error of the
    released models under the server's momentum. Example: 10"""

    @model_validator(mode="before")
    @classmethod
    def _automatic(cls, given: Any) -> Any:
        """``bands: auto`` is None."""
        return {**given, "bands": None} if isinstance(given, Mapping) and given.get("bands") == "auto" else given


class SelectionSection(Section):
    """What a run was selected by among several; fedflat tune writes it."""

    mean: Positive
    """E[K], the mean number of trials. Example: 10"""
    eta: float | None = None
    """η of the truncated negative binomial that K was drawn from (1: geometric). None: Poisson. Example: 1"""
    beside: list[dict[str, float]] = []
    """The rounds, cohorts and noise multipliers that other trials may have had, where settings change them."""
    trial: str = ""
    """A random name, which makes the trial's noise its own. Example: 6f1c"""


class PrivacySection(Section):
    """The guarantee: exactly one of noise_multiplier and epsilon, unless the method is not private."""

    clip: float | ClipSection = 1.0
    """C: the L2 norm that no client's whole update exceeds. Smaller: less noise, more bias. Change it first; a good
    start lets about half of the updates through. Example: 0.3"""
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    """σ: std of the noise on the sum, over C. Give it, or epsilon. Example: 0.95"""
    epsilon: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Target ε of the whole run; σ is calibrated to it before round 0. Give it, or noise_multiplier. Example: 8"""
    budget: Positive | None = None
    """The run stops before a round after which ε would exceed this. None: epsilon where it is given. Example: 8"""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """δ, the chance that the guarantee fails. None: 0.1/clients; a larger one warns. Example: 0.0002"""
    trust: Literal["central", "distributed", "local"] | None = None
    """central: the server is trusted. distributed: clients add noise shares and only their sum is seen. local: the
    server sees each noised update. None: central, and distributed for ddgauss."""
    protocol: Literal["sound", "published"] = "sound"
    """sound: the guarantee is true. published: a paper's released procedure, its claimed ε shown beside what is
    proven."""
    published: Annotated[str | None, BeforeValidator(lambda v: f"{v:03d}" if type(v) is int else v)] = None
    """The paper whose procedure it is, where a method is in several: 000 (Shi et al. 2023a), 002 (Liu et al. 2025), 003
    (Shi et al. 2023b) or 004 (Cheng et al. 2022). Example: 002"""
    accountant: str = "pld"
    """How ε is worked out: pld (tight), rdp (looser, simpler) or fft (our own, an independent check)."""
    secure_rng: bool = False
    """true: noise and cohorts from the operating system's entropy, and noise on an exact grid that withstands
    floating-point attacks. For models that leave the house."""
    noise: Annotated[NoiseSection, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)] = NoiseSection()
    """independent, or {kind: tree | banded | toeplitz, bands: auto | b}: noise that later rounds partly take back, for
    rounds of a client that are known to lie apart. With it σ is that of the run as one Gaussian. Example: banded"""
    noise_cohort: Positive | None = None
    """Simulate the noise of a system with this larger cohort. ε proven is that of what ran; the larger system's is
    shown as simulated. Example: 5000"""
    selection: SelectionSection | None = None
    """Written by fedflat tune into its trials' recipes: ε is that of the selection among all of them. None: the
    settings were fixed beforehand."""


class StartSection(Section):
    """What round 0 is instead of the method's; its share of the budget is fixed before the run."""

    kind: Literal["class-statistics"] = "class-statistics"
    """class-statistics: one clipped release of sums of features by class, which the last layer starts from."""
    clip: Positive | None = None
    """C of that round: the L2 norm that no client's class sums exceed. None: privacy.clip. Example: 10"""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Its share of the budget: of the sum of 1/σ² over all rounds. Example: 0.2"""
    lr: Positive = 1.0
    """The last layer is this many times the noisy mean of the class sums. Example: 10"""


class ServerSection(Section):
    """What the server does with the noisy mean."""

    optimizer: Literal["sgd", "adam", "yogi"] | None = None
    """What the server does with the noisy mean: sgd adds it; adam and yogi adapt each coordinate. None: sgd, or the
    method's own (dp-fedadam, dp-disk), beside which another is refused. Example: adam"""
    lr: Positive | None = None
    """Server learning rate. None: 1.0 for sgd, 0.03 for adam and yogi, whose every step is about lr long in each
    coordinate; the method's own with its own optimizer. Example: 1.0"""
    momentum: Share = 0.0
    """Server momentum of sgd; costs no privacy. Example: 0.9"""
    beta1: Share = 0.9
    """First moment's decay of adam and yogi. Example: 0.9"""
    beta2: Share = 0.99
    """Second moment's decay of adam and yogi. Example: 0.99"""
    tau: Positive = 1e-3
    """Added to the root of the second moment: the larger, the less adaptive. Example: 0.001"""
    average: Literal["none", "tail", "ema"] = "none"
    """What is released: none: the last iterate. tail: the mean of the iterates of the second half of the planned
    rounds. ema: a moving average. Costs no privacy, takes noise off; training goes on from the last iterate.
    Example: tail"""
    decay: Share = 0.9
    """Share of the old average that average: ema keeps in a round. Example: 0.9"""
    weights: Literal["uniform", "samples"] = "uniform"
    """uniform: every client counts the same. samples: by numbers of examples, refused for private methods, whose
    sensitivity would follow the data."""

    def filled(self) -> ServerSection:
        """The same, with the optimizer and lr that stand for None where a method brings no optimizer of its own."""
        name = self.optimizer or "sgd"
        return self.model_copy(update={"optimizer": name, "lr": SERVER_LR[name] if self.lr is None else self.lr})


class EngineSection(Section):
    """Where and how it runs; none of it changes what is computed beyond floating-point rounding."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:1. auto takes a GPU where there is one that agrees with the processor. Example: cpu"""
    backend: str = "auto"
    """auto measures what is fastest here: sequential, workers, vectorized, vectorized-fp32, lowrank, ray. graphs, on
    a GPU, is experimental: never run on a real one by us. Example: workers"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the layers' arithmetic: auto is fp32. bf16 keeps float32 weights; lowrank and vectorized-fp32 compute in
    float32 all the same. Example: bf16"""
    block: Annotated[int, Field(ge=1)] | None = None
    """Clients trained at once by block back ends. None: what memory allows. Example: 32"""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Worker processes, threads, or streams of a GPU. None: one for each core. Example: 2"""
    compile: bool | None = None
    """Train the model compiled by torch.compile. None: no."""


class EvaluationSection(Section):
    """How often, in rounds, models are evaluated; the last round always is."""

    every: Annotated[int, Field(ge=1)] = 1
    """Rounds between evaluations on public test data. Example: 5"""
    personal_every: Annotated[int, Field(ge=1)] | None = None
    """Rounds between evaluations of personal accuracy. None: about ten times in a run. Example: 10"""
    batch_size: Annotated[int, Field(ge=1)] = 500
    """Examples evaluated at once. Example: 500"""
    metrics: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = ()
    """More to measure on the public test data, each as test_NAME: f1, auc, balanced_accuracy, top5 (classification),
    f1, auc (multilabel), perplexity (next-token), mae, rmse, r2 (regression). Example: [f1, auc]"""


class Recipe(Section):
    """Everything that defines a run. Load one with ``Recipe.load``, or build it from a dict with ``Recipe.of``."""

    name: str = "run"
    """What the run is called; the folder's name where none is given. Example: mine"""
    seed: Annotated[int, Field(ge=0)] = 0
    """Drives partition, first weights, batches and public masks, and in a simulation without privacy.secure_rng the
    noise too: whoever knows it can draw the noise again. Example: 1"""
    rounds: Annotated[int, Field(ge=1)]
    """T, the number of rounds. More rounds need more noise for the same ε. Example: 60"""
    after: str | None = None
    """The folder of a run that ended: its released model is w^0, and privacy.epsilon that of all such runs together.
    Example: runs/first"""
    data: DataSection = DataSection()
    """Which examples, and how they are spread over clients."""
    model: Annotated[NamedSection, BeforeValidator(_named)] = NamedSection(name="cnn")
    """A name of fedflat list models with its options, or an import path. Example: {name: mlp, hidden: 32}"""
    task: Literal["classification", "multilabel", "regression", "next-token"] = "classification"
    """What is learnt, which decides the loss and what targets must be: class numbers (cross-entropy), a 0 or 1 for each
    label (binary cross-entropy), numbers (squared error), or the next token at each place. Example: regression"""
    loss: str | None = None
    """squared: for classification, on one-hot targets less 1/K. Or a loss of one's own, my_file.py:my_loss: (outputs,
    targets) -> loss of each example. None: the task's. Example: squared"""
    algorithm: Annotated[NamedSection, BeforeValidator(_named)]
    """A name of fedflat list algorithms with its options, or my_file.py:my_method. Example: {name: dp-fedsam, rho:
    0.05}"""
    start: Annotated[StartSection | None, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)] = None
    """Begin with one release of class sums, and go on from there. None: every round is the method's. Example:
    class-statistics"""
    local: LocalSection = LocalSection()
    """Local training, the same public numbers for every client."""
    cohort: CohortSection
    """Who takes part in a round."""
    privacy: PrivacySection = PrivacySection()
    """The guarantee: exactly one of noise_multiplier and epsilon, unless the method is not private."""
    server: ServerSection = ServerSection()
    """What the server does with the noisy mean."""
    engine: EngineSection = EngineSection()
    """Where and how it runs; none of it changes what is computed beyond rounding."""
    evaluation: EvaluationSection = EvaluationSection()
    """How often models are evaluated; the last round always is."""

    @classmethod
    def load(cls, source: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """A packaged recipe by name, or a YAML file by path; ``overrides`` are ``key.path=value`` strings.

        An override that names another method takes what the packaged recipe NAME-METHOD advises, if there is one.
        """
        overrides = list(overrides)
        return cls.of(_advised(source, read(source), overrides), overrides, where=str(source))

    @classmethod
    def of(
        cls, value: Recipe | Mapping[str, Any] | str | Path, overrides: Iterable[str] = (), where: str = "recipe"
    ) -> Recipe:
        """A recipe from a Recipe, a dict, a packaged name or a path."""
        if isinstance(value, (str, Path)):
            return cls.load(value, overrides)
        if not isinstance(value, (Recipe, Mapping)):
            raise wrong(where, type(value).__name__, "a packaged name, a path, a dict or a Recipe")
        mapping = value.dump() if isinstance(value, Recipe) else dict(value)
        mapping.pop("versions", None)
        for text in overrides:
            mapping = override(mapping, text)
        try:
            recipe = cls.model_validate(_texts(mapping))
        except ValidationError as error:
            raise _sentence(error, where) from None
        recipe._check(where)
        return recipe

    def dump(self) -> dict[str, Any]:
        """A plain dict with every default resolved; ``after`` and ``start`` only where they are set."""
        unset = {name for name in ("after", "start") if getattr(self, name) is None}
        return self.model_dump(mode="json", exclude=unset)

    def _check(self, where: str) -> None:
        local, clip = self.local, self.privacy.clip
        if local.steps is not None and local.epochs is not None:
            raise wrong(f"{where}: local", "both steps and epochs", "one of them")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.engine.device):
            raise wrong(f"{where}: engine.device", self.engine.device, "auto, cpu, cuda or one of cuda:0, cuda:1, …")
        if not isinstance(clip, ClipSection) and not (clip > 0 and math.isfinite(clip)):
            raise wrong(f"{where}: privacy.clip", clip, "a number > 0, or {kind: adaptive, quantile: 0.5, initial: …}")
        if isinstance(clip, ClipSection):
            _refuse_foreign(f"{where}: privacy.clip", "kind", clip, CLIP_KEYS)
        _refuse_foreign(f"{where}: server", "optimizer", self.server.filled(), SERVER_KEYS)
        _refuse_foreign(f"{where}: server", "average", self.server, {"decay": ("ema",)})
        if self.privacy.noise_multiplier is not None and self.privacy.epsilon is not None:
            raise wrong(f"{where}: privacy", "both noise_multiplier and epsilon", "one of them (epsilon is calibrated)")


CLIP_KEYS = {"value": ("constant",), "quantile": ("adaptive",), "initial": ("adaptive",), "count_noise": ("adaptive",),
             "values": ("per-tensor",)}  # fmt: skip
SERVER_KEYS = {"momentum": ("sgd",), "beta1": ("adam", "yogi"), "beta2": ("adam", "yogi"), "tau": ("adam", "yogi")}


RecipeLike = Recipe | Mapping[str, Any] | str | Path
"""A recipe, its mapping, the name of one that comes with fedflat, or a file's path."""


def _refuse_foreign(where: str, chooser: str, section: Section, of: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a key that differs from its default and belongs to another choice than the section's."""
    chosen = getattr(section, chooser)
    for key, choices in of.items():
        value = getattr(section, key)
        if chosen not in choices and value != type(section).model_fields[key].default:
            raise wrong(f"{where}.{key}", value, f"nothing with {chooser}: {chosen} (it is of {', '.join(choices)})")


FOLDER = Path(__file__).parent / "recipes"
QUICK_START = "quick-start"
GIVEN = "given in Python"
"""In a run's recipe.yaml: the data set, or the model, that no name stands for; whoever needs it gives it again."""


def names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(source: str | Path, depth: int = 0) -> dict[str, Any]:
    """The mapping in a packaged recipe, a YAML file or a run folder's recipe.yaml."""
    import yaml

    path = Path(source)
    if path.is_dir():
        path = path / "recipe.yaml"
    if not path.is_file():
        packaged = FOLDER / f"{source}.yaml"
        if not packaged.is_file():
            raise _not_found(path, str(source))
        path = packaged
    try:
        mapping = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        raise wrong(f"{path}{place}", getattr(error, "problem", str(error)) or "no YAML", "valid YAML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(str(path), f"a file that cannot be read ({error})", "a YAML file") from None
    if not isinstance(mapping, dict):
        found = "an empty file" if mapping is None else "no mapping"
        raise wrong(str(path), found, "recipe keys with values, for example rounds: 60")
    return _extended(mapping, path, depth)


def _advised(source: str | Path, mapping: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The packaged recipe of the method that an override names, under this one's name; else ``mapping``."""
    asked = [text.partition("=")[2].strip() for text in overrides if re.match(r"\s*algorithm(\.name)?\s*=", text)]
    if not asked or Path(source).exists():
        return mapping
    own = _named(mapping.get("algorithm"))
    family = str(source).removesuffix(f"-{own.get('name')}") if isinstance(own, Mapping) else str(source)
    if not (FOLDER / f"{family}-{asked[-1]}.yaml").is_file():
        return mapping
    return {**read(f"{family}-{asked[-1]}"), "name": mapping.get("name", str(source))}


def _not_found(path: Path, source: str) -> InputError:
    if path.parent.is_dir() and path.name == "recipe.yaml" and path.parent == Path(source):
        return wrong("recipe", f"the folder {source} without a recipe.yaml", "a YAML file, or the folder of a run")
    beside = [str(found) for ending in ("*.yaml", "*.yml") for found in path.parent.glob(ending)]
    allowed = "a YAML file, or a packaged recipe (fedflat list recipes)"
    return wrong(
        "recipe", f"no file and no packaged recipe {source}", allowed, hint=nearest(source, [*names(), *beside])
    )


def _extended(mapping: dict[str, Any], path: Path, depth: int) -> dict[str, Any]:
    """``extends: NAME`` takes another recipe (beside this file, or packaged) and changes the sections given here.

    A section's keys are merged one by one; ``algorithm`` and ``model`` are replaced whole, as their options belong to
    their name.
    """
    parent = mapping.pop("extends", None)
    if parent is None:
        return mapping
    if not isinstance(parent, str) or depth > 8:
        raise wrong(f"{path}: extends", parent, "the name or path of one other recipe, without a circle")
    beside = path.parent / parent
    merged = read(beside if beside.is_file() else parent, depth + 1)
    for key, value in mapping.items():
        old = merged.get(key)
        whole = key in ("algorithm", "model") or not (isinstance(old, dict) and isinstance(value, dict))
        merged[key] = value if whole else {**old, **value}  # type: ignore[dict-item]
    return merged


@cache
def _loader() -> Any:
    """YAML 1.2's floats: ``1e-5`` is a number."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.tag != "tag:yaml.org,2002:merge" and str(key.value) in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} twice", key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    number = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def parse_value(text: str) -> Any:
    """The value of ``-o key=value``, as YAML reads it."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError:
        return text


def override(mapping: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A copy of ``mapping`` with one ``key.path=value`` applied.

    Naming another algorithm keeps the options that it takes as well and drops the others; naming another model drops
    all options.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise wrong("-o", text, "key.path=value, for example -o privacy.clip=0.5")
    path, changed = key.strip().split("."), dict(mapping)
    place: dict[str, Any] = changed
    for index, part in enumerate(path[:-1]):
        inner = place.get(part)
        if part in ("model", "algorithm") and index == 0:
            inner = _named(inner)
        if inner is not None and not isinstance(inner, Mapping):
            inner = None
        place[part] = dict(inner or {})
        place = place[part]
    parsed = parse_value(value)
    if path[-1] == "name" and path[0] in ("algorithm", "model") and len(path) == 2 and place.get("name") != parsed:
        _drop_foreign_options(path[0], place, parsed)
    place[path[-1]] = parsed
    return changed


def _drop_foreign_options(section: str, options: dict[str, Any], name: Any) -> None:
    """Keep only the options that the newly named algorithm takes too; a model's options belong to the model."""
    import inspect

    from fedflat.algorithms import ALGORITHMS

    factory = ALGORITHMS.get(str(name)) if section == "algorithm" else None
    taken = inspect.signature(factory).parameters if factory else {}
    for key in [key for key in options if key not in taken]:
        del options[key]


def _sentence(error: ValidationError, where: str) -> InputError:
    """The first mistake of a pydantic error as the one error sentence."""
    mistakes = error.errors()
    missing = [".".join(map(str, m["loc"])) for m in mistakes if m["type"] == "missing"]
    if len(missing) == len(mistakes):
        return wrong(
            where, f"no {', no '.join(missing)}", "a value for each; for example rounds: 60, cohort: {size: 50}"
        )
    first = next((m for m in mistakes if m["type"] == "extra_forbidden"), mistakes[0])
    path = [str(p) for p in first["loc"] if p not in ("float", "ClipSection", "int", "str")]
    path = [p for p in path if not p.startswith(("function-", "list["))]
    place = f"{where}: {'.'.join(path)}"
    if first["type"] == "extra_forbidden":
        allowed = _fields(path[:-1])
        hint = elsewhere(path[-1]) or nearest(path[-1], allowed)
        return wrong(place, path[-1], ", ".join(allowed), hint=hint)
    if first["type"] == "missing":
        return wrong(place, "nothing", "a value; the key is required")
    found = first["input"]
    if first["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", str(first["ctx"]["expected"]))
        return wrong(place, found, ", ".join(choices), hint=nearest(str(found), choices))
    return wrong(place, found, _allowed(first["msg"]))


def _texts(value: Any) -> Any:
    """The same with a pathlib path, as ``after`` or ``data.dataset`` may be in Python, as text."""
    if isinstance(value, Mapping):
        return {key: _texts(inside) for key, inside in value.items()}
    return str(value) if isinstance(value, Path) else value


def elsewhere(name: str) -> str:
    """A sentence naming the keys of that name inside sections, or the empty string."""
    places = [
        f"{section}.{name}"
        for section, info in Recipe.model_fields.items()
        if isinstance(info.annotation, type)
        and issubclass(info.annotation, BaseModel)
        and name in info.annotation.model_fields
    ]
    return f"Did you mean {' or '.join(places)}?" if places else ""


def _allowed(message: str) -> str:
    """Pydantic's ``Input should be greater than or equal to 1`` as ``a number ≥ 1``."""
    text = re.sub(r"^Input should be ", "", message).replace("a valid integer", "a whole number")
    text = text.replace("a valid boolean", "true or false").replace("a valid ", "a ")
    for words, mark in (
        ("greater than or equal to", "≥"),
        ("less than or equal to", "≤"),
        ("greater than", ">"),
        ("less than", "<"),
    ):
        text = re.sub(rf"^{words} ", f"a number {mark} ", text)
    return text.split(", unable to")[0]


def _fields(path: list[str]) -> list[str]:
    """The keys allowed at a path of the recipe."""
    model: Any = Recipe
    for part in path:
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        found = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        model = found[0] if found else model
    return list(model.model_fields)
