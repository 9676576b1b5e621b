"""The folder of a run: configuration, metrics, completions, checkpoints and summary."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.reporting.writers import read_json, truncate_jsonl
from jaxrl_llm.sampling import completion_ids
from jaxrl_llm.training.rollout import Scored


class RunFolder:
    """Paths and small files of a run. Files are replaced whole, so a killed process leaves the old or the new one."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self.config, self.summary = self.path / "config.json", self.path / "summary.json"
        self.metrics, self.completions = self.path / "metrics.jsonl", self.path / "completions.jsonl"
        self.checkpoints = self.path / "checkpoints"

    def create(self, config: dict[str, Any]) -> None:
        """Begin a new run. InputError where the folder holds one."""
        if self.config.exists():
            raise InputError(
                f"{self.path} holds a run already: go on with --resume {self.path}, or choose another --output"
            )
        if self.checkpoints.exists() or self.metrics.exists():
            raise InputError(f"{self.path} holds parts of a run without its config.json: choose another --output")
        self.path.mkdir(parents=True, exist_ok=True)
        self.write(self.config, config)

    def read_config(self) -> dict[str, Any]:
        """The configuration of the run; InputError where there is none."""
        if not self.config.exists():
            raise InputError(f"{self.path} holds no run (no config.json): give the folder that jaxrl train wrote")
        if not self.is_run():
            raise InputError(f"{self.path} holds a model, not a run: give the folder that jaxrl train wrote")
        return read_json(self.config)

    def is_run(self) -> bool:
        """Whether the folder's config.json is of a run; model folders have a file of that name too."""
        return self.config.is_file() and "prompts_per_step" in read_json(self.config)

    def rewind(self, step: int) -> None:
        """Forget what was logged at `step` and after, which a resumed run writes again."""
        for file in (self.metrics, self.completions):
            if file.exists():
                truncate_jsonl(file, step)

    @staticmethod
    def write(path: Path, value: dict[str, Any]) -> None:
        """Replace a JSON file atomically."""
        new = path.with_suffix(".new")
        with new.open("w") as file:
            json.dump(value, file, indent=2, allow_nan=False, default=float)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)

    def log_completions(
        self, step: int, phase: str, tokenizer: Any, scored: Scored, rows: Sequence[dict[str, Any]], groups: int = 4
    ) -> None:
        """Append the completions of the first few groups, token by token, for the report."""
        batch = scored.batch
        chosen = np.flatnonzero(np.asarray(batch.group) < groups)
        ids, action = completion_ids(batch), np.asarray(batch.action_mask)
        fields = {"advantage": batch.advantages, "logp": batch.behaviour_logp, "entropy": batch.entropy}
        values = {name: None if x is None else np.asarray(x) for name, x in fields.items()}
        rewards = {name: np.asarray(x) for name, x in (batch.rewards or {}).items()}
        number: dict[int, int] = {}
        with self.completions.open("a") as file:
            for i in chosen:
                group = int(batch.group[i])
                number[group] = number.get(group, -1) + 1
                answer = rows[group].get("answer")
                line = {
                    "step": step,
                    "phase": phase,
                    "prompt_id": int(batch.prompt_id[i]),
                    "sample": number[group],
                    "prompt": _prompt_text(rows[group]["prompt"]),
                    "tokens": [tokenizer.decode([token]) for token in ids[i]],
                    **{
                        k: None if v is None else [round(float(x), 4) for x in v[i][action[i]]]
                        for k, v in values.items()
                    },
                    "reward": _number(np.asarray(batch.reward)[i]),
                    "rewards": {name: _number(x[i]) for name, x in rewards.items()},
                    "answer": None if answer is None else str(answer),
                    "truncated": bool(batch.truncated[i]),
                }
                file.write(json.dumps(line) + "\n")


def _prompt_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def _number(x: Any) -> float | None:
    return float(x) if np.isfinite(x) else None


class Clock:
    """Seconds spent in each phase of a run."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = dict(seconds or {})

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - start
