"""Seconds per round of fedflat and its peers on the same work, interleaved in one session: ``python -m benchmarks``."""
