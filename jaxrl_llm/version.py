"""The version of this library; pyproject.toml, CITATION.cff and CHANGELOG.md have the same."""

__version__ = "0.1.0"
