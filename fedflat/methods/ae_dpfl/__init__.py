"""AE-DPFL: clients vote on labels."""
