"""Loss surfaces, curvature and the papers' formulas."""
