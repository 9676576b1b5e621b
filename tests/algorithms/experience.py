"""A batch with every field that a method may need, and several updates on it, for tests of the whole catalogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from batches import batch_of

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import NEEDS, Need, values_of
from jaxrl_llm.core.trajectory import SHARED, PolicyOutputs, Trajectories, map_rows, with_totals

N, L, GROUP = 12, 8, np.repeat([0, 1, 2], [5, 4, 3])

# Drawn apart, so that the data of methods without them stay as they are.
LATER = {
    "previous_logp", "hint_tokens", "top_tokens", "top_logp", "teacher_logp", "teacher_entropy", "teacher_tokens",
    "turn_rewards", "state_key", "episode", "first_turn", "calls", "failed_calls", "answer_logp", "answer_tokens",
    "blanked", "blanked_logp", "implicit_logp", "target_values", "resampled", "fresh_prompts", "pivot", "refined",
    "decomposition", "greedy", "scores", "degree", "win_rate", "opponent",
}  # fmt: skip

# As the others later, so that those stay as they are.
LATEST = {"teacher_token_logp", "teacher_top", "teacher_top_logp", "teacher_states", "teacher_divergence"}

# And after these.
NEWEST = {"task", "feasible", "baseline_reward", "votes", "elbo_terms"}

# And these by themselves.
OF_MEMBERS = {"perturbation", "member", "member_seed"}

# And these four.
OF_ADAM = {"adam_step", "vine", "profile", "line_tokens"}

# And each of these by itself, so that one more changes no other.
OWN = {"staleness", "code"}

# What changes other methods too: rewards are combined with the reward, and rows of one episode count once.
STRUCTURE = {"sound", "turn_rewards", "episode", "first_turn"}


class Case(NamedTuple):
    """A batch with every field that a method may need, and the policy's outputs."""

    batch: Trajectories
    outputs: PolicyOutputs


def case(seed: int, algorithm: Algorithm, **changes: Any) -> Case:
    """Three ragged groups of right and wrong answers in turns, near the policy that sampled them."""
    random = np.random.default_rng(seed)
    mask = np.arange(L) < random.integers(3, L + 1, N)[:, None]
    mask &= np.arange(L) != 1  # one token is the environment's
    behaviour = changes.pop("behaviour", -random.gamma(2.0, 0.5, (N, L)))

    def near(scale: float) -> np.ndarray:
        return behaviour + scale * random.normal(size=(N, L))

    heads = int(max(values_of(algorithm.needs, "values"), default=1))
    values = random.normal(size=(N, L, heads) if heads > 1 else (N, L))
    fields: dict[str, Any] = {
        "entropy": random.gamma(2.0, 0.4, (N, L)),
        "values": values,
        "rewards": {"a": random.random(N), "b": random.integers(0, 2, N).astype(float)},
        "info": {},
        "prompt_id": GROUP + 10,
        "truncated": random.random(N) < 0.2,
    }
    later, latest, newest, of_members, of_adam = (np.random.default_rng([seed, number]) for number in (1, 2, 3, 4, 5))
    for need in NEEDS.values():
        if need.name in ("values", "feedback", "turns"):  # drawn elsewhere
            continue
        drawn = latest if need.name in LATEST else later if need.name in LATER else random
        drawn = newest if need.name in NEWEST else of_members if need.name in OF_MEMBERS else drawn
        drawn = of_adam if need.name in OF_ADAM else drawn
        drawn = np.random.default_rng([seed, *need.name.encode()]) if need.name in OWN else drawn
        value = need.stand_in.draw(drawn, behaviour)
        if need.name not in STRUCTURE or need.name in algorithm.needs:
            for number in values_of(algorithm.needs, need.name) or [None]:
                put(fields, need, value, number)
    # Of a prompt, not of a completion.
    fields["info"]["greedy_reward"] = random.integers(0, 2, 3).astype(float)[GROUP]
    reward = np.concatenate([random.permutation([1.0, 0.0, *random.integers(0, 2, n - 2)]) for n in (5, 4, 3)])
    batch = batch_of(
        changes.pop("mask", mask), changes.pop("reward", reward), behaviour, GROUP, **{**fields, **changes}
    )
    turn = jnp.where(batch.action_mask, jnp.asarray(np.broadcast_to(np.arange(L) // 4, (N, L))), -1)
    extras = {"values": jnp.asarray(values + 0.1, jnp.float32), "internal_logp": jnp.asarray(near(0.5), jnp.float32)}
    extras["heated_logp"] = jnp.asarray(np.minimum(near(0.2), 0), jnp.float32)
    extras["mean_logp"] = jnp.asarray(-random.uniform(3, 5, (N, L)), jnp.float32)
    logp, entropy = jnp.asarray(near(0.2), jnp.float32), jnp.asarray(random.gamma(2.0, 0.4, (N, L)), jnp.float32)
    extras["top_logp"] = jnp.asarray(NEEDS["top_logp"].stand_in.draw(random, behaviour), jnp.float32)
    extras["implicit_logp"] = jnp.asarray(np.minimum(behaviour + 0.3 * later.normal(size=(N, L)), 0), jnp.float32)
    last = np.random.default_rng([seed, 2])
    extras["greedy"] = jnp.asarray(NEEDS["greedy"].stand_in.draw(last, behaviour), jnp.float32)
    labels = int(max(values_of(algorithm.needs, "scores"), default=1))
    extras["scores"] = jnp.asarray(last.normal(size=(N, L, labels)), jnp.float32)
    for name, drawn in (("teacher_top_logp", latest), ("teacher_divergence", latest), ("perturbation", of_members)):
        extras[name] = jnp.asarray(NEEDS[name].stand_in.draw(drawn, behaviour), jnp.float32)
    extras["adam_step"] = jnp.asarray(NEEDS["adam_step"].stand_in.draw(of_adam, behaviour), jnp.float32)
    terms = fields["info"]["elbo_terms"]
    extras["elbo_terms"] = jnp.asarray(terms + 0.3 * newest.normal(size=terms.shape), jnp.float32)
    return Case(batch.replace(turn=turn.astype(jnp.int32)), PolicyOutputs(logp, entropy, extras))


def put(fields: dict[str, Any], need: Need, value: np.ndarray, number: float | None) -> None:
    """Into the fields of a batch, where the need says that it is."""
    place, key = need.place(number)
    if key:
        fields[place][key] = value
    else:
        fields[place] = value


class Found(NamedTuple):
    loss: jax.Array
    gradient: Any  # of the outputs


class Steps(NamedTuple):
    """What an update does before and with the gradient; each may be compiled."""

    prepare: Callable[[Any, Trajectories], tuple[Any, Trajectories]]  # (memory, batch) -> (memory, ready)
    gradient: Callable[[PolicyOutputs, Trajectories], Any]  # (outputs, ready) -> (loss, metrics), gradient


def steps_of(algorithm: Algorithm, parts: list[np.ndarray] | None = None) -> Steps:
    """Of a method. parts: rows of micro-batches."""

    def loss(outputs: PolicyOutputs, ready: Trajectories) -> Any:
        if parts is None:
            return algorithm.objective(outputs, ready)
        whole = algorithm.objective.refreshed(outputs, with_totals(ready))
        shared = {name: getattr(whole, name) for name in SHARED}

        def part(rows: jax.Array) -> Any:
            def pick(x: jax.Array) -> jax.Array:
                return x[rows]

            return algorithm.objective.function(jax.tree.map(pick, outputs), map_rows(pick, whole).replace(**shared))

        if len({len(rows) for rows in parts}) > 1:
            return jax.tree.map(lambda *x: sum(x), *map(part, parts))
        # A loop in the program, which is compiled once for all parts.
        return jax.tree.map(lambda x: x.sum(axis=0), jax.lax.map(part, jnp.stack(parts)))

    return Steps(algorithm.transform.apply, jax.value_and_grad(loss, has_aux=True))


def learn(algorithm: Algorithm, cases: list[Case], steps: Steps | None = None) -> Found:
    """The last of several updates, which pass state and metrics on. steps: the method's, by default as they are."""
    steps = steps_of(algorithm) if steps is None else steps
    memory, feedback = algorithm.transform.init(), None
    for number, (batch, outputs) in enumerate(cases):
        memory, ready = steps.prepare(memory, batch.replace(feedback=feedback))
        (value, metrics), gradient = steps.gradient(outputs, ready)
        if "feedback" in algorithm.needs:
            feedback = {
                "entropy": 0.5, "kl/behaviour": 0.01, "mismatch": 0.01, "grad_norm": 1.0, "loss": value, **metrics,
                "updates": float(number + 1),
            }  # fmt: skip
            feedback = {k: jnp.float32(v) for k, v in feedback.items()}
    return Found(value, gradient)
