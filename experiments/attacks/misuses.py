"""Misuses of the Python API: each must end in one line that names what is wrong, before anything is compiled.

A row is an expression, which is also its name, and a regular expression that a clear message holds; see `misuses_*`.
`FINE` are expressions at the edge of what is allowed, which must give True.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from experiments.attacks import Outcome
from experiments.attacks.misuse_tools import Tools, make_tools
from experiments.attacks.misuses_batches import BATCHES
from experiments.attacks.misuses_inputs import INPUTS
from experiments.attacks.misuses_methods import METHODS
from experiments.attacks.misuses_names import OTHER_NAMES
from experiments.attacks.misuses_plans import PLANS
from experiments.attacks.misuses_sampling import SAMPLING
from experiments.attacks.misuses_training import TRAINING
from experiments.attacks.misuses_worlds import WORLDS

MISUSES: dict[str, str] = {**BATCHES, **METHODS, **SAMPLING, **TRAINING, **INPUTS, **OTHER_NAMES, **WORLDS, **PLANS}
FINE: tuple[str, ...] = (
    "apply(scored.replace(reward=np.array([1.0, 0.0, 0.0, 1.0]))).advantages.shape == (4, 6)",
    "apply(scored.replace(reward=jnp.array([1, 0, 0, 1]))).advantages.shape == (4, 6)",
    "apply(scored.replace(reward=jnp.array([True, False, False, True]))).advantages.shape == (4, 6)",
    "apply(jax.tree.map(np.asarray, scored)).advantages.shape == (4, 6)",
    "bool(jnp.isfinite(apply(scored.replace(reward=jnp.full(4, jnp.nan))).advantages).all())",
    "jax.tree.map(lambda x: x.shape, scored).tokens == (4, 6)",
    "jax.tree.map(lambda x: None, scored).reward is None",
    "isinstance(jax.eval_shape(apply, scored).advantages, jax.ShapeDtypeStruct)",
    "algorithms.get('grpo', clip_low=np.float32(0.1), kl_coefficient=0).needs == frozenset()",
    "algorithms.get('grpo', clip_low=jnp.float32(0.1)).needs == {'reference_logp'}",
    "algorithms.grpo(0.1, 0.3).needs == {'reference_logp'}",
    "isinstance(chain(), Transform)",
    "len(tools.asked(['Hi', [5, 6]]).requests) == 2",
    "len(tools.asked([[1, 2]], group_size=np.int64(2), top_k=2**31 - 1, temperature=1).requests) == 2",
    "len(tools.asked(([1, 2], [3]), key=jax.random.PRNGKey(0)).requests) == 2",
    "tools.asked([[1]], stop_token_ids=[-1], prompt_ids=np.array([3])).requests[0].prompt_id == 3",
    "tools.asked([[1], [2]], prompt_ids=[7, 7]).requests[1].prompt_id == 7",
    "TrainConfig(rewards=(len,)).rewards == ('python:len',)",
    "TrainConfig(optimizer={'learning_rate': 3e-6}).optimizer == OptimizerConfig(learning_rate=3e-6)",
    "replace(TrainConfig(), template_options={'thinking': False}).format.options == {'thinking': False}",
    "prepare(chain(group_relative(), revised(lambda b: -b.advantages)), ((), ()), scored)[1].advantages.ndim == 2",
    "statistics.wilson_interval(0, 0) == (0.0, 1.0)",
)
NAMES: tuple[str, ...] = (*MISUSES, *FINE)


def run(names: Sequence[str] | None = None, limit: float = 60.0) -> list[Outcome]:
    """The verdict of each row of these names (None: all). limit: seconds of a row."""
    tools = make_tools()
    try:
        _ = tools.names  # imports and the model are not the rows' time
        return [_run_row(name, tools, limit) for name in (NAMES if names is None else names)]
    finally:
        tools.close()


def _run_row(name: str, tools: Tools, limit: float) -> Outcome:
    found: list[tuple[str, str]] = []
    start = time.perf_counter()
    # A row that hangs is left behind in its thread, which does not keep the process alive.
    thread = threading.Thread(target=lambda: found.append(judged(name, tools)), daemon=True)
    thread.start()
    thread.join(limit)
    verdict, said = found[0] if found else ("hang", f"no end within {limit:g} s")
    return Outcome("misuses", name, verdict, time.perf_counter() - start, said)


def judged(name: str, tools: Tools) -> tuple[str, str]:
    """Evaluate a row: its verdict, and what was said."""
    from jaxrl_llm.utils.errors import InputError

    try:
        value = eval(name, dict(tools.names))
    except InputError as error:
        return ("wrong", str(error)) if name in FINE else judge(str(error), MISUSES[name])
    except BaseException as error:  # a misuse may end in anything, such as SystemExit
        return "unclear", " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if name in FINE:
        return ("clear", "fine") if value is True else ("wrong", f"gave {value!r}"[:300])
    return "silent", f"gave {type(value).__name__}"


def judge(message: str, pattern: str) -> tuple[str, str]:
    """Whether a message is one line of at most 400 characters that names what is wrong."""
    said = " ".join(message.split())[:400]
    if len(message.splitlines()) != 1 or len(message) > 400:
        return "unclear", f"{len(message.splitlines())} lines, {len(message)} characters: {said}"
    if not re.search(pattern, message, re.IGNORECASE):
        return "unclear", f"does not name {pattern}: {said}"
    return "clear", said


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each row that is not clear, for people."""
    lines: list[Any] = [f"{o.verdict:8} {o.seconds:5.1f} s  {o.name}\n         {o.said}" for o in outcomes]
    return "\n".join(line for o, line in zip(outcomes, lines, strict=True) if o.verdict != "clear")
