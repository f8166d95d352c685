"""Empirical lower bounds on ε beside the proven one, and planted defects that they must find.

``audit_method``/``audit_all``: one round through the real server path, many times. ``audit_defects``: the same with a
defect planted; the bound must then exceed the claimed ε. ``audit_run``: a whole recipe with canary clients.
"""

from fedflat.audit.defects import audit_defects
from fedflat.audit.mechanism import audit_all, audit_method, audit_recipe
from fedflat.audit.result import AuditResult
from fedflat.audit.whole_run import audit_run

__all__ = ["AuditResult", "audit_all", "audit_defects", "audit_method", "audit_recipe", "audit_run"]
