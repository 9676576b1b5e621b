"""The bound on a response's likelihood under a masked-diffusion model, by samples (LLaDA, 2502.09992, eq. 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.diffusion.canvases import MASKED, draw_masks
from jaxrl_llm.models.packed_states import logp_at, view_of
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError


def elbo_terms(policy: Policy, params: Params, batch: Trajectories, count: int) -> Array:
    """`count` samples of the bound of each row, f32[N, count], in nats: their mean is below the log-likelihood.

        l_j = 1/t_j  sum over the masked y_i of log pi(y_i | x, the rest of y),  t_j ~ U(0, 1)

    The masks are those of `draw_masks`, the same for any policy. One pass of the model each, one after another, forward
    and backward, so that memory does not grow with their number. InputError for another model.
    """
    if policy.config.unmasking is None:
        raise InputError(
            f"elbo_terms are of a masked-diffusion model, but this is a {policy.config.family} model: take one of llada"
        )

    def term(number: Array) -> Array:
        masks, t = draw_masks(batch, number)
        view = view_of(policy, params, batch.with_info(**{MASKED: masks.astype(jnp.float32)}), None)
        logp = logp_at(policy, params, view._replace(floor=None))[0].reshape(batch.tokens.shape)
        return jnp.sum(jnp.where(masks, logp, 0.0), axis=1) / t

    found = jax.lax.map(jax.checkpoint(term, prevent_cse=False), jnp.arange(count))
    return found.T
