"""Successes to imitate and steps to prefer (EvoCUA): budgets, pairs against a loop over replies, and the loss."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import batch_of
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.agents.evocua import REFLECT, evocua, stepwise
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))
from speaking import TEMPLATES, run_agents, tokenizer_of

TOKENIZER, END = tokenizer_of("plain"), TEMPLATES["plain"][1]
# What samples 0 to 3 reply; a success has no odd number but one that 0 follows. 6 changes nothing.
SAID = [[2, 4, 6, 8], [2, 4, 7, 8], [2, 5, 5, 5], [1, 1, 1, 1]]
SECOND = {4: [0, 2, 2, 2], 5: [3, 3, 3, 3], 6: [0, 8, 8, 8]}  # after the mistake of the first, second and third failure


class Walk:
    """Four replies, numbers."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.said = list[int]()

    def _seen(self) -> Observation:
        state = "-".join(str(x) for x in self.said if x != 6) or "begin"
        return Observation([{"role": "user", "content": f"at {state}"}], state=state, done=len(self.said) == 4)

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return self._seen()

    def step(self, reply: Reply) -> Observation:
        self.said.append(int(str(reply.message["content"])))
        return self._seen()

    def close(self) -> float:
        after = [*self.said[1:], 1]
        return float(all(x % 2 == 0 or y == 0 for x, y in zip(self.said, after, strict=True)))


def says(text: str, sample: int) -> str:
    turn = text.count("assistant\n") - 1
    if sample < len(SAID):
        return f"{SAID[sample][turn]}{END}"
    begun = text.split(REFLECT[:20])[0].count("assistant\n")
    assert REFLECT in text, "a second attempt is told of its mistake"
    return f"{SECOND[sample][turn - begun]}{END}"


def played(monkeypatch: pytest.MonkeyPatch, own: Any = says, samples: int = 4, **options: Any) -> tuple[list[Any], Any]:
    async def environment_reward(task: Any, episodes: Any) -> list[Episode]:
        return [episode.scored(episode.rewards["environment"]) for episode in episodes]

    monkeypatch.setattr("speaking.by_length", environment_reward)
    rollout: Any = stepwise(**options).wrap
    found, engines = run_agents(rollout(agent(Walk, turns=4)), TOKENIZER, own, [{"prompt": "Go."}], samples, limit=400)
    (one,) = found.groups
    assert not one.failed
    return list(one.episodes), engines[0].requests


def context(replies: list[int]) -> str:
    """The conversation before the reply that follows these, by hand."""
    out = f"<|im_start|>user\nGo.\n\nat begin{END}\n<|im_start|>assistant\n"
    for n in range(len(replies)):
        here = "-".join(str(x) for x in replies[: n + 1] if x != 6)
        out += f"{replies[n]}{END}\n<|im_start|>user\nat {here}{END}\n<|im_start|>assistant\n"
    return out


def learnt(row: Episode) -> tuple[str, str]:
    """What comes before the only reply that is learnt, and that reply."""
    places = np.flatnonzero(row.actions)
    assert places.tolist() == list(range(places[0], row.size)), "nothing else, and nothing after it"
    before = TOKENIZER.decode([*row.prompt, *row.own.token[: places[0]].tolist()])
    return before, TOKENIZER.decode(row.own.token[places].tolist())


def test_pairs_are_those_of_a_loop_over_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = played(monkeypatch)
    expected = list[tuple[str, int, int]]()
    for n, bad in enumerate(SAID[1:]):
        t = next(i for i in range(4) if bad[i] != SAID[0][i])
        expected.append((context(bad[:t]), SAID[0][t], bad[t]))
        if SECOND[4 + n][0] == 0:  # it is saved
            expected.append((context(bad[: t + 1]), 0, bad[t + 1]))
    pairs = [row for row in rows if row.part]
    assert len(pairs) == 2 * len(expected) == 10
    for number, (before, right, wrong) in enumerate(expected):
        chosen, rejected = pairs[2 * number : 2 * number + 2]
        assert (learnt(chosen), learnt(rejected)) == ((before, f"{right}{END}"), (before, f"{wrong}{END}"))
        assert (chosen.score, rejected.score) == (1, 0)
        assert {chosen.part, rejected.part} == {1 + number}
        assert chosen.info["off_prompt"] == float(right == 0), "it is learnt without what it was told"
    assert len({row.sample for row in rows}) == len(rows) == 14


def test_successes_are_imitated_without_idle_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = played(monkeypatch)
    whole = [row for row in rows if not row.part]
    assert [row.info["pivot"] for row in whole] == [0, 4, 4, 4], "failures have no weight"
    said = TOKENIZER.decode(whole[0].own.token[whole[0].actions].tolist())
    assert said == f"2{END}4{END}8{END}"
    assert len(whole[0].state_keys) == 3
    assert "6" in TOKENIZER.decode(whole[0].own.token.tolist()), "it is still in the context"


@pytest.mark.parametrize(
    ("numbers", "tried"),
    [
        ([1] * 8, 2), ([2] * 8, 2), ([2, 1, 1, 1, 1, 1, 1, 1], 8), ([2, 1, 2, 2, 2, 2, 2, 2], 8),
        ([2, 1, 1, 1, 2, 2, 2, 2], 8),
    ],
)  # fmt: skip
def test_the_budget_grows_where_a_task_is_neither_easy_nor_hopeless(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], tried: int
) -> None:
    def own(text: str, sample: int) -> str:
        return f"{numbers[sample] if sample < 8 else 3}{END}"

    rows, _ = played(monkeypatch, own, 8)
    assert sum(not row.part for row in rows) == tried
    halfway, _ = played(monkeypatch, own, 8, low=0.3)
    assert sum(not row.part for row in halfway) == (4 if numbers[1:4] == [1, 1, 1] and tried == 8 else tried)


def test_it_is_the_loop() -> None:
    random = np.random.default_rng(2)
    mask = np.asarray([[1, 1, 1, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], bool)
    old = np.where(mask, -random.gamma(2.0, 0.5, mask.shape), 0).astype(np.float32)
    zeros = np.zeros(6, np.float32)
    info = {"part": np.asarray([0, 0, 1, 1, 2, 2]), "pivot": np.asarray([0, 3, 0, 0, 0, 0]), "first_turn": zeros,
            "episode": np.arange(6)}  # fmt: skip
    batch = batch_of(mask, [1.0, 0.0, 1.0, 0.0, 0.0, 1.0], old, [0, 0, 1, 1, 2, 2], old_logp=old,
                     reference_logp=1.3 * old,
                     info={name: np.asarray(x, np.float32) for name, x in info.items()})  # fmt: skip
    x, logp = arrays(batch), old + 0.3 * random.normal(size=mask.shape)

    def loop(new: np.ndarray) -> float:
        u = ((new - x.reference) * x.mask).sum(1)
        pairs = [np.log1p(np.exp(-0.4 * (u[2] - u[3]))), np.log1p(np.exp(-0.4 * (u[5] - u[4])))]
        return float(-new[0][mask[0]].sum() / mask[[0, 2, 3, 4, 5]].sum() + 0.7 * np.mean(pairs))

    assert_matches_loop(learn(evocua(preference=0.7, beta=0.4), batch, logp), loop, logp)


def test_it_needs_agents() -> None:
    with pytest.raises(InputError, match="compared step by step"):
        stepwise().wrap(group())  # type: ignore[misc]
