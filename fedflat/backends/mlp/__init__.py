"""Blocks of clients on multilayer perceptrons, in matrix products."""
