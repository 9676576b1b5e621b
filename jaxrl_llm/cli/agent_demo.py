"""What `jaxrl agent-demo` runs: SmolLM2-135M-Instruct learns to solve word problems with a calculator.

An episode has two turns. The policy reads two worked examples and a question with a product, a difference or a sum. If
it replies CALC(EXPRESSION), the calculator answers, and the next reply is the answer; any other reply is the answer
itself. The reward is 1 if the last number of the answer is right. The examples show a product and a difference, so
that which operation a question needs, and that of sums, is learned from the reward. No held-out question is a training
question. The method is DAPO without its second round of sampling, with the entropy bonus of `jaxrl demo`.
"""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from jaxrl_llm.cli.demo import dapo_with_entropy_bonus, print_summary
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.environments.tools.calculator import calculator
from jaxrl_llm.rewards.verifiers import number_match
from jaxrl_llm.training.config import OptimizerConfig, TrainConfig
from jaxrl_llm.training.loop import train
from jaxrl_llm.utils.errors import error_line

PROBLEMS = (
    ("There are {a} boxes with {b} eggs each. How many eggs are there?", "{a} * {b}"),
    ("A shop had {a} eggs and sold {b}. How many are left?", "{a} - {b}"),
    ("Ann has {a} eggs and finds {b} more. How many has she now?", "{a} + {b}"),
)
SHOWN = (0, 217, 34), (1, 640, 85)  # the worked examples: problem, a, b
COUNT = 1024  # questions, held-out ones included


def _question(problem: int, a: int, b: int) -> tuple[str, str]:
    """A question, and the expression that answers it."""
    text, expression = PROBLEMS[problem]
    return text.format(a=a, b=b), expression.format(a=a, b=b)


def questions(seed: int, count: int = COUNT) -> list[dict[str, Any]]:
    """Rows with a conversation as their prompt, and the answer: all different, each problem as often as the others."""
    conversation = [{"role": "system", "content": "You have a calculator."}]
    for given in SHOWN:
        text, expression = _question(*given)
        result = calculator(expression)
        for role, said in zip(("user", "assistant") * 2, (text, f"CALC({expression})", result, result), strict=True):
            conversation.append({"role": role, "content": said})
    random, rows = Random(seed), dict[tuple[int, int, int], dict[str, Any]]()
    while len(rows) < count:
        given = len(rows) % len(PROBLEMS), random.randint(100, 999), random.randint(12, 99)
        text, expression = _question(*given)
        if given not in SHOWN:
            prompt = [*conversation, {"role": "user", "content": text}]
            rows[given] = {"prompt": prompt, "answer": calculator(expression)}
    return list(rows.values())


class Calculator:
    """An environment of the protocol: it calculates what is in CALC(...), and takes any other reply as the answer."""

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.answer = str(row["answer"])

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The question is in the prompt already."""
        return Observation()

    def step(self, reply: Reply) -> Observation:
        """The result of a call; else the reward of an answer, which ends the episode."""
        text = reply.message["content"].strip()
        call = re.fullmatch(r"CALC\((.*)\)", text)
        if call is None:
            return Observation(reward=number_match([text], [self.answer])[0], done=True)
        try:
            result = calculator(call[1])
        except RuntimeError as error:
            result = error_line(error)
        return Observation([{"role": "user", "content": result}])


def agent_demo_config(model: str, seed: int, output: str, steps: int) -> TrainConfig:
    """The demo's settings. Its questions are beside the run's folder."""
    return TrainConfig(
        model=model,
        output=output,
        seed=seed,
        steps=steps,
        prompts=f"{output.rstrip('/')}.jsonl",
        environment=f"{__name__}:Calculator",
        turns=2,
        rewards=("environment",),
        prompts_per_step=8,
        group_size=8,
        max_new_tokens=20,
        hyperparameters={"rounds": 1},
        minibatches=2,
        remat=False,
        optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=4),
        eval_size=96,
        checkpoint_every=0,
        log_completions_every=5,
    )


def run(model: str, seed: int, output: str, steps: int) -> dict[str, Any]:
    """Train, then print the two accuracies and some episodes before and after. Returns the run's summary."""
    begun, cpu = time.monotonic(), time.process_time()
    config = agent_demo_config(model, seed, output, steps)
    file = Path(config.prompts)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in questions(seed)))
    summary = train(config, algorithm=dapo_with_entropy_bonus)
    minutes, used = (time.monotonic() - begun) / 60, (time.process_time() - cpu) / 60
    took = f"{minutes:.1f} minutes ({used:.1f} of processor time)"
    print_summary(summary, Path(output), lambda prompt: str(prompt).rpartition("user: ")[2], took)
    return summary
