"""The tensor operations of a step: cast, scale, unscale, check."""
