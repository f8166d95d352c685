"""What methods need beyond a composition of pieces: votes, whole-number noise, published procedures, noise by recipe.

Example, the noise that a recipe's rounds get, with the law that its plan accounts::

    mechanism = mechanism_of(recipe, plan)
    noisy = mechanism.release(key, broadcast, aggregate, bound)

``noise`` chooses a mechanism, and has noise that is correlated over rounds. ``ddgauss`` encodes messages as whole
numbers, ``votes`` trains AE-DPFL's voters and student, ``published`` and ``shares`` are papers' own procedures with the
ε that they claim; ``plans`` are the accounts of the first two, and ``assembly`` makes jobs of their recipes.
"""
