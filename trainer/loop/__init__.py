"""The inner loop: many training steps per call from Python."""
