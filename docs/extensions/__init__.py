"""What the documentation needs beyond Sphinx: docstrings as reStructuredText, and the pages of the catalogue."""
