"""How far a client moves a release at most, empirical lower bounds on ε, and planted defects that both must find.

``audit_method``/``audit_all``: one round through the real server path, many times. ``audit_defects``: the same with a
defect planted; the bound must then exceed the claimed ε. ``audit_worlds``: a recipe's own model, data shapes and back
ends, with and without a hostile client; ``audit_planted``: the same with a defect planted. ``audit_correlated``: turns
and noise that later rounds take back, with a defect planted. ``audit_run``: a recipe.
"""

from fedflat.audit.correlated import audit_correlated
from fedflat.audit.defects import audit_defects
from fedflat.audit.mechanism import audit_all, audit_method, audit_recipe
from fedflat.audit.movements import audit_planted, audit_worlds
from fedflat.audit.result import AuditResult
from fedflat.audit.whole_run import audit_run

__all__ = [
    "AuditResult",
    "audit_all",
    "audit_correlated",
    "audit_defects",
    "audit_method",
    "audit_planted",
    "audit_recipe",
    "audit_run",
    "audit_worlds",
]
