"""What methods need beyond a composition of pieces."""
