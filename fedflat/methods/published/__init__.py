"""Procedures exactly as their papers print them, kept apart from the sound ones."""
