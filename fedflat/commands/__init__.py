"""One module for each group of commands; cli.py only assembles them."""
