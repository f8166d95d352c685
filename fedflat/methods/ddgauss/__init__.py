"""The distributed discrete Gaussian."""
