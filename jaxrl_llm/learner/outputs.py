"""What policies say of a batch: the one that learns, its reference, its earlier weights and its teachers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxrl_llm.advantages.turns import turn_count, turn_numbers
from jaxrl_llm.core.needs.placeholders import no_answers
from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.distributed.aot import compiled
from jaxrl_llm.distributed.mesh import on_rows, to_device
from jaxrl_llm.learner.microbatches import Steps, by_slices
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers, by_teacher, from_teacher, teacher_of, under_teacher
from jaxrl_llm.models.hooked import of_a_reference
from jaxrl_llm.models.mesh_axes import row_shards
from jaxrl_llm.models.outputs import NOTHING, Wanted, distribution_at, policy_outputs, scatter
from jaxrl_llm.models.packed_states import view_of
from jaxrl_llm.models.packing import Packing
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.vocabulary import vocabulary_sum
from jaxrl_llm.utils.errors import InputError


def _rows_of(policy: Policy, batch: Trajectories) -> Sharding | None:
    """The sharding of a batch's rows on the policy's mesh; None without one, and where it does not divide them."""
    mesh = policy.mesh
    return None if mesh is None or batch.tokens.shape[0] % row_shards(mesh) else on_rows(mesh)


@compiled(results=lambda given: _rows_of(given.policy, given.batch), static_argnames=("policy", "wanted"))
def outputs_of(
    policy: Policy, params: Params, batch: Trajectories, steps: Steps | None = None, wanted: Wanted = NOTHING
) -> PolicyOutputs:
    """`policy_outputs`, compiled; with the steps of an update one slice after another, as they do.

    Parameters in the host's memory are on the device for the time of the call.
    """
    params = to_device(params)
    found = by_slices(lambda part, packing: policy_outputs(policy, params, part, packing, wanted), batch, steps)
    rows = _rows_of(policy, batch)
    return found if rows is None else jax.lax.with_sharding_constraint(found, rows)


@compiled(static_argnames=("function",))
def _computed(function: Callable[..., jax.Array], *of: Any) -> jax.Array:
    return function(*of)


@compiled(static_argnames=("policy",))
def _values_of(policy: Policy, params: Params, batch: Trajectories, steps: Steps | None) -> jax.Array:
    """The critic's values alone, f32[N, L, heads]."""

    def values(part: Trajectories, packing: Packing | None) -> jax.Array:
        return (policy_outputs(policy, params, part, packing, Wanted(("values",))).extras or {})["values"]

    return by_slices(values, batch, steps)


_under_teacher, _from_teacher = compiled()(under_teacher), compiled()(from_teacher)


@dataclass(frozen=True)
class LearnerModels:
    """`core.needs.types.Models` of a batch: one forward pass for all that is read of a policy."""

    policy: Policy
    params: Params
    of_reference: Params | Mixture | None
    of_previous: Params | None
    of_target: Params | None
    of_teacher: FrozenPolicy | Teachers | None
    batch: Trajectories
    steps: Steps | None
    wanted: Wanted
    wanted_of_teacher: Wanted

    @cached_property
    def old(self) -> PolicyOutputs:
        """Of the weights before the update; `extras` has what the needs of the method `measure`."""
        return outputs_of(self.policy, self.params, self.batch, self.steps, self.wanted)

    @cached_property
    def reference(self) -> PolicyOutputs:
        """Of the reference policy; InputError where there is none."""
        reference = self._reference
        policy, batch = of_a_reference(self.policy, self.batch.replace(experts=None))  # its router is its own
        if not isinstance(reference, Mixture):
            return outputs_of(policy, reference, batch, self.steps)
        found = [outputs_of(policy, params, batch, self.steps) for params in reference.policies]
        return PolicyOutputs(
            logp=sum(share * one.logp for share, one in zip(reference.shares, found, strict=True)),
            entropy=jnp.zeros_like(found[0].entropy),  # that of a mixture is not known
        )

    @cached_property
    def previous(self) -> PolicyOutputs:
        """Of the weights before the last update; InputError where they are not kept."""
        assert self.of_previous is not None  # `inputs.provide` checks it
        policy, batch = of_a_reference(self.policy, self.batch.replace(experts=None))
        return outputs_of(policy, self.of_previous, batch, self.steps)

    @cached_property
    def target_values(self) -> jax.Array:
        """f32[N, L, heads]: values of the target critic; InputError where there is none."""
        return _values_of(self.policy, {**self.params, "critic": self.of_target}, self.batch, self.steps)

    @cached_property
    def teacher(self) -> PolicyOutputs:
        if isinstance(self.of_teacher, Teachers):
            return by_teacher(self.batch.need("teacher"), [self._under(one) for one in self.of_teacher.policies])
        return self._under(teacher_of(self.policy, self.of_teacher, self.of_reference))

    def _under(self, teacher: FrozenPolicy) -> PolicyOutputs:
        """What a teacher says of the batch."""
        tokens, wanted = (self.batch.info or {}).get("teacher_tokens"), self.wanted_of_teacher
        ids = (self.old.extras or {})["top_tokens"] if "top_logp" in wanted.names else None
        own, params = teacher
        if tokens is None:
            rows = self.batch.replace(experts=None)
            policy, rows = of_a_reference(own, rows if ids is None else rows.with_info(top_tokens=ids))
            return outputs_of(policy, params, rows, self.steps, wanted)
        policy, rows = of_a_reference(own, _under_teacher(self.batch, tokens, ids))
        unpacked = None if self.steps is None else self.steps.replace(packing=None)
        return _from_teacher(self.batch, tokens, outputs_of(policy, params, rows, unpacked, wanted))

    @cached_property
    def answers(self) -> jax.Array:
        """f32[N, K]: the mean log-probability of the tokens of info["answer_tokens"] before each turn; NaN without."""
        return answer_logp(self.batch, self._read)

    @cached_property
    def blanked(self) -> jax.Array:
        """f32[N, L]: `old.logp`, but each turn's after info["blanked"] in place of the observation before it."""
        return blanked_logp(self.batch, self.old.logp, self._read)

    def _read(self, rows: Trajectories) -> jax.Array:
        """Log-probabilities [N, T] of other rows under the weights before the update, not packed."""
        unpacked = None if self.steps is None else self.steps.replace(packing=None)
        policy, rows = of_a_reference(self.policy, rows)
        return outputs_of(policy, self.params, rows, unpacked).logp

    @cached_property
    def affinity(self) -> jax.Array:
        """f32[N, L]: sum over the vocabulary of sqrt(pi_old pi_reference); InputError as `reference`."""
        reference = self._reference
        if isinstance(reference, Mixture):
            raise InputError("reference_affinity needs one reference policy, but this one is a mixture of several")
        return affinity_by_slices(self.policy, self.params, reference, self.batch, self.steps)

    def of_states(self, function: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        return _computed(function, (self.old.extras or {})["hidden"], self.batch.action_mask)

    def of_logp(self, function: Callable[[jax.Array, Trajectories], jax.Array]) -> jax.Array:
        """`function` of the log-probabilities [N, L] of the weights before the update, and the batch."""
        return _computed(function, self.old.logp, self.batch)

    @property
    def _reference(self) -> Params | Mixture:
        assert self.of_reference is not None  # `inputs.provide` checks it
        return self.of_reference


def affinity(
    policy: Policy, params: Params, other: Params, batch: Trajectories, packing: Packing | None = None
) -> jax.Array:
    """sum_v sqrt(p_v q_v) of the policies with two sets of parameters at each action, f32[N, L] (Bhattacharyya).

    A replayed routing is that of the first.
    """
    pairs = ((params, batch), (other, batch.replace(experts=None)))
    views = [view_of(policy, weights, rows, packing) for weights, rows in pairs]
    sources = [distribution_at(policy, weights, view) for view, weights in zip(views, (params, other), strict=True)]
    return scatter(vocabulary_sum(lambda p, q: jnp.exp((p + q) / 2), *sources), views[0], batch)


@compiled(static_argnames=("policy",))
def affinity_by_slices(
    policy: Policy, params: Params, reference: Params, batch: Trajectories, steps: Steps | None
) -> jax.Array:
    """`affinity` to a reference, whose parameters may be on the host, some rows at a time."""
    reference = to_device(reference)
    return by_slices(lambda part, packing: affinity(policy, params, reference, part, packing), batch, steps)


BEFORE = -2  # ids of tokens that open an answer are BEFORE - id
Read = Callable[[Trajectories], jax.Array]  # log-probabilities [N, T] of the actions of other rows


def after_turns(batch: Trajectories, answers: jax.Array, turn: int | jax.Array) -> Trajectories:
    """Rows [N, L + A] of what comes before a turn and then the answer, whose own tokens are the actions.

    answers: f32[N, A], info["answer_tokens"]. Rows without that turn, or without an answer, have no actions.
    """
    ids, (N, L) = answers.astype(jnp.int32), batch.tokens.shape
    first = turn_numbers(batch) == turn
    start = jnp.argmax(first, axis=1)[:, None]
    place = jnp.broadcast_to(jnp.arange(L + ids.shape[1]), (N, L + ids.shape[1]))
    answer = jnp.take_along_axis(ids, jnp.clip(place - start, 0, ids.shape[1] - 1), axis=1)
    answer = jnp.where((place >= start) & (place < start + ids.shape[1]), answer, -1)
    before = place < start
    tokens = jnp.where(before, jnp.take_along_axis(batch.tokens, jnp.clip(place, 0, L - 1), axis=1), answer)
    tokens = jnp.where(~before & (answer <= BEFORE), BEFORE - answer, tokens)
    there = jnp.any(first, axis=1)[:, None] & jnp.any(ids >= 0, axis=1)[:, None]
    action = ~before & (answer >= 0) & there
    return _rows(batch, jnp.maximum(tokens, 0), before | (answer != -1), action)


def mean_of_answer(logp: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[N]: the mean log-probability of an answer; NaN without one. logp, mask: [N, L + A], of `after_turns`."""
    count = jnp.sum(mask, axis=1)
    return jnp.where(count > 0, jnp.sum(jnp.where(mask, logp, 0.0), axis=1) / jnp.maximum(count, 1), jnp.nan)


def with_blank(batch: Trajectories, blanked: jax.Array, turn: int | jax.Array) -> Trajectories:
    """The rows with other tokens in place of the observation before a turn, and only this turn's actions.

    blanked: f32[N, L], info["blanked"]. Rows in which nothing changes have no actions.
    """
    following = jax.lax.cummin(jnp.where(batch.action_mask, turn_numbers(batch), 2**30), axis=1, reverse=True)
    between = batch.token_mask & ~batch.action_mask & (following > 0) & (following < 2**30)
    instead = (jnp.where(between, following, -1) == turn) & (blanked >= 0)
    tokens = jnp.where(instead, jnp.nan_to_num(blanked).astype(jnp.int32), batch.tokens)
    action = batch.action_mask & (turn_numbers(batch) == turn) & jnp.any(instead, axis=1)[:, None]
    return _rows(batch, tokens, batch.token_mask, action, batch.support_floor)


def _rows(
    batch: Trajectories, tokens: jax.Array, known: jax.Array, action: jax.Array, floor: jax.Array | None = None
) -> Trajectories:
    zeros = jnp.zeros(tokens.shape)
    return Trajectories(
        tokens=tokens, token_mask=known, action_mask=action, behaviour_logp=zeros,
        policy_step=zeros.astype(jnp.int32), turn=jnp.where(action, 0, -1), group=batch.group,
        prompt_id=batch.prompt_id, truncated=batch.truncated, temperature=batch.temperature, support_floor=floor,
    )  # fmt: skip


def placed(logp: jax.Array, found: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[N, L]: `found` where the mask is, else `logp`."""
    return jnp.where(mask, found, logp)


_after_turns, _mean_of_answer = compiled()(after_turns), compiled()(mean_of_answer)
_with_blank, _placed = compiled()(with_blank), compiled()(placed)


def answer_logp(batch: Trajectories, read: Read) -> jax.Array:
    """f32[N, K]: the mean log-probability of the reference answer before each turn; NaN without turn or answer."""
    ids, columns = (batch.info or {}).get("answer_tokens"), []
    ids = no_answers(batch, None) if ids is None else ids
    for turn in range(turn_count(batch)):
        rows = _after_turns(batch, ids, jnp.int32(turn))
        columns.append(_mean_of_answer(read(rows), rows.action_mask))
    return jnp.stack(columns, axis=1)


def blanked_logp(batch: Trajectories, logp: jax.Array, read: Read) -> jax.Array:
    """f32[N, L]: log-probabilities of each turn with the observation before it blanked; elsewhere `logp`."""
    ids, found = (batch.info or {}).get("blanked"), logp
    for turn in range(1, 1 if ids is None else turn_count(batch)):
        rows = _with_blank(batch, ids, jnp.int32(turn))
        found = _placed(found, read(rows), rows.action_mask)
    return found
