from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Count, Fraction, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.parts import PolicyOutputs, Trajectories, chain, part, stateless_part, surrogate_part
from jaxrl_llm.core.reference import exponential_average
from jaxrl_llm.core.transform import Metrics, Objective
from jaxrl_llm.objectives import averaged, clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.distillation.divergences import on_support
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.rollouts.guidance.hints import texts_of
from jaxrl_llm.rollouts.guidance.repair import Succeeds, succeeds
from jaxrl_llm.rollouts.programs import Episode, Task, Tools, program_part, scored_samples


@method(paper="arXiv 2604.02288", test="test_self_distilled.py::test_srpo_is_its_loop")
def srpo_sample_routing(
    strength: Paper[NonNegative] = 1.0,
    success: Paper[float] = 0.5,
    decay: Code[NonNegative] = 0.95,
    share: Code[Fraction] = 0.5,
    top: Code[Count] = 100,
    cap: Code[float] = 2.0,
    column: Ours[str | None] = None,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.28,
) -> Algorithm:
    """Sample-Routed Policy Optimization (SRPO).

    Samples of a group that failed (reward <= success) and have a teacher are distilled, the others are as in GRPO. The
    teacher q is a moving average of the policy's weights, decay theta_q + (1 - decay) theta after each update, which
    reads the same tokens after a longer prompt: with a sample of the group that succeeded, or, where none did, with the
    text of a column of the data set (None: there is no such text). With z_i = 1 for the rows that are distilled, and m
    over the actions of all rows,

        loss = [sum_m (1 - z_i) l + sum_m z_i w min(sg rho, cap) D(p, q)] / sum_m 1
        l = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  A_i = r_i - mean of all G rewards
        D = (1 - a) KL(p || m) + a KL(q || m),  m = (1 - a) p + a q,  a = share (0: KL(q || p), 1: KL(p || q))
        w = exp(-strength H(q)) / its mean over all distilled tokens

    D is over the `top` most probable tokens of the policy before the update, and all others as one; in the code they
    are those of the current policy, which differ after the first gradient step. H is of the whole distribution. Groups
    in which all fail, without a column, have no signal. The memory is that of a reference policy and of 3 `top` numbers
    a token; the teacher's pass is of whole rows, not of shared prompts.
    """
    objective = policy_gradient(token_ratio(), unless_distilled(clip(clip_low, clip_high)), token_mean())
    return Algorithm(
        chain(group_relative("none"), route_failures(success, strength)),
        objective + self_distillation(top, share, cap),
        rollout=with_right_siblings(succeeds(success), column),
        reference=exponential_average(decay),
    )


def confidence_weights(entropy: jax.Array, mask: jax.Array, strength: float | jax.Array = 1.0) -> jax.Array:
    """exp(-strength H), divided by its mean over the mask bool[...]; f32[...], 0 outside of it (2604.02288).

    >>> H = jnp.asarray([0.167701, 1.386294, 0.940448])
    >>> [round(float(w), 4) for w in confidence_weights(H, H > 0)]
    [1.7071, 0.5047, 0.7882]
    """
    lowest = jnp.min(jnp.where(mask, entropy, jnp.inf))  # so that not all weights underflow
    weights = jnp.where(mask, jnp.exp(-strength * (entropy - jnp.where(jnp.isfinite(lowest), lowest, 0.0))), 0.0)
    return weights * jnp.sum(mask) / jnp.maximum(jnp.sum(weights), 1e-30)


@stateless_part({"teacher_tokens", "teacher_entropy"})
def route_failures(b: Trajectories, success: float = 0.5, strength: NonNegative = 1.0) -> Trajectories:
    """Choose the rows to distil, info["distilled"] f32[N], and weigh their tokens, info["distil_weight"] f32[N, L].

    They are those with info["teacher_tokens"] and a score of at most `success`; weights: `confidence_weights` of the
    teacher's entropy over all their actions in the batch.
    """
    tokens = (b.info or {}).get("teacher_tokens", jnp.full((len(b.group), 1), -1))
    rows = jnp.any(tokens >= 0, axis=1) & (b.scores <= success)
    mask = rows[:, None] & (b.loss_weights != 0)
    weight = confidence_weights(jax.lax.stop_gradient(b.need("teacher_entropy")), mask, strength)
    return b.with_info(distilled=rows.astype(jnp.float32), distil_weight=weight)


@surrogate_part
def unless_distilled(
    ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories, sampled: Surrogate
) -> tuple[jax.Array, Metrics]:
    """The surrogate `sampled`, 0 on the rows that `route_failures` chose. Statistics: its own, and "distil/share"."""
    value, statistics = sampled(ratio, outputs, batch)
    there = jnp.broadcast_to(batch.need("distilled")[:, None] > 0, value.shape)
    return jnp.where(there, 0.0, value), {**statistics, "distil/share": there.astype(jnp.float32)}


@part
def self_distillation(top: Count = 100, share: Fraction = 0.5, cap: Positive = 2.0) -> Objective:
    """Token mean, over all tokens, of w sg(min(rho, cap)) D(p, q) on the rows that were chosen.

    D: `generalised_jsd` with beta = share. p: the policy, q: the teacher, each of the `top` most probable tokens of the
    policy before the update and of the rest. w: of `route_failures`. rho: `token_ratio`. Metric "distil/divergence":
    the mean divergence of those tokens, without w and rho, times their share.
    """
    ratio, mean = token_ratio(), token_mean()

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        p, q = (outputs.extras or {})["top_logp"], jax.lax.stop_gradient(batch.need("teacher_logp"))
        there = (batch.need("distilled")[:, None] > 0) & (batch.loss_weights != 0)
        even = -jnp.log(1.0 + p.shape[-1])
        p, q = (jnp.where(there[..., None], x, even) for x in (p, q))
        divergence = jnp.where(there, on_support(p, q, share), 0.0)
        trust = jax.lax.stop_gradient(jnp.minimum(ratio(outputs, batch), cap))
        value = mean(divergence * trust * batch.need("distil_weight"), batch)
        return value, {"distil/divergence": mean(divergence, batch), "distil/loss": value}

    needs = {f"top_tokens:{top}", f"top_logp:{top}", "teacher_logp", "teacher_entropy", "teacher_tokens"}
    return averaged(objective, mean, needs)


SOLVED = "\n\nA correct solution is:\n\n{}\n\nNow answer the question yourself."


@program_part("with_right_siblings", {"teacher_tokens"}, ["{column}"])
async def with_right_siblings(
    tools: Tools, task: Task, succeeds: Succeeds, column: str | None = None, text: str = SOLVED
) -> list[Episode]:
    """A group of samples, of which each failed one has a teacher's prompt: with the text of one that succeeded.

    succeeds: a function of a scored episode, see `repair.succeeds`. Each failed sample draws one of those that
    succeeded. Where none did, `column` of the data set may have other information: feedback, or a solution. text: how
    it is written after the prompt. A sample that does not fit into the model's context behind it has no teacher.

    Provides teacher_tokens (`batch.teacher_tokens`); info["taught"] is 1 for samples with a teacher's prompt.
    """

    def taught(tools: Tools, episode: Episode, known: Sequence[str], which: int) -> Episode:
        """The episode with its teacher's prompt, where it failed and something is known."""
        prompt: tuple[int, ...] = ()
        if known and not succeeds(episode):
            longer = tools.prompt_with(text.format(known[which]))
            prompt = longer if tools.fits((*longer, *episode.own.token.tolist())) else ()
        return replace(episode, teacher_prompt=prompt).with_info(taught=float(bool(prompt)))

    found = await scored_samples(tools, task.prompt, range(task.samples))
    right = [tools.decode(one.own.token.tolist()) for one in found if succeeds(one)]
    known = right or (texts_of(task.row.get(column), column) if column is not None else [])
    drawn = tools.random("teacher").integers(0, max(len(known), 1), len(found))
    return [taught(tools, one, known, int(which)) for one, which in zip(found, drawn, strict=True)]
