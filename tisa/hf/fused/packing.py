"""Examples end to end in one row: no padding, and no token sees another example's."""
