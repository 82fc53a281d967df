"""The loss-scale rules: one frozen value each, with a pure transition."""
