"""Protocols that are cheap to ask for with ``isinstance``: a round asks some twenty times, and before Python 3.12 each
time collects the protocol's members anew."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Protocol, _ProtocolMeta

__all__ = ["Offered"]

_MISSING = object()


@cache
def _members(protocol: type) -> tuple[tuple[str, bool], ...]:
    """(name, whether it is a method) of each member, the inherited ones too."""
    asked = [base for base in protocol.__mro__ if base is not Protocol and getattr(base, "_is_protocol", False)]
    names = {name for base in asked for name in (*vars(base), *inspect.get_annotations(base))}
    public = sorted(name for name in names if name == "__call__" or not name.startswith("_"))
    return tuple((name, callable(getattr(protocol, name, None))) for name in public)


class Offered(_ProtocolMeta):
    """Metaclass of a runtime-checkable protocol: whoever has all of its members is an instance, as in ``typing``."""

    def __instancecheck__(cls, instance: object) -> bool:
        if not cls.__dict__.get("_is_protocol", False):  # a class that was derived from one
            return super().__instancecheck__(instance)
        for name, method in _members(cls):
            found = getattr(instance, name, _MISSING)
            if found is _MISSING or (method and found is None):
                return False
        return True
