"""Conversations whose environments take their time: python experiments/benchmarks/conversations.py

16 conversations of 6 turns, whose environments take 50 ms for each answer, against the same tokens without
environments, where observations are known at once. Both ways run in turns in one process; tokens a second are those
that were sampled, and the ratio is that of the best times, because other load on the machine only ever adds to them.
The lengths of replies are spread evenly from half of --tokens to half more. Weights are random and there is no end
token, so that the lengths are what they should be. Prompt tokens computed are those of prompts and observations that
went through the model outside of the decode loop, by the engine's counters, against the distinct ones.
"""

from __future__ import annotations

import argparse
import time
from asyncio import gather, sleep
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from rollout_ours import load

from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.engines import engines_of
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog
from jaxrl_llm.rollouts.runtime.source import LOOK
from jaxrl_llm.rollouts.runtime.source_setup import Experience, ExperienceState
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.stats import Stats


@dataclass(frozen=True)
class Case:
    """What is measured."""

    ours: Any
    conversations: int
    group: int
    turns: int
    tokens: int
    prompt: int
    observation: int
    seconds: float

    def lengths(self, prompt_id: int, number: int) -> list[int]:
        """Tokens of the replies of a conversation."""
        least = self.tokens // 2
        return np.random.default_rng([prompt_id, number]).integers(least, 3 * least + 1, self.turns).tolist()

    def observed(self, prompt_id: int, number: int, turn: int) -> list[int]:
        """Token ids of an observation."""
        vocabulary = self.ours.policy.config.vocab_size
        return np.random.default_rng([prompt_id, number, turn]).integers(vocabulary, size=self.observation).tolist()


def program_of(case: Case, environments: bool, threads: bool) -> Any:
    """The program of a group. environments: whether observations take their time, or are known."""

    async def one(tools: Tools, task: Task, number: int) -> Episode:
        episode: Any = Episode(task.prompt, task.prompt_id, number)

        async def slowly(turn: int) -> list[int]:
            await sleep(case.seconds)
            return case.observed(task.prompt_id, number, turn)

        def in_thread(turn: int) -> list[int]:
            time.sleep(case.seconds)
            return case.observed(task.prompt_id, number, turn)

        for turn, limit in enumerate(case.lengths(task.prompt_id, number)):
            if turn and environments:
                answer = in_thread if threads else slowly
                episode += given(await tools.call(answer, turn, name=f"{number}/{turn}", again=True))
            elif turn:
                episode += given(case.observed(task.prompt_id, number, turn))
            episode = await tools.sample(replace(episode, truncated=False), limit=limit)
        return episode

    async def program(tools: Tools, task: Task) -> list[Episode]:
        return list(await gather(*(one(tools, task, number) for number in range(task.samples))))

    return program


def rollout(case: Case, slots: int, environments: bool, ahead: int | None, threads: bool) -> tuple[Any, Stats, float]:
    """The episodes, the engine's counts, and the seconds."""
    prompts = case.conversations // case.group
    vocabulary = case.ours.policy.config.vocab_size
    ids = [np.random.default_rng(i).integers(vocabulary, size=case.prompt).tolist() for i in range(prompts)]
    rows: list[dict[str, Any]] = [{"prompt": ""}] * prompts
    longest = case.turns * (3 * (case.tokens // 2) + case.observation)
    made = Rollout(
        program_of(case, environments, threads),
        "conversations",
        frozenset({"turns"}),
        demands=Demands(turns=case.turns, longest=longest, max_wait_steps=ahead),
    )
    stats = list[Stats]()
    setup = Experience(
        case.ours.policy, PromptSet(rows, ids), [], shuffled_epochs(rows, 0),
        SamplingConfig(max_new_tokens=case.tokens, slots=slots), made, prompts_per_step=prompts, group_size=case.group,
        watch=stats.append,
    )  # fmt: skip
    state: Any = ExperienceState((), (), (), Drafts())
    make = engines_of(setup, prompts, case.ours.params, jax.random.key(0), 0, state)

    async def score(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        return [episode.scored(0.0) for episode in episodes]

    driver = Driver(made, make, score, None, context=8192, chunk=LOOK)
    logs = [GroupLog(tuple(one), i, case.group, 0) for i, one in enumerate(ids)]
    flight = [(log, Task({}, log.prompt, log.prompt_id, case.group, case.tokens)) for log in logs]
    began = time.perf_counter()
    found = driver.run(flight, Rule())
    return [episode for one in found.groups for episode in one.episodes], stats[0], time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:llama-8m", help="as for rollout.py")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--group", type=int, default=1, help="conversations of a prompt")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32, help="of a reply, on the average")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--observation", type=int, default=12)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 8, 4])
    parser.add_argument(
        "--ahead", nargs="+", default=["4", "0", "none"], help="see jaxrl_llm/rollouts/runtime/external_calls.py"
    )
    parser.add_argument("--threads", action="store_true", help="environments in threads, not in the event loop")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    case = Case(
        load(given.model, "float32", None), given.conversations, given.group, given.turns, given.tokens, given.prompt,
        given.observation, given.milliseconds / 1000,
    )  # fmt: skip
    distinct = given.conversations // given.group * given.prompt
    distinct += given.conversations * (given.turns - 1) * given.observation
    print("| slots | ahead | tokens/s | without | ratio | computed / distinct | copied | steps | without |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for slots in given.slots:
        ways: list[tuple[bool, int | None]] = [(False, 0)]
        ways += [(True, None if ahead == "none" else int(ahead)) for ahead in given.ahead]
        seconds: dict[Any, list[float]] = {way: [] for way in ways}
        last: dict[Any, Any] = {}
        for repeat in range(given.repeats + 1):  # the first compiles
            for way in ways:
                last[way] = rollout(case, slots, *way, given.threads)
                if repeat:
                    seconds[way].append(last[way][2])
        expected, base, _ = last[ways[0]]
        tokens = sum(int(episode.actions.sum()) for episode in expected)
        for way in ways[1:]:
            found, stats, _ = last[way]
            same = [episode.tokens for episode in found] == [episode.tokens for episode in expected]
            rates = [tokens / min(seconds[which]) for which in (way, ways[0])]
            computed = (stats.prompt_tokens + stats.continued_tokens) / distinct
            print(
                f"| {slots} | {way[1]} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[0] / rates[1]:.3f} | {computed:.3f} "
                f"| {stats.reused_tokens} | {stats.steps} | {base.steps} |" + ("" if same else " OTHER TOKENS"),
                flush=True,
            )


if __name__ == "__main__":
    main()
