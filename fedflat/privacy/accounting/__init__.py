"""From public numbers to a proven ε.

Example::

    >>> from fedflat.privacy.accounting.epsilon import epsilon, noise_multiplier
    >>> round(epsilon(clients=500, cohort=50, rounds=300, noise_multiplier=0.95, delta=0.002), 2)
    9.37
    >>> noise_multiplier(epsilon=8, clients=500, cohort=50, rounds=300, delta=0.002)
    1.029893

``epsilon`` answers both questions, and ``budget`` for every accountant and cohort law at once. ``curves`` asks
dp-accounting for many equal rounds, which ``composition`` makes fast, always rounded up. ``gaussian`` is exact where no
cohort is drawn, ``discrete`` bounds whole-number noise, and ``factorisation`` finds factors for noise correlated over
rounds. ``independent`` shares no code with these, and brackets what they find.
"""
