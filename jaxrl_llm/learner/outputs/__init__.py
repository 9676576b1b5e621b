"""What policies say of a batch: the one that learns, its reference, its earlier weights and its teachers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.distributed.aot import compiled
from jaxrl_llm.distributed.mesh import on_rows, to_device
from jaxrl_llm.learner.microbatches import Steps, by_slices
from jaxrl_llm.learner.outputs.affinity import affinity_by_slices
from jaxrl_llm.learner.outputs.rescoring import answer_logp, blanked_logp
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers, from_teacher, of_rows, teacher_of, under_teacher
from jaxrl_llm.models.hooked import of_a_reference
from jaxrl_llm.models.mesh_axes import row_shards
from jaxrl_llm.models.outputs import NOTHING, Wanted, policy_outputs
from jaxrl_llm.models.packing import Packing
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError


def _rows_of(policy: Policy, batch: Trajectories) -> Sharding | None:
    """The sharding of a batch's rows on the policy's mesh; None without one, and where it does not divide them."""
    mesh = policy.mesh
    return None if mesh is None or batch.tokens.shape[0] % row_shards(mesh) else on_rows(mesh)


@compiled(results=lambda given: _rows_of(given.policy, given.batch), static_argnames=("policy", "wanted"))
def outputs_of(
    policy: Policy,
    params: Params,
    batch: Trajectories,
    steps: Steps | None = None,
    wanted: Wanted = NOTHING,
) -> PolicyOutputs:
    """`policy_outputs`, compiled; with the steps of an update one slice after another, as they do.

    Parameters in the host's memory are on the device for the time of the call.
    """
    params = to_device(params)
    found = by_slices(lambda part, packing: policy_outputs(policy, params, part, packing, wanted), batch, steps)
    rows = _rows_of(policy, batch)
    return found if rows is None else jax.lax.with_sharding_constraint(found, rows)


@compiled(static_argnames=("function",))
def _of_states(function: Callable[[jax.Array, jax.Array], jax.Array], hidden: jax.Array, mask: jax.Array) -> jax.Array:
    return function(hidden, mask)


@compiled(static_argnames=("policy",))
def _values_of(policy: Policy, params: Params, batch: Trajectories, steps: Steps | None) -> jax.Array:
    """The critic's values alone, f32[N, L, heads]."""

    def values(part: Trajectories, packing: Packing | None) -> jax.Array:
        return (policy_outputs(policy, params, part, packing, Wanted(("values",))).extras or {})["values"]

    return by_slices(values, batch, steps)


_under_teacher, _from_teacher = compiled()(under_teacher), compiled()(from_teacher)


@compiled(static_argnames=("function",))
def _of_logp(
    function: Callable[[jax.Array, Trajectories], jax.Array], logp: jax.Array, batch: Trajectories
) -> jax.Array:
    return function(logp, batch)


@dataclass(frozen=True)
class Models:
    """`needs.Models` of a batch: one forward pass for all that is read of a policy."""

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
        return outputs_of(self.policy, self.params, self.batch, self.steps, self.wanted)

    @cached_property
    def reference(self) -> PolicyOutputs:
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
        assert self.of_previous is not None  # `inputs.provide` checks it
        policy, batch = of_a_reference(self.policy, self.batch.replace(experts=None))
        return outputs_of(policy, self.of_previous, batch, self.steps)

    @cached_property
    def target_values(self) -> jax.Array:
        return _values_of(self.policy, {**self.params, "critic": self.of_target}, self.batch, self.steps)

    @cached_property
    def teacher(self) -> PolicyOutputs:
        if isinstance(self.of_teacher, Teachers):
            return of_rows(self.batch.need("teacher"), [self._under(one) for one in self.of_teacher.policies])
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
        found = outputs_of(policy, params, rows, unpacked, wanted)
        return _from_teacher(self.batch, tokens, found)

    @cached_property
    def answers(self) -> jax.Array:
        return answer_logp(self.batch, self._read)

    @cached_property
    def blanked(self) -> jax.Array:
        return blanked_logp(self.batch, self.old.logp, self._read)

    def _read(self, rows: Trajectories) -> jax.Array:
        """Log-probabilities [N, T] of other rows under the weights before the update, not packed."""
        unpacked = None if self.steps is None else self.steps.replace(packing=None)
        policy, rows = of_a_reference(self.policy, rows)
        return outputs_of(policy, self.params, rows, unpacked).logp

    @cached_property
    def affinity(self) -> jax.Array:
        reference = self._reference
        if isinstance(reference, Mixture):
            raise InputError("reference_affinity needs one reference policy, but this one is a mixture of several")
        return affinity_by_slices(self.policy, self.params, reference, self.batch, self.steps)

    def of_states(self, function: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        return _of_states(function, (self.old.extras or {})["hidden"], self.batch.action_mask)

    def of_logp(self, function: Callable[[jax.Array, Trajectories], jax.Array]) -> jax.Array:
        return _of_logp(function, self.old.logp, self.batch)

    @property
    def _reference(self) -> Params | Mixture:
        assert self.of_reference is not None  # `inputs.provide` checks it
        return self.of_reference
