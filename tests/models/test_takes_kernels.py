"""Which devices take the kernel for attention of packed rows, and TPUs' layouts with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.layers.packed_attention import lanes
from jaxrl_llm.models.mesh_axes import takes_kernels
from jaxrl_llm.models.placement import placement

CONFIG = ModelConfig(
    family="llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0,), window_of_layer=(0,), query_scale=0.35,
)  # fmt: skip


@pytest.mark.parametrize("device, attention, layouts", [
    ({"platform": "tpu"}, True, True),
    ({"platform": "gpu", "compute_capability": "9.0"}, True, False),
    ({"platform": "gpu", "compute_capability": "7.5"}, False, False),  # before Ampere
    ({"platform": "gpu", "compute_capability": "gfx90a"}, False, False),  # AMD
    ({"platform": "cpu"}, False, False),
])  # fmt: skip
def test_devices(device: dict[str, Any], attention: bool, layouts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda **_: [SimpleNamespace(**device)])
    assert takes_kernels(None) == attention
    assert lanes(None) == (128 if attention else 1)
    where = placement(CONFIG, None)
    assert (where.turned is not None, bool(where.joined)) == (layouts, layouts)
