"""What every other room of `trainer` rests on."""
