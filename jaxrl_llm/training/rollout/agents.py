"""The environment and the tools of a run: loaded by name, tried before the model is loaded, made a rollout."""

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from jaxrl_llm.core.by_value import ByValue, named_value
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.data.chat.encode import is_conversation, row_format
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.adapters import environments
from jaxrl_llm.environments.protocol import Environment, MakeEnvironment
from jaxrl_llm.environments.tools.base import WithTools
from jaxrl_llm.rewards.specs import ENVIRONMENT, is_among
from jaxrl_llm.rewards.workers.loading import check_file, load_function, load_value
from jaxrl_llm.rollouts.agents.compaction import NAMED, compact_by_name
from jaxrl_llm.rollouts.agents.plans import PLAN, planned
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.agents.restarts import IMITATED, restarting
from jaxrl_llm.rollouts.agents.self_play import self_play
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError, error_line, optional_package, require_choice, shown
from jaxrl_llm.utils.starting import limited, phase
from jaxrl_llm.utils.value_digest import value_digest

logger = logging.getLogger("jaxrl_llm.training")
TURN_REWARDS = "turn_rewards"
T = TypeVar("T")
Row = Mapping[str, Any]  # of the data set


def agent_of(config: TrainConfig, needs: Collection[str] = (), greedy: bool = False) -> Rollout:
    """The rollout of a run with an environment or tools.

    needs: of the method; rewards of turns are apart from the episode's where it needs `turn_rewards`, replies are read
    as plans where it needs `plan`, and half of the samples begin with a success where it needs `imitated`. greedy: for
    evaluations. InputError for what cannot be loaded.
    """
    given: dict[str, Any] = {
        name: getattr(config, name) or None for name in ("turns", "turn_tokens", "episode_tokens", "context_tokens")
    }
    given["compact"] = None if config.compact is None else compact_by_name(config.compact)
    given |= {
        "turn_rewards": TURN_REWARDS in needs, "greedy": greedy, "system": config.system_prompt,
        "ahead": config.environment_steps, "format": config.format,
    }  # fmt: skip
    make, players = make_environment(config), config.players
    if IMITATED in needs and (players > 1 or given["context_tokens"]):
        raise InputError(
            f"episodes that begin in the middle of a success have no {'players' if players > 1 else 'context_tokens'}: "
            "leave that out, or choose another algorithm"
        )
    rollout = agent(make, **given) if players == 1 else self_play(make, players, **given)
    rollout = restarting(rollout) if IMITATED in needs else rollout
    rollout = planned(rollout) if PLAN in needs else rollout
    if config.world:
        return rollout
    return replace(rollout, provides=rollout.provides - {ENVIRONMENT})  # tools alone give none


def make_environment(config: TrainConfig) -> MakeEnvironment:
    """What makes a row's environment. InputError for an environment or tools that cannot be loaded."""
    tools = tuple(_loaded(spec, "the tool", load_function) for spec in config.tools)
    if config.world is None:
        return lambda row: WithTools(tools, config.tool_time_limit)
    return environments(_factory(config), tools, config.tool_time_limit, config.players)


def agent_digests(config: TrainConfig) -> dict[str, str]:
    """The digests of environment or harness, tools and compaction, or of their files, among a run's inputs."""
    worlds = {"the environment's file": config.environment, "the harness's file": config.harness}
    named = {name: spec for name, spec in worlds.items() if spec}
    named |= {f"the file of the tool {spec.rpartition(':')[2]}": spec for spec in config.tools}
    values = {name: value_digest(spec.value) for name, spec in named.items() if isinstance(spec, ByValue)}
    named = {name: spec for name, spec in named.items() if name not in values}
    if config.compact and config.compact.partition("(")[0] not in NAMED:
        named["the file of compact"] = config.compact
    return {name: load_value(spec, name)[1] for name, spec in named.items()} | {
        name.replace("'s file", "").replace("the file of ", ""): digest for name, digest in values.items()
    }


def check_agent(config: TrainConfig, rows: Sequence[Row], tokenizer: Callable[[], Any]) -> list[ChatTurns]:
    """Try the environments of a run before its model is loaded: each is made once, and their tools described.

    tokenizer: reads the model's. Returns how the conversations of each environment begin and go on.

    Raises InputError, in one line, for an environment that cannot be made or has no `reset`, tools that are not
    described, names in the column `environment` that the run does not have, a reward `environment` that the environment
    does not give, a tokenizer without a chat template, and a template whose calls of tools cannot be read, or that does
    not read the options that it is given. Where the template does not describe tools, the log says who does.
    """
    make = make_environment(config)
    text_tokenizer, told = tokenizer(), False
    chats: list[ChatTurns] = []
    if any(row.get("tools") for row in rows[:1]):
        logger.warning("the column tools is not used: the policy has the tools of its environment and of --tools")
    for name, row in _kinds(config, rows).items():
        world, described = _made(config, make, row)
        if is_among(config.rewards) and not getattr(world, "gives_reward", True):
            raise InputError(
                f"the environment {name} has no get_reward, but rewards has environment: give another reward"
            )
        chat = ChatTurns(text_tokenizer, described, row_format(config.format, row))
        chats.append(chat)
        chat.check_options(config.format.options)
        assert chat.reading is not None  # raises InputError for a format of calls that cannot be read
        if described and not chat.shows_tools and not told:
            told = True
            logger.warning(
                "the chat template describes no tools: the %s message tells the policy of them",
                "system" if chat.takes_system else "first user",
            )
        prompt: Any = row.get("prompt")
        asked = prompt if is_conversation(prompt) else [{"role": "user", "content": str(prompt)}]
        if config.system_prompt is not None and asked[0].get("role") != "system":
            asked = [{"role": "system", "content": config.system_prompt}, *asked]
        chat.begin(asked)
        if callable(close := getattr(world, "close", None)) and not inspect.iscoroutinefunction(close):
            try:
                _in_time(config, close, f"close the environment {name}, which was not reset")
            except InputError as error:
                logger.warning("%s", error)
            except (Exception, SystemExit):  # of an environment that was never reset
                logger.debug("closing an environment that was not reset", exc_info=True)
    return chats


def tell_ends(chats: Sequence[ChatTurns], ends: Collection[int]) -> None:
    """Log where nothing ends a reply that the chat template ends. ends: tokens at which the model stops."""
    for chat in chats:
        said, called = chat.ends
        for what, own in (("replies", said), *([("calls of tools", called)] if chat.tools else ())):
            if own and not own & {*ends}:
                logger.warning(
                    "the chat template ends %s with %s, where this model does not stop: add its id %d to eos_token_id "
                    "in the model's generation_config.json", what, chat.tokenizer.decode([min(own)]), min(own),
                )  # fmt: skip
                return


def _kinds(config: TrainConfig, rows: Sequence[Row]) -> dict[str, Row]:
    """A row for each kind of environment that the rows name; of rows that are read as they are drawn, the first."""
    factory = _factory(config) if config.world else None
    first = dict(rows[0]) if isinstance(rows, list) else dict(next(iter(rows[:1])))
    if not isinstance(factory, Mapping):
        return {str(config.world or "tools"): first}
    known: dict[str, Row] = {}
    for row in rows if isinstance(rows, list) else [first]:
        name = str(row.get("environment"))
        if "environment" not in row:
            raise InputError(
                f"{config.environment} has several environments: each row must name one in its column environment, but "
                "one has no such column"
            )
        require_choice("environment", name, factory)
        known.setdefault(name, row)
    return known


def _in_time(config: TrainConfig, function: Callable[[], T], what: str) -> T:
    """What a call of an environment returns, which takes no longer than one in a rollout may."""
    seconds = config.rollout_time_limit
    with phase(what):
        return limited(function, seconds, f"it took more than {seconds:g} s to {what}, which rollout_time_limit allows")


def _made(config: TrainConfig, make: MakeEnvironment, row: Row) -> tuple[Environment, tuple[Mapping[str, Any], ...]]:
    """An environment, and the tools that it describes."""

    def tried() -> Any:
        world = make(row)
        return world, tuple(world.tools)

    try:
        return _in_time(config, tried, f"make the environment {config.world or 'of the tools'}")
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"the environment {config.world} cannot be made: {error_line(error)}") from None


def _factory(config: TrainConfig) -> Any:
    """What makes environments: a class, a function, or a dict of them. InputError for what cannot be loaded, or is
    anything else."""
    if config.harness is not None:
        with optional_package("aiohttp", "serve", "a harness"):
            from jaxrl_llm.server.harness import harness
        return harness(_loaded(config.harness, "the harness", load_function))
    spec = config.environment
    assert spec is not None
    found = _loaded(spec, "the environment", load_value)
    if not callable(found) and not (isinstance(found, Mapping) and found and all(map(callable, found.values()))):
        raise InputError(
            f"the environment {spec} is {shown(found)}, but must be a class, a function that makes one, or a dict of "
            "them"
        )
    return found


def _loaded(spec: str, what: str, load: Callable[[str, str], Any]) -> Any:
    if (found := named_value(spec, what)) is not None:
        return found
    check_file(spec, what)
    if ":" not in spec:
        raise InputError(f"{what} {spec!r} has no module: write FILE.py:NAME or MODULE:NAME")
    return load(spec, what)[0]
