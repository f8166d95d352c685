"""``python -m fedflat``."""

from fedflat.cli.main import main

main()
