"""Training data: the accepted types, the saved position, and errors."""
