"""`fused_logprob` over a cut vocabulary against its reference: values, gradients, and what moves between devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import optimised
from jaxrl_kernels import fused_logprob
from other_process import on_devices, result_of
from tpu_environment import tpu_environment

ON_FOUR_DEVICES = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import P
from jax.sharding import NamedSharding
from jaxrl_kernels import fused_logprob
from jaxrl_kernels.logprob.dispatch import HeadOptions
from jaxrl_kernels.logprob.dispatch import by_slices

random, out = np.random.default_rng(0), []
M, D = 10, 20
temperature = jnp.asarray(random.uniform(0.5, 2.0, M), jnp.float32)
weights = jnp.asarray(random.normal(size=(2, M)), jnp.float32)
meshes = {
    name: jax.sharding.Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("data", "vocab"))
    for name, rows, columns in (("two", 1, 2), ("four", 1, 4), ("two by two", 2, 2), ("one", 2, 1))
}

def compare(name, V, implementation, floor, scale=1.0, known=None):
    mesh = meshes[name]
    hidden, unembedding = (jnp.asarray(random.normal(size=(n, D)) * s, jnp.float32) for n, s in ((M, scale), (V, 1.0)))
    targets = jnp.asarray(random.integers(0, V, M), jnp.int32).at[0].set(V - 1).at[1].set(-1).at[2].set(V)
    # The floor leaves several tokens, and slices without any; a row without a target keeps some.
    floors = None if floor is None else jnp.full(M, floor).at[:3].set(-6.0)
    settings = {"temperature": temperature, "softcap": 9.0 * scale, "support_floor": floors, "vocab_size": known}

    def value(logp, entropy):
        logp = jnp.where(jnp.isfinite(logp), logp, 0.1 * entropy)
        return jnp.sum(weights[0] * logp + weights[1] * entropy)

    def alone(hidden, unembedding):
        return fused_logprob(
            hidden, unembedding, targets, **settings, implementation="reference"
        )

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def together(hidden, unembedding):
        return fused_logprob(
            hidden, unembedding, targets, **settings, implementation=implementation, block_size=128, vocab_axis="vocab",
        )

    def both(pair, *arrays):
        def of(*arrays):
            found = pair(*arrays)
            return value(*found), found
        return jax.jit(jax.grad(of, argnums=(0, 1), has_aux=True))(*arrays)

    spread = put(hidden, "data"), put(unembedding, "vocab" if V % mesh.shape["vocab"] == 0 else None)
    found, wanted = both(together, *spread), both(alone, hidden, unembedding)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert a.shape == b.shape
        infinite = bool(jnp.all(jnp.isinf(a) == jnp.isinf(b)))
        a, b = jnp.where(jnp.isfinite(b), a, 0), jnp.where(jnp.isfinite(b), b, 0)
        far = float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-3))
        out.append([infinite, far, [name, V, implementation, floor, scale]])

compare("two", 400, None, None)
compare("one", 400, None, -3.0)
compare("two by two", 400, "xla", -3.0)
compare("four", 800, None, -0.2)
compare("four", 400, None, None, scale=300.0)
compare("four", 333, None, None)  # slices would not be equal: no device cuts the vocabulary
compare("two", 400, "pallas", None)
compare("four", 800, "pallas", -3.0)
compare("two by two", 600, "pallas", None)
compare("four", 400, None, -3.0, known=150)  # two slices are padding
compare("four", 800, "pallas", None, known=799)

# Inside of `shard_map`, as a training step does: the gradient of hidden states is summed over the vocabulary's axis.
mesh = meshes["two by two"]
hidden, unembedding = (jnp.asarray(random.normal(size=(n, D)), jnp.float32) for n in (M, 400))
targets = jnp.arange(M) * 39
def step(hidden, unembedding, targets):
    def loss(hidden, unembedding):
        logp, entropy = by_slices(
            hidden, unembedding, targets, jnp.ones(len(hidden)), None, HeadOptions(0.0, None, None, None), "vocab"
        )
        return jax.lax.psum(jnp.sum(logp + 0.3 * entropy), "data")
    return jax.grad(loss, argnums=(0, 1))(hidden, unembedding)
specs = P("data"), P("vocab")
found = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs))(
    hidden, unembedding, targets
)
def plain(hidden, unembedding):
    logp, entropy = fused_logprob(hidden, unembedding, targets, implementation="reference")
    return jnp.sum(logp + 0.3 * entropy)
for a, b in zip(found, jax.grad(plain, argnums=(0, 1))(hidden, unembedding)):
    out.append([True, float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))), ["inside"]])

print("RESULT" + json.dumps(out))
"""


@optimised
def test_a_cut_vocabulary_gives_the_same() -> None:
    found = result_of(ON_FOUR_DEVICES, environment=on_devices(4))
    assert len(found) == 11 * 4 + 2
    for infinite, far, case in found:
        assert infinite, case
        assert far < (2e-5 if case[-1] == 1 else 1e-4), (far, case)  # logits of a thousand have six digits less


TPU_PROGRAM = """
import json, re
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax import P
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jaxrl_kernels import fused_logprob

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "vocab"))
M, D, V = 1024, 1024, 50000

def shaped(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

def loss(hidden, unembedding, targets, floor):
    logp, entropy = fused_logprob(hidden, unembedding, targets, support_floor=floor, vocab_axis="vocab")
    return jnp.mean(logp + entropy)

compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(
    shaped((M, D), jnp.bfloat16, "data"), shaped((V, D), jnp.bfloat16, "vocab"), shaped((M,), jnp.int32, "data"),
    shaped((M,), jnp.float32, "data"),
).compile()
text = compiled.as_text()
kinds = "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"
moved = {kind: [] for kind in kinds}
for shape, kind in re.findall(r"= (.*?) (" + "|".join(kinds) + r")[\\w-]*\\(", text):
    for dims in re.findall(r"\\w\\[([\\d,]*)\\]", shape):
        moved[kind].append(int(np.prod([int(n) for n in dims.split(",") if n])))
kernels, temporaries = text.count('"tpu_custom_call"'), compiled.memory_analysis().temp_size_in_bytes
print("RESULT" + json.dumps({"moved": moved, "kernels": kernels, "temporaries": temporaries}))
"""


@pytest.mark.heavy
def test_compiles_for_four_tpus_without_gathering_the_unembedding() -> None:
    found = result_of(TPU_PROGRAM, environment=tpu_environment())
    M, D, V = 1024, 1024, 50000
    moved = found["moved"]
    assert moved["all-gather"] == moved["all-to-all"] == moved["collective-permute"] == []
    # Sums over the vocabulary's axis are of rows and of hidden's gradient, those over rows of a slice's gradient.
    assert max(moved["all-reduce"] + moved["reduce-scatter"]) <= V // 2 * D
    assert M // 2 * D in moved["all-reduce"]
    assert found["kernels"] >= 3
    assert found["temporaries"] < 4 * M // 2 * V // 2 + 2 * V // 2 * D


def test_one_device_is_the_whole() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    call = jax.jit(lambda h, u, t: fused_logprob(h, u, t, mesh=mesh))
    # Probabilities 1/2, 1/4, 1/4.
    logp, entropy = call(jnp.ones((2, 1)), jnp.log(jnp.array([[2.0], [1.0], [1.0]])), jnp.array([0, 2]))
    assert jnp.allclose(logp, -jnp.log(jnp.array([2.0, 4.0])))
    assert jnp.allclose(entropy, 1.5 * jnp.log(2.0))
