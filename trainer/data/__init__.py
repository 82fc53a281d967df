"""What may be passed in as data, and the position in it."""
