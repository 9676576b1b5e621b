"""Metrics of a loss, and those of a sum of losses."""

import jax

Metrics = dict[str, jax.Array]


def merge_metrics(first: Metrics, second: Metrics) -> Metrics:
    """The metrics of two terms together; a name of both is numbered in the second, so that neither is lost.

    >>> merge_metrics({"kl": 1, "loss": 2}, {"kl": 3, "kl/2": 4})
    {'kl': 1, 'loss': 2, 'kl/3': 3, 'kl/2': 4}
    """
    found = dict(first)
    for name, value in second.items():
        number = 2
        label = name
        while label in found or (label != name and label in second):
            label, number = f"{name}/{number}", number + 1
        found[label] = value
    return found
