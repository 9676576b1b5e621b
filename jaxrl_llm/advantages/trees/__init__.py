"""Credit in trees of completions. Names are imported on first use."""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.advantages.trees.values import (
        Tree,
        best_of,
        gains,
        leaves,
        node_values,
        scored_tree,
        segment_sums,
        shares,
        state_values,
        sums,
        tree_of,
    )

__all__ = [
    "Tree",
    "best_of",
    "gains",
    "leaves",
    "node_values",
    "scored_tree",
    "segment_sums",
    "shares",
    "state_values",
    "sums",
    "tree_of",
]
_MODULES = {
    "Tree": "values",
    "best_of": "values",
    "gains": "values",
    "leaves": "values",
    "node_values": "values",
    "scored_tree": "values",
    "segment_sums": "values",
    "shares": "values",
    "state_values": "values",
    "sums": "values",
    "tree_of": "values",
}
__getattr__ = imported_at_first_use(__name__, _MODULES)
