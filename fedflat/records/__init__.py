"""What a run leaves on disk, and what holds it together: folder, checkpoints, keys, what run it is, signatures.

Example::

    from pathlib import Path

    from fedflat.records import checkpoint
    from fedflat.records.folder import METRICS, read_lines

    state, heads, facts = checkpoint.newest(Path("runs/first/checkpoints"))
    accuracy = read_lines(Path("runs/first") / METRICS)[-1]["test_accuracy"]

``folder`` names the files of a run, seals their lines and keeps what is private apart; ``checkpoint`` writes the model
after a round, so that a kill leaves the old one or the new one. ``opening`` says what run it is, before anything is
drawn. ``keys`` has the noise keys, outside of every run's folder, and their marks, which say how far each was used.
``signing`` signs what a run ended with, and each round's place in the ledger.
"""

__all__ = ["checkpoint", "folder", "keys", "opening", "signing"]
