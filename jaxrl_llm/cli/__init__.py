"""The command line. `main` is the program `jaxrl`."""

from jaxrl_llm.cli.program import main

__all__ = ["main"]
