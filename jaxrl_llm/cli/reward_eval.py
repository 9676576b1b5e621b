"""The command jaxrl reward-eval: how often a reward model prefers the right answers."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxrl_llm.cli.eval_and_sample import check_output_file
from jaxrl_llm.cli.options import Checks, parse, positional
from jaxrl_llm.core.arguments.ranges import Range
from jaxrl_llm.utils.errors import InputError, several, shown


def reward_eval_command(arguments: list[str]) -> int:
    """Accuracy of a reward model on prompts with right and wrong answers (chosen and rejected), with 95 % intervals."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: positional("MODEL")  # type: ignore[valid-type]
        """A reward model's folder, or its name on the hub."""
        prompts: str = ""
        """Rows with prompt, chosen and rejected (texts, messages, or lists of these), and maybe subset and id."""
        size: Annotated[int | None, Range(least=1, most=2**31 - 1)] = None
        """Number of rows."""
        dtype: Literal["float32", "bfloat16"] = "float32"
        """Of weights and computation."""
        output: str | None = None
        """JSON file for the results."""

    args = parse(Arguments, arguments, "jaxrl reward-eval", reward_eval_command.__doc__, _checks)
    from jaxrl_llm.data.load import load_prompts
    from jaxrl_llm.distributed import mesh_of
    from jaxrl_llm.reporting.reward_accuracy import accuracies
    from jaxrl_llm.rewards.models.steps import model_reward, on_devices
    from jaxrl_llm.rewards.specs import MODEL, ModelName

    rows = load_prompts(args.prompts, limit=args.size)
    answers = [answers_of(row, f"{args.prompts}, row {number}") for number, row in enumerate(rows, start=1)]
    (reward,) = on_devices([model_reward(ModelName(MODEL, (), args.model), 1.0)], mesh_of(""), args.dtype)
    items, unscored = _scored(reward.function, rows, answers)
    if unscored:
        print(f"{several(unscored, 'prompt')} with an answer that was not scored left out")
    found = accuracies(items)
    for one in found:
        low, rate, high = (100 * share for share in (one.low, one.accuracy, one.high))
        prompts, name = several(one.prompts, "prompt"), one.subset or args.prompts
        said = f"{name}: {rate:.1f} % ({low:.1f} to {high:.1f}) of {prompts}"
        ties = f", {several(one.ties, 'tie')}" if one.ties else ""
        print(said + ties + ("" if one.score == one.accuracy else f", score {100 * one.score:.1f}"))
    if args.output:
        figures = {"unscored": unscored, "subsets": [one._asdict() for one in found]}
        Path(args.output).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _checks(args: Any) -> Checks:
    yield partial(check_output_file, args.output)
    yield partial(require_prompts, args.prompts)


def require_prompts(source: str) -> None:
    """InputError where none are given."""
    if not source:
        raise InputError("--prompts is missing: give rows with prompt, chosen and rejected")


def answers_of(row: Mapping[str, Any], where: str) -> tuple[list[Any], list[Any]]:
    """The right and the wrong answers of a row. InputError for a row that lacks either."""
    from jaxrl_llm.data.chat.encode import is_conversation

    def listed(name: str) -> list[Any]:
        value = row.get(name)
        several = isinstance(value, list | tuple) and not is_conversation(value)
        found = list(value or ()) if several else [value]
        if not found or not all(isinstance(one, str) or is_conversation(one) for one in found):
            raise InputError(f"{where}: {name} is {shown(value)}, but must be an answer, or a list of them")
        return found

    return listed("chosen"), listed("rejected")


def _scored(
    function: Any, rows: Sequence[Mapping[str, Any]], answers: Sequence[tuple[list[Any], list[Any]]]
) -> tuple[list[Any], int]:
    """The scores of all answers, and how many prompts are left out as one of theirs was not scored.

    An answer of messages that begins with those of the prompt is the whole conversation.
    """
    from jaxrl_llm.reporting.reward_accuracy import Rated

    prompts, texts = list[Any](), list[Any]()
    for row, (right, wrong) in zip(rows, answers, strict=True):
        for answer in (*right, *wrong):
            whole = not isinstance(answer, str) and answer[0]["role"] != "assistant"
            prompts.append([] if whole else row["prompt"])
            texts.append(answer)
    scores = iter(function(prompts, texts))
    items, unscored = [], 0
    for row, (right, wrong) in zip(rows, answers, strict=True):
        of_right, of_wrong = ([next(scores) for _ in some] for some in (right, wrong))
        if None in (*of_right, *of_wrong):
            unscored += 1
        else:
            items.append(Rated(of_right, of_wrong, str(row.get("subset") or ""), str(row.get("id") or "")))
    return items, unscored
