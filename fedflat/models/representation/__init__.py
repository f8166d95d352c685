"""Representations: a frozen body that has seen no client's data, and a head that is trained on its features."""

from fedflat.models.representation.bodies import FILE, write_body
from fedflat.models.representation.build import NAME, Representation, representation

__all__ = ["FILE", "NAME", "Representation", "representation", "write_body"]
