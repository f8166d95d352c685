"""From public numbers to a proven epsilon."""
