"""Rewards by name, for command lines and configuration files."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jaxrl_llm.core.arguments.signatures import PYTHON
from jaxrl_llm.core.by_value import ByValue, named_value
from jaxrl_llm.rewards.specs import OWN, model_name, unweighted
from jaxrl_llm.rewards.workers.calling import reads_environments
from jaxrl_llm.rewards.workers.loading import ARGUMENTS, FACTORIES, FUNCTIONS, load_function
from jaxrl_llm.rewards.workers.process import ProcessFunction
from jaxrl_llm.rewards.workers.runner import Reward
from jaxrl_llm.utils.errors import InputError, InputErrors, error_line, unknown
from jaxrl_llm.utils.peer_names import reward_hint


def names() -> list[str]:
    """The names of the built-in rewards, sorted."""
    return sorted([*FUNCTIONS, *FACTORIES])


def get_reward(spec: str, folder: str | os.PathLike[str] = ".") -> Reward:
    """The reward of a spec `NAME[*WEIGHT]`; the weight is 1 by default.

    NAME is one of `names()`, some of which take an argument such as `format_match(REGEX)`, `path/to/file.py:FUNCTION`,
    `package.module:FUNCTION`, or a model by its folder or name on the hub: `model:PATH` (`models.whole.ModelReward`),
    `steps:PATH`, `sentences:PATH` or `worst_step:PATH` (`models.steps.StepReward`).
    `environment` is what the environment of an episode gave for it. A function is loaded and called in a process of its
    own with the working directory `folder`; see `process.ProcessFunction`. The process can be killed, but it is not
    sandboxed: the code must be trusted.

    >>> get_reward("number_match*0.5").weight
    0.5

    Raises InputError for an unknown name, a file, module or function that is missing or fails, or an invalid weight.
    """
    return get_rewards([spec], folder)[0]


def get_rewards(specs: Sequence[str], folder: str | os.PathLike[str] = ".") -> list[Reward]:
    """The reward of each spec; their processes start in parallel. Raises InputErrors if several specs are invalid.

    A spec may be a `ByValue`, a function that a program gave; see `given`.
    """
    if isinstance(specs, str):
        raise InputError(f"get_rewards needs a list of strings: write get_rewards([{specs!r}])")
    started: list[tuple[ProcessFunction | None, Callable[[], Reward]]] = []
    rewards, problems = [], []
    for spec in specs:
        try:
            started.append(_of_value(spec, folder) if isinstance(spec, ByValue) else _begun(spec, folder))
        except InputError as error:
            problems.append(str(error))
    for _, finish in started:
        try:
            rewards.append(finish())
        except InputError as error:
            problems.append(str(error))
    if problems:
        for process, _ in started:
            if process is not None:
                process.close()
        raise InputErrors(problems) if len(problems) > 1 else InputError(problems[0])
    return rewards


def _begun(spec: str, folder: str | os.PathLike[str]) -> tuple[ProcessFunction | None, Callable[[], Reward]]:
    """The process of a reward, which has begun to load it, and what waits for it."""
    name, weight = _parse(spec, folder)
    if name in OWN:  # which episodes have; no process computes it
        return None, lambda: Reward(OWN[name], weight)
    if (of_model := model_name(name, folder)) is not None:
        from jaxrl_llm.rewards.models.steps import model_reward  # which needs JAX

        reward = model_reward(of_model, weight, folder)
        return None, lambda: reward
    process = ProcessFunction(name, folder)
    process.start()

    def finish() -> Reward:
        process.load()
        return _in_this_process(process, weight) if process.reads_environments else Reward(process, weight)

    return process, finish


def model_path(spec: str) -> str | None:
    """The path, or the name on the hub, of the model in a spec; None for another reward."""
    if isinstance(spec, ByValue) or model_name(spec.strip()) is None:
        return None
    found = model_name(_parse(spec, ".")[0])
    return None if found is None else found.path


def _in_this_process(process: ProcessFunction, weight: float) -> Reward:
    """The reward of a function that reads environments, which are objects of this process."""
    process.close()
    source, _, name = process.name.rpartition(":")
    path = Path(process.folder, Path(source).expanduser()) if source.endswith(".py") else source
    loaded = load_function(f"{path}:{name}", "rewards")
    reward = Reward(loaded.function, weight, process.__name__, digest=loaded.digest)
    return _in_thread(reward, "reads the environments of episodes")


def _parse(spec: str, folder: str | os.PathLike[str]) -> tuple[str, float]:
    """The name and the weight of a spec, checked as far as possible without running code."""
    if not isinstance(spec, str):
        raise InputError(f"a reward is given as text, such as 'number_match*0.5'; found {type(spec).__name__}")
    spec = spec.strip()
    named_value(spec, "the reward")  # raises InputError for the name of a value
    name = unweighted(spec)
    weight = 1.0 if name == spec else _weight(spec, spec.rpartition("*")[2])
    head, bracket, rest = name.partition("(")
    if bracket and head in FACTORIES:
        if not rest.endswith(")"):
            raise InputError(f"reward {spec!r}: the bracket after {head!r} is not closed")
        return name, weight
    if name in FACTORIES:
        what = "a pattern" if name == "format_match" else "an argument"
        raise InputError(f"reward {name!r} needs {what}: {name}({ARGUMENTS[name]})")
    if model_name(name, folder) is not None:
        return name, weight
    if ":" in name:
        source = name.rpartition(":")[0]
        if source.endswith(".py") and not (path := Path(folder, Path(source).expanduser())).is_file():
            where = "" if Path(source).is_absolute() else f" in {path.absolute().parent}"
            raise InputError(f"no reward file {source!r}{where}: give the path of a Python file")
        return name, weight
    if name.endswith(".py"):
        raise InputError(f"reward {name!r} names no function: write {name}:FUNCTION")
    if name not in FUNCTIONS:
        if hint := reward_hint(name):
            raise InputError(hint)
        raise unknown("reward", name, names())
    return name, weight


def _weight(spec: str, factor: str) -> float:
    try:
        weight = float(factor)
    except ValueError:
        weight = math.nan
    if not abs(weight) <= 1e30:  # keeps the total reward within float32
        raise InputError(f"reward {spec!r}: {factor!r} is not a weight; write NAME*WEIGHT, such as number_match*0.5")
    return weight


LARGEST = 2**26  # bytes of a function with all that it refers to, which its process holds too


def _of_value(spec: ByValue, folder: str | os.PathLike[str]) -> tuple[ProcessFunction | None, Callable[[], Reward]]:
    """The process of a reward that is a value, which has begun to load it, and what waits for it.

    The reward's `note` says where it runs. InputError for a value that is no reward.
    """
    name = spec.removeprefix(PYTHON).partition("*")[0]
    reward = spec.value if isinstance(spec.value, Reward) else Reward(spec.value, name=name)
    if isinstance(reward.function, ProcessFunction):  # of `get_reward`
        return reward.function, lambda: reward
    why, payload = "", b""
    if reads_environments(reward.function):
        why = "reads the environments of episodes"
    else:
        try:
            import cloudpickle

            payload = cloudpickle.dumps(reward.function)
        except Exception as error:  # whatever objects raise that cannot be pickled
            why = f"cannot be sent to a process ({error_line(error)[:100]})"
        if len(payload) > LARGEST:
            why = f"has {len(payload) / 1e6:.0f} MB with all that it refers to"
    if why:
        return None, lambda: _in_thread(reward, why)
    process = ProcessFunction(reward.name, folder, payload)
    process.start()

    def finish() -> Reward:
        try:
            process.load()
        except InputError as error:  # such as a module that only this process finds
            return _in_thread(reward, f"cannot be loaded in a process ({str(error)[:100]})")
        note = f"the reward {reward.name} is a Python value: it runs in a process, whose changes are not seen here"
        return replace(reward, function=process, note=note)

    return process, finish


def _in_thread(reward: Reward, why: str) -> Reward:
    note = f"the reward {reward.name} {why}, so it runs in a thread: at its time limit it is left behind, not killed"
    return replace(reward, note=note)
