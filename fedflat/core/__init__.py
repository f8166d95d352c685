"""Values that travel through a round, flat vectors, named random streams, and one-line errors.

Example::

    >>> from fedflat.core.checks import in_range
    >>> from fedflat.core.rng import stream
    >>> in_range("privacy.clip", 0.5, 0, open_low=True)  # or: privacy.clip: found -1; allowed: a number > 0.
    0.5
    >>> bool(stream(7, "batches", 3, 12).random() == stream(7, "batches", 3, 12).random())  # round 3, client 12
    True

``types`` has what every room speaks of: ``Algorithm`` and its pieces, ``Broadcast``, ``RoundState``, ``Aggregate``, and
the kinds of clip, cohort law and noise. ``params`` lays a module out as one vector, ``rounding`` adds long vectors and
bounds what that may cost, ``discrete`` draws whole-number noise exactly, ``factors`` has the matrices of correlated
noise. ``held`` and ``identity`` look into objects of a user's own: has one changed, and which one is it.
"""
