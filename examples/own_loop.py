"""A server loop of one's own, without any framework: linear regression by 300 clients. Run: python own_loop.py"""

import sys

import numpy as np

import fedflat
from fedflat.privacy.statement import headline

generator = np.random.Generator(np.random.Philox(0))
truth = generator.standard_normal(5)
inputs = generator.standard_normal((300, 20, 5))
targets = inputs @ truth + 0.1 * generator.standard_normal((300, 20))
w, ledger = np.zeros(5), sys.argv[1] if len(sys.argv) > 1 else "ledger.jsonl"

with fedflat.Guard(ledger, clip=0.5, clients=300, cohort=100, rounds=30, epsilon=4) as guard:
    for turn in range(guard.next_round, 30):
        updates = {}
        for i in guard.cohort(turn):
            x, y = inputs[i], targets[i]
            updates[int(i)] = 0.2 * x.T @ (y - x @ w) / len(y)  # one local step: what a client would send
        w = w + guard.release(turn, updates)  # charged, clipped, summed, noised once, divided by 100
    print(f"distance to the truth {np.linalg.norm(w - truth):.3f}; {headline(guard.statement())}")
