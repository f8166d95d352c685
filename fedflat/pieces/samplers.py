"""Cohort samplers: ``Poisson`` (default), ``Truncated`` and ``Fixed``.

Their definitions are in ``fedflat.core.cohorts``, because the privacy accounts are computed from the same
values and ``privacy`` may not import ``pieces``.
"""

from fedflat.core.cohorts import NAMES, Fixed, Ids, Poisson, Truncated, make_sampler
from fedflat.core.types import Sampler

__all__ = ["NAMES", "Fixed", "Ids", "Poisson", "Sampler", "Truncated", "make_sampler"]
