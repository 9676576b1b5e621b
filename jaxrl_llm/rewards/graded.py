"""Rewards that grade more than right or wrong: levels, modes, distance to successes, and coverage of a list."""

import functools
import inspect
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from jaxrl_llm.rewards.entries import REWARD, SPANS
from jaxrl_llm.rewards.parsing.final_answers import answer_text, final_answer, last_number
from jaxrl_llm.rewards.parsing.readings import after_thoughts
from jaxrl_llm.rewards.verifiers import last_tagged, score_each, text_of
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.words import words

Function = Callable[..., Any]

LEVELS = (1.0, 0.4, 0.2, 0.0)  # right; wrong; no answer that can be read; another form
MODES = {"<short>": 1.0, "<think>": 0.5}  # the reward of a right answer by the tag that the completion begins with
WRONG = -1.0
_FORM = re.compile(r"\s*(?:<think>)?.*?</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_SIZE = 256  # of the vectors that stand for texts


def tagged_levels(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 for a right answer, 0.4 for a wrong one, 0.2 where the tags hold no answer, 0 for another form.

    The form is `<think>...</think><answer>...</answer>`, where a prompt may have opened the first tag. An answer is
    right if it is the expected text, but for white space, or has the same last number. Where the expected answer has a
    number, a text without one is no answer.

    >>> tagged_levels(["<think>2+2</think><answer>4</answer>", "<think></think><answer>?</answer>", "4"], ["4"] * 3)
    [1.0, 0.2, 0.0]
    """

    def level(text: str, expected: Any) -> float:
        found, wanted = (last_tagged(text) or "").split(), answer_text(expected).split()
        number, right = last_number(" ".join(found)), last_number(answer_text(expected))
        if not _FORM.fullmatch(text):
            return LEVELS[3]
        if found == wanted or (right is not None and number == right):
            return LEVELS[0]
        return LEVELS[2 if not found or (right is not None and number is None) else 1]

    return score_each(level, completions, answer)


def answer_bleu(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """BLEU of the final answer against the expected one, with n-grams no longer than the shorter of the two.

        exp(min(0, 1 - r/c)) (p_1 ... p_N)^(1/N),    N = min(4, r, c)

    for c words of the final answer and r of the expected one; p_n is the share of its n-grams that are in the expected
    answer, each counted as often as it is there at most. Words are in lower case, and marks are words. The final answer
    is what the last box or answer tag holds, else what follows the thoughts.

    >>> answer_bleu(["<answer>Paris</answer>", "the Paris", "London"], ["Paris"] * 3)
    [1.0, 0.5, 0.0]
    """

    def ngrams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
        return Counter(zip(*(words[i:] for i in range(n)), strict=False))

    def bleu(text: str, expected: Any) -> float:
        found = final_answer(text)
        said, wanted = map(words, (after_thoughts(text) if found is None else found, answer_text(expected)))
        most = min(4, len(said), len(wanted))
        shares = []
        for n in range(1, most + 1):
            own, other = ngrams(said, n), ngrams(wanted, n)
            shares.append((own & other).total() / own.total())
        short = math.exp(min(0.0, 1 - len(wanted) / len(said))) if said else 0.0
        return short * math.prod(shares) ** (1 / most) if most else 0.0

    return score_each(bleu, completions, answer)


def by_mode(base: Function) -> Function:
    """A reward for policies that begin with the tag of a mode: `MODES` for right answers, -1 for others.

    base: a reward function; an answer is right if its reward is above 0.5. A completion without a tag gets -1. The tags
    must not be special tokens of the tokenizer, which texts of completions do not show.
    """

    @functools.wraps(base, assigned=())
    def by_mode(completions: Sequence[Any], **columns: Any) -> dict[str, list[Any]]:
        found = base(completions, **columns)
        entries = dict(found) if isinstance(found, dict) else {REWARD: found}
        rewards = []
        for completion, value in zip(completions, entries[REWARD], strict=True):
            text = text_of(completion).lstrip()
            best = next((worth for tag, worth in MODES.items() if text.startswith(tag)), WRONG)
            rewards.append(best if value is not None and value > 0.5 else WRONG)
        return {**entries, REWARD: rewards}

    return by_mode


def distances(base: Function, success: float = 0.5) -> Function:
    """A reward with the entry "distance": how far a failure's text is from the successes of its prompt.

    base: a reward function; a success has a reward above `success`. A text is a vector of unit length, the counts of
    its words and pairs of words. The successes are clustered, and the distance is that to the nearest centre of a
    cluster. There is none for successes, for texts without words, and where a prompt has no success.
    """

    @functools.wraps(base, assigned=())
    def distances(completions: Sequence[Any], prompts: Sequence[Any], **columns: Any) -> dict[str, list[Any]]:
        import numpy as np  # not at import, because a reward's process starts faster without

        found = base(completions, prompts=prompts, **columns)
        entries = dict(found) if isinstance(found, dict) else {REWARD: found}
        good = [value is not None and value > success for value in entries[REWARD]]
        vectors = np.stack([_vector(text_of(completion)) for completion in completions])
        there = np.any(vectors != 0, axis=1).tolist()
        out: list[float | None] = [None] * len(completions)
        of_prompt: dict[str, list[int]] = {}
        for row, prompt in enumerate(prompts):
            of_prompt.setdefault(repr(prompt), []).append(row)
        for rows in of_prompt.values():
            successes = [row for row in rows if good[row] and there[row]]
            if not successes:
                continue
            centres = cluster_centres(vectors[successes])
            for row in rows:
                if not good[row] and there[row]:
                    out[row] = float(np.min(np.linalg.norm(centres - vectors[row], axis=1)))
        return {**entries, "distance": out}

    reads_prompts(distances, base)
    distances.provides = frozenset({"distance", *getattr(base, "provides", ())})  # type: ignore[attr-defined]
    distances.per_sample = False  # type: ignore[attr-defined]  # whatever its base is
    return distances


def _vector(text: str) -> Any:
    """f32[256] of unit length; 0 for a text without words."""
    import numpy as np

    said = re.findall(r"\w+", text.lower())
    out: Any = np.zeros(_SIZE)
    for item in [*said, *(f"{one} {two}" for one, two in pairwise(said))]:
        out[zlib.crc32(item.encode()) % _SIZE] += 1
    return out / max(float(np.linalg.norm(out)), 1e-12)


def cluster_centres(points: Any, radius: float = 0.5, least: int = 2) -> Any:
    """The centres f64[C, D] of the clusters of points [S, D]; their mean where there is no cluster.

    Clusters are those of DBSCAN on standardised coordinates: points with `least` neighbours, themselves included,
    within the radius are cores; neighbouring cores share a cluster, to which their other neighbours belong too.
    """
    import numpy as np
    from scipy.sparse.csgraph import connected_components

    points = np.asarray(points, np.float64)
    spread = points.std(axis=0)
    scaled = (points - points.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    near = np.linalg.norm(scaled[:, None] - scaled, axis=-1) <= radius
    cores = np.flatnonzero(near.sum(axis=1) >= least)
    if not len(cores):
        return points.mean(axis=0, keepdims=True)
    count, label = connected_components(near[np.ix_(cores, cores)], directed=False)
    cluster = np.where(near[:, cores], label, count).min(axis=1)  # of several, the first
    return np.stack([points[cluster == number].mean(axis=0) for number in range(count)])


def coverage(column: str) -> Function:
    """A reward of each item of a list that a text mentions: spans of 1 / items, and the share of the items as "share".

    column: of the data set, a list of texts. An item counts where the text has it first, in any case. The rewards are
    the spans, and the score itself is 0, so that nothing is counted twice.

    Raises InputError for a name that is no column's.
    """
    if not column.isidentifier():
        raise InputError(f"coverage({column}) names no column: give the name of a column of the data set")

    def coverage(completions: Sequence[Any], **columns: Any) -> dict[str, list[Any]]:
        spans, shares = [], []
        for completion, items in zip(completions, columns[column], strict=True):
            text = text_of(completion).lower()
            wanted = list(dict.fromkeys(str(item).lower() for item in items if str(item).strip()))
            starts = {item: text.find(item) for item in wanted}
            worth = 1 / max(len(wanted), 1)
            spans.append([(at, at + len(item), worth) for item, at in starts.items() if at >= 0])
            shares.append(len(spans[-1]) * worth)
        return {REWARD: [0.0] * len(shares), SPANS: spans, "share": shares}

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_KEYWORD
    coverage.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("completions", kinds[0]), inspect.Parameter(column, kinds[0])]
    )
    coverage.provides = frozenset({SPANS, "share"})  # type: ignore[attr-defined]
    return coverage


def reads_prompts(function: Function, base: Function) -> None:
    """Let a function that calls another reward have the columns of that one, and the prompts beside them."""
    parameters = list(inspect.signature(base).parameters.values())
    prompts = inspect.Parameter("prompts", inspect.Parameter.KEYWORD_ONLY)
    parameters = [one for one in parameters if one.name != "prompts"]
    rest = [one for one in parameters if one.kind is one.VAR_KEYWORD]
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*(one for one in parameters if one not in rest), prompts, *rest]
    )
