"""Proofs about the loss-scale rules, for all constants and all states."""
