"""The laboratory: methods x tasks x seeds, all in JAX, with statistics that say how sure one may be."""
