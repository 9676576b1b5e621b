"""`python -m jaxrl_llm.cli` is `jaxrl`."""

import sys

from jaxrl_llm.cli import main

sys.exit(main())
