"""Credit in trees of completions."""
