"""Selection of the rows and tokens to train on: what makes transforms.

The functions of arrays and batches that select are in `jaxrl_llm.selection.functional`.
"""

from jaxrl_llm.selection.rows import keep_weighted

__all__ = ["keep_weighted"]
