"""A client's side of a deployment."""
