"""Policies beside the one that is trained: references, kept on disk or moving, and teachers."""
