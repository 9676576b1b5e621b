"""What is compiled ahead of time is what a run compiles: the same programs, with the same shardings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import with_devices

from jaxrl_llm.distributed import ahead_of_time, data_mesh, replicate, to_mesh
from jaxrl_llm.distributed.aot import compiled

TESTS = Path(__file__).parents[1]

# A run of one step on four devices, whose programs JAX itself writes to a folder; then the same ahead of time.
RUN = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import jax, numpy as np
import tiny_runs as runs
from jaxrl_llm.distributed import ahead_of_time, replicate, to_mesh
from jaxrl_llm.distributed.mesh import on_rows
from jaxrl_llm.learner.setup import compile_learning
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.models.outputs import wanted_of
from jaxrl_llm.training import step as learning
from jaxrl_llm.training import loop

assert len(jax.devices()) == 4
method, folder = sys.argv[1], Path(sys.argv[2])
real, calls = learning.learn_batch, []

def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

def watched(learner, state, memory, batch, *rest):
    calls.append((learner._replace(reference=shapes(learner.reference)), shapes(state.params), batch))
    return real(learner, state, memory, batch, *rest)

learning.learn_batch = watched
config = runs.small_config(folder, algorithm=method, steps=1, minibatches=2, eval_size=0)
jax.config.update("jax_include_debug_info_in_dumps", False)
jax.config.update("jax_dump_ir_to", str(folder / "programs"))
loop.train(config)
jax.config.update("jax_dump_ir_to", "")
ran = {path.read_text().strip() for path in (folder / "programs").glob("*.mlir")}
assert len(ran) > 3

(learner, params, batch), = calls
assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch)), "a batch is on the host until to_mesh"
with ThreadPoolExecutor(1) as beside:
    programs = compile_learning(learner, params, batch, beside=beside)
outputs = [program.compiled.output_shardings for program in programs if program.name == "outputs_of"]
assert outputs and all(x.is_equivalent_to(on_rows(learner.mesh), 2) for x in jax.tree.leaves(outputs)), "as it says"
print([program.name for program in programs], flush=True)
for program in programs:
    assert program.lowered.as_text().strip() in ran, program.name

# With another sharding of the batch it is another program, which the run has not compiled.
with ahead_of_time():
    steps = plan_steps(batch, minibatches=2, seed=(config.seed, 0), mesh=learner.mesh)
    params = replicate(params, learner.mesh)
    for put, same in ((to_mesh, True), (replicate, False)):
        asked = learner.policy, params, put(batch, learner.mesh), steps
        text = outputs_of.lower(*asked, wanted_of(learner.algorithm.needs)).as_text()
        assert (text.strip() in ran) == same
print("the same")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_the_programs_of_a_run_are_those_compiled_ahead_of_time(method: str, tmp_path: Path) -> None:
    """grpo has a reference policy; ppo has a critic, old log-probabilities and feedback."""
    paths = [str(TESTS), str(TESTS / "training"), os.environ.get("PYTHONPATH", "")]
    environment = {"XLA_FLAGS": with_devices(4), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, method, str(tmp_path)], env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("the same\n")


@compiled(static_argnames=("times",))
def scaled(x: jax.Array, times: float) -> jax.Array:
    return times * x


def test_nothing_runs_ahead_of_time() -> None:
    """Shapes go from one program to the next; outside, the same calls give numbers."""
    mesh = data_mesh()
    batch = {"rows": np.ones((2 * mesh.size, 3), np.float32), "number": np.float32(2)}
    with ahead_of_time() as programs:
        spread, whole = to_mesh(batch, mesh), replicate(batch["rows"], mesh)
        out = scaled(scaled(spread["rows"], times=2.0), times=3.0)
    assert [program.name for program in programs] == ["scaled", "scaled"]
    for x in (spread["rows"], spread["number"], whole, out):
        assert isinstance(x, jax.ShapeDtypeStruct)
    assert out.shape == (2 * mesh.size, 3)
    assert out.sharding.is_equivalent_to(programs[1].compiled.output_shardings, 2)
    assert spread["rows"].sharding == to_mesh(batch, mesh)["rows"].sharding
    np.testing.assert_array_equal(scaled(jnp.asarray(batch["rows"]), times=2.0), 2.0)
