"""``python -m fedflat``."""

from fedflat.cli import main

main()
