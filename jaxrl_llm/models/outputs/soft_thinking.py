"""Soft tokens (`core.soft_thinking`) in the update: what the model sees of them, and their log-densities."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.soft_thinking import RECORD, SoftThinking, entropy_of_kept, is_soft, log_density, log_probabilities
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.parts import accumulation_dtype
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError

# What `policy_outputs` finds of the drawn token, which a soft token is not.
OF_TOKENS = frozenset({"internal_logp", "heated_logp", "greedy", "implicit_logp", "elbo_terms"})


def check_thinking(thinking: SoftThinking, config: ModelConfig) -> None:
    """InputError for a model that cannot think softly; static."""
    for setting, what in {
        "unmasking": "a masked-diffusion model, which draws tokens in no order",
        "score": "a reward model",
        "layer_inputs": "a model whose layers have embeddings of their own",
    }.items():
        if getattr(config, setting):
            raise InputError(f"this is {what}, and does not think softly: choose another model or method")
    if thinking.top_k > config.known_tokens:
        raise InputError(
            f"soft thinking mixes {thinking.top_k} tokens, but the model has {config.known_tokens}: lower top_k"
        )


def check_thoughts(policy: Policy, batch: Trajectories, wanted: Iterable[str]) -> None:
    """InputError where a batch has the soft tokens of another policy, or what is wanted is not of them; static."""
    if batch.thoughts is None:
        return
    if policy.thinking is None:
        raise InputError(
            "the batch has soft tokens, but the policy does not think so: dataclasses.replace(policy, thinking=...)"
        )
    if (found := tuple(batch.thoughts.shape[2:])) != (RECORD, policy.thinking.top_k):
        raise InputError(
            f"the batch has soft tokens of the shape {list(found)}, but the policy's are of "
            f"{[RECORD, policy.thinking.top_k]}: give the SoftThinking that it was sampled with"
        )
    if other := sorted(OF_TOKENS & {*wanted}):
        raise InputError(f"soft tokens have no {', '.join(other)}: leave out soft thinking, or what needs it")


@jax.named_scope("head")
def soft_logp(
    policy: Policy, params: Params, states: Array, temperature: Array, thoughts: Array
) -> tuple[Array, Array, Array]:
    """Which of M tokens are soft, bool[M], their log-densities, and the entropies over their K tokens, f32[M] each.

    states: [M, D], from which they were drawn; temperature: f32[M]; thoughts: f32[M, 3, K]. Differentiable with respect
    to params and states: the gradient is that of log p alone.
    """
    thinking = policy.thinking
    assert thinking is not None
    hidden, head = policy.head_states(params, states), jnp.asarray(policy.unembedding(params))
    ids = jnp.maximum(thoughts[:, 0], 0).astype(jnp.int32)
    dtype, cap = accumulation_dtype(policy.dtype), policy.config.logit_softcap

    @jax.checkpoint  # rows of the unembedding are looked up again, not kept
    def logit(token: Array) -> Array:
        return jnp.einsum("md,md->m", hidden, head[token], preferred_element_type=dtype)

    z = jnp.stack([logit(ids[:, j]) for j in range(thinking.top_k)], axis=1)
    z = cap * jnp.tanh(z / cap) if cap else z
    kept = thoughts[:, 0] >= 0
    logp = log_probabilities(thinking, z / temperature[:, None], kept)
    return is_soft(thoughts), log_density(thinking, logp, thoughts), entropy_of_kept(logp, kept)
