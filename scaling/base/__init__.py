"""What the rest of `scaling` builds on: argument checks, number formats, verdicts, types."""
