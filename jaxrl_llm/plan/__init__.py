"""Plans: whether a run fits a topology, and what its programs cost there."""
