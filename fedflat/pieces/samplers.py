"""Cohort samplers: ``Poisson`` (default), ``Truncated`` and ``Fixed``.

Their definitions are in ``fedflat.core.cohorts``, because the privacy accounts are computed from the same
values and ``privacy`` may not import ``pieces``.

>>> sampler = make_sampler("poisson", clients=500, size=50)
>>> sampler.q, sampler.relation
(0.1, 'add-remove')
"""

from fedflat.core.cohorts import NAMES, Fixed, Ids, Poisson, Sampler, Truncated, make_sampler

__all__ = ["NAMES", "Fixed", "Ids", "Poisson", "Sampler", "Truncated", "make_sampler"]
