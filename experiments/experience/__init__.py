"""Does a method of experience help where its paper says? See RESULTS.md, and `python -m experiments.experience`."""
