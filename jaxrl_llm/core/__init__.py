"""The algebra: trajectories, transforms, objectives, and the types that an algorithm is made of. Read it first."""
