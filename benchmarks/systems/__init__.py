"""One module per system; each runs in a process (and a peer in an environment) of its own and speaks ``protocol``."""
