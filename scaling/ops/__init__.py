"""What a step does to tensors: cast, scale, unscale, check."""
