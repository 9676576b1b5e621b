"""Compaction: what goes on when the budget of the context is near, its rows, masks and credit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.compaction import Compact, Summary, compact_by_name, keep_last
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.collate import program_metrics, to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

TOKENIZER, END = tokenizer_of("plain"), TEMPLATES["plain"][1]
ROWS = [{"prompt": "Find all five."}]
START = "<|im_start|>assistant\n"
SUMMARY = Summary(20, ask="Sum up.")


class Finding:
    """It tells a letter with each turn, with a reward of 1, 2, ...; the end gives 10."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.turn = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation([{"role": "user", "content": "Go."}], state="start")

    def step(self, reply: Reply) -> Observation:
        self.turn += 1
        told = [{"role": "user", "content": f"found {'abcde'[self.turn - 1] * 60}"}]
        return Observation(told, float(self.turn), self.turn == 5, state=f"after {self.turn}")

    def close(self) -> float:
        return 10.0


def says(text: str, sample: int) -> str:
    """A summary names the letters that were found, and other replies how many came before in this context."""
    seen = sorted(set(re.findall(r"found (\w)", text)) | set("".join(re.findall(r"letters: (\w+)", text))))
    return (f"letters: {''.join(seen)}" if text.endswith(f"Sum up.{END}\n{START}") else f"next {len(seen)}") + END


def rows_of(compact: Compact | None, context: int | None = 290, **settings: Any) -> list[Episode]:
    rollout = agent(Finding, context_tokens=context, compact=compact, turn_tokens=8, **settings)
    (one,) = run_agents(rollout, TOKENIZER, says, ROWS, samples=1)[0].groups
    return one.episodes


def texts(rows: Sequence[Episode]) -> list[str]:
    return [TOKENIZER.decode(row.tokens) for row in rows]


def chat(*contents: str, more: str = "") -> str:
    """The conversation of a user and an assistant, who say these in turn."""
    said = "".join(
        f"<|im_start|>{('user', 'assistant')[number % 2]}\n{text}{END}\n" for number, text in enumerate(contents)
    )
    return said + START + more


def found(letter: str) -> str:
    return f"found {letter * 60}"


def test_a_summary_by_hand() -> None:
    """Each row has the replies, then the summary, all of which are actions; the next begins with what is left."""
    rows = rows_of(SUMMARY, turn_rewards=True)
    asked = "Find all five.\n\nGo."
    told = f"{asked}\n\nSummary of what was said since:\nletters: "
    assert texts(rows) == [
        chat(asked, "next 0", found("a"), "next 1", found("b"), "next 2", "Sum up.", more=f"letters: ab{END}"),
        chat(f"{told}ab", "next 2", found("c"), "next 3", "Sum up.", more=f"letters: abc{END}"),
        chat(f"{told}abc", "next 3", found("d"), more=f"next 4{END}"),
    ]
    actions = [[TOKENIZER.decode(row.own.token[row.turns == turn]) for turn in range(4)] for row in rows]
    assert actions == [
        [f"next 0{END}", f"next 1{END}", f"next 2{END}", f"letters: ab{END}"],
        [f"next 3{END}", f"letters: abc{END}", "", ""],
        [f"next 4{END}", "", "", ""],
    ]
    assert [row.actions.sum() for row in rows] == [sum(len(TOKENIZER.encode(text)) for text in one) for one in actions]
    assert [TOKENIZER.decode(row.prompt) for row in rows[1:]] == [
        chat(f"{told}ab", "next 2", found("c")), chat(f"{told}abc", "next 3", found("d")),
    ]  # fmt: skip


def test_the_episodes_credit_reaches_all_rows() -> None:
    rows = rows_of(SUMMARY, turn_rewards=True)
    assert [row.turn_rewards for row in rows] == [(1.0, 2.0, 3.0, 0.0), (4.0, 0.0), (5.0,)]
    assert [row.info["first_turn"] for row in rows] == [0.0, 4.0, 6.0]
    assert [row.info["compactions"] for row in rows] == [2.0] * 3
    assert [row.info["new_rows"] for row in rows] == [0.0] * 3
    assert {row.info["episode"] for row in rows} == {0.0}
    assert [row.rewards for row in rows] == [{"environment": 10.0}] * 3
    assert len({row.sample for row in rows}) == 3
    assert not any(row.truncated for row in rows)
    keys = [key for row in rows for key in row.state_keys]
    assert len(keys) == len(set(keys)) == 7
    alone = [key for row in rows_of(None, None) for key in row.state_keys]
    assert [key for key in keys if key in alone] == alone, "summaries change no state of the environment"
    assert [row.rewards for row in rows_of(SUMMARY)] == [{"environment": 25.0}] * 3

    found, _ = run_agents(
        agent(Finding, context_tokens=290, compact=SUMMARY, turn_tokens=8), TOKENIZER, says, ROWS * 2, samples=2
    )
    batch = to_batch(found.groups, SamplingConfig(max_new_tokens=200), 0)
    np.testing.assert_array_equal(batch.group, [0] * 6 + [1] * 6)
    metrics = program_metrics(found.groups)
    assert (metrics["rollout/turns"], metrics["rollout/compactions"], metrics["rollout/new_rows"]) == (7.0, 2.0, 0.0)


def test_dropped_turns_by_hand() -> None:
    rows = rows_of(keep_last(1), 250)
    asked = "Find all five.\n\nGo."
    assert texts(rows) == [
        chat(asked, "next 0", found("a"), "next 1", found("b"), more=f"next 2{END}"),
        chat(asked, "next 2", found("c"), "next 1", found("d"), more=f"next 2{END}"),
    ]
    assert [row.info["first_turn"] for row in rows] == [0.0, 3.0]
    assert [len(row.state_keys) for row in rows] == [3, 2]


@pytest.mark.parametrize("compact", [None, keep_last(1), SUMMARY], ids=["none", "keep_last", "summary"])
@pytest.mark.parametrize("name", ["plain", "hermes"])
def test_a_budget_that_is_never_reached_changes_nothing(name: str, compact: Compact | None) -> None:
    def batch(**settings: Any) -> Any:
        rollout = agent(Finding, turn_rewards=True, **settings)
        return to_batch(run_agents(rollout, tokenizer_of(name), says, ROWS)[0].groups, SamplingConfig(), 0)

    plain, other = batch(), batch(context_tokens=2000, compact=compact)
    for one in ("tokens", "action_mask", "turn", "behaviour_logp", "turn_rewards", "state_key", "group", "truncated"):
        np.testing.assert_array_equal(getattr(plain, one), getattr(other, one))
    assert plain.info.keys() == other.info.keys()
    for key, value in plain.info.items():
        np.testing.assert_array_equal(value, other.info[key])


@pytest.mark.parametrize("compact", [None, keep_last(1), SUMMARY], ids=["none", "keep_last", "summary"])
def test_no_row_is_longer_than_its_context(compact: Compact | None) -> None:
    """Whatever the budget, and beside the budget of the episode."""
    whole = 0
    for context in range(46, 480, 31):
        for episode in (None, 200):
            rows = rows_of(compact, context, episode_tokens=episode)
            assert max(len(row.tokens) for row in rows) <= context
            assert episode is None or sum(row.size for row in rows) <= episode
            turns = sum(int(row.turns.max(initial=-1)) + 1 for row in rows)
            assert [len(row.state_keys) for row in rows] == [int(row.turns.max(initial=-1)) + 1 for row in rows]
            done = turns - rows[0].info["compactions"] * isinstance(compact, Summary) == 5
            assert rows[-1].truncated != done or not rows[0].size
            whole += done
    assert whole > 1


def test_a_prompt_that_leaves_no_room_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    (row,) = rows_of(None, 38)
    assert np.isnan(row.reward or 0.0)
    assert row.info["failed_environments"] == 1.0
    assert "a prompt of 38 tokens leaves no room for a reply: context_tokens 38 is too small" in caplog.text


def test_a_summary_has_a_row_of_its_own_where_the_template_does_not_append() -> None:
    class WithTools(Finding):
        tools = ({"type": "function", "function": {"name": "add", "description": "", "parameters": {}}},)

    def replies(text: str, sample: int) -> str:
        return ("letters: a" if text.endswith("Sum up.[/INST]") else "next") + TEMPLATES["moving"][1]

    rollout = agent(WithTools, context_tokens=350, compact=SUMMARY, turn_tokens=8, turn_rewards=True)
    (one,) = run_agents(rollout, tokenizer_of("moving"), replies, ROWS, samples=1)[0].groups
    assert [row.turn_rewards for row in one.episodes] == [(n,) for n in (1, 2, 3, 0, 4, 5)]
    summed = tokenizer_of("moving").decode(one.episodes[3].prompt)
    assert summed.count("found") == 2, "the third result is not summed up: it is what comes next"
    assert summed.endswith("Sum up.[/INST]")
    assert "letters: a" in tokenizer_of("moving").decode(one.episodes[4].prompt)


def test_turns_are_kept_whole() -> None:
    said = [
        {"role": role, "content": text}
        for role, text in [("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "b"), ("tool", "c"),
                           ("assistant", "d"), ("tool", "e")]
    ]  # fmt: skip

    def kept(turns: int) -> str:
        keep: Any = keep_last(turns)
        return "".join(message["content"] for message in keep(said))

    assert [kept(turns) for turns in (1, 2, 3)] == ["sqde", "sqabcde", "sqabcde"]


def raising(messages: Any) -> Any:
    raise KeyError("old")


@pytest.mark.parametrize(
    ("compact", "why"),
    [
        (raising, "compact failed: KeyError: 'old'"),
        (lambda messages: "nothing", "compact returns 'nothing', but must return messages"),
        (lambda messages: messages[:2], "compact returns .*the last of which is to be answered"),
    ],
)
def test_a_function_that_fails_ends_the_episode(compact: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    (row,) = rows_of(compact, 250)
    assert row.info["failed_environments"] == 1.0
    assert (row.truncated, row.rewards) == (True, {"environment": 16.0})
    assert re.search(f"in step, where its episode ends: {why}", caplog.text)


def test_a_function_that_keeps_all_is_asked_again() -> None:
    rollout = agent(Finding, context_tokens=600, compact=list, turn_tokens=300)
    (one,) = run_agents(rollout, TOKENIZER, says, ROWS, samples=1)[0].groups
    (row,) = one.episodes
    assert (row.info["compactions"], row.info["failed_environments"]) == (0.0, 0.0)
    assert row.rewards == {"environment": 25.0}


def test_names_and_what_is_refused() -> None:
    assert compact_by_name("summary") == Summary()
    assert compact_by_name("summary(64, 2)") == Summary(64, 2)
    assert compact_by_name("jaxrl_llm.rollouts.agents.compaction:keep_last") is keep_last
    for spec, why in {
        "sumary": "sumary", "summary(x)": "must be whole numbers", "keep_last(1, 2)": "must be whole numbers",
        "jaxrl_llm.rollouts.agents.compaction:ASK": "is 'The conversation becomes",
        "keep_last(0)": "turns of keep_last is 0", "summary(0)": "tokens of Summary is 0",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=re.escape(why)):
            compact_by_name(spec)
    with pytest.raises(InputError, match="context_tokens says when"):
        agent(Finding, compact=SUMMARY)
    with pytest.raises(InputError, match="fresh prompts have nothing to compact"):
        agent(Finding, compact=SUMMARY, context_tokens=100, fresh=True)
