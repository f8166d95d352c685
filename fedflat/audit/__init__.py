"""Measure what a run gives away: how far one client moves a release, the noise itself, and lower bounds on ε.

Example: every audit that takes a minute, of a packaged recipe::

    from fedflat.audit import audit_run

    for result in audit_run("quick-start"):
        print(result.kind, result.lower_bound, result.proven, result.violations)

``audit_run`` audits a recipe or a run. ``audit_worlds`` runs a recipe's own model, data shapes and back ends with and
without a hostile client. ``audit_noise`` compares the noise of real rounds with the plan. ``audit_method`` and
``audit_all`` run one round through the real server path many times and bound ε from below.
"""

from fedflat.audit.bounds import AuditResult
from fedflat.audit.mechanism import audit_all, audit_method, audit_recipe, audit_run, write_audit
from fedflat.audit.movements import audit_worlds
from fedflat.audit.noise import audit_noise

__all__ = [
    "AuditResult",
    "audit_all",
    "audit_method",
    "audit_noise",
    "audit_recipe",
    "audit_run",
    "audit_worlds",
    "write_audit",
]
