"""`python -m jaxrl_llm.cli` is `jaxrl`."""

import sys

from jaxrl_llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
