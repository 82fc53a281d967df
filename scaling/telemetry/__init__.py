"""Gradient statistics: measuring, recording, and simulating rules on recorded runs."""
