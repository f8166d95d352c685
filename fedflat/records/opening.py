"""What a run is, written down before anything is drawn: ``private/run.json``, and its public half in the ledger.

A run is its settled recipe (without what cannot change a release: ``engine``, ``evaluation``, ``name``), its data, its
initial weights and layout, and its method. Whatever differs on a resume makes it another run. The digests are HMACs
under a secret of the run's own, so no file tells whose data it was, or which seed, to somebody who can guess.
"""

import functools
import hashlib
import hmac
import itertools
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from fedflat.core import Identity, digest, durable, reading, require, versions
from fedflat.records.folder import OPENING

FORMAT = 2
PARTS = ("recipe", "data", "model", "method")
CHOOSING = (
    "ATEN_CPU_CAPABILITY", "DNNL_", "ONEDNN_", "MKL_", "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES",
    "OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS", "OMP_NESTED", "OMP_SCHEDULE", "KMP_",
    "NVIDIA_TF32_OVERRIDE", "CUBLAS", "CUDNN_", "TORCH_CUDNN_", "DISABLE_ADDMM_CUDA_LT", "PYTORCH_TUNABLEOP_",
)  # fmt: skip
"""How the names begin of environment variables by which numerical libraries choose their instructions and threads."""
KEPT = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
"""What scikit-learn sets when it is loaded, which changes no number."""
_ROUNDING = re.compile(r"_get_(\w*(sdp|allow|precision|preferred|determin)\w*|(cudnn|mkldnn|nnpack)_\w+)$").match
"""Matches the names of torch's own getters of such settings."""


@dataclass(frozen=True)
class Opening:
    """private/run.json: whose files these are.

    run: public random-looking id. secret: keys the digests. attempt: counts fresh keys of this run. digests: of
    ``PARTS``, keyed. recipe_file: SHA-256 of recipe.yaml as written.
    software: what may change bits. key: the public name of the key that is in use, once there is one. engine: what the
    key follows besides the run. terms: public facts that the privacy statement needs (``assembly.stating.Terms``).
    """

    run: str
    secret: str
    attempt: int
    digests: Mapping[str, str | None]
    recipe_file: str
    software: Mapping[str, Any]
    key: str = ""
    engine: str = ""
    format: int = FORMAT
    terms: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, identity: Identity, key: bytes, recipe_text: str, software: Mapping[str, Any], run: str | None,
        terms: Mapping[str, Any],
    ) -> "Opening":  # fmt: skip
        """The opening of a new run. key: of a seeded run its noise key, so that equal runs have equal files; else fresh
        entropy. run: the name of the key file, if there is one."""
        secret, name = digest(key, "secret of a run").hex(), digest(key, "name of a run").hex()[:32]
        digests, file = keyed(identity, secret), hashlib.sha256(recipe_text.encode()).hexdigest()
        return cls(run or name, secret, 1, digests, file, software, engine=identity.engine, terms=terms)

    @property
    def public(self) -> dict[str, Any]:
        """What the ledger's lines carry."""
        facts = {"format": self.format, "id": self.run, "attempt": self.attempt, **self.digests}
        return {**facts, "software": self.software, "terms": self.terms}

    def differing(self, identity: Identity) -> list[str]:
        """Return which parts of a run are not those it was opened with."""
        here = keyed(identity, self.secret)
        return [part for part in PARTS if here[part] != self.digests.get(part)]

    def is_recipe(self, content: bytes) -> bool:
        """Return whether these are recipe.yaml's bytes as they were written."""
        return hashlib.sha256(content).hexdigest() == self.recipe_file

    def write(self, folder: Path) -> None:
        """Write private/run.json, readable by its owner only; a kill leaves the old one or the new one."""
        (folder / OPENING).parent.mkdir(mode=0o700, exist_ok=True)
        text = json.dumps({**vars(self), "checksum": durable.digest_of_json(vars(self))}, indent=1)
        durable.replace(folder / OPENING, text + "\n", mode=0o600)

    @classmethod
    def read(cls, folder: Path) -> "Opening":
        """Return the opening of the run in a folder.

        Raises:
            InputError: there is none, or it is damaged.
        """
        path = folder / OPENING
        with reading(path, "a damaged record", "the file that was written at the start"):
            require(path.exists(), str(path), "no such file", "the one this run was opened with")
            body = json.loads(path.read_bytes())
            if body.pop("checksum") != durable.digest_of_json(body) or type(body["attempt"]) is not int:
                raise ValueError("its checksum does not match, or its attempt is no whole number")
            return TypeAdapter(cls).validate_python(vars(cls(**body)))


def refuse_older(where: str, path: Path, terms: object) -> None:
    """Raise InputError for a run without terms, of which less could be checked than of one of 1.0."""
    older = f"{path}, a run whose records have no terms: of fedflat 0.1 or 0.2, or somebody took them out"
    hint = "fedflat 0.2 verifies, loads and resumes its own runs, and verifies those of 0.1."
    require(bool(terms), where, older, "a run of fedflat 1.0 or later", hint=hint)


def keyed(identity: Identity, secret: str) -> dict[str, str | None]:
    """Return digests for the disk: HMACs under the run's secret, for a seed could be guessed from a plain hash."""
    key, values = bytes.fromhex(secret), {part: getattr(identity, part) for part in PARTS}
    texts = {part: None if value is None else f"{part}:{value}".encode() for part, value in values.items()}
    return {part: None if text is None else hmac.new(key, text, "sha256").hexdigest() for part, text in texts.items()}


def machine(device: torch.device) -> dict[str, Any]:
    """Return the part of ``software`` that the engine does not decide. device: where it computes; a GPU by its name."""
    facts = {"machine": platform.machine(), "instructions": torch.backends.cpu.get_cpu_capability()}
    facts |= {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {**facts, "processor": processor(), **arithmetic(), **versions(("fedflat", "torch", "numpy"))}


def arithmetic() -> dict[str, str]:
    """Return torch's settings of the process that decide how sums and products round: whatever this version can say of
    itself, and whether it flushes tiny numbers to zero, which only such a number shows."""
    settings = {}
    for name, read in _getters().items():
        try:
            settings[name] = str(read())
        except Exception as error:  # torch refuses to sum up settings that do not go together
            settings[name] = type(error).__name__
    return settings


@functools.cache
def _getters() -> dict[str, Callable[[], Any]]:
    names = filter(_ROUNDING, dir(torch._C))
    read: dict[str, Callable[[], Any]] = {name.removeprefix("_get_"): getattr(torch._C, name) for name in names}
    if hasattr(torch._C, "_get_fp32_precision_getter"):  # PyTorch 2.9
        for pair in itertools.product(("generic", "cuda", "mkldnn"), ("all", "conv", "rnn", "matmul")):
            read[" ".join(pair)] = functools.partial(torch._C._get_fp32_precision_getter, *pair)
    for kind in ("cpu", "cuda"):
        read[f"{kind} autocast"] = functools.partial(torch.is_autocast_enabled, kind)
        read[f"{kind} autocast to"] = functools.partial(torch.get_autocast_dtype, kind)
    read |= {"mha": torch.backends.mha.get_fastpath_enabled, "dtype": torch.get_default_dtype}
    read["einsum"] = lambda: (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy)
    read["flushes denormals"] = lambda: not float(torch.full((1,), 1e-39) * 0.5)
    return {f"torch {name}": read[name] for name in sorted(read)}


@functools.cache
def processor() -> str:
    """Return a short digest of the processor's model and abilities, and of settings that keep libraries from them."""
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(CHOOSING) and name not in KEPT}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    abilities = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.sha256(json.dumps([abilities, settings]).encode()).hexdigest()[:16]
