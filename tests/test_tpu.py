"""The programs of a training step compile for real TPUs, ahead of time and without one: on four v5e chips."""

import pytest
from other_process import result_of
from tpu_environment import tpu_environment

PROGRAM = """
import json, re
from functools import partial

import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies

from jaxrl_llm.algorithms import get
from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.learner.setup import compile_learning
from jaxrl_llm.learner.step import Learner
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.core.trajectory import Trajectories

mesh = data_mesh(list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices))
# The shapes of SmolLM2-135M.
config = ModelConfig(
    family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, norm_epsilon=1e-5, tie_embeddings=True, ropes=(Rope(100000.0),),
    rope_of_layer=(0,) * 30, window_of_layer=(0,) * 30, query_scale=0.125, max_positions=8192,
)
policy = Policy(config, jnp.dtype(jnp.bfloat16), mesh=mesh)
params = jax.eval_shape(partial(init_params, config=config), jax.random.key(0))
N, L, G, prompt = 64, 192, 8, 128
random, group = np.random.default_rng(0), np.arange(N, dtype=np.int32) // G
action = np.broadcast_to(np.arange(L) >= prompt, (N, L))
tokens = random.integers(0, 49152, (N, L), dtype=np.int32)
tokens[:, :prompt] = tokens[group * G, :prompt]
batch = Trajectories(
    tokens=tokens, token_mask=np.ones((N, L), bool), action_mask=action,
    behaviour_logp=np.zeros((N, L), np.float32), policy_step=np.zeros((N, L), np.int32),
    turn=np.where(action, 0, -1).astype(np.int32), group=group, prompt_id=group, truncated=np.zeros(N, bool),
    temperature=np.ones(N, np.float32), reward=np.zeros(N, np.float32),
)
optimizer = make_optimizer(OptimizerConfig(), 10)
learner = Learner(policy, get("grpo"), optimizer, mesh, micro_batches=2, reference=params)
out = {}
for name, lowered, compiled, _ in compile_learning(learner, params, batch):
    memory = compiled.memory_analysis()
    out[name] = {"temporaries": memory.temp_size_in_bytes, "arguments": memory.argument_size_in_bytes}
    out[name]["reused"], out[name]["summed"] = memory.alias_size_in_bytes, "all-reduce" in compiled.as_text()
    out[name]["kernels"] = sorted(set(re.findall('kernel_name = "([a-z_]+)', lowered.as_text())))
state = jax.tree.leaves(jax.eval_shape(lambda p: init_state(p, optimizer), params))
print("RESULT" + json.dumps([out, sum(x.size * x.dtype.itemsize for x in state)]))
"""


@pytest.mark.heavy
def test_a_step_compiles_for_four_v5e_chips() -> None:
    programs, state = result_of(PROGRAM, environment=tpu_environment())
    assert list(programs) == ["outputs_of", "prepare", "update"]
    sizes = programs["update"]
    parameters = 134_515_008 * 4
    assert sizes["temporaries"] + sizes["arguments"] < 16 * 2**30, sizes
    # Gradients, their sums and the optimiser's updates, with the padding of TPU layouts.
    assert sizes["temporaries"] < 8 * parameters
    assert sizes["reused"] >= state, "the new state takes the memory of the old"
    assert sizes["summed"], "gradients are summed over the chips"
    assert "ratio_clip" in sizes["kernels"], sizes  # each chip on its rows
