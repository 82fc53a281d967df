"""What every other room of `scaling` rests on."""
