"""The modules of a benchmark, as they are when it is started as a script, and the tiny model that tests give it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.config.rope import Rope

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments/benchmarks"
CONFIG = ModelConfig(
    family="gemma2", vocab_size=60, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=False, ropes=(Rope(),), rope_of_layer=(0, 0), window_of_layer=(6, 0),
    query_scale=0.35,
)  # fmt: skip


@contextmanager
def loaded(names: Sequence[str], prefix: str, others: Sequence[str] = ()) -> Iterator[Any]:
    """The modules as attributes, by their names without the prefix. others: names of modules that these import."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name.removeprefix(prefix): importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(FOLDER))
        for name in (*names, *others):
            sys.modules.pop(name, None)
