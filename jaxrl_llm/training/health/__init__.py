"""Whether a run is well: goodput, hangs, loss spikes, memory and profiles."""
