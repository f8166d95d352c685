"""Small pieces that compose into algorithms. Pieces know the core types and nothing of each other."""
