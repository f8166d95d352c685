"""Data of a federation: where it comes from, who holds what, and the order in which a client reads it.

Example::

    from fedflat.data.clients import from_pairs
    from fedflat.data.sources import load

    load({"dataset": "digits", "partition": {"kind": "dirichlet", "alpha": 0.6}, "clients": 200})  # by a recipe's keys
    from_pairs([(inputs, targets), …])  # one pair for each client; fedflat.clients(…) takes tables too

``locate`` finds a data set, ``encoding`` and ``decoding`` make tensors of its columns by public rules alone, ``tables``
and ``own`` say which columns, for recipes and for Python, ``partition`` splits the rows among ``clients``, and
``sources`` reads what a recipe names.
``preparation`` is what travels with a released model, so that it can be used on new rows.
"""

__all__ = ["clients", "decoding", "encoding", "locate", "own", "partition", "preparation", "sources", "tables"]
