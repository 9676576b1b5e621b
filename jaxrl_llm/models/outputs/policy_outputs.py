"""What a policy says of sampled tokens: log-probability and entropy of each action, never all logits at once."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.shapes import check_batch
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.models.by_row import perturbations
from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.hooked import Places, hooked_logp
from jaxrl_llm.models.layers.parts import accumulation_dtype
from jaxrl_llm.models.layers.routing import check_experts, of_all_rows
from jaxrl_llm.models.outputs.readings import READINGS, Seen, distribution_at, elbo_terms, stopped, tempered_logp
from jaxrl_llm.models.outputs.soft_thinking import check_thoughts, soft_logp
from jaxrl_llm.models.outputs.wanted import NOTHING, Wanted
from jaxrl_llm.models.packed_states import EXPERTS, LOAD, View, logp_at, numbers_of, packed_states, view_of
from jaxrl_llm.models.packing import Packing, whole_rows
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.scores import scores_of
from jaxrl_llm.utils.errors import InputError

PERTURBATION = "perturbation"


def policy_outputs(
    policy: Policy, params: Params, batch: Trajectories, packing: Packing | None = None, wanted: Wanted = NOTHING
) -> PolicyOutputs:
    """Log-probability and entropy of each action under `params`, f32[N, L], 0 where there is no action.

    They are of the distribution that was sampled from: at the trajectories' temperature, through the policy's hook, and
    of the truncated support where top-k, top-p or min-p were on. Differentiable with respect to params, but not to
    those of a second policy that the hook reads, params["other"].

    With a packing (`learner.microbatches` makes them on the host, `packing.shared_prompts` under jit) what several rows
    share goes through the model once, forward and backward, short rows lie side by side, and the vocabulary is only
    looked at for the actions it lists. Without one every row goes through as it is. The results are the same.

    What is `wanted` (`readings`) is in `extras`, at each action, and through a hook only where that changes
    temperatures by their entropy (`Hook.factor`): MEASURES and tempered log-probabilities of the untruncated
    distribution, under stop-gradient; "values" of the critic, f32[N, L] or [N, L, heads]; "internal_logp", the
    log-probability under the unembedded state after a layer (no last norm); "heated_logp", at another temperature and
    without truncation, differentiable; "hidden" [N, L, D]; "greedy", 1 where the action is the most probable token.
    "top_tokens" [N, L, K] are the ids of the K = `top` most probable tokens, and "top_logp" [N, L, K] their
    log-probabilities without truncation; where only these are wanted they are of the ids in info["top_tokens"], and
    differentiable. "implicit_logp" is the log-probability under the implicit reward model (a critic of the kind
    "likelihood"), differentiable with respect to its parameters.
    Of a teacher: "head_states" [N, L, D], the states that its unembedding multiplies, and "most_probable" [N, L, 2, K],
    ids and log-probabilities of its K = `top` most probable tokens. With info["teacher_top"] of them "teacher_top_logp"
    [N, L, K] are the policy's log-probabilities of these ids, and with info["teacher_states"] "teacher_divergence"
    f32[N, L] is the generalised Jensen-Shannon divergence from it, with `beta`; both differentiable.
    "adam_step" [N, L, 2] is of the step that Adam would take for an action alone (`readings.adam_step`), by its moments
    params["moments"], which `learner.update` gives, the batch's advantages, and what its controls say of Adam.
    Of a masked-diffusion model "elbo_terms" f32[N, n] are n = `masks` samples of the bound on its likelihood of a row,
    differentiable (`readings.elbo_terms`).
    "experts" int[N, L, layers, k] are of all tokens, not only of actions, and so is "router_load", the `moe.Load` of a
    mixture [layers, E], of which tokens that rows share count once with a packing; one of both at a time.

    Where "perturbation" f32[N] is wanted, of the row's member of the policy's population and differentiable (see
    `by_row.perturbations`), no token goes through the model: log-probabilities and entropies are the sampler's, and
    there is nothing else.

    Of a reward model log-probabilities and entropies are 0, and "scores" [N, L, labels] those of the token before each
    action, differentiable; it has nothing else.

    Where the batch has `thoughts`, soft tokens go through the model as mixtures of the current embeddings; their
    log-probability is the log-density of their scores, and their entropy that over their K tokens
    (`core.soft_thinking`).

    Where the batch has `experts`, a mixture sees its tokens with these instead of its router's choice (routing replay).

    InputError for parameters of another policy, and arrays of the batch that do not fit its tokens.
    """
    check_params(policy, params)
    check_batch(batch)
    check_experts(policy, batch)
    check_thoughts(policy, batch, (*wanted.names, *(["heated_logp"] if wanted.temperatures else [])))
    record = next((name for name in (EXPERTS, LOAD) if name in wanted.names), None)
    if PERTURBATION in wanted.names:
        return _perturbed(policy, params, batch, wanted)
    if policy.config.score:
        return _scored(params, view_of(policy, params, batch, packing, record), batch, wanted)
    view = view_of(policy, params, batch, packing, record)
    logp, entropy = _drawn_from(policy, params, view, batch, packing)
    if batch.thoughts is not None:
        thoughts = batch.thoughts.at[view.row, view.column].get(mode="clip")
        soft, *of_soft = soft_logp(policy, params, view.states, view.temperature, thoughts)
        logp, entropy = (jnp.where(soft, x, y) for x, y in zip(of_soft, (logp, entropy), strict=True))
    found = {"logp": logp, "entropy": entropy}
    whole = distribution_at(policy, params, view)
    seen = Seen(policy, params, batch, packing, wanted, view, whole, stopped(whole))
    for name in (name for name in READINGS if name in wanted.names):
        read = READINGS[name](seen)
        found |= read if isinstance(read, dict) else {name: read}
    for times in wanted.temperatures:
        found[f"tempered_logp:{times:g}"] = jax.lax.stop_gradient(tempered_logp(seen, times))
    placed = {name: scatter(values, view, batch) for name, values in found.items()}
    if "elbo_terms" in wanted.names:
        placed["elbo_terms"] = elbo_terms(policy, params, batch, wanted.masks)
    if record is not None:
        placed[record] = of_all_rows(view.routing, batch) if record == EXPERTS else view.routing
    return PolicyOutputs(placed.pop("logp"), placed.pop("entropy"), placed or None)


def _perturbed(policy: Policy, params: Params, batch: Trajectories, wanted: Wanted) -> PolicyOutputs:
    """The outputs of an update by evolution. InputError for what only a pass through the model finds."""
    if other := {*wanted.names, *(["tempered_logp"] if wanted.temperatures else [])} - {PERTURBATION}:
        raise InputError(
            f"an update by evolution runs no model, and has no {', '.join(sorted(other))}: leave out one of the two"
        )
    drawn = jnp.where(batch.action_mask, batch.behaviour_logp, 0.0)
    entropy = jnp.zeros_like(drawn) if batch.entropy is None else jnp.where(batch.action_mask, batch.entropy, 0.0)
    return PolicyOutputs(drawn, entropy, {PERTURBATION: perturbations(policy, params, batch)})


def _scored(params: Params, view: View, batch: Trajectories, wanted: Wanted) -> PolicyOutputs:
    """The outputs of a reward model. InputError for what only a language model has."""
    if other := {*wanted.names, *(["tempered_logp"] if wanted.temperatures else [])} - {"scores"}:
        raise InputError(f"a reward model has no {', '.join(sorted(other))}: train a policy with this method")
    nothing = jnp.zeros(batch.tokens.shape, accumulation_dtype(view.states.dtype))
    scores = {"scores": scatter(scores_of(params, view.states), view, batch)} if "scores" in wanted.names else None
    return PolicyOutputs(nothing, nothing, scores)


def _drawn_from(
    policy: Policy, params: Params, view: View, batch: Trajectories, packing: Packing | None
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy f32[M] of the distribution that tokens were drawn from."""
    if (hook := policy.hook) is None or hook.factor is not None:
        return logp_at(policy, params, view)
    packing = whole_rows(batch) if packing is None else packing
    others = None
    if hook.other is not None:
        others, _ = packed_states(policy, jax.lax.stop_gradient(params["other"]), batch.tokens, packing)
    places = Places(view.states, view.targets, view.temperature, view.floor, numbers_of(hook, batch, packing), others)
    return hooked_logp(policy, hook, params, places)


def scatter(values: jax.Array, view: View, batch: Trajectories) -> jax.Array:
    """From chosen tokens [M, ...] to positions f32[N, L, ...], 0 where there is no action."""
    action = batch.action_mask.at[view.row, view.column].get(mode="fill", fill_value=False)
    values = jnp.where(action.reshape(-1, *[1] * (values.ndim - 1)), values, 0.0)
    empty = jnp.zeros((*batch.tokens.shape, *values.shape[1:]), accumulation_dtype(values.dtype))
    return empty.at[view.row, view.column].set(values.astype(empty.dtype), mode="drop")
