"""Evaluation, prediction, averaged weights and export."""
