"""What can be checked of a run before all of its data is read: it takes a second, and tells all mistakes together."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

from jaxrl_llm.core.by_value import ByValue
from jaxrl_llm.data.generate import COLUMNS, check_task, games
from jaxrl_llm.data.load import open_prompts
from jaxrl_llm.data.sources.random_access import RandomAccess
from jaxrl_llm.models.io.folders import check_source
from jaxrl_llm.rewards import Reward, close_rewards, get_rewards, require_columns
from jaxrl_llm.rewards.parsing.final_answers import answer_text
from jaxrl_llm.rewards.workers.calling import ENVIRONMENTS
from jaxrl_llm.rewards.workers.loading import READ_ANSWERS
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.checks import GENERATED, is_agent
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.utils.errors import InputError, gather, require_choice, shown
from jaxrl_llm.utils.value_digest import value_digest

Rows = list[dict[str, Any]]


def checked_rewards(
    config: TrainConfig, source: RandomAccess | None, folder: str, *checks: Callable[[], Any]
) -> list[Reward]:
    """The rewards of a run. Raises InputError with all problems of these, the first prompts and the other checks."""
    made: list[Reward] = []
    heads: list[Rows] = []

    def columns() -> None:
        if made and heads:  # both could be read
            check_rewards(made, available_columns(config, *heads), config.eval_reward)

    def head(path: str | RandomAccess | None) -> None:
        if path is None and not (path := prompt_source(config)):
            return heads.append(games(1, config.seed))
        name = path if isinstance(path, str) else config.prompts
        if isinstance(path, str) and path.startswith(GENERATED):
            check_task(path.removeprefix(GENERATED))
            return heads.append([dict.fromkeys(COLUMNS)])
        heads.append(list(open_prompts(path, limit=1, **prompt_options(config, name))))

    sources: list[Any] = [source]
    sources += [config.eval_prompts] if config.eval_size and config.eval_prompts is not None else []
    with closing_on_error(made):
        first = (partial(head, path) for path in sources)
        gather(*first, lambda: made.extend(make_rewards(config, folder)), columns, *checks)
    return made


@contextmanager
def closing_on_error(rewards: Sequence[Reward]) -> Iterator[None]:
    """Context manager that closes the rewards if an exception leaves it."""
    try:
        yield
    except BaseException:
        close_rewards(rewards)
        raise


def check_model(model: str) -> None:
    """InputError if the model is the folder of a run, or cannot be a model."""
    if RunFolder(model, reading=True).is_run():
        raise InputError(f"model is {model!r}, which is a run: write its model with jaxrl export first, and give that")
    check_source(model)


def check_rewards(rewards: Sequence[Reward], columns: set[str], judge: str | None) -> None:
    """InputError if a reward needs a column that is missing, or `judge` is not a reward."""
    names = [one.name for one in rewards]
    named = [] if judge is None else [partial(require_choice, "reward to judge by", judge, names)]
    gather(partial(require_columns, rewards, columns), *named)


def check_answers(rewards: Sequence[Reward], *sets: Sequence[dict[str, Any]]) -> None:
    """InputError for an answer that a built-in reward cannot read, with its row, before a model is loaded.

    Rows that are read as they are drawn are not looked at: such a reward then fails on their completions.
    """
    if not any(getattr(reward.function, "name", "") in READ_ANSWERS for reward in rewards):
        return
    for rows in sets:
        for number, row in enumerate(rows if isinstance(rows, list) else (), start=1):
            try:
                answer_text(row.get("answer"))
            except InputError as error:
                raise InputError(f"row {number}, {shown(row.get('prompt'))}: {error}") from None


def check_conversations(config: TrainConfig, rewards: Sequence[Reward], *sets: Sequence[dict[str, Any]]) -> None:
    """InputError where a reward model cannot read what the run will ask: see `refuses` of `ModelReward`."""
    prompts = [rows[0]["prompt"] for rows in sets if isinstance(rows, list) and rows]
    for reward, prompt in product(rewards, prompts):
        if why := getattr(reward.function, "refuses", lambda *_: "")(prompt, is_agent(config)):
            raise InputError(f"the reward model {reward.name} {why}")


def make_rewards(config: TrainConfig, folder: str = ".") -> list[Reward]:
    """The reward functions of a run; relative files and modules are looked up from `folder`.

    Raises InputError for rewards that cannot be loaded, or share a name.
    """
    rewards = []
    for spec, reward in zip(config.rewards, get_rewards(config.rewards, folder), strict=True):
        value = spec.value if isinstance(spec, ByValue) else None
        changes: dict[str, Any] = {} if value is None else {"digest": value_digest(value)}
        if not isinstance(value, Reward):  # which has its own
            changes |= {"time_limit": config.reward_time_limit, "default": config.reward_default}
        rewards.append(dataclasses.replace(reward, **changes))
    names = [reward.name for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        close_rewards(rewards)
        raise InputError(f"two rewards are named {min(twice)!r}, so their metrics would clash: rename one of them")
    return rewards


def available_columns(config: TrainConfig, *sets: Sequence[dict[str, Any]]) -> set[str]:
    """Arguments available to reward functions: columns that all sets have, and those that scoring adds."""
    rows = [some[0] for some in sets if some]
    with_world = config.world or config.rollout != TrainConfig.rollout  # a program may have environments too
    added = {"prompts", "completion_ids"} | ({ENVIRONMENTS} if with_world else set())
    return (set.intersection(*(set(row) for row in rows)) | added) - {"prompt"}


def prompt_source(config: TrainConfig) -> str:
    """The source of a run's training prompts; "" for games of its environment. InputError where there is none."""
    if config.prompts or config.world or (config.tools and config.system_prompt):
        return config.prompts
    if config.tools:
        raise InputError(
            "tools are given, but nothing is asked: give prompts, or a system_prompt that says what to use them for"
        )
    raise InputError(
        "prompts is missing: give a .jsonl, .json or .parquet file, a folder of them, a data set of the Hugging Face "
        "hub (OWNER/NAME:CONFIG/SPLIT) or a generated task, such as --prompts reasoning-gym:chain_sum"
    )


def prompt_options(config: TrainConfig, source: str) -> dict[str, Any]:
    """How the prompts of a source are read, as arguments of `load_prompts`."""
    options = {name: read_value(text, f"task_options.{name}") for name, text in config.task_options.items()}
    return {
        "seed": config.seed, "prompt_column": config.prompt_column, "prompt_template": config.prompt_template,
        "answer_column": config.answer_column,
        # The options belong to the generated task; held-out prompts may come from a file.
        "task_options": options if source == config.prompts or source.startswith(GENERATED) else None,
    }  # fmt: skip


def read_value(text: Any, name: str = "a value") -> Any:
    """The value of a text from the command line, parsed as YAML; InputError if it is not valid YAML."""
    import yaml

    try:
        return yaml.safe_load(text) if isinstance(text, str) else text
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{name} is {shown(text)}, which YAML cannot read: {' '.join(str(error).split())}") from None
