"""Teachers: frozen policies beside the one that learns, and how they read its actions, also after another prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed.aot import compiled
from jaxrl_llm.distributed.mesh import to_device
from jaxrl_llm.models.policy import Head, Params, Policy
from jaxrl_llm.utils.errors import InputError


class FrozenPolicy(NamedTuple):
    """A policy that does not learn, which may be of another architecture with the same tokens."""

    policy: Policy
    params: Params


class Teachers(NamedTuple):
    """Several teachers, of which each row of a batch has one: info["teacher"] int32[N] is its place here."""

    names: tuple[str, ...]
    policies: tuple[FrozenPolicy, ...]


@compiled()
def by_teacher(which: jax.Array, found: Sequence[Any]) -> Any:
    """Of trees of arrays [N, ...], one of each teacher, the rows that each row's teacher gave; which int32[N]."""

    def chosen(first: jax.Array, *others: jax.Array) -> jax.Array:
        for place, x in enumerate(others, start=1):
            first = jnp.where((which == place).reshape(-1, *[1] * (x.ndim - 1)), x, first)
        return first

    return jax.tree.map(chosen, *found)


def teacher_of(policy: Policy, teacher: FrozenPolicy | None, reference: Params | Mixture | None) -> FrozenPolicy:
    """The teacher of a policy: another one, or else its reference. InputError for a mixture of several."""
    if teacher is not None:
        return teacher
    if isinstance(reference, Mixture):
        raise InputError("a teacher is one reference policy, but this one is a mixture of several")
    assert reference is not None  # `provide` checks it
    return FrozenPolicy(policy, reference)


def with_head(
    policy: Policy, needs: Iterable[str], frozen: Params | None, teacher: FrozenPolicy | Teachers | None,
    reference: Params | Mixture | None,
) -> tuple[Policy, Params | None]:  # fmt: skip
    """The policy, and the parameters that do not learn, with the teacher's unembedding where an objective needs it."""
    if "teacher_states" not in needs:
        return policy, frozen
    if isinstance(teacher, Teachers):
        raise InputError("states of several teachers are of several unembeddings: compare their top_k tokens")
    of = teacher_of(policy, teacher, reference)
    head = Head(of.policy.config.logit_softcap, of.policy.config.unpadded)
    return replace(policy, teacher=head), {**(frozen or {}), "teacher": {"unembedding": _unembedding(*of)}}


@compiled(static_argnames=("policy",))
def _unembedding(policy: Policy, params: Params) -> jax.Array:
    return policy.unembedding(to_device(params))


def under_teacher(batch: Trajectories, tokens: jax.Array, top: jax.Array | None = None) -> Trajectories:
    """The batch whose rows are `tokens` f32[N, T]: another prompt, then the row's tokens from its first action on.

    T positions; -1 after the tokens, and everywhere in rows without another prompt, which have no actions. top:
    f32[N, L, K], info["top_tokens"] at the actions, if that is there, which moves with them. Nothing else of info is
    kept, and no support of top-k or top-p, which is not known under this prompt.
    """
    ids = tokens.astype(jnp.int32)
    known = ids >= 0
    # Of each place, its column in the batch, and whether it has one.
    place = jnp.arange(known.shape[1])
    prompt = _prompts(batch, known)[:, None]
    inside = known & (place >= jnp.maximum(prompt, 1))
    columns = jnp.clip(place - prompt + _first(batch)[:, None], 0, batch.tokens.shape[1] - 1)

    moved = partial(_taken, columns=columns, inside=inside)
    zeros = jnp.zeros(ids.shape)
    return Trajectories(
        tokens=jnp.maximum(ids, 0), token_mask=known, action_mask=moved(batch.action_mask, False),
        behaviour_logp=zeros, policy_step=zeros.astype(jnp.int32), turn=moved(batch.turn, -1), group=batch.group,
        prompt_id=batch.prompt_id, truncated=batch.truncated, temperature=batch.temperature,
        info=None if top is None else {"top_tokens": moved(top, 0.0)},
    )  # fmt: skip


def from_teacher(batch: Trajectories, tokens: jax.Array, found: Any) -> Any:
    """Arrays [N, T, ...] of the actions in `under_teacher` at their places in the batch, [N, L, ...]; 0 elsewhere."""
    known = tokens >= 0
    L, T = batch.tokens.shape[1], tokens.shape[1]
    columns = jnp.arange(L) - (_first(batch) - _prompts(batch, known))[:, None]
    inside = batch.action_mask & (columns >= 0) & (columns < T) & jnp.any(known, axis=1)[:, None]
    columns = jnp.clip(columns, 0, T - 1)
    return jax.tree.map(lambda x: _taken(x, 0.0, columns, inside), found)


def _taken(x: jax.Array, otherwise: Any, columns: jax.Array, inside: jax.Array) -> jax.Array:
    """[N, L, ...]: what is at the columns int32[N, L] of x [N, T, ...], where they are inside."""
    more = [1] * (x.ndim - 2)
    found = jnp.take_along_axis(x, columns.reshape(*columns.shape, *more), axis=1)
    return jnp.where(inside.reshape(*inside.shape, *more), found, otherwise)


def _first(batch: Trajectories) -> jax.Array:
    """int32[N]: the first action of each row; 0 without actions."""
    return jnp.argmax(batch.action_mask, axis=1)


def _prompts(batch: Trajectories, known: jax.Array) -> jax.Array:
    """int32[N]: tokens of the other prompts: those that are not the row's own from its first action on."""
    return jnp.sum(known, axis=1) - (jnp.sum(batch.token_mask, axis=1) - _first(batch))
