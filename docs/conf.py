"""Sphinx configuration of the documentation; `make docs` builds it into docs/_build."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "kernels")]

import jaxrl_llm  # noqa: E402  (the path is set above)

project = "jaxrl_llm"
author = "The authors of jaxrl_llm"
copyright = f"2026, {author}"
release = version = jaxrl_llm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "extensions.docstrings",
    "extensions.catalogue",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "extensions"]
suppress_warnings: list[str] = []

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
add_module_names = False

html_theme = "furo"
html_title = f"jaxrl_llm {release}"
html_static_path: list[str] = []
smartquotes = False
html_show_sourcelink = False
