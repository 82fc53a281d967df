"""The loss-scale rules: frozen dataclasses, each with a pure transition function."""
