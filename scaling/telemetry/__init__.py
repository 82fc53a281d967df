"""What stands in the gradients: measured, recorded, and rules played over it."""
