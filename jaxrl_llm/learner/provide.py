"""What methods ask for beyond a sampled and scored batch (`algorithms.needs`), computed by the policies at hand."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.needs import value_of, values_of
from jaxrl_llm.distributed.ahead_of_time import compiled
from jaxrl_llm.distributed.sharding import to_device
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.learner.checks import check_alive, check_rows
from jaxrl_llm.learner.steps import Steps, by_slices, check_steps
from jaxrl_llm.models.check import check_params
from jaxrl_llm.models.outputs import MEASURES, NOTHING, Wanted, affinity, policy_outputs
from jaxrl_llm.models.policy import Params, Policy
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


DURING_UPDATE = ("values", "mean_logp", "internal_logp")  # what objectives find in outputs.extras


def wanted_of(needs: Iterable[str], names: Iterable[str] | None = None) -> Wanted:
    """What `policy_outputs` shall find for some needs (of those in `names`)."""
    needs = frozenset(needs)
    asked = {value_of(need)[0] for need in needs}
    known = {*MEASURES, *DURING_UPDATE} if names is None else set(names)
    layers = values_of(needs, "internal_logp")
    if len(layers) > 1:
        raise InputError(f"internal_logp is needed of the layers {layers}, but only one layer is supported")
    return Wanted(
        names=tuple(sorted(asked & known)) + (("hidden",) if "effective_rank" in asked and names is None else ()),
        temperatures=tuple(values_of(needs, "tempered_logp")) if names is None else (),
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
    """Fill in what is needed of the weights before the update and of the reference policy.

    params: the weights before the update. reference: those of the reference policy; InputError where they are needed
    and None. "greedy_reward" and "feedback" are the loop's to provide. With the update's `steps` the batch goes through
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
    asked = {value_of(need)[0] for need in needs}
    if asked & {"reference_logp", "reference_affinity"} and reference is None:
        raise InputError("this method needs a reference policy, but none is loaded")
    wanted = wanted_of(needs)
    if "old_logp" in asked or wanted != Wanted():
        outputs = outputs_of(policy, params, batch, steps, wanted)
        found = dict(outputs.extras or {})
        batch = batch.replace(old_logp=outputs.logp, values=found.pop("values", batch.values))
        if "hidden" in found:
            batch = batch.with_info(effective_rank=_ranks(found.pop("hidden"), batch))
        batch = batch.with_info(**found) if found else batch
    if "reference_logp" in asked:
        batch = batch.replace(reference_logp=outputs_of(policy, reference, batch, steps).logp)
    if "reference_affinity" in asked:
        batch = batch.with_info(reference_affinity=_affinity(policy, params, reference, batch, steps))
    if "hidden_square" in asked:
        hidden = outputs_of(policy, params, batch, steps, Wanted(names=("hidden",))).extras
        batch = batch.with_info(hidden_square=_squares(hidden["hidden"])) if hidden else batch
    return batch


@compiled()
def _squares(hidden: jax.Array) -> jax.Array:
    """f32[N, L]: squared lengths of states [N, L, D]."""
    return jnp.sum(hidden**2, axis=-1)


@compiled()
def _ranks(hidden: jax.Array, batch: Trajectories) -> jax.Array:
    """f32[N, 3], a row at a time: its singular values need all its states at once."""
    from jaxrl_llm.advantages.rank import rank_measures

    return jax.lax.map(lambda row: rank_measures(*row), (hidden, batch.action_mask))
