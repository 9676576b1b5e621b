"""A run that optimises a text: its folder, its steps, and the held-out score before and after."""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.reporting.logging.writers import JsonlWriter, read_json
from jaxrl_llm.rewards import Reward
from jaxrl_llm.texts.candidates import State, state_of_json
from jaxrl_llm.texts.engine import Row, StepEngine, TextPrompts, means
from jaxrl_llm.texts.method import TextMethod, constructor
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.auto_dtype import with_dtype
from jaxrl_llm.training.config.checks import is_agent
from jaxrl_llm.training.config.json_text import to_dict
from jaxrl_llm.training.evaluation.evaluate import evaluate_as
from jaxrl_llm.training.folder.files import TEXT_SETTINGS, RunFolder
from jaxrl_llm.training.folder.lock import locked
from jaxrl_llm.training.folder.report import write_report
from jaxrl_llm.training.inputs import Inputs, read_inputs
from jaxrl_llm.training.notes import accuracy_line
from jaxrl_llm.training.run_model import load_model
from jaxrl_llm.utils.errors import InputError, require, several
from jaxrl_llm.utils.storage import is_url, replace_file

logger = logging.getLogger("jaxrl_llm.texts")

SHOWN = 256  # held-out completions that are written down for the report
Say = Callable[[str], object]


class Parts(NamedTuple):
    """What the steps of a run share."""

    config: TrainConfig
    method: TextMethod
    policy: Policy
    params: Params
    rewards: Sequence[Reward]
    prompts: TextPrompts
    reply_tokens: int

    def engine(self, step: int) -> StepEngine:
        """What the method asks in a step, from 0."""
        return StepEngine(self.policy, self.params, self.rewards, self.prompts, step, self.reply_tokens)


def optimise(
    config: TrainConfig, text: str, *, reply_tokens: int = 96, resume: bool = False, say: Say = print
) -> dict[str, Any]:
    """Optimise a text with a method of `texts.names()`, the configuration's algorithm, and return the run's summary.

    text: to begin with, in the place of a system prompt, or before the prompts of a model without a chat template.
    reply_tokens: of what the policy replies to the method's questions, at most. resume: go on with the run in the
    configuration's output, which has a text already. The weights stay as they are. After each step the state is in
    state.json, and what a step does depends on (seed, step) and the state only, so a run that is killed and resumed
    ends as one that is not. text.txt has the text, text.yaml the settings with which a run has it in its prompts.

    Raises InputError for bad input, before anything is written, and KeyboardInterrupt after Ctrl-C.
    """
    method = _checked(config, text, reply_tokens, resume)
    folder, begun = RunFolder(config.output), dict[str, Any]()
    if resume:
        begun = read_json(folder.path / "state.json")
        if not isinstance(begun.get("step"), int):
            raise InputError(f"{folder.path} holds no run of jaxrl texts (no state.json): leave out --resume")
        text, reply_tokens = str(begun.get("first_text")), int(begun["reply_tokens"])
    with read_inputs(config, resume=resume) as inputs:
        rows, held_out = _rows(inputs)
        config, of_dtype = with_dtype(config, resume)
        if of_dtype:
            say(of_dtype)
        policy, params, tokenizer = load_model(config, frozenset())
        prompts = TextPrompts(config, tokenizer, policy.config.max_positions, rows, text, held_out)
        if dropped := len(rows) + len(held_out) - len(prompts.rows) - len(prompts.held_out):
            say(f"{several(dropped, 'prompt')} with more than {prompts.limit} tokens left out")
        parts = Parts(config, method, policy, params, inputs.rewards, prompts, reply_tokens)
        state, first = method.init(text), 0
        if resume:
            state, first = state_of_json(begun.get("state")), begun["step"]
            if begun.get("digests") != inputs.digests:
                raise InputError(f"the prompts or rewards of {folder.path} have changed: put them back")
            folder.rewind(first)
        else:
            folder.create(to_dict(config))
        with nullcontext() if resume else locked(folder.path):
            own = {"first_text": text, "reply_tokens": reply_tokens, "digests": inputs.digests}
            return _run(parts, folder, state, first, own, say)


def _run(parts: Parts, folder: RunFolder, state: State, first: int, own: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """The steps of a run from `first`, between two evaluations; returns the summary. own: what state.json holds too."""
    config, method, summary = parts.config, parts.method, folder.read_summary()
    if config.eval_size and "eval_before" not in summary:
        _evaluate(parts, folder, summary, "eval_before", str(own["first_text"]), 0)
    say(f"before: {accuracy_line(summary['eval_before'])}")
    with closing(JsonlWriter(folder.metrics)) as metrics:
        if not first:
            _save(parts, folder, state, 0, own)
        for step in range(first, config.steps):
            engine = parts.engine(step)
            state = method.step(state, tasks_of(config, parts.prompts.rows, step), engine)
            found = {**engine.counts, "reward/mean": means(engine.all), "text/characters": len(method.text(state))}
            found |= {"text/candidates": len(state.candidates), "text/experiences": len(state.experiences)}
            metrics.write(step + 1, found)
            metrics.flush()
            _save(parts, folder, state, step + 1, own)
            say(f"step {step + 1}/{config.steps}: reward {found['reward/mean']:.3f}, text {method.text(state)!r}"[:200])
    text = method.text(state)
    _evaluate(parts, folder, summary, "eval_after", text, config.steps)
    say(f"after:  {accuracy_line(summary['eval_after'])}")
    totals = _totals(folder)
    summary |= {"steps": config.steps, "text": text, "counts": totals, "warnings": _warnings(totals)}
    folder.write(folder.summary, summary)
    for line in summary["warnings"]:
        say(f"warning: {line}")
    try:
        write_report(folder.path)
    except Exception as error:  # whatever it is: the run itself is complete and saved
        logger.warning("no report was written: %s: jaxrl report %s tries again", error, config.output)
    return summary


def tasks_of(config: TrainConfig, rows: Sequence[Row], step: int) -> list[Row]:
    """The tasks of a step: prompts_per_step of the rows, in epochs, each in an order of its own."""
    first = step * config.prompts_per_step
    found = list[Row]()
    for place in range(first, first + min(config.prompts_per_step, len(rows))):
        epoch, at = divmod(place, len(rows))
        found.append(rows[np.random.default_rng([config.seed, epoch]).permutation(len(rows))[at]])
    return found


def _evaluate(parts: Parts, folder: RunFolder, summary: dict[str, Any], name: str, text: str, step: int) -> None:
    """Greedy accuracy on the held-out prompts under a text, into the summary."""
    config = parts.config
    prompts = parts.prompts.under(text, parts.prompts.held_out)
    result = evaluate_as(config, parts.policy, parts.params, prompts, parts.rewards)
    judge = config.eval_reward or parts.rewards[0].name
    rows = [dict(row) for row in parts.prompts.held_out]
    summary[name] = result.figures
    folder.log_completions(step, name, parts.prompts.tokenizer, result.scored, rows, SHOWN, judge)
    folder.write(folder.summary, summary)


def _save(parts: Parts, folder: RunFolder, state: State, step: int, own: Mapping[str, Any]) -> None:
    """Write the text, and then the state, after which a resumed run begins."""
    text = parts.method.text(state)
    settings = json.dumps(parts.prompts.settings(text), ensure_ascii=False)  # JSON is YAML
    replace_file(folder.path / "text.txt", text + "\n")
    replace_file(folder.path / TEXT_SETTINGS, settings + "\n")
    folder.write(folder.path / "state.json", {**own, "step": step, "state": state.as_json()})


def _checked(config: TrainConfig, text: str, reply_tokens: int, resume: bool) -> TextMethod:
    """The method; InputError for settings that no run of texts can have."""
    build = constructor(config.algorithm)
    require("reply_tokens", reply_tokens, least=1, most=2**16)
    if not resume and not text.strip():
        raise InputError("the text to begin with is empty: give one, such as --text 'Answer the question.'")
    if config.system_prompt is not None:
        raise InputError("system_prompt is the text that is optimised: give it as the text to begin with (--text)")
    if is_agent(config):
        raise InputError(
            "an environment or tools are given, but texts are optimised for single answers: leave them out"
        )
    if not config.eval_size:
        raise InputError("eval_size is 0, so that nothing is held out: a text is judged on held-out prompts")
    if is_url(config.output):
        raise InputError(f"output is {config.output}: give a folder of this machine")
    return build(**config.hyperparameters)


def _rows(inputs: Inputs) -> tuple[list[Row], list[Row]]:
    training, held_out = inputs.prompts.training, inputs.prompts.held_out
    if not isinstance(training, list):
        raise InputError(f"there are {len(training)} prompts, more than texts are optimised on: lower num_prompts")
    if not held_out:
        raise InputError("there are no held-out prompts: give eval_prompts, or an eval_size that the data have")
    return list(training), list(held_out)


def _totals(folder: RunFolder) -> dict[str, int]:
    totals = dict[str, int]()
    for line in folder.metrics.read_text().splitlines():
        for name, value in json.loads(line).items():
            if name.startswith(("samples/", "judge/", "texts/")):
                totals[name] = totals.get(name, 0) + int(value)
    return dict(sorted(totals.items()))


def _warnings(totals: Mapping[str, int]) -> list[str]:
    found, proposed = list[str](), totals.get("texts/proposed", 0)
    if (asked := totals.get("judge/verdicts", 0)) and totals["judge/unreadable"] == asked:
        found.append(f"the judge gave no readable verdict of {several(asked, 'question')}: no text could win")
    names = ("empty", "duplicates", "too_long", "unreadable")
    if proposed and sum(totals.get(f"texts/{name}", 0) for name in names) >= proposed:
        found.append(f"all {several(proposed, 'proposal')} were empty, known, too long or unreadable")
    return found


def resume(path: str, *, steps: int | None = None, say: Say = print) -> dict[str, Any]:
    """Go on with a run, perhaps to another number of steps, see `optimise`."""
    folder = RunFolder(path)
    config = folder.read_config()
    if steps is not None and steps != config.steps:
        if steps < (done := int(read_json(folder.path / "state.json").get("step", 0))):
            raise InputError(f"--steps is {steps}, but the run has taken {done} steps: give a larger number")
        config = dataclasses.replace(config, steps=steps)
        folder.write(folder.config, {**read_json(folder.config), "steps": steps})
        folder.write(folder.summary, {k: v for k, v in folder.read_summary().items() if k == "eval_before"})
    return optimise(config, "", resume=True, say=say)
