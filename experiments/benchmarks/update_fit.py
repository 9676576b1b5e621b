"""Which updates fit on which TPU slices: compiled ahead of time, without a TPU.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python experiments/benchmarks/update_fit.py 8b 1.7b-lora 70b

Needs libtpu. GRPO with a KL reference; groups of 16 completions of 1,024 tokens over prompts of 1,024, each prompt
once; bfloat16 parameters with float32 masters, first moments in bfloat16 and second in float32; weights and moments
sharded over all chips. A micro-batch has the given number of groups; a step may have any number of micro-batches, which
costs only the memory of their tokens. The reference policy's weights stay on the devices during the update.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from jaxrl_llm.algorithms import get
from jaxrl_llm.distributed import ahead_of_time, fully_sharded, make_mesh, to_mesh
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.learner.steps import plan_steps
from jaxrl_llm.learner.update import init_state, update
from jaxrl_llm.models import ModelConfig, Policy, init_params, lora
from jaxrl_llm.models.rope_config import Rope
from jaxrl_llm.trajectory import Trajectories

GROUP, PROMPT, COMPLETION, GIB = 16, 1024, 1024, 2**30
Shape = jax.ShapeDtypeStruct


def model(family: str, layers: int, sizes: tuple[int, int, int, int, int], vocabulary: int, **more: Any) -> ModelConfig:
    """sizes: hidden, inner, heads, key-value heads, head size."""
    D, F, H, K, h = sizes
    return ModelConfig(
        family=family, vocab_size=vocabulary, hidden_size=D, intermediate_size=F, num_layers=layers, num_heads=H,
        num_kv_heads=K, head_dim=h, norm_epsilon=1e-6, ropes=(Rope(1e6),), rope_of_layer=(0,) * layers,
        window_of_layer=(0,) * layers, query_scale=h**-0.5, max_positions=32768, **more,
    )  # fmt: skip


QWEN3_8B = model("qwen3", 36, (4096, 12288, 32, 8, 128), 151_936, tie_embeddings=False, qk_norm=True)
QWEN3_1_7B = model("qwen3", 28, (2048, 6144, 16, 8, 128), 151_936, tie_embeddings=True, qk_norm=True)
LLAMA_70B = model("llama", 80, (8192, 28672, 64, 8, 128), 128_256, tie_embeddings=False)


@dataclasses.dataclass(frozen=True)
class Case:
    """An update and where it shall run."""

    config: ModelConfig
    topology: str
    data: int
    tensor: int
    memory: float  # of a chip, GiB
    groups: int  # in a micro-batch
    micro_batches: int = 2
    rank: int = 0  # of LoRA


CASES = {
    "8b": Case(QWEN3_8B, "v5e:4x4", 4, 4, 16, 4),
    "1.7b": Case(QWEN3_1_7B, "v5e:2x2", 2, 2, 16, 4),
    "1.7b-lora": Case(QWEN3_1_7B, "v5e:2x2", 2, 2, 16, 8, rank=16),
    "70b": Case(LLAMA_70B, "v5p:4x4x4", 16, 4, 95, 48),
}


def batch_of(rows: int, vocabulary: int) -> Trajectories:
    """A prepared batch on the host: every prompt and completion is of the full length."""
    shape = rows, PROMPT + COMPLETION
    zeros, group = np.zeros(shape, np.float32), np.arange(rows, dtype=np.int32) // GROUP
    action = np.broadcast_to(np.arange(shape[1]) >= PROMPT, shape)
    tokens = np.random.default_rng(0).integers(0, vocabulary, shape, dtype=np.int32)
    tokens[:, :PROMPT] = tokens[group * GROUP, :PROMPT]
    return Trajectories(
        tokens=tokens, token_mask=np.ones(shape, bool), action_mask=action, behaviour_logp=zeros,
        policy_step=np.zeros(shape, np.int32), turn=np.where(action, 0, -1).astype(np.int32), group=group,
        prompt_id=group, truncated=np.zeros(rows, bool), temperature=np.ones(rows, np.float32), advantages=zeros,
        reference_logp=zeros,
    )  # fmt: skip


def bytes_of(tree: Any) -> int:
    """On one chip."""
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


def measure(case: Case) -> dict[str, float]:
    """GiB on each chip: what is given to the update, its temporaries, the reference policy; and seconds to compile."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    mesh = make_mesh(1, case.tensor, list(chips), fsdp=case.data)
    policy = Policy(case.config, jnp.dtype(jnp.bfloat16), mesh=mesh)
    optimizer = make_optimizer(OptimizerConfig(moments="bfloat16"), 10)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def laid_out(tree: Any) -> Any:
        places = fully_sharded(tree, case.config, mesh)
        return jax.tree.map(lambda x, place: Shape(x.shape, x.dtype, sharding=place), tree, places)

    weights = jax.eval_shape(partial(init_params, config=case.config, dtype=jnp.bfloat16), key)
    frozen, learning = None, weights
    if case.rank:
        frozen = laid_out(jax.eval_shape(lambda p: lora.scaled(p, case.rank, 32.0), weights))
        learning = jax.eval_shape(partial(lora.init, config=case.config, rank=case.rank), key)
    state = laid_out(jax.eval_shape(partial(init_state, optimizer=optimizer), learning))
    batch = batch_of(case.groups * case.micro_batches * GROUP, case.config.vocab_size)
    start = time.perf_counter()
    with ahead_of_time() as programs:
        steps = plan_steps(batch, micro_batches=case.micro_batches, mesh=mesh)
        update(policy, get("grpo").objective, optimizer, state, to_mesh(batch, mesh), steps, frozen=frozen)
    memory: Any = programs[0].compiled.memory_analysis()
    found = {
        "arguments": memory.argument_size_in_bytes / GIB,
        "temporaries": memory.temp_size_in_bytes / GIB,
        # The frozen weights are the reference.
        "reference": 0.0 if case.rank else bytes_of(laid_out(weights)) / GIB,
    }
    return {**found, "all": sum(found.values()), "seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--groups", type=int, default=0, help="in a micro-batch, instead of the case's")
    options = parser.parse_args()
    print("| update | chips (data x tensor) | groups a micro-batch | arguments | temporaries | reference | all, GiB |")
    print("|---|---|---|---|---|---|---|")
    for name in options.cases:
        case = CASES[name]
        case = dataclasses.replace(case, groups=options.groups or case.groups)
        found = measure(case)
        figures = " | ".join(f"{found[part]:.2f}" for part in ("arguments", "temporaries", "reference", "all"))
        print(
            f"| {name} | {case.topology} ({case.data} x {case.tensor}) | {case.groups} | {figures} of {case.memory:g}"
            f"{'' if found['all'] < case.memory else ': does not fit'} | {found['seconds']:.0f} s to compile",
            flush=True,
        )


if __name__ == "__main__":
    main()
