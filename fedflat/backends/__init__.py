"""Map local training over a cohort; every back end gives the same messages, up to rounding.

Example, one client after the other, then the same in blocks of eight::

    Sequential(algorithm, problem, local, data, seed).train(cohort, broadcast, kept, clipped)
    backend_for("vectorized", 8, None, parts, problem, data, seed).train(cohort, broadcast, kept, clipped)

A back end is anything with a ``name`` and ``train``, which yields parts of the round in client order; it knows neither
clip nor sum. In ``in_process`` are the sequential loop, which the others must equal, and training in blocks, as
products of matrices for stacks of linear layers; ``workers`` and ``ray`` run the loop in processes. ``choose`` takes
the one that a recipe names, or that public shapes and this machine's cores speak for; ``features`` computes a frozen
body once.
"""

__all__ = ["choose", "features", "in_process", "ray", "workers"]
