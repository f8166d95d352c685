"""Look at loss surfaces, and evaluate what the papers prove.

Example: how flat the models of two finished runs are::

    from fedflat.landscape.flatness import Settings, measure

    found = measure(["runs/dp-fedavg", "runs/dp-fedsam"], Settings(points=21))
    print([(group["label"], group["numbers"]["eigenvalue"]) for group in found["groups"]])

``objective`` computes mean loss and accuracy as a function of flat weights, ``surfaces`` its shape and curvature
around a point, ``flatness`` measures finished runs. ``bounds`` has the papers' formulas, each with its equation, and
``statements`` evaluates them for a recipe. Nothing here enters a privacy statement.
"""

__all__ = ["bounds", "flatness", "statements"]
