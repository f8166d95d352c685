"""A recipe: its keys, their meaning, and the packaged ones."""
