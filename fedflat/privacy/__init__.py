"""What a run may promise: its plan before it starts, its ledger while it runs, its statement when it ends.

Example, the plan of 300 rounds of about 50 of 500 clients, with the noise for ε = 8::

    >>> from fedflat.privacy.plan import build_plan
    >>> plan = build_plan(clients=500, cohort=50, rounds=300, epsilon=8.0, delta=0.002)
    >>> round(plan.noise_multiplier, 2), round(plan.epsilon(rounds=100), 1)  # the noise, and ε after the first 100
    (1.03, 4.2)

``plan`` says how much noise a round gets and what is proven after any number of rounds; no other file computes either.
``trust`` has the adversaries of each trust model, ``correlated`` the account of noise that is correlated over rounds,
``tuning`` that of a run that was chosen among several, and ``together`` that of several runs on the same clients;
``accounting`` turns all of them into ε. ``ledger`` writes an event to disk before its model is released. ``verify``
computes ε from these lines alone, by formulas of its own, and ``schedules`` how far a client moves rounds that follow a
schedule. ``statement`` writes ``privacy.json``: what is promised, to whom, and what is not.
"""

__all__ = ["accounting", "correlated", "ledger", "plan", "statement", "together", "trust", "tuning", "verify"]
