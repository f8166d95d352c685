"""The round: local training, what is measured and added up, the server's one path, evaluation, going on with a run.

Example, a round by hand (``examples/one_round.py`` has it without the engine)::

    broadcast = broadcast_of(parts, state, seed)              # what every client receives
    total = accumulator_of(parts, broadcast, key)             # clips, and adds in float64
    reduced = RoundSum(parts.algorithm, parts.local, broadcast, total, kept)
    for part in backend.train(cohort, broadcast, kept, reduced.clipped):  # the back end maps,
        reduced.add(part)                                     # the round reduces
    state, info = finish_round(parts, state, broadcast, total.result(), key, ledger.append)

``train`` runs the rounds of a ``job``; ``client`` is the only local loop, on a ``problem`` that gives gradients of
``batches``; ``reduce`` adds what clients send, vectors in factors by ``factored`` and ``measured``;
``round`` is the server; ``isolated`` records a user's own pieces; ``resume`` decides how a run goes on.
"""

__all__ = [
    "batches", "client", "device", "evaluate", "factored", "isolated", "job", "mlp", "problem", "reduce", "resume",
    "round", "train",
]  # fmt: skip
