"""Runs the training: builds the parts, takes the steps, saves, resumes and recovers."""
