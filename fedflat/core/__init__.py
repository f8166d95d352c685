"""The vocabulary every other room shares; it imports nothing of ours."""
