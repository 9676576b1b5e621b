"""The pool of solved problems: what it holds, whom it shows to whom, and what a checkpoint keeps of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.algorithms.exploration.xrpo import nearest, solved_examples, texts_in
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.curriculum.embedded import text_features
from jaxrl_llm.rollouts.runtime.source_setup import ExperienceState, loaded, saved
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.utils.errors import InputError

ROWS: list[dict[str, Any]] = [
    {"prompt": "how many apples are in the basket"}, {"prompt": "how many pears are in the basket"},
    {"prompt": [{"role": "user", "content": "solve x + 2 = 5"}]}, {"prompt": "solve x + 7 = 9"}, {"prompt": [4, 5]},
]  # fmt: skip
PLAIN = {"text": "{problem} > {solution}"}


def step_of(*rows: tuple[int, str, float]) -> Any:
    """What the curriculum reads of a step: prompt, completion and reward of each row."""
    ids, texts, reward = (np.asarray(column) for column in zip(*rows, strict=True))
    batch = SimpleNamespace(prompt_id=ids, need=lambda name: reward)
    return SimpleNamespace(scored=SimpleNamespace(batch=batch, texts=texts.tolist()))


def shown(curriculum: Any, state: Any, *ids: int) -> list[list[str]]:
    return [one["solved_examples"] for one in curriculum.columns(state, np.asarray(ids, np.int32))]


def own(state: Any) -> Any:
    return {name.removeprefix("rule0_"): value for name, value in state.items()}


def test_it_shows_the_most_similar_problems_but_not_the_prompt_itself() -> None:
    curriculum = in_epochs(solved_examples(2, **PLAIN))(ROWS, 0)
    empty = curriculum.init()
    assert shown(curriculum, empty, 0, 4) == [[], []]
    step = step_of((0, "three", 0.0), (0, "two", 1.0), (0, "2!", 1.0), (3, "2", 0.5), (2, "no", 0.0), (4, "a", 1.0))
    state = curriculum.observe(empty, step)
    apples, seven = "how many apples are in the basket > two", "solve x + 7 = 9 > 2"
    assert texts_in(own(state)) == [apples, seven], (
        "of a problem the first success; none without one, or without a text"
    )
    assert shown(curriculum, state, 0, 1, 2, 3, 4) == [[seven], [seven, apples], [apples, seven], [apples], []]
    assert texts_in(own(empty)) == [], "a state is not changed"
    state = curriculum.observe(state, step_of((0, "it is 2", 1.0), (1, "4", 1.0)))
    assert texts_in(own(state))[1:] == [
        "how many apples are in the basket > it is 2",
        "how many pears are in the basket > 4",
    ]
    assert curriculum.metrics(state) == {"curriculum/pool": 3.0}


def test_the_pool_holds_those_solved_last() -> None:
    curriculum = in_epochs(solved_examples(9, pool=2, **PLAIN))(ROWS, 0)
    state = curriculum.init()
    for prompt in (0, 1, 0, 2):
        state = curriculum.observe(state, step_of((prompt, str(prompt), 1.0)))
    assert own(state)["pool_ids"].tolist() == [0, 2]
    for row, prompt in enumerate((0, 2)):
        words = ROWS[prompt]["prompt"] if prompt == 0 else "solve x + 2 = 5"
        np.testing.assert_array_equal(own(state)["pool_features"][row], text_features(words))


def test_nearest_is_a_loop() -> None:
    features = np.random.default_rng(0).integers(-1, 2, (20, 3)).astype(np.float32)
    query = np.array([1.0, 2.0, -1.0], np.float32)
    order = sorted(range(20), key=lambda i: (-float(features[i] @ query), -i))
    assert nearest(query, features, 7) == order[:7]


def test_it_goes_on_from_a_checkpoint_and_draws_shuffled_epochs() -> None:
    curriculum, plain = in_epochs(solved_examples(**PLAIN))(ROWS, 3), shuffled_epochs(ROWS, 3)
    state, other = curriculum.init(), plain.init()
    for turn in range(4):
        ids, state = curriculum.select(state, 3)
        expected, other = plain.select(other, 3)
        np.testing.assert_array_equal(ids, expected)
        state = curriculum.observe(state, step_of(*((int(i), f"é {turn}", float(i % 2)) for i in ids)))
        kept = ExperienceState(state, {}, (), Drafts())
        again = loaded(*saved(kept)).curriculum
        assert shown(curriculum, again, 0, 1, 2) == shown(curriculum, state, 0, 1, 2)
        assert curriculum.select(again, 5)[0].tolist() == curriculum.select(state, 5)[0].tolist()


def test_wrong_settings_are_named() -> None:
    with pytest.raises(InputError, match="pool of solved_examples is 0, but must be at least 1"):
        solved_examples(pool=0)
    with pytest.raises(InputError, match="examples of solved_examples is -1, but must be at least 0"):
        solved_examples(-1)
