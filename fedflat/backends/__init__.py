"""Map local training over a cohort; every back end gives the same messages, up to rounding.

Example, one client after the other, then the same in blocks of eight::

    Sequential(algorithm, problem, local, data, seed).train(cohort, broadcast, kept, clipped)
    backend_for("vectorized", 8, None, parts, problem, data, seed).train(cohort, broadcast, kept, clipped)

A back end is anything with a ``name`` and ``train``, which yields parts of the round in client order; it knows neither
clip nor sum. ``sequential`` is what the others must equal: ``workers`` and ``ray`` run it in processes, ``vectorized``
trains blocks at once, as products of matrices for stacks of linear layers. ``choose`` takes the one that a recipe names
or that public shapes speak for; ``features`` computes a frozen body once.
"""

__all__ = ["choose", "features", "in_process", "ray", "workers"]
