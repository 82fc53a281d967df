"""What losses, metrics and weights mean: one loss and one weight for each example."""
