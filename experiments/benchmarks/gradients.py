"""How far gradients of SmolLM2 are from the plain formula's: kernels, packing and micro-batches.

    python experiments/benchmarks/gradients.py --model smollm2-135m

The plain formula takes each sequence by itself, builds its logits and their log-softmax. Errors are norms of
differences over norms: the largest of all parameters, and the largest of all parameters of single layers.

First in float64, where only bugs would be visible. Then in float32, one change at a time: the kernels against the plain
formula, packing against a row for each sequence, micro-batches against one. Last, the error of float32 itself: how far
all of them, including the plain formula, are from the plain formula in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import load_policy
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, with_totals
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.in_jax.steps import draw_steps
from jaxrl_llm.learner.microbatches import plan_steps, take_rows
from jaxrl_llm.learner.update import gradient
from jaxrl_llm.models.packing import shared_prompts
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.objectives import clip, entropy, policy_gradient, sequence_mean, sequence_ratio, token_mean, token_ratio

OBJECTIVES = {
    "GRPO": policy_gradient(token_ratio(), clip(0.2, 0.2), sequence_mean()),
    "GSPO": policy_gradient(sequence_ratio(), clip(3e-4, 4e-4), sequence_mean()),
    "with entropy": policy_gradient(token_ratio(), clip(0.2, 0.28), token_mean()) - 0.01 * entropy(),
}
LONGEST_PROMPT = 32


def uneven_batch(vocabulary: int, groups: int, group_size: int, longest: int, seed: int = 0) -> Trajectories:
    """Groups with prompts of 8 to 32 random tokens, and completions of 1 to `longest`."""
    random = np.random.default_rng(seed)
    N, L = groups * group_size, LONGEST_PROMPT + longest
    owner = np.arange(N) // group_size
    start = random.integers(8, LONGEST_PROMPT + 1, groups)[owner]
    end = start + random.integers(1, longest + 1, N)
    place = np.arange(L)
    prompts = random.integers(0, vocabulary, (groups, L))
    action = (place >= start[:, None]) & (place < end[:, None])
    tokens = np.where(place < start[:, None], prompts[owner], random.integers(0, vocabulary, (N, L)))
    return Trajectories(
        tokens=jnp.asarray(tokens, jnp.int32), token_mask=jnp.asarray(place < end[:, None]),
        action_mask=jnp.asarray(action), behaviour_logp=jnp.zeros((N, L), jnp.float32),
        policy_step=jnp.zeros((N, L), jnp.int32), turn=jnp.asarray(np.where(action, 0, -1)),
        group=jnp.asarray(owner), prompt_id=jnp.asarray(owner), truncated=jnp.zeros(N, bool),
        temperature=jnp.ones(N, jnp.float32),
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


def summed(policy: Policy, objective: Objective, params: Any, batch: Trajectories) -> Any:
    """The plain gradient, row by row."""
    whole, total = with_totals(batch), None
    for row in range(batch.tokens.shape[0]):
        new = plain_gradient(policy, objective, params, whole, take_rows(batch, jnp.asarray([row])))
        total = new if total is None else jax.tree.map(jnp.add, total, new)
    return total


def behind_padding(batch: Trajectories, columns: int) -> Trajectories:
    """The same rows with padding before them."""

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (columns, 0))) if x.ndim == 2 else x

    return jax.tree.map(pad, batch)


def errors(found: Any, expected: Any) -> tuple[float, float]:
    """The largest |found - expected| / |expected| of all parameters, and of all parameters of single layers."""

    def of(by_layer: bool, path: Any, a: jax.Array, b: jax.Array) -> float:
        axes = tuple(range(1, a.ndim)) if by_layer and "layers" in jax.tree_util.keystr(path) else None
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        return float(np.max(np.sqrt(np.sum((a - b) ** 2, axis=axes) / np.maximum(np.sum(b**2, axis=axes), 1e-60))))

    def worst(by_layer: bool) -> float:
        return max(jax.tree.leaves(jax.tree_util.tree_map_with_path(partial(of, by_layer), found, expected)))

    return worst(False), worst(True)


Report = Callable[[str, str, Any, Any], None]  # (table, line, found, expected)


def compare(policy: Policy, params: Any, objective: Objective, batch: Trajectories, report: Report) -> None:
    """All gradients of one objective. policy, params: in float64."""
    grad_fn: Any = jax.jit(gradient, static_argnums=(0, 1))

    def packed(policy: Policy, params: Any, batch: Trajectories, parts: int) -> Any:
        return grad_fn(policy, objective, params, batch, plan_steps(batch, micro_batches=parts).slices)[0]

    name = "fused, packed, prompts once, {} micro-batch{}".format
    names = {parts: name(parts, "" if parts == 1 else "es") for parts in (1, 2, 4, 8)}
    wide = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, batch)
    truth = summed(policy, objective, params, wide)
    alone = "fused, a row for each sequence"
    report("float64 against the plain formula in float64", alone, grad_fn(policy, objective, params, wide)[0], truth)
    for parts in (1, 4):
        report("float64 against the plain formula in float64", names[parts], packed(policy, params, wide, parts), truth)
    truth = jax.tree.map(np.asarray, truth)

    policy, params = replace(policy, dtype=jnp.float32), jax.tree.map(lambda x: x.astype(jnp.float32), params)
    plain = summed(policy, objective, params, batch)
    far = "float32 against the plain formula in float64"
    report(far, "plain", plain, truth)
    padded = summed(policy, objective, params, behind_padding(batch, 8))
    report(far, "plain, behind 8 columns of padding", padded, truth)
    each, itself = "float32, each thing by itself", "the plain formula behind 8 columns of padding, against itself"
    report(each, itself, padded, plain)
    row_each = grad_fn(policy, objective, params, batch)[0]
    report(far, alone, row_each, truth)
    report(each, "fused, against plain", row_each, plain)
    for parts, line in names.items():
        found = packed(policy, params, batch, parts)
        report(far, line, found, truth)
        report(each, f"{line}, against a row for each sequence", found, row_each)
    size = int(jnp.sum(batch.group == 0))
    sizes = {"group_size": size, "prompt_length": LONGEST_PROMPT}
    share = partial(shared_prompts, **sizes, completion_length=batch.tokens.shape[1] - LONGEST_PROMPT)
    for packing, rows in ((None, ""), (share, ", prompts once")):
        found = {}
        for parts in (1, 2, 4, 8):
            drawn = draw_steps(jax.random.key(0), batch, minibatches=parts, group_size=size, packing=packing)
            found[parts] = grad_fn(policy, objective, params, batch, drawn.slices)[0]
        for parts in (2, 4, 8):
            report(each, f"{parts} micro-batches against one{rows}", found[parts], found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--longest", type=int, default=48)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    policy, params, _ = load_policy(options.model, dtype=jnp.float64)
    batch = uneven_batch(policy.config.vocab_size, options.groups, options.group_size, options.longest)
    print(f"{len(batch.tokens)} rows, {int(batch.action_mask.sum())} completion tokens, 1 to {options.longest} a row")
    tables: dict[str, dict[str, list[tuple[float, float]]]] = {}

    def report(table: str, line: str, found: Any, expected: Any) -> None:
        tables.setdefault(table, {}).setdefault(line, []).append(errors(found, expected))

    for objective in OBJECTIVES.values():
        # On policy but for the noise of a stale sampler, so that some ratios are clipped.
        logp = plain_outputs(policy, params, batch).logp
        noise = 0.1 * jax.random.normal(jax.random.key(1), logp.shape)
        stale = jnp.where(batch.action_mask, logp + noise, 0.0).astype(jnp.float32)
        compare(policy, params, objective, batch.replace(behaviour_logp=stale), report)
    for table, lines in tables.items():
        print(f"\n| {table}: worst parameter (of a layer) | " + " | ".join(OBJECTIVES) + " |")
        print("|---|" + "---|" * len(OBJECTIVES))
        for line, found in lines.items():
            print(f"| {line} | " + " | ".join(f"{whole:.2e} ({layer:.1e})" for whole, layer in found) + " |")


if __name__ == "__main__":
    main()
