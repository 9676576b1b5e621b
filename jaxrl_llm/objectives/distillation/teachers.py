"""Objectives that bring the policy to its teacher, which add to any other."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import FractionNumber, NonNegativeInt, Source
from jaxrl_llm.core.log_ratios import needed, source
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, Trajectories, part
from jaxrl_llm.objectives.averages import Average, Mean, as_average, mean_of
from jaxrl_llm.objectives.distillation.divergences import SupportOf, first_of_each, on_support
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import Ratio, token_ratio
from jaxrl_llm.objectives.surrogates import Surrogate, log_probability

Gain = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (student, teacher, mask [N, L]) -> advantages [N, L]


@part
def distillation(
    beta: FractionNumber = 0.5,
    top_k: NonNegativeInt = 0,
    *,
    support: SupportOf | None = None,
    tail: bool = True,
    average: Average | Mean | None = None,
    metric: str = "distillation",
) -> Objective:
    """Mean generalised Jensen-Shannon divergence of the policy from its teacher, nats per token (GKD, 2306.13649).

    The teacher is the run's (--teacher), or else the reference policy, and reads the tokens at the temperature of the
    policy; where the batch has info["teacher_tokens"], after another prompt, and rows without one have no divergence
    but count in the mean. beta: see `divergences.generalised_jsd`.

    top_k: 0 for the whole distribution, by blocks of the vocabulary, which keeps a state of the teacher for each token;
    else the divergence on the most probable tokens, see `divergences.top_k_divergence`, of which the policy's are those
    before the update. A teacher behind a URL has its top_k only, so that it needs support="teacher".
    average: default token_mean(). metric: name of the reported metric. InputError for numbers out of range.
    """
    if support is None:
        support = "teacher" if beta == 0 else "student" if beta == 1 else "union"
    of_teacher, of_student = support != "student", support != "teacher"
    needs = {"teacher_states", f"teacher_divergence:{beta:g}"} if not top_k else set[str]()
    if top_k and of_teacher:
        needs |= {f"teacher_top:{top_k}", f"teacher_top_logp:{top_k}"}
    if top_k and of_student:
        needs |= {f"top_tokens:{top_k}", f"top_logp:{top_k}", "teacher_logp"}

    def divergence(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        extras = outputs.extras or {}
        if not top_k:
            return extras["teacher_divergence"]
        ids, s, t = [], [], []
        if of_student:
            ids.append(batch.need("top_tokens"))
            s.append(extras["top_logp"])
            t.append(batch.need("teacher_logp"))
        if of_teacher:
            taught = batch.need("teacher_top")
            ids.append(taught[:, :, 0])
            s.append(extras["teacher_top_logp"])
            t.append(taught[:, :, 1])
        tokens, student, teacher = (jnp.concatenate(x, axis=-1) for x in (ids, s, jax.lax.stop_gradient(t)))
        even = -jnp.log(1.0 + student.shape[-1])  # where there is no action, so that gradients are finite
        there = (batch.loss_weights != 0)[..., None]
        student, teacher = (jnp.where(there, x, even) for x in (student, teacher))
        return on_support(student, teacher, beta, tail=tail, counts=first_of_each(tokens) if len(ids) > 1 else None)

    def taught(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        return jnp.where(taught_rows(batch)[:, None], divergence(outputs, batch), 0.0)

    return mean_of(taught, average, metric, needs)


@part
def towards_teacher(
    gain: Gain,
    ratio: Ratio | None = None,
    surrogate: Surrogate | None = None,
    average: Average | Mean | None = None,
    *,
    against: Source = "untruncated",
    metric: str = "teacher/gain",
) -> Objective:
    """The policy gradient with advantages from the teacher's log-probabilities of the sampled tokens.

    gain: (log-probabilities of the policy, of the teacher, mask [N, L]) -> advantages f32[N, L], such as
    `sampled_tokens.iw_opd_advantage`. ratio, surrogate, average: as in `policy_gradient`; default -A log pi, the token
    mean. against: whose log-probabilities the policy's are, by default those that sampled, before filters. The
    advantages of the batch are another objective's. Metrics: `metric`, the mean advantage, and "teacher/log_ratio", the
    mean of log pi - log t, which estimates KL(pi || t).
    """
    ratio, surrogate = ratio or token_ratio(), surrogate or log_probability()
    inner, mean = policy_gradient(ratio, surrogate, as_average(average), kernel=None), as_average(None)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        there = taught_rows(batch)[:, None] & (batch.loss_weights != 0)
        own, taught = source(batch, against), batch.need("teacher_token_logp")
        advantages = jax.lax.stop_gradient(gain(own, taught, there.astype(own.dtype)))
        loss, _ = inner.function(outputs, batch.replace(advantages=jnp.where(there, advantages, 0.0)))
        log_ratio = mean(jnp.where(there, own - taught, 0.0), batch)
        return loss, {metric: mean(jnp.where(there, advantages, 0.0), batch), "teacher/log_ratio": log_ratio}

    return Objective(objective, inner.needs | needed(against) | {"teacher_token_logp"}, inner.refresh)


def taught_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: the rows that the teacher read: all, or where it has prompts of its own, those with one."""
    tokens = (batch.info or {}).get("teacher_tokens")
    return jnp.ones(batch.tokens.shape[0], bool) if tokens is None else jnp.any(tokens >= 0, axis=1)
