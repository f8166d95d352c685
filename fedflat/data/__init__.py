"""Data of a federation: where it comes from, who holds what, and the order in which a client reads it."""
