"""Modules that were elsewhere: the old paths of README, docs and notebooks work for one release, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "jaxrl_llm"
STAY = {"objective": "core.objective", "trajectory": "core.trajectory", "transform": "core.transform"}  # for good
MOVED = {
    "advantages.tree_credit": "advantages.trees.credit",
    "agent_demo": "cli.agent_demo",
    "algorithms.algorithm": "core.algorithm",
    "choices": "core.choices",
    "environments.calculator": "environments.tools.calculator",
    "environments.files": "environments.tools.files",
    "environments.mcp_servers": "environments.tools.mcp",
    "environments.python_tools": "environments.tools.python",
    "environments.search": "environments.tools.search",
    "errors": "utils.errors",
    "hooks": "core.hooks",
    "lab.config": "in_jax.lab.config",
    "lab.grid": "in_jax.lab.grid",
    "lab.laboratory": "in_jax.lab.laboratory",
    "lab.outcome": "in_jax.lab.outcome",
    "lab.statistics": "in_jax.lab.statistics",
    "learner.learn": "learner.step",
    "learner.provide": "learner.inputs",
    "learner.steps": "learner.microbatches",
    "needs": "core.needs",
    "references": "core.reference",
    "reporting.files": "reporting.logging.files",
    "rollouts.by_name": "rollouts.registry",
    "rollouts.curricula": "curriculum.compose",
    "rollouts.curricula_scores": "curriculum.scores",
    "rollouts.curricula_stages": "curriculum.stages",
    "rollouts.experience": "rollouts.runtime.source",
    "rollouts.experience_setup": "rollouts.runtime.source_setup",
    "rollouts.hints": "rollouts.guidance.hints",
    "rollouts.ready_made": "rollouts.runtime.offline",
    "rollouts.repair": "rollouts.guidance.repair",
    "rollouts.replays": "replay.base",
    "rollouts.rounds": "rollouts.adaptive",
    "rollouts.rules": "core.rules",
    "rollouts.sources": "rollouts.runtime.sources",
    "rollouts.tools": "rollouts.context",
    "runs.config": "training.config",
    "runs.evaluate": "training.evaluate",
    "runs.loop": "training.loop",
    "runs.run": "training.folder.run",
    "runs.run_report": "training.folder.report",
}
GONE = ("lab", "runs")  # packages, of which the old paths of modules are left


class _Alias(Loader):
    """Loads a module under another name: both names are the same module."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import system has replaced by that of the other name


class _Empty(Loader):
    """Loads a package without modules of its own."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        pass


class Moved(MetaPathFinder):
    """Finds modules by their old paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != PACKAGE or name not in (*STAY, *MOVED, *GONE):
            return None
        if name in GONE:
            return ModuleSpec(fullname, _Empty(), is_package=True)
        new = f"{PACKAGE}.{STAY.get(name) or MOVED[name]}"
        if name not in STAY:
            warnings.warn(f"{fullname} is now {new}; the old path goes with the next release", DeprecationWarning, 2)
        return ModuleSpec(fullname, _Alias(new))


def find_moved() -> None:
    """Find modules by their old paths from now on; idempotent."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, Moved())
