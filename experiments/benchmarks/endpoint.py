"""The endpoint of harnesses against conversations without it: python experiments/benchmarks/endpoint.py

32 episodes of 5 calls are played at once, by the `openai` package's async client in another process against the
endpoint of `server.harness`, and by an environment of this process that says the same. Both ways run in turns, with the
same prompts and noise, so that they sample the same tokens, which is checked; the ratio is that of the best times,
because other load on the machine only ever adds to them.

Replies must end before their limit, where an episode would end. So every --tokens-th token of the vocabulary ends one:
of weights that know nothing a reply has as many tokens on the average.

What needs JAX is imported where it is used: the other process goes without.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

CALLS = 5
PROMPT, NEXT = "Tell a short story about number {}.", "Go on."


async def client() -> None:
    """The other process: an episode for each line of stdin, {"id", "url", "key", "row"}, and a line for its end."""
    import openai

    http, lines = openai.DefaultAsyncHttpxClient(), asyncio.StreamReader(limit=2**24)
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    playing = set[asyncio.Task[None]]()

    async def play(asked: dict[str, Any]) -> None:
        policy = openai.AsyncOpenAI(base_url=asked["url"], api_key=asked["key"], http_client=http, max_retries=0)
        messages: Any = [{"role": "user", "content": asked["row"]["prompt"]}]
        ended = None
        try:
            for _ in range(CALLS):
                answer = await policy.chat.completions.create(model="policy", messages=messages)
                messages += [answer.choices[0].message.model_dump(include={"role", "content"})]
                messages += [{"role": "user", "content": NEXT}]
        except openai.OpenAIError as error:
            ended = repr(error)
        print(json.dumps({"id": asked["id"], "error": ended}), flush=True)

    while line := await lines.readline():
        task = asyncio.ensure_future(play(json.loads(line)))
        playing.add(task)
        task.add_done_callback(playing.discard)


class Client:
    """The other process, as a harness: `play`."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--client"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.numbers, self.ends, self.lock = itertools.count(), dict[int, Future[Any]](), threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            found = json.loads(line)
            self.ends.pop(found["id"]).set_result(found["error"])

    async def play(self, url: str, key: str, row: dict[str, Any]) -> float:
        """An episode."""
        end = Future[Any]()
        with self.lock:
            number = next(self.numbers)
            self.ends[number] = end
            assert self.process.stdin is not None
            print(json.dumps({"id": number, "url": url, "key": key, "row": row}), file=self.process.stdin, flush=True)
        error = await asyncio.wrap_future(end)
        if error is not None:
            raise RuntimeError(error)
        return 0.0

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


class Here:
    """The environment that says what the client does."""

    tools = ()

    def __init__(self) -> None:
        self.calls = 0

    async def reset(self, row: Any, seed: int) -> Any:
        """Nothing beside the row's prompt."""
        from jaxrl_llm.environments.protocol import Observation

        return Observation()

    async def step(self, reply: Any) -> Any:
        """What is said next."""
        from jaxrl_llm.environments.protocol import Observation

        self.calls += 1
        return Observation(({"role": "user", "content": NEXT},), done=self.calls == CALLS)

    async def close(self) -> float:
        """The same reward for all."""
        return 0.0


class Played(NamedTuple):
    """A step's episodes."""

    seconds: float
    tokens: int  # that were sampled
    replies: int
    rows: Counter[tuple[int, ...]]


def played(policy: Any, params: Any, make: Any, given: argparse.Namespace) -> Played:
    """Play the episodes of a step with environments that `make` makes."""
    import jax
    import numpy as np

    from jaxrl_llm.data.chat.rendering import PromptFormat
    from jaxrl_llm.data.prompt_set import PromptSet
    from jaxrl_llm.environments.adapters import environments
    from jaxrl_llm.rewards import Reward
    from jaxrl_llm.rewards.specs import environment
    from jaxrl_llm.rollouts.agents.program import agent
    from jaxrl_llm.rollouts.runtime.source import experience
    from jaxrl_llm.rollouts.runtime.source_setup import Experience
    from jaxrl_llm.rollouts.runtime.sources import same_prompts
    from jaxrl_llm.sampling.sampler import SamplingConfig

    format = PromptFormat("chat" if policy.tokenizer.chat_template else "plain")
    rows = [{"prompt": PROMPT.format(number)} for number in range(given.episodes)]
    every = np.arange(len(rows), dtype=np.int32)
    source = experience(
        Experience(
            policy, PromptSet(list(rows), [[0] for _ in rows]), (Reward(environment),),
            same_prompts(every),
            SamplingConfig(max_new_tokens=given.limit, slots=given.episodes),
            agent(environments(make), CALLS + 1, format=format, ahead=None if given.ahead < 0 else given.ahead),
            prompts_per_step=len(rows), group_size=1, time_limit=600.0,
        )
    )  # fmt: skip
    began = time.perf_counter()
    found, _ = source.next(source.init(), params, jax.random.key(given.seed), 0)
    seconds = time.perf_counter() - began
    batch = found.scored.batch
    turn, tokens = np.asarray(batch.turn), np.asarray(batch.tokens)
    ids = Counter(tuple(own[of >= 0].tolist()) for own, of in zip(tokens, turn, strict=True))
    return Played(seconds, int((turn >= 0).sum()), int((turn.max(1) + 1).sum()), ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="smollm2-135m", help="as for jaxrl train, such as tests/vectors/llama_tied")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24, help="of a reply, on the average")
    parser.add_argument("--limit", type=int, default=512, help="most tokens of a reply")
    parser.add_argument("--ahead", type=int, default=4, help="--environment-steps of jaxrl train; -1: as they answer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if given.client:
        asyncio.run(client())
        return
    from jaxrl_llm import load_policy
    from jaxrl_llm.server.harness import harness

    policy, params, _ = load_policy(given.model, dtype=given.dtype)
    ends = tuple(range(0, policy.config.vocab_size, given.tokens))
    policy = replace(policy, config=replace(policy.config, max_positions=8192, eos_token_ids=ends))
    other = Client()
    ways = {"endpoint": harness(other.play), "here": Here}
    times: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Played] = {}
    try:
        for repeat in range(given.repeats + 1):  # the first compiles
            for name, make in ways.items():
                found[name] = played(policy, params, make, given)
                times[name] += [found[name].seconds] if repeat else []
    finally:
        other.close()
    same = found["endpoint"].rows == found["here"].rows
    rates = {name: found[name].tokens / min(times[name]) for name in ways}
    print("| model | episodes | calls | tokens | rows | endpoint, tokens/s | here, tokens/s | ratio | same tokens |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {given.model} | {given.episodes} | {found['endpoint'].replies} | {found['endpoint'].tokens} "
        f"| {found['endpoint'].rows.total()} | {rates['endpoint']:.1f} | {rates['here']:.1f} "
        f"| {rates['endpoint'] / rates['here']:.3f} | {'yes' if same else 'NO'} |"
    )


if __name__ == "__main__":
    main()
