"""An environment of its own for each peer, made on first use: ``.venv/benchmarks/<peer>`` in the project."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

PEERS = {"pfl": "pfl==0.6.0", "flower": "flwr[simulation]==1.41.0"}
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv" / "benchmarks"


def python_of(peer: str, folder: Path = FOLDER) -> str:
    """The interpreter of a peer's environment, installed if need be, with the same torch as this one."""
    import torch

    place = folder / peer
    python = place / "bin" / "python"
    if not (place / "installed").is_file():
        print(f"installing {PEERS[peer]} into {place} (once)", file=sys.stderr, flush=True)
        venv.create(place, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        exact, public = f"torch=={torch.__version__}", f"torch=={torch.__version__.split('+')[0]}"
        for wanted in (exact, public):
            if subprocess.run([*pip, PEERS[peer], wanted], stdout=sys.stderr).returncode == 0:
                break
        else:
            raise RuntimeError(f"{PEERS[peer]} could not be installed")
        (place / "installed").write_text(PEERS[peer] + "\n", encoding="utf-8")
    return str(python)


def versions(python: str) -> dict[str, str]:
    """Versions that matter, as the environment itself reports them."""
    import json

    names = ["fedflat", "pfl", "flwr", "ray", "torch", "numpy"]
    code = (
        "import json, platform\nfrom importlib import metadata as m\nfound = {'python': platform.python_version()}\n"
        f"for n in {names!r}:\n    try: found[n] = m.version(n)\n"
        "    except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return dict(json.loads(answer.stdout))
