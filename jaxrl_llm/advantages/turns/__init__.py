"""Credit of turns and episodes."""
