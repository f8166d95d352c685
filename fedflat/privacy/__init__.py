"""What a run may promise: plan, accounting, ledger, statement, verification and audit."""
