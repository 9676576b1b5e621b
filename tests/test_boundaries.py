"""Arrays of wrong rank, shape or dtype at each public function: one line that names the argument and what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxrl_kernels import decode_attention, fused_logprob, fused_sample, own_attention, ratio_clip, sample_logits

import jaxrl_llm
from jaxrl_llm import InputError, algorithms
from jaxrl_llm.core.shapes import BOOL, FLOATS, INTEGERS, NUMBERS, check_array
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import Transform
from jaxrl_llm.in_jax.rollout import evaluate_task, greedy_reward, roll_out
from jaxrl_llm.in_jax.steps import draw_steps
from jaxrl_llm.in_jax.tasks import addition
from jaxrl_llm.in_jax.train import LabSettings, fresh_params, make_policy, make_train, warm_start
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import gradient, prepare, update
from jaxrl_llm.models import ModelConfig, Policy, init_params, save_policy
from jaxrl_llm.models.critic import Critic, init_critic, values_of
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.sampling import completion_ids

N, L, V, D = 4, 6, 32, 16
CONFIG = ModelConfig(
    family="llama", vocab_size=V, hidden_size=D, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0,), window_of_layer=(0,), query_scale=0.35,
)  # fmt: skip
POLICY, KEY = Policy(CONFIG), jax.random.key(0)
PARAMS = init_params(KEY, CONFIG)
CRITIC = Critic("shared")
WITH_CRITIC = init_critic(KEY, Policy(CONFIG, critic=CRITIC), PARAMS, CRITIC)
ACTIONS = np.arange(L)[None] >= np.full((N, 1), 3)
BATCH = Trajectories(
    tokens=jnp.ones((N, L), jnp.int32), token_mask=jnp.ones((N, L), bool), action_mask=jnp.asarray(ACTIONS),
    behaviour_logp=-jnp.asarray(ACTIONS, jnp.float32), policy_step=jnp.zeros((N, L), jnp.int32),
    turn=jnp.asarray(np.where(ACTIONS, 0, -1), jnp.int32), group=jnp.array([0, 0, 1, 1]),
    prompt_id=jnp.array([0, 0, 1, 1]),
    truncated=jnp.zeros(N, bool), reward=jnp.array([0.0, 1, 0, 1]), reference_logp=-jnp.asarray(ACTIONS, jnp.float32),
)  # fmt: skip
GRPO, OPTIMIZER = algorithms.get("grpo"), optax.sgd(0.1)
READY = BATCH.replace(advantages=jnp.ones((N, L)))
OUTPUTS = PolicyOutputs(jnp.zeros((N, L)), jnp.zeros((N, L)))
TASK, SETTINGS = addition(1), LabSettings(iterations=1, prompts=2, group_size=2, hidden=8, layers=1)
IN_JAX = make_policy(TASK, SETTINGS), fresh_params(KEY, TASK, SETTINGS)
HIDDEN, MATRIX, ROWS = jnp.ones((N, D)), jnp.ones((V, D)), jnp.ones((N, L))
COUNTERS = jnp.zeros((N, 4), jnp.uint32)
# P, K, W, R, h, S = 1, 1, 2, 1, 8, 16
PROMPTS = {
    "q": jnp.ones((1, 1, 2, 1, 8)), "keys": jnp.ones((1, 1, 8, 16)), "values": jnp.ones((1, 1, 16, 8)),
    "length": jnp.array([3]), "position": jnp.array([[3, 3]]),
}  # fmt: skip
PART = decode_attention(**PROMPTS)
OWN = {
    "q": jnp.ones((2, 1, 1, 8)), "k": jnp.ones((2, 1, 8)), "v": jnp.ones((2, 1, 8)), "keys": jnp.ones((2, 1, 8, 16)),
    "values": jnp.ones((2, 1, 16, 8)), "count": jnp.array([0, 0]), "step": jnp.int32(0),
    "prompt": jax.tree.map(lambda x: x.swapaxes(1, 2).reshape(2, 1, *x.shape[3:]), PART),
}  # fmt: skip


def changed(path: str, x: Any) -> Any:
    """PARAMS with another array at a path."""
    first, _, rest = path.partition("/")
    return {**PARAMS, first: {**PARAMS[first], rest: x} if rest else x}


def transform_of(batch: Trajectories) -> Any:
    return Transform(lambda: (), lambda state, batch: (state, batch)).apply((), batch)


def step(batch: Trajectories = READY, params: Any = PARAMS) -> Any:
    state = init_state(jax.tree.map(jnp.copy, params), OPTIMIZER)
    return update(POLICY, GRPO.objective, OPTIMIZER, state, batch)


def batches(call: Callable[[Trajectories], Any]) -> dict[str, Callable[[], Any]]:
    """Bad batches that every function of a batch must refuse."""
    return {
        r"tokens .*float32": lambda: call(READY.replace(tokens=jnp.ones((N, L)))),
        r"tokens .*int32\[6\]": lambda: call(READY.replace(tokens=READY.tokens[0])),
        r"action_mask .*\[4, 5\].*\[4, 6\]": lambda: call(READY.replace(action_mask=READY.action_mask[:, 1:])),
        r"action_mask .*int32.*bool": lambda: call(READY.replace(action_mask=READY.tokens)),
        r"behaviour_logp .*\[4\].*\[4, 6\]": lambda: call(READY.replace(behaviour_logp=jnp.zeros(N))),
        r"group .*float32.*integers": lambda: call(READY.replace(group=jnp.zeros(N))),
        r"advantages .*\[1, 6\].*\[4, 6\]": lambda: call(READY.replace(advantages=jnp.ones((1, L)))),
        r"reward .*\[5\].*\[4\]": lambda: call(READY.replace(reward=jnp.ones(5))),
        r"batch is .*dict": lambda: call({"tokens": READY.tokens}),  # type: ignore[arg-type]
    }


def parameters(call: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
    """Bad parameters that every function of a policy must refuse."""
    return {
        r"embed .*\(33, 16\).*\(32, 16\)": lambda: call(changed("embed", jnp.ones((V + 1, D)))),
        r"layers/query .*\(2, 16, 2, 8\).*\(1, 16, 2, 8\)": lambda: call(
            changed("layers/query", jnp.ones((2, D, 2, 8)))
        ),
        r"layers/up .*int32": lambda: call(changed("layers/up", jnp.ones((1, D, 32), jnp.int32))),
        r"lack layers": lambda: call({"embed": PARAMS["embed"], "final_norm": PARAMS["final_norm"]}),
    }


def keys(call: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
    """What is no random key."""
    return {
        r"key is .*(0|int)": lambda: call(0),
        r"key is .*": lambda: call(jax.random.split(KEY, 2)),
    }


def without(kernel: Callable[..., Any], given: dict[str, Any], **other: Any) -> Callable[[], Any]:
    return lambda: kernel(**{**given, **other})


def kernels() -> dict[str, dict[str, Callable[[], Any]]]:
    targets = jnp.zeros(N, jnp.int32)
    return {
        "fused_logprob": {
            r"hidden .*\[4\]": lambda: fused_logprob(HIDDEN[:, 0], MATRIX, targets),
            r"unembedding .*int32": lambda: fused_logprob(HIDDEN, MATRIX.astype(jnp.int32), targets),
            r"\[32, 15\]|32, 15": lambda: fused_logprob(HIDDEN, MATRIX[:, 1:], targets),
            r"targets .*float32": lambda: fused_logprob(HIDDEN, MATRIX, jnp.zeros(N)),
            r"targets .*\[3\]": lambda: fused_logprob(HIDDEN, MATRIX, targets[1:]),
            r"temperature .*\[3\]": lambda: fused_logprob(HIDDEN, MATRIX, targets, temperature=jnp.ones(3)),
            r"support_floor .*\[3\]": lambda: fused_logprob(HIDDEN, MATRIX, targets, support_floor=jnp.ones(3)),
        },
        "fused_sample": {
            r"hidden .*\[4\]": lambda: fused_sample(HIDDEN[:, 0], MATRIX, COUNTERS),
            r"unembedding .*int32": lambda: fused_sample(HIDDEN, MATRIX.astype(jnp.int32), COUNTERS),
            r"counters .*float32": lambda: fused_sample(HIDDEN, MATRIX, jnp.zeros((N, 4))),
            r"counters .*\[4, 3\]": lambda: fused_sample(HIDDEN, MATRIX, COUNTERS[:, 1:]),
            r"temperature .*\[3\]": lambda: fused_sample(HIDDEN, MATRIX, COUNTERS, temperature=jnp.ones(3)),
            r"allowed .*\[32\]": lambda: fused_sample(HIDDEN, MATRIX, COUNTERS, allowed=jnp.ones(V, bool)),
            r"allowed .*float32": lambda: fused_sample(HIDDEN, MATRIX, COUNTERS, allowed=jnp.ones((N, V))),
        },
        "sample_logits": {
            r"logits .*\[4\]": lambda: sample_logits(HIDDEN[:, 0], COUNTERS),
            r"logits .*int32": lambda: sample_logits(jnp.ones((N, V), jnp.int32), COUNTERS),
            r"counters .*\[4, 3\]": lambda: sample_logits(jnp.ones((N, V)), COUNTERS[:, 1:]),
        },
        "decode_attention": {
            r"q must .*\[1, 1, 2, 8\]": without(decode_attention, PROMPTS, q=jnp.ones((1, 1, 2, 8))),
            r"keys must .*\[1, 2, 8, 16\]": without(decode_attention, PROMPTS, keys=jnp.ones((1, 2, 8, 16))),
            r"values must .*\[1, 1, 15, 8\]": without(decode_attention, PROMPTS, values=jnp.ones((1, 1, 15, 8))),
            r"length must .*float32": without(decode_attention, PROMPTS, length=jnp.ones(1)),
            r"position must .*\[1, 3\]": without(decode_attention, PROMPTS, position=jnp.ones((1, 3), jnp.int32)),
        },
        "own_attention": {
            r"q must .*int32": without(own_attention, OWN, q=jnp.ones((2, 1, 1, 8), jnp.int32)),
            r"k must .*\[2, 1, 7\]": without(own_attention, OWN, k=jnp.ones((2, 1, 7))),
            r"v must .*bfloat16": without(own_attention, OWN, v=jnp.ones((2, 1, 8), jnp.bfloat16)),
            r"keys must .*\[2, 2, 8, 16\]": without(own_attention, OWN, keys=jnp.ones((2, 2, 8, 16))),
            r"count must .*float32": without(own_attention, OWN, count=jnp.ones(2)),
            r"step must .*\[2\]": without(own_attention, OWN, step=jnp.zeros(2, jnp.int32)),
            r"prompt.acc must .*\[1, 1, 2, 1, 8\]": without(own_attention, OWN, prompt=PART),
        },
        "ratio_clip": {
            r"logp must .*\[4\]": lambda: ratio_clip(ROWS[:, 0], ROWS, ROWS, ROWS),
            r"other must .*\[4, 5\]": lambda: ratio_clip(ROWS, ROWS[:, 1:], ROWS, ROWS),
            r"advantages must .*int32": lambda: ratio_clip(ROWS, ROWS, ROWS.astype(jnp.int32), ROWS),
            r"weights must .*bool": lambda: ratio_clip(ROWS, ROWS, ROWS, ROWS > 0),
            r"low must .*\[4\]": lambda: ratio_clip(ROWS, ROWS, ROWS, ROWS, low=jnp.ones(N)),
        },
    }


def table(folder: Any = None) -> dict[str, dict[str, Callable[[], Any]]]:
    """Public function -> what a message holds -> a call with one bad array."""
    prompts = [[1, 2]]
    tokens = jnp.ones((2, 3), jnp.int32)
    return {
        "sample": parameters(lambda params: jaxrl_llm.sample(POLICY, params, prompts, KEY))
        | keys(lambda key: jaxrl_llm.sample(POLICY, PARAMS, prompts, key))
        | {
            r"allowed .*bool\[32\].*bool\[31\]": lambda: jaxrl_llm.sample(
                POLICY, PARAMS, prompts, KEY, allowed=np.ones(V - 1, bool)
            ),
            r"prompts .*int32\[2, 3\]": lambda: jaxrl_llm.sample(POLICY, PARAMS, tokens, KEY),  # type: ignore[arg-type]
        },
        "policy.logits": parameters(lambda params: POLICY.logits(params, tokens))
        | {
            r"tokens .*float32": lambda: POLICY.logits(PARAMS, tokens * 1.0),
            r"tokens .*int32\[3\]": lambda: POLICY.logits(PARAMS, tokens[0]),
            r"mask .*bool\[2, 2\].*bool\[2, 3\]": lambda: POLICY.logits(PARAMS, tokens, jnp.ones((2, 2), bool)),
        },
        "policy_outputs": parameters(lambda params: policy_outputs(POLICY, params, READY))
        | batches(lambda batch: policy_outputs(POLICY, PARAMS, batch)),
        "gradient": parameters(lambda params: gradient(POLICY, GRPO.objective, params, READY))
        | batches(lambda batch: gradient(POLICY, GRPO.objective, PARAMS, batch)),
        "update": parameters(lambda params: step(params=params)) | batches(step),
        "draw_steps": batches(lambda batch: draw_steps(KEY, batch)) | keys(lambda key: draw_steps(key, READY)),
        "init_state": {r"up .*int32": lambda: init_state(changed("up", jnp.ones(2, jnp.int32)), OPTIMIZER)},
        "prepare": batches(lambda batch: prepare(GRPO.transform, GRPO.transform.init(), batch)),
        "Transform.apply": batches(transform_of),
        "Algorithm.transform.apply": batches(lambda batch: GRPO.transform.apply(GRPO.transform.init(), batch)),
        "Algorithm.objective": batches(lambda batch: GRPO.objective(OUTPUTS, batch))
        | {
            r"outputs\.logp .*\[4, 5\].*\[4, 6\]": lambda: GRPO.objective(
                OUTPUTS.replace(logp=jnp.zeros((N, L - 1))), READY
            ),
            r"outputs\.entropy .*int32": lambda: GRPO.objective(OUTPUTS.replace(entropy=READY.tokens), READY),
        },
        "values_of": {
            r"states .*\[4, 15\]": lambda: values_of(CRITIC, WITH_CRITIC, HIDDEN[:, 1:]),
            r"states .*int32": lambda: values_of(CRITIC, WITH_CRITIC, HIDDEN.astype(jnp.int32)),
        },
        "init_params": keys(lambda key: init_params(key, CONFIG)),
        "init_critic": keys(lambda key: init_critic(key, POLICY, PARAMS, CRITIC))
        | parameters(lambda params: init_critic(KEY, POLICY, params, CRITIC)),
        "save_policy": parameters(lambda params: save_policy("nowhere", POLICY, params)),
        "completion_ids": batches(completion_ids),
        "in_jax.train": keys(make_train(TASK, "grpo", SETTINGS))
        | {
            r"embed .*\(2, 2\).*\(13, 8\)": lambda: make_train(TASK, "grpo", SETTINGS)(
                KEY, {}, {"embed": jnp.ones((2, 2))}
            )
        },
        "in_jax.roll_out": {
            r"prompts .*float32": lambda: roll_out(*IN_JAX, TASK, jnp.ones((2, TASK.prompt_length)), KEY),
            r"prompts .*\[2, 9\]": lambda: roll_out(*IN_JAX, TASK, jnp.ones((2, 9), jnp.int32), KEY),
            r"prompts .*\[9\]": lambda: greedy_reward(*IN_JAX, TASK, jnp.ones(9, jnp.int32)),
        },
        "in_jax.evaluate": keys(lambda key: evaluate_task(IN_JAX[1], TASK, SETTINGS, key))
        | {r"embed .*\(2, 2\).*\(13, 8\)": lambda: evaluate_task({"embed": jnp.ones((2, 2))}, TASK, SETTINGS, KEY)},
        "in_jax.warm_start": keys(lambda key: warm_start(key, TASK, SETTINGS, 1)),
        **kernels(),
    }


CASES = [(name, message, call) for name, calls in table().items() for message, call in calls.items()]


@pytest.mark.parametrize(("name", "message", "call"), CASES, ids=[f"{name}: {message}" for name, message, _ in CASES])
def test_a_bad_array_gives_one_line(name: str, message: str, call: Callable[[], Any]) -> None:
    # The kernels are a package of their own, whose errors are the class that InputError extends.
    kind = ValueError if name in kernels() else InputError
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_kinds_and_axes() -> None:
    for kind, dtype in ((BOOL, bool), (INTEGERS, np.uint8), (FLOATS, jnp.bfloat16), (NUMBERS, bool), (NUMBERS, int)):
        check_array("x", jnp.ones((2, 3), dtype), kind, (2, "columns"))
        check_array("x", np.ones((), dtype), kind, ())
        check_array("x", jax.ShapeDtypeStruct((2, 3), dtype), kind, ("rows", 3))
    for value, message in (
        (None, r"x is None, but must be an array, floating point \[rows, 3\]"),
        ([1.0], r"x is of the type list, but must be an array"),
        (jnp.ones((2, 4)), r"x has the shape \[2, 4\], but must be \[rows, 3\], as y is"),
        (jnp.ones(3), r"x has the shape \[3\], but must be \[rows, 3\], as y is"),
        (jnp.ones((2, 3), int), "x has the dtype int32, but must be floating point"),
    ):
        with pytest.raises(InputError, match=message):
            check_array("x", value, FLOATS, ("rows", 3), ", as y is")


def test_traced_arrays_are_checked_and_cost_nothing() -> None:
    def checked(x: jax.Array) -> jax.Array:
        check_array("x", x, FLOATS, (2, 3))
        return x + 1

    x = jnp.ones((2, 3))
    assert str(jax.make_jaxpr(checked)(x)) == str(jax.make_jaxpr(lambda x: x + 1)(x))
    with pytest.raises(InputError, match="x has the shape"):
        jax.jit(checked)(x.T)
    with pytest.raises(InputError, match="x has the dtype"):
        jax.vmap(checked)(jnp.ones((4, 2, 3), bool))
