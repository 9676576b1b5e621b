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
    "Algorithm", "InputError", "Objective", "OptimizerConfig", "PolicyOutputs", "Run", "TrainConfig", "Trajectories",
    "Transform", "algorithms", "chain", "compare", "evaluate", "init_state", "load_policy", "load_reward_model",
    "make_train", "prepare", "sample", "save_policy", "score", "show", "train", "update",
]  # fmt: skip
_MODULES = {
    "core.algorithm": "Algorithm",
    "core.trajectory": "PolicyOutputs Trajectories",
    "core.transform": "Objective Transform chain",
    "in_jax.train": "make_train",
    "learner.interactive": "prepare update",
    "learner.optimizer_config": "OptimizerConfig",
    "learner.train_state": "init_state",
    "models": "load_policy load_reward_model save_policy",
    "reporting.completions": "show",
    "reporting.credit": "compare",
    "rewards.of_batch": "score",
    "sampling": "sample",
    "training.config": "TrainConfig",
    "training.evaluation.evaluate": "evaluate",
    "training.folder.run": "Run",
    "training.loop": "train",
    "utils.errors": "InputError",
}

find_moved()
__getattr__ = imported_at_first_use(__name__, _MODULES)
