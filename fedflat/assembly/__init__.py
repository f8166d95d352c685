"""From a recipe to a job: everything live that a run needs, built and checked before anything is trained.

Example::

    from fedflat.assembly.jobs import prepare
    from fedflat.config.recipe import Recipe

    job = prepare(Recipe.load("quick-start", ["privacy.epsilon=4"]))
    job.parts.plan.epsilon()  # what all rounds together will have spent
    job.backend.name          # what local training runs on

``inputs`` builds the federation and the module, ``plans`` the privacy plan and other public numbers, and ``tasks`` the
loss and the metrics; ``piece_check`` tries a user's own pieces on made-up numbers. ``jobs`` puts all of it together,
for a simulation as for a deployment; ``planning`` says what it will cost. ``records`` writes down what the run is
before its first draw, and makes the model of a finished one again; ``stating`` makes its privacy statement, in the run
and again in ``fedflat verify``.
"""

__all__ = ["inputs", "jobs", "planning", "plans", "records", "stating", "tasks"]
