"""Words of texts, and how alike their counts are."""

import math
import re
from collections.abc import Mapping
from typing import Any


def words(text: str) -> list[str]:
    """The words of a text in small letters; each mark is a word.

    >>> words("It's 3.")
    ['it', "'", 's', '3', '.']
    """
    return re.findall(r"\w+|[^\w\s]", text.lower())


def cosine(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    """The cosine of two vectors, numbers by name, of which those that are left out are 0; 0 where a vector is 0.

    >>> cosine({"red": 3, "apple": 4}, {"apple": 2, "pear": 0})
    0.8
    """
    size = math.sqrt(sum(x * x for x in a.values()) * sum(x * x for x in b.values()))
    return sum(x * b.get(name, 0) for name, x in a.items()) / size if size else 0.0
