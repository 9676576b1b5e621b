"""What a policy says of sampled tokens: log-probability and entropy of each action, never all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.needs import NEEDS, need_of, value_of, values_of
from jaxrl_llm.core.shapes import check_batch
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.models.adam_step import adam_step
from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.critic import implicit_logp, values_at
from jaxrl_llm.models.diffusion.elbo import elbo_terms
from jaxrl_llm.models.divergence import divergence
from jaxrl_llm.models.hooked import Places, hooked_logp
from jaxrl_llm.models.layers.parts import accumulation_dtype
from jaxrl_llm.models.layers.routing import check_experts, of_all_rows
from jaxrl_llm.models.members import perturbations
from jaxrl_llm.models.packed_states import EXPERTS, LOAD, View, logp_at, numbers_of, packed_states, view_of
from jaxrl_llm.models.packing import Packing, whole_rows
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.scores import scores_of
from jaxrl_llm.models.soft_thinking import check_thoughts, soft_logp
from jaxrl_llm.models.stacks import inner_policy
from jaxrl_llm.models.vocabulary import Distribution, logp_of_tokens, most_probable, vocabulary_sum
from jaxrl_llm.utils.errors import InputError


class Wanted(NamedTuple):
    """What `policy_outputs` shall find beside log-probabilities and entropies; static."""

    # Of MEASURES, "values", "hidden", "greedy", "internal_logp", "heated_logp", "top_tokens", "top_logp",
    # "implicit_logp", "scores", "experts", "router_load", "head_states", "most_probable", "teacher_top_logp",
    # "teacher_divergence", "elbo_terms", "adam_step", "perturbation" (alone).
    names: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = ()  # "tempered_logp:T" for each, a multiple of the sampling temperature
    layer: int = 0  # of "internal_logp", counting from 1
    heat: float = 0.0  # of "heated_logp", a multiple of the sampling temperature
    top: int = 0  # of "top_tokens" and "top_logp"; of "most_probable"
    beta: float = 0.0  # of "teacher_divergence"
    masks: int = 0  # of "elbo_terms"


# Sums over the vocabulary of what is made of its log-probabilities.
MEASURES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "squared_probability": lambda logp: jnp.exp(2 * logp),
    "cubed_probability": lambda logp: jnp.exp(3 * logp),
    "mean_logp": lambda logp: logp,  # divided by the size of the vocabulary below
}
PERTURBATION = "perturbation"
ADAM = ("beta1", "beta2", "epsilon")  # controls that "adam_step" reads
NOTHING = Wanted()
# What objectives find in outputs.extras.
DURING_UPDATE = tuple(need.name for need in NEEDS.values() if need.by_outputs is not None)


def wanted_of(needs: Iterable[str], names: Iterable[str] | None = None) -> Wanted:
    """What `policy_outputs` must find for some needs; with `names`, those whose outputs.extras objectives read."""
    needs = [need for need in needs if names is None or value_of(need)[0] in set(names)]
    betas = values_of(needs, "teacher_divergence")
    if len(betas) > 1:
        raise InputError(f"divergences from the teacher are needed with beta {betas}, but only one is supported")
    layers = values_of(needs, "internal_logp")
    if len(layers) > 1:
        raise InputError(f"internal_logp is needed of the layers {layers}, but only one layer is supported")
    heats = values_of(needs, "heated_logp")
    if len(heats) > 1:
        raise InputError(f"heated_logp is needed at the temperatures {heats}, but only one is supported")
    known = map(need_of, needs)
    measures = {found for need in known if (found := need.measure if names is None else need.by_outputs) is not None}
    return Wanted(
        names=tuple(sorted(measures - {"tempered_logp"})),
        temperatures=tuple(values_of(needs, "tempered_logp")),
        layer=int(layers[0]) if layers else 0,
        heat=heats[0] if heats else 0.0,
        top=int(max([*values_of(needs, "top_tokens"), *values_of(needs, "top_logp")], default=0)),
        beta=betas[0] if betas else 0.0,
        masks=int(max(values_of(needs, "elbo_terms"), default=0)),
    )


OF_TEACHER = {"teacher_logp": "top_logp", "teacher_top": "most_probable", "teacher_states": "head_states"}


def wanted_of_teacher(needs: Iterable[str]) -> Wanted:
    """What `policy_outputs` must find of a teacher for some needs."""
    needs = list(needs)
    names = {OF_TEACHER[name] for need in needs if (name := value_of(need)[0]) in OF_TEACHER}
    return Wanted(tuple(sorted(names)), top=int(max(values_of(needs, "teacher_top"), default=0)))


def policy_outputs(
    policy: Policy,
    params: Params,
    batch: Trajectories,
    packing: Packing | None = None,
    wanted: Wanted = NOTHING,
) -> PolicyOutputs:
    """Log-probability and entropy of each action under `params`, f32[N, L], 0 where there is no action.

    They are of the distribution that was sampled from: at the trajectories' temperature, through the policy's hook, and
    of the truncated support where top-k, top-p or min-p were on. Differentiable with respect to params, but not to
    those of a second policy that the hook reads, params["other"].

    With a packing (`learner.microbatches` makes them on the host, `packing.shared_prompts` under jit) what several rows
    share goes through the model once, forward and backward, short rows lie side by side, and the vocabulary is only
    looked at for the actions it lists. Without one every row goes through as it is. The results are the same.

    What is `wanted` is in `extras`, at each action, and through a hook only where that changes temperatures by their
    entropy (`Hook.factor`): MEASURES and tempered log-probabilities of the untruncated
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
    "adam_step" [N, L, 2] is of the step that Adam would take for an action alone (`models.adam_step`), by its moments
    params["moments"], which `learner.update` gives, the batch's advantages, and what its controls say of Adam.
    Of a masked-diffusion model "elbo_terms" f32[N, n] are n = `masks` samples of the bound on its likelihood of a row,
    differentiable (`models.diffusion.elbo`).
    "experts" int[N, L, layers, k] are of all tokens, not only of actions, and so is "router_load", the `moe.Load` of a
    mixture [layers, E], of which tokens that rows share count once with a packing; one of both at a time.

    Where "perturbation" f32[N] is wanted, of the row's member of the policy's population and differentiable (see
    `members.perturbations`), no token goes through the model: log-probabilities and entropies are the sampler's, and
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
    source = whole._replace(
        hidden=jax.lax.stop_gradient(whole.hidden), unembedding=jax.lax.stop_gradient(whole.unembedding)
    )
    for name in sorted(set(wanted.names) & set(MEASURES)):
        scale = 1 / policy.config.known_tokens if name == "mean_logp" else 1.0
        found[name] = scale * vocabulary_sum(MEASURES[name], source)
    for times in wanted.temperatures:
        tempered = view._replace(temperature=times * view.temperature, floor=None)
        found[f"tempered_logp:{times:g}"] = jax.lax.stop_gradient(logp_at(policy, params, tempered)[0])
    if "internal_logp" in wanted.names:
        inner, weights = inner_policy(policy, params, wanted.layer)
        states = view_of(inner, weights, batch, packing)._replace(floor=None)
        found["internal_logp"] = logp_at(inner, weights, states)[0]
    if "heated_logp" in wanted.names:
        heated = view._replace(temperature=wanted.heat * view.temperature, floor=None)
        found["heated_logp"] = logp_at(policy, params, heated)[0]
    if "greedy" in wanted.names:
        found["greedy"] = (most_probable(source, 1)[0][:, 0] == view.targets).astype(jnp.float32)
    if "top_tokens" in wanted.names:
        tokens, found["top_logp"] = most_probable(source, wanted.top)
        found["top_tokens"] = tokens.astype(jnp.float32)  # exact: vocabularies are far smaller than 2^24
    elif "top_logp" in wanted.names:
        found["top_logp"] = logp_of_tokens(whole, _at(batch, "top_tokens", view).astype(jnp.int32))
    if "most_probable" in wanted.names:
        ids, logs = most_probable(source, wanted.top)
        found["most_probable"] = jnp.stack([ids.astype(logs.dtype), logs], axis=1)
    if "head_states" in wanted.names:
        found["head_states"] = source.hidden
    if "teacher_top_logp" in wanted.names:
        found["teacher_top_logp"] = logp_of_tokens(whole, _at(batch, "teacher_top", view)[:, 0].astype(jnp.int32))
    if "teacher_divergence" in wanted.names:
        teacher = _of_teacher(policy, params, _at(batch, "teacher_states", view), view)
        found["teacher_divergence"] = divergence(whole, teacher, wanted.beta)
    if "adam_step" in wanted.names:
        found["adam_step"] = _adam_step(source, params, batch, view)
    if "hidden" in wanted.names:
        found["hidden"] = jax.lax.stop_gradient(view.states)
    if "values" in wanted.names:
        found["values"] = values_at(policy, params, view, batch, packing)
    if "implicit_logp" in wanted.names:
        found["implicit_logp"] = implicit_logp(policy, params, batch, packing)
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


def distribution_at(policy: Policy, params: Params, view: View) -> Distribution:
    """The distributions that a view's tokens were drawn from, without truncation."""
    states, head, config = policy.head_states(params, view.states), policy.unembedding(params), policy.config
    return Distribution(states, head, view.temperature, config.logit_softcap, config.known_tokens)


def _at(batch: Trajectories, name: str, view: View) -> jax.Array:
    """What the batch has at the chosen tokens, [M, ...]."""
    return batch.need(name).at[view.row, view.column].get(mode="clip")


def _adam_step(source: Distribution, params: Params, batch: Trajectories, view: View) -> jax.Array:
    """f32[M, 2]. InputError where Adam's moments are not at hand, or what the transform says of it."""
    if "moments" not in params:
        raise InputError("a step of Adam needs its moments, which only an update has: give the objective to update")
    said = batch.controls or {}
    if missing := [name for name in ADAM if name not in said]:
        raise InputError(f"a step of Adam needs the control {missing[0]}: a transform gives it, by with_controls")
    advantages = jax.lax.stop_gradient(_at(batch, "advantages", view))
    b1, b2, epsilon = (said[name] for name in ADAM)
    return adam_step(source, view.targets, advantages, params["moments"], (b1, b2, epsilon))


def _of_teacher(policy: Policy, params: Params, states: jax.Array, view: View) -> Distribution:
    """The teacher's distributions at the same temperatures. InputError where its unembedding is not at hand."""
    if policy.teacher is None or "teacher" not in params:
        raise InputError("a divergence from the whole distribution of a teacher needs its unembedding: train by a run")
    head = params["teacher"]["unembedding"]
    return Distribution(states.astype(head.dtype), head, view.temperature, *policy.teacher)


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
    state = numbers_of(hook, batch, packing)
    places = Places(view.states, view.targets, view.temperature, view.floor, state, others)
    return hooked_logp(policy, hook, params, places)


def scatter(values: jax.Array, view: View, batch: Trajectories) -> jax.Array:
    """From chosen tokens [M, ...] to positions f32[N, L, ...], 0 where there is no action."""
    action = batch.action_mask.at[view.row, view.column].get(mode="fill", fill_value=False)
    values = jnp.where(action.reshape(-1, *[1] * (values.ndim - 1)), values, 0.0)
    empty = jnp.zeros((*batch.tokens.shape, *values.shape[1:]), accumulation_dtype(values.dtype))
    return empty.at[view.row, view.column].set(values.astype(empty.dtype), mode="drop")
