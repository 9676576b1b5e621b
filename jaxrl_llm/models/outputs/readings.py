"""What else can be read of sampled tokens while a policy's states are at hand: one function for each name.

M tokens are chosen, of a batch [N, L]; D is the width of the model, K a number of tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models import vocabulary
from jaxrl_llm.models.canvases import MASKED, draw_masks
from jaxrl_llm.models.critic import implicit_logp, values_at
from jaxrl_llm.models.outputs.wanted import Wanted
from jaxrl_llm.models.packed_states import View, logp_at, view_of
from jaxrl_llm.models.packing import Packing
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.stacks import inner_policy
from jaxrl_llm.models.vocabulary import Distribution, logits_of_block, logp_of_tokens, most_probable, vocabulary_sum
from jaxrl_llm.utils.errors import InputError


class Seen(NamedTuple):
    """What there is to read from."""

    policy: Policy
    params: Params
    batch: Trajectories
    packing: Packing | None
    wanted: Wanted
    view: View
    whole: Distribution  # that tokens were drawn from, without truncation
    source: Distribution  # the same, under stop-gradient

    def at(self, name: str) -> Array:
        """What the batch has at the chosen tokens, [M, ...]."""
        return self.batch.need(name).at[self.view.row, self.view.column].get(mode="clip")


def distribution_at(policy: Policy, params: Params, view: View) -> Distribution:
    """The distributions that a view's tokens were drawn from, without truncation."""
    states, head, config = policy.head_states(params, view.states), policy.unembedding(params), policy.config
    return Distribution(states, head, view.temperature, config.logit_softcap, config.known_tokens)


def stopped(whole: Distribution) -> Distribution:
    """The distributions without gradients."""
    stop = jax.lax.stop_gradient
    return whole._replace(hidden=stop(whole.hidden), unembedding=stop(whole.unembedding))


def tempered_logp(seen: Seen, times: float) -> Array:
    """f32[M]: log-probability at a multiple of the sampling temperature, without truncation; differentiable."""
    tempered = seen.view._replace(temperature=times * seen.view.temperature, floor=None)
    return logp_at(seen.policy, seen.params, tempered)[0]


def _internal_logp(seen: Seen) -> Array:
    inner, weights = inner_policy(seen.policy, seen.params, seen.wanted.layer)
    return logp_at(inner, weights, view_of(inner, weights, seen.batch, seen.packing)._replace(floor=None))[0]


def _top_tokens(seen: Seen) -> dict[str, Array]:
    tokens, logp = most_probable(seen.source, seen.wanted.top)
    return {"top_tokens": tokens.astype(jnp.float32), "top_logp": logp}  # exact: vocabularies are far below 2^24


def _most_probable(seen: Seen) -> Array:
    ids, logs = most_probable(seen.source, seen.wanted.top)
    return jnp.stack([ids.astype(logs.dtype), logs], axis=1)


def _teacher_divergence(seen: Seen) -> Array:
    """InputError where the teacher's unembedding is not at hand."""
    if seen.policy.teacher is None or "teacher" not in seen.params:
        raise InputError("a divergence from the whole distribution of a teacher needs its unembedding: train by a run")
    head = seen.params["teacher"]["unembedding"]
    states = seen.at("teacher_states").astype(head.dtype)
    teacher = Distribution(states, head, seen.view.temperature, *seen.policy.teacher)  # at the same temperatures
    return vocabulary.divergence(seen.whole, teacher, seen.wanted.beta)


ADAM = ("beta1", "beta2", "epsilon")  # controls that "adam_step" reads


def _adam_step(seen: Seen) -> Array:
    """f32[M, 2]. InputError where Adam's moments are not at hand, or what the transform says of it."""
    if "moments" not in seen.params:
        raise InputError("a step of Adam needs its moments, which only an update has: give the objective to update")
    said = seen.batch.controls or {}
    if missing := [name for name in ADAM if name not in said]:
        raise InputError(f"a step of Adam needs the control {missing[0]}: a transform gives it, by with_controls")
    b1, b2, epsilon = (said[name] for name in ADAM)
    advantages = jax.lax.stop_gradient(seen.at("advantages"))
    return adam_step(seen.source, seen.view.targets, advantages, seen.params["moments"], (b1, b2, epsilon))


# Sums over the vocabulary of what is made of its log-probabilities, f32[M].
MEASURES: dict[str, Callable[[Seen], Array]] = {
    "squared_probability": lambda seen: vocabulary_sum(lambda logp: jnp.exp(2 * logp), seen.source),
    "cubed_probability": lambda seen: vocabulary_sum(lambda logp: jnp.exp(3 * logp), seen.source),
    "mean_logp": lambda seen: vocabulary_sum(lambda logp: logp, seen.source) * (1 / seen.policy.config.known_tokens),
}
# What is found under a name, or under several, [M, ...].
READINGS: dict[str, Callable[[Seen], Array | dict[str, Array]]] = {
    **MEASURES,
    "values": lambda seen: values_at(seen.policy, seen.params, seen.view, seen.batch, seen.packing),
    "implicit_logp": lambda seen: implicit_logp(seen.policy, seen.params, seen.batch, seen.packing),
    "internal_logp": _internal_logp,
    "heated_logp": lambda seen: tempered_logp(seen, seen.wanted.heat),
    "hidden": lambda seen: jax.lax.stop_gradient(seen.view.states),
    "head_states": lambda seen: seen.source.hidden,
    "greedy": lambda seen: (most_probable(seen.source, 1)[0][:, 0] == seen.view.targets).astype(jnp.float32),
    "top_tokens": _top_tokens,
    "top_logp": lambda seen: (
        {} if "top_tokens" in seen.wanted.names  # which has them
        else logp_of_tokens(seen.whole, seen.at("top_tokens").astype(jnp.int32))
    ),
    "most_probable": _most_probable,
    "teacher_top_logp": lambda seen: logp_of_tokens(seen.whole, seen.at("teacher_top")[:, 0].astype(jnp.int32)),
    "teacher_divergence": _teacher_divergence,
    "adam_step": _adam_step,
}  # fmt: skip


BLOCK = 1024  # of the vocabulary, in `adam_step`
TOKENS = 16  # at once there


@jax.named_scope("adam_step")
def adam_step(
    source: Distribution,
    actions: Array,
    advantages: Array,
    moments: dict[str, Array],
    betas: tuple[Array, Array, Array],
    block: int = BLOCK,
) -> Array:
    """What Adam's step on one token alone would do to the logits at that token, in the last layer: of u = G h at each
    token v.u and the variance of u under pi, f32[M, 2].

    h is the token's last hidden state f32[D], pi its distribution f32[V], a the action, A its advantage and v =
    onehot(a) - pi. The unembedding's gradient of A log pi(a) is g = A v h^T, and Adam's next step from it alone, after
    n steps, with its moments P and Q of the unembedding,

        G = (b1 P + (1 - b1) g) / (1 - b1^(n+1)) / (sqrt((b2 Q + (1 - b2) g^2) / (1 - b2^(n+1))) + epsilon)

    source: of M tokens, whose unembedding is what Adam steps on. actions: int[M]. advantages: f32[M]. moments: "first"
    and "second" f32[V, D], "count" int32[], the steps that they are of. betas: b1, b2, epsilon. A block of the
    vocabulary at a time, with some ten elementwise operations for each token and number of the unembedding.
    """
    V = source.unembedding.shape[0]
    block = min(block, V)
    rows, starts = vocabulary.unembedding_blocks(source, block)
    parts = tuple(
        jnp.pad(moments[name].astype(jnp.float32), ((0, len(rows) * block - V), (0, 0))).reshape(rows.shape)
        for name in ("first", "second")
    )
    b1, b2, epsilon = betas
    after = moments["count"].astype(jnp.float32) + 1
    hidden = source.hidden.astype(jnp.float32)
    M = hidden.shape[0]

    def add_mass(total: Array, each: tuple[Array, ...]) -> tuple[Array, None]:
        return jnp.logaddexp(total, jax.nn.logsumexp(logits_of_block(source, *each), axis=1)), None

    total, _ = jax.lax.scan(add_mass, jnp.full(M, -jnp.inf), (rows, starts))

    def add(sums: Array, each: tuple[Array, ...]) -> tuple[Array, None]:
        some, start, P, Q = each
        pi = jnp.exp(logits_of_block(source, some, start) - total[:, None])
        own = jax.nn.one_hot(actions - start, block)

        def logits_step(token: tuple[Array, ...]) -> Array:
            scale, h = token  # A v f32[block] and f32[D]
            g = scale[:, None] * h
            first = (b1 * P + (1 - b1) * g) / (1 - b1**after)
            second = (b2 * Q + (1 - b2) * g**2) / (1 - b2**after)
            return jnp.sum(first / (jnp.sqrt(second) + epsilon) * h, axis=1)

        u = jax.lax.map(logits_step, (advantages[:, None] * (own - pi), hidden), batch_size=TOKENS)
        found = jnp.sum(own * u, axis=1), jnp.sum(pi * u, axis=1), jnp.sum(pi * u**2, axis=1)
        return sums + jnp.stack(found, axis=1), None

    at_action, mean, square = jax.lax.scan(add, jnp.zeros((M, 3)), (rows, starts, *parts))[0].T
    return jnp.stack([at_action - mean, square - mean**2], axis=1)


def elbo_terms(policy: Policy, params: Params, batch: Trajectories, count: int) -> Array:
    """`count` samples of the bound on each row's likelihood under a masked-diffusion model, f32[N, count], in nats:
    their mean is below the log-likelihood (LLaDA, 2502.09992, eq. 3).

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

    return jax.lax.map(jax.checkpoint(term, prevent_cse=False), jnp.arange(count)).T
