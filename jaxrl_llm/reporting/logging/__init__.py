"""What a run writes while it goes on: metric writers, JSON lines and live progress."""
