"""The papers' tables (published value, ours, claimed ε, proven ε; one YAML file each) and figures (``figures.yaml``)."""

from __future__ import annotations

from fedflat.reproduce.rows import Outcome, dry, train
from fedflat.reproduce.scales import SCALES, scaled
from fedflat.reproduce.tables import Cell, Table, find, load, names

__all__ = ["SCALES", "Cell", "Outcome", "Table", "dry", "find", "load", "names", "scaled", "train"]
