"""Secure aggregation: the server sees a sum and nothing else."""
