"""Rewards of actions on a screen, as agents of GUIs answer them. Screens are out of scope: prompts describe them.

An answer is <think>...</think><answer>[{"action": "click", "point": [120, 48], "input_text": "no input text"}]
</answer>, of whose actions the first counts. The column `action` of the data set has the expected one, an object or its
JSON, such as {"action": "click", "box": [100, 40, 140, 60]}: clicks have a "point" [x, y] or a "box" [x1, y1, x2, y2]
in pixels, others perhaps an "input_text".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.rewards.boxes import numbers, read, tagged_objects
from jaxrl_llm.rewards.verifiers import TAGS, matching, score_each
from jaxrl_llm.utils.errors import InputError, shown

RADIUS = 140.0  # pixels within which a click on a point is right, exclusive (GUI-R1)
SAME_TEXT = 0.5  # least token F1 of texts that count as equal (GUI-R1)
WITH_TEXT = ("type", "select", "open_app")
DIRECTIONS = ("left", "right", "up", "down")


def gui_format(completions: Sequence[Any], reply_start: Sequence[str] | None = None, **_: Any) -> list[float]:
    """1.0 if a completion has the tags of `answer_tags` and in them a list of well-formed actions, else 0.0.

    An action has the texts "action" and "input_text", which is not empty for type, select and open_app and a direction
    for scroll, and a "point" of two numbers (GUI-R1, arXiv 2504.10458).

    >>> gui_format(['<think></think><answer>[{"action": "back", "point": [0, 0], "input_text": ""}]</answer>', "back"])
    [1.0, 0.0]
    """

    return matching(
        lambda text: TAGS.fullmatch(text) and (found := tagged_objects(text)) and all(map(_is_whole, found)),
        *(completions, reply_start),
    )


def gui_action(completions: Sequence[Any], action: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if the answer is the expected action, else 0.0 (GUI-R1, arXiv 2504.10458).

    The kinds must be equal. A click is right within 140 pixels of a point, or strictly inside a box; type, select and
    scroll if the token F1 of the texts is at least 0.5; any other action by its kind alone.

    >>> said = '<answer>[{"action": "click", "point": [10, 10], "input_text": ""}]</answer>'
    >>> gui_action([said] * 2, [{"action": "click", "point": [90, 90]}, {"action": "click", "box": [10, 0, 20, 20]}])
    [1.0, 0.0]
    """

    def is_right(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
        kind = _kind(wanted)
        if kind == "click" == _kind(found):
            return _hits(_point(found), wanted, border=False)
        with_text = kind in ("type", "select", "scroll")
        return _kind(found) == kind and (not with_text or token_f1(_text(found), _text(wanted)) >= SAME_TEXT)

    return _compared(is_right, completions, action)


def _compared(
    alike: Callable[[Mapping[str, Any], Mapping[str, Any]], float], completions: Sequence[Any], action: Sequence[Any]
) -> list[float]:
    def score(text: str, wanted: Any) -> float:
        first = next(iter(tagged_objects(text)), {})
        return alike(first, _expected(wanted))

    return score_each(score, completions, action)


def gui_kind(completions: Sequence[Any], action: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if the kind of the answer's action is the expected one, in any case, else 0.0 (UI-R1, arXiv 2503.21620)."""
    return _compared(lambda found, wanted: _kind(found) == _kind(wanted), completions, action)


def gui_click(completions: Sequence[Any], action: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if the answer's point is in the expected box, borders included, else 0.0 (UI-R1, arXiv 2503.21620).

    Within 140 pixels where a point is expected. 1.0 where the expected action is no click.
    """
    return _compared(
        lambda found, wanted: _kind(wanted) != "click" or _hits(_point(found), wanted, border=True), completions, action
    )


def gui_parameter(completions: Sequence[Any], action: Sequence[Any], **_: Any) -> list[float]:
    """How alike the parameters of an action of the expected kind are, 0.0 for another kind (CRAFT-GUI, 2508.11360).

    A click as in `gui_click`, a scroll by its direction, 1.0 or 0.0; other actions with a text by the token F1 of it,
    from 0 to 1, and those without one have 1.0.

    >>> said = '<answer>[{"action": "type", "point": [0, 0], "input_text": "red shoes"}]</answer>'
    >>> gui_parameter([said], [{"action": "type", "input_text": "red running shoes"}])
    [0.8]
    """

    def alike(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
        said, expected = _text(found), _text(wanted)
        if _kind(found) != _kind(wanted):
            return 0.0
        if _kind(wanted) == "click":
            return _hits(_point(found), wanted, border=True)
        if _kind(wanted) == "scroll":
            return said.strip().lower() == expected.strip().lower()
        return token_f1(said, expected) if expected else 1.0

    return _compared(alike, completions, action)


def token_f1(found: str, wanted: str) -> float:
    """F1 of the sets of lower-case words. Of two single words 1.0 if one contains the other.

    >>> token_f1("Red shoes", "red running shoes"), token_f1("shoe", "shoes"), token_f1("", "shoes")
    (0.8, 1.0, 0.0)
    """
    one, other = set(found.lower().split()), set(wanted.lower().split())
    if len(one) == len(other) == 1:
        (a,), (b,) = one, other
        return float(a in b or b in a)
    return 2 * len(one & other) / (len(one) + len(other)) if one or other else 1.0


def _expected(action: Any) -> Mapping[str, Any]:
    """An expected action. InputError for anything else."""
    found = read(action) if isinstance(action, str) else action
    if not isinstance(found, Mapping) or not isinstance(found.get("action"), str):
        raise InputError(f"the column 'action' has {shown(action)}, but must have an object with a text named action")
    if _kind(found) == "click" and numbers(found.get("box"), 4) is None and numbers(found.get("point"), 2) is None:
        raise InputError(f"the column 'action' has the click {shown(action)} without a point [x, y] or a box")
    return found


def _kind(action: Mapping[str, Any]) -> str:
    kind = action.get("action")
    return kind.strip().lower() if isinstance(kind, str) else ""


def _text(action: Mapping[str, Any]) -> str:
    return text if isinstance(text := action.get("input_text"), str) else ""


def _point(action: Mapping[str, Any]) -> tuple[float, ...] | None:
    return numbers(action.get("point", action.get("coordinate")), 2)


def _hits(point: tuple[float, ...] | None, wanted: Mapping[str, Any], border: bool) -> bool:
    """Whether a click is in the expected box, or within 140 pixels of the expected point."""
    if point is None:
        return False
    if (box := numbers(wanted.get("box"), 4)) is not None:
        inside = [box[k] < point[k] < box[k + 2] for k in (0, 1)]
        return all(inside) or (border and all(box[k] <= point[k] <= box[k + 2] for k in (0, 1)))
    place = numbers(wanted.get("point"), 2)
    return place is not None and math.dist(point, place) < RADIUS


def _is_whole(action: Mapping[str, Any]) -> bool:
    """Whether an action has all that it needs, of the right types."""
    kind, text = _kind(action), action.get("input_text")
    if not kind or not isinstance(text, str) or numbers(action.get("point"), 2) is None:
        return False
    return bool(text.strip()) if kind in WITH_TEXT else kind != "scroll" or text.strip().lower() in DIRECTIONS
