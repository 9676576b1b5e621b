"""What methods need beyond a sampled and scored batch (`jaxrl_llm.needs`), computed from the policies at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import jax

from jaxrl_llm.distributed.mesh import compiled, to_device
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.learner.checks import check_alive, check_rows
from jaxrl_llm.learner.steps import Steps, by_slices, check_steps
from jaxrl_llm.models.check import check_params
from jaxrl_llm.models.outputs import NOTHING, Wanted, affinity, policy_outputs
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.needs import NEEDS, need_of, of_reference, value_of, values_of
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories


@compiled(static_argnames=("policy", "wanted"))
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
    return by_slices(lambda part, packing: policy_outputs(policy, params, part, packing, wanted), batch, steps)


@compiled(static_argnames=("policy",))
def _affinity(policy: Policy, params: Params, reference: Params, batch: Trajectories, steps: Steps | None) -> jax.Array:
    reference = to_device(reference)
    return by_slices(lambda part, packing: affinity(policy, params, reference, part, packing), batch, steps)


@compiled(static_argnames=("function",))
def _of_states(function: Callable[[jax.Array, jax.Array], jax.Array], hidden: jax.Array, mask: jax.Array) -> jax.Array:
    return function(hidden, mask)


@dataclass(frozen=True)
class _Models:
    """`needs.Models` of a batch: one forward pass for all that is read of a policy."""

    policy: Policy
    params: Params
    of_reference: Params | None
    batch: Trajectories
    steps: Steps | None
    wanted: Wanted

    @cached_property
    def old(self) -> PolicyOutputs:
        return outputs_of(self.policy, self.params, self.batch, self.steps, self.wanted)

    @cached_property
    def reference(self) -> PolicyOutputs:
        return outputs_of(self.policy, self._reference, self.batch, self.steps)

    @cached_property
    def affinity(self) -> jax.Array:
        return _affinity(self.policy, self.params, self._reference, self.batch, self.steps)

    def of_states(self, function: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        return _of_states(function, (self.old.extras or {})["hidden"], self.batch.action_mask)

    @property
    def _reference(self) -> Params:
        assert self.of_reference is not None  # `provide` checks it
        return self.of_reference


# What objectives find in outputs.extras.
DURING_UPDATE = tuple(need.name for need in NEEDS.values() if need.by_outputs is not None)


def wanted_of(needs: Iterable[str], names: Iterable[str] | None = None) -> Wanted:
    """What `policy_outputs` must find for some needs (of those in `names`)."""
    needs = [need for need in needs if names is None or value_of(need)[0] in set(names)]
    layers = values_of(needs, "internal_logp")
    if len(layers) > 1:
        raise InputError(f"internal_logp is needed of the layers {layers}, but only one layer is supported")
    measures = {measure for need in needs if (measure := need_of(need).measure) is not None}
    return Wanted(
        names=tuple(sorted(measures - {"tempered_logp"})),
        temperatures=tuple(values_of(needs, "tempered_logp")),
        layer=int(layers[0]) if layers else 0,
    )


def provide(
    policy: Policy,
    needs: frozenset[str],
    params: Params,
    reference: Params | None,
    batch: Trajectories,
    steps: Steps | None = None,
) -> Trajectories:
    """Fill in the needs that have a `compute`: one forward pass for each policy, whatever is read of it.

    params: the weights before the update. reference: those of the reference policy; InputError where they are needed
    and None. Other needs are the loop's, or the rollouts', to provide. With the update's `steps` the batch goes through
    a policy as it does in the update, slice by slice.

    Raises InputError, too, for parameters of another model, token ids beyond the vocabulary, and steps that were
    planned for another batch.
    """
    check_rows(policy, batch)
    if isinstance(needs, str) or not all(isinstance(need, str) for need in needs):
        raise InputError(f"needs is {shown(needs)}, but must be a set of names, such as an algorithm's `needs`")
    check_alive("a parameter", params, "Go on from the state that the update gave back")
    check_params(policy, params)
    if reference is not None:
        check_alive("a parameter of the reference policy", reference, "Keep a copy that no update takes")
        check_params(policy, reference)
    if steps is not None:
        check_steps(steps, batch)
    if of_reference(needs) and reference is None:
        raise InputError("this method needs a reference policy, but none is loaded")
    models = _Models(policy, params, reference, batch, steps, wanted_of(needs))
    for text in sorted(needs):
        (_, number), need = value_of(text), need_of(text)
        if need.compute is not None:
            batch = need.put(batch, need.compute(models, models.batch, number), number)
    return batch
