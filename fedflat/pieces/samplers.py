"""Cohort samplers: ``Poisson`` (default), ``Truncated``, ``Fixed``, ``Full``, ``MinSeparation``, ``CyclicPoisson``.

Their definitions are in ``fedflat.core.cohorts`` and ``fedflat.core.schedules``, because the privacy accounts are
computed from the same values and ``privacy`` may not import ``pieces``.
"""

from fedflat.core.cohorts import NAMES, Fixed, Ids, Poisson, Sampler, Truncated, make_sampler
from fedflat.core.schedules import CyclicPoisson, Full, MinSeparation

__all__ = [
    "NAMES", "CyclicPoisson", "Fixed", "Full", "Ids", "MinSeparation", "Poisson", "Sampler", "Truncated",
    "make_sampler",
]  # fmt: skip
