"""What the texts that name rewards say: `NAME*WEIGHT`, `model:PATH`, `sentences(0,1,-1):PATH`. Imports no JAX.

Episodes have some rewards already: `environment`, `given` with the data set, and `judge`, from that of a rollout.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.utils.errors import InputError

MODEL = "model"
# How process reward models take a completion apart: a step is a line, a sentence ends with punctuation before a space,
# and neither begins with spaces. Possessive, so that the time is in proportion to the text.
LINE = re.compile(r"\S[^\n]*+")
SENTENCE = re.compile(r"(?=\S)(?:[^\n.,;:!?]++|[.,;:!?]++(?!\s|\Z))*+[.,;:!?]*+")
PIECES = {"steps": LINE, "sentences": SENTENCE, "worst_step": LINE}
DENSE = frozenset({"steps", "sentences"})  # whose rewards are earned where pieces end
_MODEL = re.compile(rf"({'|'.join([MODEL, *PIECES])})(?:\(([^()]*)\))?:(.+)", re.DOTALL)


def unweighted(spec: str) -> str:
    """A reward's name without its weight; a star in brackets belongs to a regular expression.

    >>> unweighted("number_match*0.5"), unweighted("format_match(a*)")
    ('number_match', 'format_match(a*)')
    """
    spec = spec.strip()
    return spec if spec.endswith(")") or "*" not in spec else spec.rpartition("*")[0].strip()


def component_name(spec: str) -> str:
    """The name of a reward's component, in a text that may add a file, arguments and a weight; of a model its folder's.

    >>> [component_name(one) for one in ("my.py:sound*0", "format_match(a:b*)*0.2", "steps:runs/judge*0.5")]
    ['sound', 'format_match', 'judge']
    """
    name = unweighted(spec)
    if (found := _MODEL.fullmatch(name)) is not None:
        return Path(found[3]).name
    return name.partition("(")[0].rpartition(":")[2].strip()


def weights_in_words(specs: Sequence[str]) -> str:
    """The components of rewards with their weights, in the order of the specs.

    >>> weights_in_words(["my.py:sound*0.5", "number_match"])
    'sound=0.5,number_match=1'
    """
    rest = [spec.strip().removeprefix(unweighted(spec)).lstrip(" *") for spec in specs]
    return ",".join(f"{component_name(spec)}={weight or 1}" for spec, weight in zip(specs, rest, strict=True))


class ModelName(NamedTuple):
    """What the name of a model's reward says."""

    kind: str  # MODEL, or a name of PIECES
    worths: tuple[float, ...]  # of the classes of a step; () for those of two, wrong and right
    path: str


def model_name(name: str, folder: str | os.PathLike[str] = ".") -> ModelName | None:
    """What a reward's name without its weight says of a model, and None for the name of a function.

    `model:name` is a function of a module called `model`, unless `name` is a folder. InputError for worths that are no
    numbers.

    >>> model_name("sentences(0, 1, -1):judge/model")
    ModelName(kind='sentences', worths=(0.0, 1.0, -1.0), path='judge/model')
    """
    found = _MODEL.fullmatch(name)
    if found is None:
        return None
    kind, worths, path = found.groups()
    if worths is None and path.isidentifier() and not Path(folder, path).is_dir():
        return None
    try:
        numbers = tuple(float(one) for one in worths.split(",")) if worths is not None else ()
    except ValueError:
        numbers = ()
    if worths is not None and (kind == MODEL or len(numbers) < 2 or not all(abs(x) <= 1e30 for x in numbers)):
        raise InputError(
            f"the reward {name!r} has ({worths}), where the worths of two classes or more are wanted, as in "
            "steps(0,1):PATH"
        )
    return ModelName(kind, numbers, path)


ENVIRONMENT = "environment"
GIVEN = "given"
JUDGE = "judge"


def _had(name: str, why: str) -> Callable[[list[Any]], list[float]]:
    """A reward that episodes have already, so that it is never computed from completions: they are of no such episode.

    Raises ValueError, with `why`.
    """

    def reward(completions: list[Any]) -> list[float]:
        raise ValueError(why)

    reward.__name__ = reward.__qualname__ = name
    return reward


environment = _had(
    ENVIRONMENT, "these completions were sampled without an environment: give one, --environment MODULE:NAME"
)
given = _had(GIVEN, "these completions were sampled, so that no reward was given with them: name a reward function")
judge = _had(JUDGE, "no judge read these completions: take a rollout that asks one, such as --rollout judged_pairs")
OWN = {ENVIRONMENT: environment, GIVEN: given, JUDGE: judge}


def is_among(rewards: Iterable[str], name: str = ENVIRONMENT) -> bool:
    """Whether one of the reward specs NAME[*WEIGHT] is `name`; a function of that name in a file is not.

    >>> is_among(["number_match", "environment*0.5"]), is_among(["my.py:environment"])
    (True, False)
    """
    return any(text.partition("*")[0].strip() == name for text in rewards)
