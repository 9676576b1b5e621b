"""The calculator task of `make agent-demo`, once as an environment and once by an agent with a client of its own.

    python -m experiments.harness --output /tmp/harness

The agent is written with the package `openai`, knows nothing of training, and plays each episode against the policy
behind an endpoint (`--harness`). All else is the same: questions, method, settings, seeds and held-out questions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from jaxrl_llm.cli.agent_demo import agent_demo_config, questions
from jaxrl_llm.cli.demo import dapo_with_entropy_bonus
from jaxrl_llm.environments.tools.calculator import calculator
from jaxrl_llm.rewards.verifiers import number_match
from jaxrl_llm.training.loop import train
from jaxrl_llm.training.notes import accuracy_line
from jaxrl_llm.utils.errors import error_line

MODEL, STEPS = "smollm2-135m", 8
WAYS: dict[str, dict[str, Any]] = {
    "environment": {},
    "harness": {"environment": None, "harness": f"{Path(__file__).resolve()}:play"},
}


async def play(base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
    """An episode of `agent_demo.Calculator`: at most one call, then an answer; its reward."""
    messages = list(row["prompt"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = (answer.choices[0].message.content or "").strip()
            call = re.fullmatch(r"CALC\((.*)\)", said)
            if call is None:
                return number_match([said], [str(row["answer"])])[0]
            try:
                result = calculator(call[1])
            except RuntimeError as error:
                result = error_line(error)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
    return 0.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for way in options.ways:
            begin = time.monotonic()
            config = agent_demo_config(MODEL, seed, str(options.output / f"{way}-{seed}"), options.steps)
            Path(config.prompts).write_text("".join(json.dumps(row) + "\n" for row in questions(seed)))
            summary = train(dataclasses.replace(config, **WAYS[way]), algorithm=dapo_with_entropy_bonus)
            for when in ("eval_before", "eval_after"):
                print(f"{way}, seed {seed}, {when}: {accuracy_line(summary[when])}", flush=True)
            print(f"{way}, seed {seed}: {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
