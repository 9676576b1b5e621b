"""Rewards that return more than numbers: entries of each completion, on every way into a batch."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_hosts import on_hosts

from jaxrl_llm.advantages.returns import terminal_rewards
from jaxrl_llm.core.rollout import Task
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rewards import Reward, close_rewards, get_reward, get_rewards, score
from jaxrl_llm.rewards.entries import entry, parsed_result
from jaxrl_llm.rewards.entry_arrays import concatenable, keys_of, stacked, token_ends
from jaxrl_llm.rewards.scoring import Scored, concatenate_groups, score_batch, some_rows, with_defaults
from jaxrl_llm.rewards.streamed import StreamedScores
from jaxrl_llm.rewards.workers.loading import declared
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.episode import given as given_tokens
from jaxrl_llm.rollouts.runtime.admission import Collected
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.rollouts.runtime.multihost_gather import of_all_hosts
from jaxrl_llm.sampling import completion_ids
from jaxrl_llm.utils.errors import InputError

WORDS = ["", "one ", "two ", "three ", "é", "\U0001f600 "]
TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens=True: "".join(WORDS[i] for i in ids))
ROWS: list[dict[str, Any]] = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
FILE = """
def tests(completions, answer):
    if answer[0] == "fail":
        raise ValueError("no sandbox")
    return [{"reward": 1.0, "tests": [True, False], "answer_key": text[:1]} for text in completions]


tests.provides = {"tests", "answer_key"}
"""


def batch() -> Trajectories:
    """Two groups of two rows; a prompt of one token, and two, three, one and two actions."""
    tokens = np.asarray([[1, 1, 2, 0], [1, 2, 3, 1], [1, 3, 0, 0], [1, 1, 1, 0]], np.int32)
    real = np.asarray([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], bool)
    values: dict[str, Any] = {
        "tokens": tokens, "token_mask": real, "action_mask": real & (np.arange(4) > 0), "turn": tokens * 0,
        "behaviour_logp": np.zeros((4, 4), np.float32), "policy_step": tokens * 0, "group": np.asarray([0, 0, 1, 1]),
        "prompt_id": np.asarray([0, 0, 1, 1]), "truncated": np.zeros(4, bool),
    }  # fmt: skip
    return Trajectories(**values)


def rich(completions: list[str], answer: list[str]) -> dict[str, Any]:
    return {
        "reward": [float(len(text)) for text in completions],
        "answer_key": [text.split()[-1] if "o" in text else None for text in completions],
        "tests": [[1, 0, 1][: 1 + int(a)] for a in answer],
        "level": [2.0] * len(completions),
        "spans": [[(0, 3, 1.0)] for _ in completions],
    }


def other(completions: list[str]) -> list[dict[str, Any]]:
    return [{"reward": 0.5, "level": 7, "spans": [(len(text) - 1, len(text), 0.25)]} for text in completions]


REWARDS = [Reward(rich), Reward(other, weight=2.0)]


def check(found: Trajectories) -> None:
    """What `REWARDS` give the batch."""
    info = found.info or {}
    key = info["answer_key"]
    assert key.dtype == np.int32
    assert key[2] == -1  # "three " has no o
    assert len({int(key[0]), int(key[1]), -1}) == 3
    assert key[3] >= 0
    np.testing.assert_array_equal(info["tests"], [[1, 0, np.nan], [1, 0, np.nan], [1, 0, 1], [1, 0, 1]])
    np.testing.assert_array_equal(info["level"], [2, 2, 2, 2])  # of the first reward that has it
    # Value 1 where the first three letters end, and 2 x 0.25 at the end of the text.
    wanted = [[0, 1, 0.5, 0], [0, 1, 0, 0.5], [0, 1.5, 0, 0], [0, 1, 0.5, 0]]
    np.testing.assert_array_equal(found.token_rewards, wanted)
    np.testing.assert_array_equal((found.rewards or {})["other"], [0.5] * 4)


def test_entries_reach_the_batch_at_once_and_group_by_group() -> None:
    check(score_batch(REWARDS, TOKENIZER, ROWS, batch()).batch)
    ids = completion_ids(batch())
    with StreamedScores(REWARDS, TOKENIZER) as streamed:
        for number in (1, 0):
            streamed.add(number, ROWS[number], ids[2 * number : 2 * number + 2])
        check(score_batch([], TOKENIZER, ROWS, batch(), streamed.scores()).batch)


def test_they_come_back_with_episodes_through_a_log() -> None:
    """Of a program that scores by itself: as the JSON text of a checkpoint restores them."""
    episodes = [Episode((1,), group) + given_tokens(ids) for group, ids in zip((0, 0, 1, 1), completion_ids(batch()))]  # noqa: B905
    episodes = [
        Episode(e.prompt, e.prompt_id, 0, tuple(s._replace(sampled=True) for s in e.segments)) for e in episodes
    ]

    async def scored(streamed: StreamedScores) -> list[Episode]:
        return [*await streamed.episodes(ROWS[0], episodes[:2]), *await streamed.episodes(ROWS[1], episodes[2:])]

    with StreamedScores(REWARDS, TOKENIZER) as streamed:
        found = asyncio.run(scored(streamed))
        restored = [
            e.scored(*json.loads(json.dumps([f.reward, dict(f.rewards), dict(f.entries)])))
            for e, f in zip(episodes, found, strict=True)
        ]
        check(score_batch(REWARDS, TOKENIZER, ROWS, batch(), streamed.known(restored)).batch)
        assert found[0].entries["tests"] == [1.0, 0.0]
        assert found[0].first(1).entries == {}
        # A group whose program failed has none.
        part = score_batch(REWARDS, TOKENIZER, ROWS, batch(), streamed.known([*episodes[:2], *restored[2:]])).batch
    np.testing.assert_array_equal((part.info or {})["level"], [np.nan, np.nan, 2, 2])
    assert (part.info or {})["answer_key"][:2].tolist() == [-1, -1]
    np.testing.assert_array_equal(np.asarray(part.token_rewards)[:2], np.zeros((2, 4)))


def test_rounds_of_dynamic_sampling_may_differ_in_width() -> None:
    whole = score_batch(REWARDS, TOKENIZER, ROWS, batch())
    check(concatenate_groups([some_rows(whole, 0, slice(0, 2)), some_rows(whole, 1, slice(2, 4))]).batch)

    def short(completions: list[str]) -> dict[str, Any]:
        return {"reward": [1.0] * len(completions), "tests": [[1.0]] * len(completions)}

    less = score_batch([Reward(short, name="rich"), Reward(other, weight=2.0)], TOKENIZER, ROWS, batch())
    plain = less._replace(batch=less.batch.replace(token_rewards=None))
    both = concatenate_groups([some_rows(whole, 0, slice(2, 4)), some_rows(plain, 1, slice(0, 2))])
    info = both.batch.info or {}
    np.testing.assert_array_equal(info["tests"][2:], [[1, np.nan, np.nan]] * 2)
    assert info["answer_key"][2:].tolist() == [-1, -1]
    np.testing.assert_array_equal(np.asarray(both.batch.token_rewards)[2:], np.zeros((2, 4)))
    assert set(both.entries) == {"answer_key", "tests", "level"}


@pytest.mark.parametrize("count", [2, 3])
def test_all_hosts_have_the_entries_of_all(count: int) -> None:
    """Each scores its groups; the third host has none."""
    whole = batch()

    def part_of(groups: Any) -> Trajectories:
        rows = np.concatenate([np.flatnonzero(whole.group == one.task.prompt_id) for one in groups])
        found = jax.tree.map(lambda x: x[rows], whole)
        width = int(found.token_mask.sum(axis=1).max())
        cut = {name: x[:, :width] for name, x in vars(found).items() if getattr(x, "ndim", 1) == 2}
        return found.replace(**cut, group=np.repeat(np.arange(len(groups)), 2))

    def run(hosts: Any) -> Scored:
        places = hosts.share(range(2))
        groups = [Group(Task({}, (1,), place, 2, 4), [Episode((1,))] * 2, [False] * 2) for place in places]
        found = Collected(groups, (), [], list(range(len(places))), [])
        mine = score_batch(REWARDS, TOKENIZER, [ROWS[place] for place in places], part_of(groups)) if groups else None
        return of_all_hosts(hosts, places, found, mine, part_of)[1]

    for found in on_hosts(count, run):
        check(found.batch)
        assert set(found.entries) == {"answer_key", "tests", "level"}


def test_failed_rows_and_rows_that_continue_have_none() -> None:
    some = np.asarray([True, False, True, True])
    lost = with_defaults(REWARDS, score_batch(REWARDS, TOKENIZER, ROWS, batch()), ~some).batch
    windows = score_batch(REWARDS, TOKENIZER, ROWS, batch(), which=some).batch
    for found in (lost, windows):
        info = found.info or {}
        assert info["answer_key"][1] == -1
        assert (info["answer_key"] >= 0).tolist() == [True, False, False, True]
        np.testing.assert_array_equal(info["level"], [2, np.nan, 2, 2])
        assert not np.asarray(found.token_rewards)[1].any()


def test_declared_entries_are_there_even_where_the_function_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a process: the attribute is known before any model is loaded, and after loading."""
    (tmp_path / "own.py").write_text(FILE)
    name = f"{tmp_path / 'own.py'}:tests"
    assert declared(name) == {"tests", "answer_key"}
    assert declared("number_match") == {"answer_key"}
    assert declared("distances(number_match)") == {"distance"}
    assert declared("format_match(.*)") == declared("no such") == declared("missing.py:one") == frozenset()
    reward = get_reward(name)
    with caplog.at_level(logging.WARNING):
        found = score([reward], ["ab", "cd"], {"answer": ["1", "2"]})
        failed = score([reward], ["ab", "cd"], {"answer": ["fail", "fail"]})
    assert found.entries == {"tests": [[1.0, 0.0]] * 2, "answer_key": ["a", "c"]}
    assert failed.entries == {"tests": [None] * 2, "answer_key": [None] * 2}
    assert failed.failures == {"tests": 2}
    close_rewards([reward])
    with pytest.raises(InputError, match="provides is 4"):
        Reward(_declaring(4))
    assert score_batch([reward], TOKENIZER, ROWS, batch(), failed_of(4)).batch.info is not None
    close_rewards([reward])


def _declaring(value: Any) -> Any:
    def function(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    function.provides = value  # type: ignore[attr-defined]
    return function


def failed_of(count: int) -> Any:
    found = score([Reward(_declaring({"tests"}))], ["x"] * count, {})
    assert found.entries == {"tests": [None] * count}
    return found


@pytest.mark.parametrize(
    "result, problem",
    [
        ({"tests": [[1], [2]]}, "ValueError: returned a dict without 'reward': 'tests'"),
        ({"reward": [1, 2], "tests": [[1]]}, "ValueError: returned 'tests': 1 values for 2 samples"),
        ({"reward": [1, 2], "tests": "ab"}, "TypeError: returned 'tests': str, not a list of 2 values"),
        ({"reward": [1, 2], "two words": [1, 2]}, "ValueError: returned an entry named 'two words', but names"),
        (
            {"reward": [1, 2], "tests": [[1], 1]},
            "ValueError: returned 'tests' with 0 and with 1 axes: give all the same",
        ),
        ({"reward": [1, 2], "tests": [[[1], [1, 2]], [1]]}, "ValueError: returned 'tests' with lists of different"),
        ({"reward": [1, 2], "tests": [["a"], [1]]}, "TypeError: returned 'tests' with str, not a number"),
        (
            {"reward": [1, 2], "spans": [[(3, 3, 1.0)], None]},
            "ValueError: returned the span (3, 3, 1.0), but needs 0 <=",
        ),
        (
            {"reward": [1, 2], "spans": [[4], None]},
            "ValueError: returned the span 4, but a span is (start, end, value)",
        ),
        ([{"reward": 1}, {"tests": [1]}], "ValueError: returned a dict without 'reward' for a completion"),
        ({1.0, 2.0}, "TypeError: returned set, not a list of 2 numbers"),
    ],
)
def test_malformed_results_are_one_clear_line(result: Any, problem: str) -> None:
    _, failed, _, said = parsed_result(result, 2)
    assert said.startswith(problem)
    assert any(failed)
    assert "\n" not in said


def test_a_malformed_entry_costs_only_its_completion() -> None:
    values, failed, entries, problem = parsed_result(
        [{"reward": 1, "tests": ["a"]}, {"reward": 2, "tests": (1, None)}, 3], 3
    )
    assert failed == [True, False, False]
    assert values[1:] == [2.0, 3.0]
    assert entries["tests"][0] is None
    assert entries["tests"][1][0] == 1
    assert entries["tests"][2] is None
    assert "str" in problem
    assert entry("answer_key", 3) == entry("answer_key", 3.0) == "3"


ANSWERS = st.one_of(st.none(), st.text("ab", max_size=2))


@given(st.lists(st.tuples(st.integers(0, 3), ANSWERS), max_size=12), st.randoms())
def test_keys_say_which_answers_of_a_prompt_are_equal(rows: list[Any], random: Any) -> None:
    group, answers = np.asarray([g for g, _ in rows], np.int32), [a for _, a in rows]
    keys = keys_of(answers, group)
    for i in range(len(rows)):
        assert (keys[i] == -1) == (answers[i] is None)
        for j in range(len(rows)):
            if group[i] == group[j] and answers[i] is not None and answers[j] is not None:
                assert (keys[i] == keys[j]) == (answers[i] == answers[j])
    order = random.sample(range(len(rows)), len(rows))
    np.testing.assert_array_equal(keys_of([answers[i] for i in order], group[order]), keys[order])


def test_answers_with_one_checksum_keep_different_keys() -> None:
    """Two texts with the same CRC-32."""
    pair = ["plumless", "buckeroo"]
    keys = keys_of(pair, np.zeros(2, np.int32))
    assert keys[0] != keys[1]
    np.testing.assert_array_equal(keys_of(pair[::-1], np.zeros(2, np.int32)), keys[::-1])


def test_arrays_of_different_axes_are_refused() -> None:
    with pytest.raises(InputError, match=r"returns 'tests' with \[1, 2\] axes for different prompts"):
        stacked("tests", [[1.0], [[1.0]]])
    with pytest.raises(InputError, match="axes for different prompts"):
        concatenable([({"x": np.ones((1, 2))}, 1), ({"x": np.ones((1, 2, 3))}, 1)])
    assert stacked("tests", [None, None]).shape == (2,)
    with pytest.raises(InputError, match="returns 'level', which the rollout gives"):
        score_batch(REWARDS, TOKENIZER, ROWS, batch().with_info(level=jnp.ones(4)))


@given(st.lists(st.integers(0, 5), max_size=12))
def test_tokens_end_where_their_text_does(ids: list[int]) -> None:
    text = TOKENIZER.decode(ids)
    wanted = [len(TOKENIZER.decode(ids[: n + 1])) for n in range(len(ids))]
    assert token_ends(TOKENIZER, ids, text).tolist() == wanted


def test_ends_of_the_parts_of_a_character() -> None:
    """Bytes as tokens: a character is the last of its bytes'."""
    decode = SimpleNamespace(decode=lambda ids, skip_special_tokens=True: bytes(ids).decode("utf-8", "replace"))
    text = "aé\U0001f600b"
    ids = list(text.encode())
    assert token_ends(decode, ids, text).tolist()[0] == 1
    ends = token_ends(decode, ids, text)
    assert ends.tolist() == sorted(ends.tolist())
    assert ends[-1] == len(text)
    assert np.searchsorted(ends, 4) == len(ids) - 1


def test_returns_read_the_rewards_of_spans() -> None:
    found = score_batch(REWARDS, TOKENIZER, ROWS, batch()).batch
    rewards = np.asarray(terminal_rewards(found))
    wanted = np.asarray(found.reward) + np.asarray(found.token_rewards).sum(axis=1)
    np.testing.assert_allclose(rewards.sum(axis=1), wanted)


def test_built_in_rewards_give_keys() -> None:
    """The same ones in a process and here; equal answers in other words have the same."""
    rewards = get_rewards(["number_match", "exact_match", "tagged_match"])
    found = [score([one], ["x 0.5", "= 1/2", "<answer>7</answer>", ""], {"answer": ["1/2"] * 4}) for one in rewards]
    keys = [one.entries["answer_key"] for one in found]
    assert keys == [["1/2", "1/2", "7", None], ["x 0.5", "= 1/2", "<answer>7</answer>", None], [None, None, "7", None]]
    assert found[0].components["number_match"].tolist() == [1, 1, 0, 0]
    close_rewards(rewards)


def test_keys_of_expressions() -> None:
    pytest.importorskip("math_verify")
    from jaxrl_llm.rewards.workers.loading import FUNCTIONS

    texts = [r"$\frac{1}{2}$", "so 0.5", r"$x^2+1$", "nothing", r"$1+x^2$"]
    found = partial(FUNCTIONS["math_verify"], answer=["1/2"] * 5)(texts)
    one, two, three, four, five = found["answer_key"]
    assert one == two == "0.5"
    assert three == five
    assert four is None
    assert found["reward"][:2] == [1.0, 1.0]
