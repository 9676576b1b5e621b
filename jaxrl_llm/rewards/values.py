"""Rewards that a Python program gives as values: in processes where they can be sent there, else in threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from jaxrl_llm.core.arguments.signatures import PYTHON
from jaxrl_llm.core.by_value import ByValue
from jaxrl_llm.rewards.workers.calling import reads_environments
from jaxrl_llm.rewards.workers.process import ProcessFunction
from jaxrl_llm.rewards.workers.runner import Reward
from jaxrl_llm.utils.errors import InputError, error_line

LARGEST = 2**26  # bytes of a function with all that it refers to, which its process holds too


def begun(spec: ByValue, folder: str | os.PathLike[str]) -> tuple[ProcessFunction | None, Callable[[], Reward]]:
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
