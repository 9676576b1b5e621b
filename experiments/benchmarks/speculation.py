"""Speculation in the tail of a rollout of very uneven lengths, against the decode loop alone.

    python experiments/benchmarks/speculation.py [--prompts questions] [--width 4] [--repeats 3]

The long-tailed case of `rollout.py`: completions with log-normal limits on fewer slots, here of SmolLM2-135M over
sums in words (`questions`) or over random ids (`random`). Each repeat samples twice over the same prompts, epoch 0 and
epoch 1, with another seed in each, so that no completion of an epoch is one of the other; and each without and with
speculation, in turns. The tail begins when no request waits and one slot in eight is still decoding. Tokens without
and with speculation are compared. Prints the seconds of the tails and of the whole, and their ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
from rollout_tail import endless, tail_limits
from rollout_worker import random_prompts

from jaxrl_llm import load_policy
from jaxrl_llm.sampling.capacity import size_for
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.engine import CHUNK, Engine
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.speculative.tail import most_rows
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.weights import take_weights

LOOK = 8  # steps between looks at how many rows are left, before the tail


def questions(tokenizer: Any, count: int) -> list[list[int]]:
    """Prompts of word problems, with the model's chat template."""
    number = random.Random(0)
    out = []
    for _ in range(count):
        a, b, c = (number.randrange(2, 30) for _ in range(3))
        text = (
            f"A shop sells boxes of {a} pencils. Mia buys {b} boxes and gives {c} pencils to her brother. How many "
            "pencils does she have now? Think step by step, and check every step twice."
        )
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        out.append(list(ids["input_ids"] if hasattr(ids, "keys") else ids))
    return out


def run(
    policy: Any, weights: Any, requests: list[Request], slots: int, settings: DrawSettings, width: int, drafts: Drafts
) -> Any:
    """(seconds of the tail, of the whole, completions by index, counts)."""
    stats, done = Stats(), {}
    size = size_for(requests, slots)
    begin = time.perf_counter()
    engine = Engine(
        policy, weights, settings, size, stats=stats, speculative_tokens=width, drafts=drafts if width else None
    )
    for request in requests:
        engine.submit(request)
    tail = begin
    while engine.busy:
        placed, waiting = engine.schedule.placed, engine.schedule.queue
        in_tail = not waiting and placed and len(placed) <= most_rows(size, weights.mesh)
        if not in_tail:
            tail = time.perf_counter()
        done |= {c.index: c for c in engine.step(CHUNK if in_tail else LOOK)}
    end = time.perf_counter()
    return end - tail, end - begin, done, stats


def main() -> None:
    """Print a line for each epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", choices=["questions", "random"], default="questions")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--median", type=float, default=24)
    parser.add_argument("--longest", type=float, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    policy, params, tokenizer = load_policy(given.model)
    number = -(-given.count // given.group)
    prompts = questions(tokenizer, number)
    if given.prompts == "random":
        prompts = random_prompts(number, 32, policy.config.vocab_size)
    limits = tail_limits(given.count, given.median, given.longest, 0)
    requests = [
        Request(tuple(prompts[i // given.group]), limit, i // given.group, i % given.group)
        for i, limit in enumerate(limits)
    ]
    weights = take_weights(policy, params)
    found: dict[int, list[Any]] = {0: [], 1: []}
    for repeat in range(given.repeats + 1):  # the first compiles
        drafts = Drafts()
        for epoch in range(2):
            settings = endless(2 * repeat + epoch)._replace(temperature=jnp.float32(given.temperature))
            plain = run(policy, weights, requests, given.slots, settings, 0, Drafts())
            fast = run(policy, weights, requests, given.slots, settings, given.width, drafts)
            same = sum(np.array_equal(plain[2][i].tokens.token, fast[2][i].tokens.token) for i in range(len(requests)))
            if repeat:
                found[epoch].append((plain, fast, same))
                print(
                    f"epoch {epoch}: tail {plain[0]:.2f} and {fast[0]:.2f} s, whole {plain[1]:.2f} and {fast[1]:.2f} s",
                    flush=True,
                )
    for epoch, runs in found.items():
        tails = [plain[0] / fast[0] for plain, fast, _ in runs]
        wholes = [plain[1] / fast[1] for plain, fast, _ in runs]
        drafted, accepted = (sum(getattr(fast[3], name) for _, fast, _ in runs) for name in ("drafted", "accepted"))
        print(
            f"epoch {epoch}: tail {statistics.median(p[0] for p, _, _ in runs):.2f} s without, "
            f"{statistics.median(f[0] for _, f, _ in runs):.2f} s with, {statistics.median(tails):.2f} times as fast "
            f"({min(tails):.2f} to {max(tails):.2f}); whole {statistics.median(wholes):.2f} ({min(wholes):.2f} to "
            f"{max(wholes):.2f}); steps {runs[0][0][3].steps} and {runs[0][1][3].steps}; drafts right "
            f"{accepted}/{drafted}; same completions {sum(same for *_, same in runs)} of {len(requests) * len(runs)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
