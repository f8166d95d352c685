"""Ways to map local training over a cohort; all give the same sums."""
