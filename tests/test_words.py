"""What is public, that it is documented, that its examples run, and that papers are cited so that they can be found."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import fedflat
from fedflat import algorithms, pieces
from fedflat.algorithms import ALGORITHMS
from fedflat.methods.published import CITED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PUBLIC = [
    "Algorithm", "ClientState", "ClientView", "CommonMask", "GradientFn", "GradientRule", "Guard", "InputError",
    "Local", "MaskView", "MeanView", "Optimizer", "Phase", "PrivateClassifier", "PrivateRegressor", "Recipe",
    "Result", "RoundResult", "RunError", "ServerStep", "ServerView", "Transform", "clients", "epsilon", "export",
    "load", "noise_multiplier", "run",
]  # fmt: skip
METHODS = [
    "ae_dpfl", "ae_fl", "centaur", "class_statistics", "ddgauss", "dp2_fedsam", "dp_disk", "dp_fedadam",
    "dp_fedavg", "dp_fedavg_blur", "dp_fedavg_blurs", "dp_fedavg_ft", "dp_fedavg_la", "dp_fedavg_ls",
    "dp_fedavg_lus", "dp_fednsam", "dp_fedpgn", "dp_fedpgn_ls", "dp_fedprox", "dp_fedsam", "dp_fedsam_ft",
    "dp_fedsam_topk", "dp_scaffold", "fed_normec", "fed_smp_randk", "fed_smp_topk", "fedavg", "fedsam", "p_fedsam",
    "sam_over_blur",
]  # fmt: skip
ROOMS = [
    "algorithms", "assembly", "audit", "backends", "cli", "config", "core", "data", "engine", "estimator",
    "federation", "guard", "landscape", "methods", "models", "papers", "pieces", "privacy", "records", "report",
    "simulation",
]  # fmt: skip
PIECES = [f"fedflat.pieces.{found.name}" for found in pkgutil.iter_modules(pieces.__path__)]
TOLD = ["privacy.accounting.epsilon", "simulation.run", "simulation.result", "data.own", "methods.published"]
EXAMPLES = [*PIECES, *(f"fedflat.{name}" for name in ["algorithms", "core", "privacy", "privacy.accounting", *TOLD])]


def test_the_public_names_are_these() -> None:
    """A new name is a promise: it is added here, to docs/api.md, and to the changelog."""
    assert sorted(fedflat.__all__) == sorted(PUBLIC)
    assert sorted(algorithms.__all__) == sorted([*METHODS, "ALGORITHMS", "Algorithm", "Factory", "Phase"])
    assert {factory.__name__ for factory in ALGORITHMS.values()} == set(METHODS)
    assert sorted(found.name for found in pkgutil.iter_modules(fedflat.__path__) if found.name != "__main__") == ROOMS
    assert all(getattr(fedflat, name) is not None for name in PUBLIC) and set(PUBLIC) <= set(dir(fedflat))


def documented() -> tuple[set[str], dict[str, set[str]]]:
    """The names of docs/api.md, and of each module there those chosen (empty: all)."""
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    single = set(re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)", text, re.MULTILINE))
    modules = re.findall(r"^\.\. automodule:: (\S+)\n   :members:(.*)", text, re.MULTILINE)
    return single, {module: set(re.findall(r"\w+", chosen)) for module, chosen in modules}


def test_every_public_name_is_in_the_reference() -> None:
    single, modules = documented()
    for name in PUBLIC:
        chosen = modules.get(fedflat._PLACES[name])
        assert f"fedflat.{name}" in single or (chosen is not None and (not chosen or name in chosen)), name
    assert modules["fedflat.algorithms"] == set() and set(PIECES) <= set(modules)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings_run(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted and not done.failed


def test_every_public_function_of_a_piece_or_method_has_an_example() -> None:
    for name in [*PIECES, "fedflat.algorithms"]:
        module = importlib.import_module(name)
        for found in [found for _, found in inspect.getmembers(module) if getattr(found, "__module__", "") == name]:
            if not found.__name__.startswith("_"):
                told = inspect.getdoc(found) or ""
                assert len(told.split()) > 4, found
                assert ">>>" in told or inspect.isclass(found), found


CITATION = re.compile(
    r"([A-Z][\w-]+(?: et al\.| and [A-Z][\w-]+)) \(?(\d{4}[a-z]?)|\b([A-Z][a-z]{4,}) ((?:19|20)\d\d[a-z]?)\b"
)
NO_PAPER = {"Version", "Copyright", "November"}


def citations(text: str) -> set[str]:
    """``Reddi et al. 2021``, ``Balle and Wang 2018``, ``Feldman 1987``: what is cited, line breaks taken out."""
    flat = re.sub(r"\s*\n\s*(?:# )?", " ", text)
    found = {f"{m[1] or m[3]} {m[2] or m[4]}" for m in CITATION.finditer(flat)}
    return {name for name in found if name.split()[0] not in NO_PAPER}


PAGES = [path for path in [ROOT / "README.md", *DOCS.glob("*.md")] if path.name != "bibliography.md"]
SOURCES = [*PAGES, *(ROOT / "fedflat").rglob("*.py"), *(ROOT / "fedflat").rglob("*.yaml")]


def test_every_paper_cited_is_in_the_bibliography() -> None:
    text = (DOCS / "bibliography.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^- \*\*(.+?)\.\*\*", text, re.MULTILINE))
    assert set(CITED.values()) <= listed and all(f"| {number} | {name} |" in text for number, name in CITED.items())
    for path in SOURCES:
        missing = citations(path.read_text(encoding="utf-8")) - listed
        assert not missing, f"{path.relative_to(ROOT)}: {missing}"


def test_citations_are_found_at_all() -> None:
    text = "as in Reddi et al. 2021, Balle and\n    Wang 2018 (Feldman 1987) and CVPR 2023; see Nobody et al. 1999"
    assert citations(text) == {"Reddi et al. 2021", "Balle and Wang 2018", "Feldman 1987", "Nobody et al. 1999"}


def test_no_paper_is_cited_by_its_number_alone() -> None:
    """The numbers are names of files and keys; in prose a paper has authors and a year."""
    alone = re.compile(r"(?<!\.)[Pp]apers? 00[0-4]\b|\b00[0-4](,? (Eq|Alg|Def|Theorem|Fig|Table)|'s\b)|\[00[0-4]\]")
    for path in SOURCES:
        assert not alone.search(path.read_text(encoding="utf-8")), path.relative_to(ROOT)


def test_the_specification_has_what_the_code_cites() -> None:
    text = (DOCS / "specification.md").read_text(encoding="utf-8")
    titles = set(re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    cited = {title for path in SOURCES for title in re.findall(
        r'docs/specification\.md, "([^"]+)"', path.read_text(encoding="utf-8")
    )}  # fmt: skip
    assert cited and cited <= titles
    assert [name for name in ALGORITHMS if f"`{name}`" not in text] == []
    assert not [path for path in SOURCES if "algorithms.md" in path.read_text(encoding="utf-8")]
