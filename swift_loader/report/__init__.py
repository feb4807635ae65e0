"""Says why a loop is slow, and what would help, from what was measured of its loader."""
