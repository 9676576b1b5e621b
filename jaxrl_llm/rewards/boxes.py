"""Rewards of boxes around the objects of an image, and of their names. Images are out of scope: prompts describe them.

An answer is <think>...</think><answer>[{"Position": [1, 1, 10, 10], "Confidence": 0.9}, ...]</answer>. The column
`boxes` of the data set has the expected boxes [x1, y1, x2, y2] in pixels, a list or its JSON. An answer is read as JSON
or as a Python literal.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rewards.verifiers import TAGS, last_tagged, matching, score_each
from jaxrl_llm.utils.errors import InputError, shown

OVERLAP = 0.5  # IoU that a matched box exceeds (Visual-RFT)
Box = tuple[float, float, float, float]


class Guess(NamedTuple):
    """A box of an answer."""

    box: Box
    confidence: float


def box_format(completions: Sequence[Any], reply_start: Sequence[str] | None = None, **_: Any) -> list[float]:
    """1.0 if a completion has the tags of `answer_tags` and in them a list of boxes with confidences, else 0.0."""
    return matching(lambda text: TAGS.fullmatch(text) and _guesses(text) is not None, completions, reply_start)


def box_overlap(completions: Sequence[Any], boxes: Sequence[Any], **_: Any) -> list[float]:
    """The sum of `matched` over the larger number of boxes, of the answer or expected (Visual-RFT, arXiv 2503.01785).

    0.0 for an answer that cannot be read. 1.0 where no box is expected and none given.

    >>> said = "<answer>[{'Position': [1, 1, 10, 10], 'Confidence': 0.9}, {'Position': [0, 0, 1, 1], 'Confidence': 1}]"
    >>> box_overlap([said + "</answer>"], [[[0, 0, 10, 10], [20, 20, 30, 30]]])
    [0.405]
    """

    def overlap(text: str, expected: Any) -> float:
        wanted, found = _boxes(expected), _guesses(text)
        if found is None:
            return 0.0
        size = max(len(wanted), len(found))
        return sum(matched(found, wanted)) / size if size else 1.0

    return score_each(overlap, completions, boxes)


def box_confidence(completions: Sequence[Any], boxes: Sequence[Any], **_: Any) -> list[float]:
    """The mean over the answer's boxes of c where `matched` is above 0, and of 1 - c elsewhere (Visual-RFT).

    0.0 for an answer that cannot be read. Without boxes 1.0 where none is expected, else 0.0.
    """

    def confidence(text: str, expected: Any) -> float:
        wanted, found = _boxes(expected), _guesses(text)
        if not found:
            return found is not None and not wanted
        values = zip(sorted(found, key=lambda g: -g.confidence), matched(found, wanted), strict=True)
        return sum(g.confidence if iou > 0 else 1 - g.confidence for g, iou in values) / len(found)

    return score_each(confidence, completions, boxes)


def class_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if the tagged answer contains the expected name or is part of it, else 0.0 (Visual-RFT).

    Case, white space and underscores do not count. An empty answer has 0.0.
    """

    def same(text: str, expected: Any) -> bool:
        found, wanted = (re.sub(r"[\s_]", "", one.lower()) for one in (last_tagged(text) or "", str(expected)))
        return bool(found) and (found in wanted or wanted in found)

    return score_each(same, completions, answer)


def iou(one: Box, other: Box) -> float:
    """Intersection over union of two boxes (x1, y1, x2, y2); 0 for boxes without an area.

    >>> iou((0, 0, 10, 10), (1, 1, 10, 10))
    0.81
    """
    width, height = (min(one[2 + k], other[2 + k]) - max(one[k], other[k]) for k in (0, 1))
    shared = max(width, 0.0) * max(height, 0.0)
    union = sum(max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0) for box in (one, other)) - shared
    return shared / union if union > 0 else 0.0


def matched(found: Sequence[Guess], wanted: Sequence[Box]) -> list[float]:
    """The IoU of each box with the expected one that it is matched to, 0 without one; the most confident first.

    Each takes the expected box, of those that are left, with which it has the largest IoU, if that is above 0.5.
    """
    left, out = list(range(len(wanted))), []
    for guess in sorted(found, key=lambda g: -g.confidence):
        best = max(left, key=lambda i: iou(guess.box, wanted[i]), default=None)
        value = 0.0 if best is None else iou(guess.box, wanted[best])
        if best is not None and value > OVERLAP:
            left.remove(best)
        out.append(value if value > OVERLAP else 0.0)
    return out


def _guesses(text: str) -> list[Guess] | None:
    """The different boxes of a completion; None where its answer is no list of boxes with confidences."""
    answer, found = tagged_objects(text), dict[Guess, None]()
    if not answer and read(last_tagged(text) or "") != []:
        return None
    for one in answer:
        named = {str(name).lower(): value for name, value in one.items()}
        box, confidence = numbers(named.get("position"), 4), numbers([named.get("confidence")], 1)
        if box is None or confidence is None or not 0 <= confidence[0] <= 1:
            return None
        found[Guess((box[0], box[1], box[2], box[3]), confidence[0])] = None
    return list(found)


def _boxes(boxes: Any) -> list[Box]:
    """The expected boxes. InputError for anything else."""
    found = read(boxes) if isinstance(boxes, str) else boxes
    if not isinstance(found, (list, tuple)) or any(numbers(one, 4) is None for one in found):
        raise InputError(f"the column 'boxes' has {shown(boxes)}, but must have a list of boxes [x1, y1, x2, y2]")
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in found]


def read(text: str) -> Any:
    """JSON or a Python literal; None for anything else."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return None


def tagged_objects(text: str) -> list[dict[str, Any]]:
    """The objects of a completion's tagged list; none where there is no such list."""
    found = read(last_tagged(text) or "")
    found = [found] if isinstance(found, dict) else found
    return found if isinstance(found, list) and all(isinstance(one, dict) for one in found) else []


def numbers(value: Any, count: int) -> tuple[float, ...] | None:
    """Finite numbers; None for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        return None
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 1e9 for x in value):
        return None
    return tuple(map(float, value))
