"""The papers' tables (published, ours, claimed ε, proven ε) and figures: a YAML file each, one for all figures."""

from __future__ import annotations

from fedflat.reproduce.outcome import Outcome
from fedflat.reproduce.rows import dry, train
from fedflat.reproduce.scales import SCALES, scaled
from fedflat.reproduce.tables import Cell, Table, find, load, names

__all__ = ["SCALES", "Cell", "Outcome", "Table", "dry", "find", "load", "names", "scaled", "train"]
