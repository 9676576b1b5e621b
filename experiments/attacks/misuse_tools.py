"""What the rows of `misuses` are made of: a tiny model, a scored batch that fits it, and the library's functions."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
import shutil
import tempfile
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).resolve().parents[2] / "tests" / "vectors"


class World:
    """An environment that takes its row."""

    def __init__(self, row: Any) -> None:
        self.row = row

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """One that says nothing."""
        return "", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Over at once."""
        return "", 0.0, True, False, {}


def _public(module: Any) -> list[tuple[str, Any]]:
    """The names that a module defines."""
    found = [(name, one) for name, one in vars(module).items() if not name.startswith("_")]
    return [(name, one) for name, one in found if getattr(one, "__module__", "") == module.__name__]


def _parts(package: Any) -> dict[str, Any]:
    """The factories of parts that the modules of a package define."""
    names = [one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    found = [pair for name in names for pair in _public(importlib.import_module(name))]
    return {name: one for name, one in found if getattr(one, "makes_parts", False)}


@dataclasses.dataclass
class Tools:
    """The names that rows use; made when a row first needs them, so that few rows take little time."""

    folder: Path

    @functools.cached_property
    def api(self) -> dict[str, Any]:
        """Modules and functions of the public API."""
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax

        import jaxrl_llm
        import jaxrl_llm.advantages.functional
        import jaxrl_llm.objectives.functional
        from jaxrl_llm import advantages, algorithms, curriculum, data, objectives, replay, rewards, rollouts, sampling
        from jaxrl_llm.algorithms import method
        from jaxrl_llm.core.rules import Partial
        from jaxrl_llm.core.transform import stateless
        from jaxrl_llm.distributed import chips, mesh
        from jaxrl_llm.environments import adapters
        from jaxrl_llm.environments.tools import base as environment_tools
        from jaxrl_llm.environments.tools import calculator, files, mcp, python, search
        from jaxrl_llm.in_jax import steps, tasks
        from jaxrl_llm.in_jax import train as in_jax
        from jaxrl_llm.in_jax.lab import config as lab_config
        from jaxrl_llm.in_jax.lab import laboratory
        from jaxrl_llm.learner import inputs, microbatches, optimizer, train_state, update
        from jaxrl_llm.models import lora
        from jaxrl_llm.reporting import statistics
        from jaxrl_llm.reporting.html import shading
        from jaxrl_llm.rewards.transforms import soft_overlong_penalty
        from jaxrl_llm.rollouts.agents import compaction, conversation
        from jaxrl_llm.training import config
        from jaxrl_llm.training.config import json_text as config_json

        made = (adapters, calculator, chips, files, lab_config, laboratory, mcp, mesh, python)
        return {
            **_parts(algorithms),
            **_parts(rollouts),
            **_parts(curriculum),
            **_parts(replay),
            **{name: one for module in (*made, search, environment_tools) for name, one in _public(module)},
            **{name: getattr(jaxrl_llm, name) for name in jaxrl_llm.__all__},
            **{
                name: getattr(package, name)
                for package in (objectives.functional, objectives, advantages.functional, advantages, data)
                for name in package.__all__
            },
            **{name: getattr(train_state, name) for name in ("TrainState", "init_state")},
            **{name: getattr(update, name) for name in ("prepare", "update")},
            **{name: getattr(tasks, name) for name in ("addition", "get_task")},
            "Algorithm": algorithms.Algorithm,
            "Lab": in_jax.LabSettings,
            "Limits": conversation.Limits,
            "OptimizerConfig": optimizer.OptimizerConfig,
            "Partial": Partial,
            "Summary": compaction.Summary,
            "World": World,
            "keep_last": compaction.keep_last,
            "lora": lora,
            "PromptFormat": data.PromptFormat,
            "Path": Path,
            "DynamicSampling": algorithms.DynamicSampling,
            "TrainConfig": config.TrainConfig,
            "algorithms": algorithms,
            "completion_texts": sampling.completion_texts,
            "from_dict": config_json.from_dict,
            "inf": math.inf,
            "jax": jax,
            "jaxrl_llm": jaxrl_llm,
            "jnp": jnp,
            "key": jax.random.key(0),
            "make_optimizer": optimizer.make_optimizer,
            "make_train": in_jax.make_train,
            "math": math,
            "nan": math.nan,
            "np": np,
            "optax": optax,
            "draw_steps": steps.draw_steps,
            "plan_steps": microbatches.plan_steps,
            "provide": inputs.provide,
            "replace": dataclasses.replace,
            "rewards": rewards,
            "run_settings": method.run_settings,
            "several_steps": method.several_steps,
            "stateless": stateless,
            "shade": shading.shade,
            "soft_overlong_penalty": soft_overlong_penalty,
            "statistics": statistics,
        }

    @property
    def vectors(self) -> Path:
        """The folder of the tiny model."""
        return VECTORS / "llama"

    @functools.cached_property
    def model(self) -> tuple[Any, Any, Any]:
        """(policy, params, tokenizer) of 257 tokens and a context of 128."""
        return self.api["load_policy"](self.vectors)

    @functools.cached_property
    def other(self) -> tuple[Any, Any, Any]:
        """Another family's, whose parameters have other names."""
        return self.api["load_policy"](VECTORS / "gemma2")

    @functools.cached_property
    def batch(self) -> Any:
        """A batch of two groups of two rows, 6 positions, without rewards. Made in numpy: nothing is compiled."""
        jnp, np, Trajectories = (self.api[name] for name in ("jnp", "np", "Trajectories"))
        place, row = np.arange(6), np.arange(4)[:, None]
        action = (place >= 2) & (place < np.array([6, 5, 6, 4])[:, None])
        group = np.array([0, 0, 1, 1], np.int32)
        fields = {
            "tokens": np.where(place >= 2, (7 * place + 11 * row) % 97, group[:, None] + 3).astype(np.int32),
            "token_mask": action | (place < 2),
            "action_mask": action,
            "behaviour_logp": np.where(action, -1.0, 0.0).astype(np.float32),
            "policy_step": np.zeros((4, 6), np.int32),
            "turn": np.where(action, 0, -1).astype(np.int32),
            "group": group,
            "prompt_id": group,
            "truncated": np.zeros(4, bool),
            "temperature": np.ones(4, np.float32),
        }
        return Trajectories(**{name: jnp.asarray(x) for name, x in fields.items()})

    def apply(self, batch: Any, name: str = "grpo") -> Any:
        """The batch after a method's transform."""
        transform = self.api["algorithms"].get(name).transform
        return transform.apply(transform.init(), batch)[1]

    def asked(self, prompts: Any, key: Any = None, **settings: Any) -> Any:
        """What `sample` asks of its engine, without sampling."""
        from jaxrl_llm.sampling.sampler import requests_of

        settings = {"max_new_tokens": 4, **settings}
        return requests_of(self.model[0], prompts, self.api["key"] if key is None else key, **settings)

    def draw(self, **settings: Any) -> Any:
        """`sample` with one setting wrong."""
        policy, params, _ = self.model
        settings = {"prompts": [[5, 6]], "key": self.api["key"], "max_new_tokens": 4, **settings}
        return self.api["sample"](policy, params, **settings)

    def step(self, batch: Any = None, **changes: Any) -> Any:
        """`update` with one argument wrong; a state of its own, as the update donates it."""
        api, (policy, params, _) = self.api, self.model
        optimizer = changes.pop("optimizer", api["optax"].sgd(0.1))
        jax = api["jax"]
        given: dict[str, Any] = {
            "policy": policy,
            "objective": self.objective,
            "optimizer": optimizer,
            "batch": self.ready if batch is None else batch,
        }
        if "state" not in changes:
            copied = jax.tree.map(lambda x: x + 0, params)
            given["state"] = api["init_state"](copied, api["optax"].sgd(0.1))
        return api["update"](**{**given, **changes})

    @functools.cached_property
    def objective(self) -> Any:
        """PPO's clipped one."""
        api = self.api
        return api["policy_gradient"](api["token_ratio"](), api["clip"](), api["token_mean"]())

    @functools.cached_property
    def scored(self) -> Any:
        """The batch with a right and a wrong answer in each group."""
        return self.batch.replace(reward=self.api["jnp"].asarray([1.0, 0.0, 0.0, 1.0]))

    @functools.cached_property
    def ready(self) -> Any:
        """The scored batch with advantages."""
        jnp, np = self.api["jnp"], self.api["np"]
        signs = np.array([1.0, -1.0, -1.0, 1.0], np.float32)[:, None]
        return self.scored.replace(advantages=jnp.asarray(signs * np.asarray(self.batch.action_mask)))

    def write(self, name: str, text: str) -> str:
        """A file of that text; its path."""
        path = self.folder / name
        path.write_text(text)
        return str(path)

    @functools.cached_property
    def names(self) -> dict[str, Any]:
        """The names by which rows find everything."""
        policy, params, tokenizer = self.model
        jnp, np = self.api["jnp"], self.api["np"]
        entropy = jnp.asarray(np.zeros((4, 6), np.float32))
        wide = np.asarray(self.scored.tokens) + 999
        return {
            **self.api,
            "tools": self,
            "policy": policy,
            "params": params,
            "tokenizer": tokenizer,
            "batch": self.batch,
            "scored": self.scored,
            "ready": self.ready,
            "too_great": self.scored.replace(tokens=jnp.asarray(wide)),
            "objective": self.objective,
            "outputs": self.api["PolicyOutputs"](self.batch.behaviour_logp, entropy),
            "apply": self.apply,
            "draw": self.draw,
            "step": self.step,
            "folder": self.folder,
            "write": self.write,
        }

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def make_tools() -> Tools:
    """Tools with a folder of their own."""
    return Tools(Path(tempfile.mkdtemp(prefix="misuses-")))
