"""What a run measures while it goes and says at its end."""
