"""Reinforcement learning of language models as an algebra of pure JAX functions.

Read `core.trajectory` (the two pytrees that functions exchange) and `core.transform` (how functions compose) first.
These names stay: a run is `train(TrainConfig(...), algorithm=mine)`, and `Run(folder)` what it wrote; a loop of one's
own is `load_policy`, `sample`, `score`, `prepare`, `update` and `evaluate`; `make_train` makes a whole run a pure
function; `show` and `compare` display completions and credit. See the README.

Names are imported on first use, so that commands and reward processes that do not need JAX start quickly.
"""

from typing import TYPE_CHECKING

from jaxrl_llm.moved import find_moved
from jaxrl_llm.utils.lazy import imported_at_first_use
from jaxrl_llm.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxrl_llm import algorithms
    from jaxrl_llm.core.algorithm import Algorithm
    from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
    from jaxrl_llm.core.transform import Objective, Transform, chain
    from jaxrl_llm.in_jax.train import make_train
    from jaxrl_llm.learner.interactive import prepare, update
    from jaxrl_llm.learner.optimizer_config import OptimizerConfig
    from jaxrl_llm.learner.train_state import init_state
    from jaxrl_llm.models import load_policy, load_reward_model, save_policy
    from jaxrl_llm.reporting.completions import show
    from jaxrl_llm.reporting.credit import compare
    from jaxrl_llm.rewards.of_batch import score
    from jaxrl_llm.sampling import sample
    from jaxrl_llm.training.config import TrainConfig
    from jaxrl_llm.training.evaluation.evaluate import evaluate
    from jaxrl_llm.training.folder.run import Run
    from jaxrl_llm.training.loop import train
    from jaxrl_llm.utils.errors import InputError

__all__ = [
    "Algorithm",
    "InputError",
    "Objective",
    "OptimizerConfig",
    "PolicyOutputs",
    "Run",
    "TrainConfig",
    "Trajectories",
    "Transform",
    "algorithms",
    "chain",
    "compare",
    "evaluate",
    "init_state",
    "load_policy",
    "load_reward_model",
    "make_train",
    "prepare",
    "sample",
    "save_policy",
    "score",
    "show",
    "train",
    "update",
]
_MODULES = {
    "Algorithm": "core.algorithm",
    "InputError": "utils.errors",
    "Objective": "core.transform",
    "OptimizerConfig": "learner.optimizer_config",
    "PolicyOutputs": "core.trajectory",
    "Run": "training.folder.run",
    "TrainConfig": "training.config",
    "Trajectories": "core.trajectory",
    "Transform": "core.transform",
    "chain": "core.transform",
    "compare": "reporting.credit",
    "evaluate": "training.evaluation.evaluate",
    "init_state": "learner.train_state",
    "load_policy": "models",
    "load_reward_model": "models",
    "make_train": "in_jax.train",
    "prepare": "learner.interactive",
    "sample": "sampling",
    "save_policy": "models",
    "score": "rewards.of_batch",
    "show": "reporting.completions",
    "train": "training.loop",
    "update": "learner.interactive",
}

find_moved()
__getattr__ = imported_at_first_use(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
