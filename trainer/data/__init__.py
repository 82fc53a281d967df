"""Training data: what users may pass, the position in it, and its errors."""
