"""What a recipe's method brings to a round beyond its pieces: clip, noise, server optimiser; votes, papers' procedures.

Example, the noise that a recipe's rounds get, with the law that its plan accounts::

    mechanism = mechanism_of(recipe, plan)
    noisy = mechanism.release(key, broadcast, aggregate, bound)

``rounds`` puts together what server and clients agree on; ``noise`` chooses a mechanism, and has noise that is
correlated over rounds. ``ddgauss`` encodes messages as whole numbers, ``votes`` trains AE-DPFL's voters and student,
``published`` and ``shares`` are papers' own procedures with the ε that they claim; ``plans`` are the accounts of votes
and of ``ddgauss``. ``assembly`` makes jobs of their recipes.
"""

__all__ = ["ddgauss", "noise", "plans", "published", "rounds", "shares", "votes"]
