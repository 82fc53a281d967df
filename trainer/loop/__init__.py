"""The inner loop: many steps in one graph call."""
