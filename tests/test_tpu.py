"""The update compiles for real TPUs, ahead of time and without one: on four v5e chips."""

import json
import subprocess
import sys

import pytest
from tpu_environment import tpu_environment

PROGRAM = """
import json, re
from functools import partial

import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxrl_llm.algorithms import get
from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.packing import Layout
from jaxrl_llm.models.rope import Rope
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.learner.update import init_state, update
from jaxrl_llm.trajectory import Trajectories

chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = data_mesh(list(chips))
whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
# The shapes of SmolLM2-135M.
config = ModelConfig(
    family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, norm_epsilon=1e-5, tie_embeddings=True, ropes=(Rope(100000.0),),
    rope_of_layer=(0,) * 30, window_of_layer=(0,) * 30, query_scale=0.125, max_positions=8192,
)
policy = Policy(config, jnp.dtype(jnp.bfloat16), mesh=mesh)

def shaped(tree, sharding):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

def report(name, lowered):
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    out[name] = {"temporaries": memory.temp_size_in_bytes, "arguments": memory.argument_size_in_bytes}
    out[name]["kernels"] = sorted(set(re.findall('kernel_name = "([a-z_]+)', lowered.as_text())))

out = {}
params = jax.eval_shape(partial(init_params, config=config), jax.random.key(0))
N, L, G, prompts, new = 64, 192, 8, 128, 64
i32, f32 = jnp.int32, jnp.float32
S = jax.ShapeDtypeStruct
row = S((N,), i32)
key = jax.eval_shape(lambda: jax.random.key(0))
batch = Trajectories(
    tokens=S((N, L), i32), token_mask=S((N, L), bool), action_mask=S((N, L), bool), behaviour_logp=S((N, L), f32),
    policy_step=S((N, L), i32), turn=S((N, L), i32), group=row, prompt_id=row, truncated=S((N,), bool),
    temperature=S((N,), f32), advantages=S((N, L), f32), reference_logp=S((N, L), f32),
)
optimizer = make_optimizer(OptimizerConfig(), 10)
train_state = jax.eval_shape(lambda p: init_state(p, optimizer), params)
report("update", update.trace(
    policy, get("grpo").objective, optimizer, shaped(train_state, whole), shaped(batch, rows), shaped(key, whole),
    layout=Layout(G, prompts, new), micro_batches=2,
).lower())
print("RESULT" + json.dumps(out))
"""


@pytest.mark.heavy
def test_the_update_compiles_for_four_v5e_chips() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=tpu_environment(), capture_output=True, text=True, timeout=500
    )
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    sizes = json.loads(done.stdout.split("RESULT")[1])["update"]
    parameters = 134_515_008 * 4
    assert sizes["temporaries"] + sizes["arguments"] < 16 * 2**30, sizes
    # Gradients, their sums and the optimiser's updates, with the padding of TPU layouts.
    assert sizes["temporaries"] < 8 * parameters
    assert "ratio_clip" in sizes["kernels"], sizes  # each chip on its rows
