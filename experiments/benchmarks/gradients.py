"""How far gradients of SmolLM2 are from the plain formula's, in float32: kernels, packing and micro-batches.

    python experiments/benchmarks/gradients.py --model smollm2-135m

The plain formula takes each sequence by itself, builds its logits and their log-softmax. Errors are norms of
differences over norms: the tables have the largest of all parameters, and the largest of all parameters of single
layers. Runs of the plain formula itself differ in float32: the first line has its rows in the opposite order, the
second its tokens behind some padding, so that attention sums in another order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import load_policy
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.objectives import clip, entropy, policy_gradient, sequence_mean, sequence_ratio, token_mean, token_ratio
from jaxrl_llm.training.steps import plan_steps, take
from jaxrl_llm.training.update import gradient
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories, with_totals
from jaxrl_llm.transform import Objective

OBJECTIVES = {
    "GRPO": policy_gradient(token_ratio(), clip(0.2, 0.2), sequence_mean()),
    "GSPO": policy_gradient(sequence_ratio(), clip(3e-4, 4e-4), sequence_mean()),
    "with entropy": policy_gradient(token_ratio(), clip(0.2, 0.28), token_mean()) - 0.01 * entropy(),
}


def uneven_batch(vocabulary: int, groups: int, group_size: int, longest: int, seed: int = 0) -> Trajectories:
    """Groups with prompts of 8 to 32 random tokens, and completions of 1 to `longest`."""
    random = np.random.default_rng(seed)
    N, L = groups * group_size, 32 + longest
    owner = np.arange(N) // group_size
    start = random.integers(8, 33, groups)[owner]
    end = start + random.integers(1, longest + 1, N)
    place = np.arange(L)
    prompts = random.integers(0, vocabulary, (groups, L))
    action = (place >= start[:, None]) & (place < end[:, None])
    tokens = np.where(place < start[:, None], prompts[owner], random.integers(0, vocabulary, (N, L)))
    return Trajectories(
        tokens=jnp.asarray(tokens, jnp.int32), token_mask=jnp.asarray(place < end[:, None]),
        action_mask=jnp.asarray(action), behaviour_logp=jnp.zeros((N, L)), policy_step=jnp.zeros((N, L), jnp.int32),
        turn=jnp.asarray(np.where(action, 0, -1)), group=jnp.asarray(owner), prompt_id=jnp.asarray(owner),
        truncated=jnp.zeros(N, bool), temperature=jnp.ones(N),
        advantages=jnp.asarray(np.where(action, random.normal(size=(N, 1)), 0), jnp.float32),
    )  # fmt: skip


def plain_outputs(policy: Policy, params: Any, batch: Trajectories) -> PolicyOutputs:
    """Log-probabilities and entropies by whole logits."""
    logp = jax.nn.log_softmax(policy.logits(params, batch.tokens, batch.token_mask))[:, :-1]
    chosen = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], axis=2)[..., 0]
    spread = partial(jnp.pad, pad_width=((0, 0), (1, 0)))
    found = spread(chosen), spread(-jnp.sum(jnp.exp(logp) * logp, axis=-1))
    return PolicyOutputs(*(jnp.where(batch.action_mask, x, 0.0) for x in found))


@partial(jax.jit, static_argnums=(0, 1))
def plain_gradient(policy: Policy, objective: Objective, params: Any, batch: Trajectories, part: Trajectories) -> Any:
    """Of one row, with the totals of all."""

    def loss(params: Any) -> jax.Array:
        return objective.function(plain_outputs(policy, params, part), part.replace(totals=batch.totals))[0]

    return jax.grad(loss)(params)


def summed(policy: Policy, objective: Objective, params: Any, batch: Trajectories, order: Any) -> Any:
    """The plain gradient, row by row."""
    whole, total = with_totals(batch), None
    for row in order:
        new = plain_gradient(policy, objective, params, whole, take(batch, jnp.asarray([row])))
        total = new if total is None else jax.tree.map(jnp.add, total, new)
    return total


def behind_padding(batch: Trajectories, columns: int) -> Trajectories:
    """The same rows with padding before them."""

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (columns, 0))) if x.ndim == 2 else x

    return jax.tree.map(pad, batch)


def error(found: Any, expected: Any, by_layer: bool) -> float:
    """The largest over the parameters (of each layer by itself) of |found - expected| / |expected|."""

    def of(path: Any, a: jax.Array, b: jax.Array) -> float:
        axes = tuple(range(1, a.ndim)) if by_layer and "layers" in jax.tree_util.keystr(path) else None
        return float(jnp.max(jnp.sqrt(jnp.sum((a - b) ** 2, axis=axes) / jnp.maximum(jnp.sum(b**2, axis=axes), 1e-30))))

    return max(jax.tree.leaves(jax.tree_util.tree_map_with_path(of, found, expected)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--longest", type=int, default=48)
    options = parser.parse_args()
    policy, params, _ = load_policy(options.model)
    batch = uneven_batch(policy.config.vocab_size, options.groups, options.group_size, options.longest)
    rows = range(batch.tokens.shape[0])
    derive: Callable[..., Any] = jax.jit(gradient, static_argnums=(0, 1))
    print(f"{len(rows)} rows, {int(batch.action_mask.sum())} completion tokens of 1 to {options.longest} a row")
    lines: dict[tuple[bool, str], list[float]] = {}
    for objective in OBJECTIVES.values():
        # On policy but for the noise of a stale sampler, so that some ratios are clipped.
        logp = plain_outputs(policy, params, batch).logp
        noise = 0.1 * jax.random.normal(jax.random.key(1), logp.shape)
        sampled = batch.replace(behaviour_logp=jnp.where(batch.action_mask, logp + noise, 0.0))
        expected = summed(policy, objective, params, sampled, rows)
        found = {
            "plain, rows in the opposite order": summed(policy, objective, params, sampled, reversed(rows)),
            "plain, behind 8 columns of padding": summed(policy, objective, params, behind_padding(sampled, 8), rows),
            "fused, a row for each sequence": derive(policy, objective, params, sampled)[0],
        }
        for parts in (1, 2, 4, 8):
            order, packing = plan_steps(sampled, micro_batches=parts).slices
            part = take(sampled, order.reshape(-1))
            name = f"fused, packed, prompts once, {parts} micro-batch{'es' if parts > 1 else ''}"
            found[name] = derive(policy, objective, params, part, layout=packing)[0]
        for by_layer in (False, True):
            for name, value in found.items():
                lines.setdefault((by_layer, name), []).append(error(value, expected, by_layer))
    for by_layer in (False, True):
        heading = f"worst parameter{' of a layer' if by_layer else ''}"
        print(f"\n| {heading} | " + " | ".join(OBJECTIVES) + " |\n|---|" + "---|" * len(OBJECTIVES))
        for (which, name), errors in lines.items():
            if which == by_layer:
                print(f"| {name} | " + " | ".join(f"{value:.1e}" for value in errors) + " |")


if __name__ == "__main__":
    main()
