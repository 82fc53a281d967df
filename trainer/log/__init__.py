"""What a run shows to people and leaves for programs while it goes on."""
