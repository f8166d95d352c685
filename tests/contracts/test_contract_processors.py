"""Contract 6 on other machines: it holds with two numbers of threads on two kinds of processor.

What torch and oneDNN may use is read once, when they are loaded, so each combination is a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
METHODS = ("dp-fedavg", "dp-fedsam-blur", "dp2-fedsam")
"""One of each form: plain, a rule with a transform, a head that stays with the client."""
PROCESSORS = {
    "plain": {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2"},
}
PROGRAM = f"""
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
from fedflat.assembly import records
records.engine_facts = lambda recipe, problem, backend: ""  # one noise key for all engines
import test_contract_engines as engines
for method in {METHODS}:
    engines.test_every_engine_and_block_size_agrees(method)
    engines.test_the_order_of_clients_does_not_matter(method)
print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
"""
SHAPES = {
    "linear": (1, 8, 8), "mlp": (1, 8, 8), "cnn": (1, 28, 28), "cnn-2-layers": (1, 28, 28), "cnn-3": (3, 32, 32),
    "resnet10": (3, 32, 32), "resnet18": (3, 32, 32), "char-gru": (20,), "char-linear": (20,),
    "bow-linear": (16,),
}  # fmt: skip
BITS = f"""
import hashlib, torch
from fedflat.config.recipe import Recipe
from fedflat.data.sources import load
from fedflat.models import build

def bits(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()

for name, shape in {SHAPES}.items():
    more = dict(vocabulary=90) if name.startswith("bow") else dict()
    print(name, bits(build(name, shape, 10, 3, **more).parameters()))
data = load(Recipe.load("quick-start").data, 3)
print("digits", bits([data.inputs, data.targets, data.test_inputs, data.test_targets]))
"""


def said(program: str, processor: str, *words: str) -> str:
    """What ``program`` prints in a process that may use this processor's instructions and no others."""
    given = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    env = {**given, **PROCESSORS[processor], "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_initial_weights_and_data_are_the_same_bits() -> None:
    plain, avx2 = (said(BITS, name).splitlines() for name in PROCESSORS)
    assert plain == avx2 and len(plain) == len(SHAPES) + 1


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.long
def test_back_ends_blocks_and_orders_agree(name: str, threads: str) -> None:
    capability, used = said(PROGRAM, name, threads).split()
    assert used == threads and (name != "plain" or capability == "DEFAULT")
