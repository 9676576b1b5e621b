from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import kl_reward, running_reward_scaling
from jaxrl_llm.advantages.filters import demonstrated_rows
from jaxrl_llm.advantages.returns import clip_advantages, generalised_advantages, whiten_advantages
from jaxrl_llm.algorithms.classic.ppo import chain_present
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.annotations import Code, NonNegative, Number, Ours, Positive
from jaxrl_llm.core.parts import Array, Metrics, Objective, PolicyOutputs, Trajectories, control, part, stateless_part
from jaxrl_llm.objectives import (
    Average,
    clipped_policy,
    count_tokens,
    entropy,
    imitation,
    mean_by,
    token_mean,
    value_loss,
)
from jaxrl_llm.rollouts.guidance.responses import NEED, demonstration
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools, altered, group
from jaxrl_llm.utils.errors import is_off


def sampled_rows(batch: Trajectories) -> Array:
    """bool[N]: the rows that the policy sampled, and no texts of the data set."""
    return ~demonstrated_rows(batch)


@method(paper="arXiv 2307.04964", test="test_actor_critic.py::test_ppo_max_is_its_loop")
@presets(
    paper={"kl_coefficient": 0.05, "reward_scaling": "normalise", "reward_clip": 0.3},
    code={"kl_coefficient": 0.01, "reward_scaling": "scale", "reward_clip": None},
)
def ppo_max(
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    value_clip: Code[Positive | None] = 0.2,
    value_coefficient: Code[NonNegative] = 1.0,
    gamma: Code[float] = 1.0,
    lam: Code[float] = 0.95,
    kl_coefficient: Ours[NonNegative] = 0.05,
    reward_scaling: Ours[Literal["scale", "normalise", "none"]] = "normalise",
    reward_clip: Ours[float | None] = 0.3,
    whiten: Code[bool] = False,
    advantage_clip: Code[float | None] = None,
    entropy_weight: Code[NonNegative] = 0.0,
    entropy_target: Code[NonNegative] = 35.0,
    pretraining_coefficient: Code[float] = 0.0,
    column: Ours[str] = "answer",
) -> Algorithm:
    """PPO-max (Secrets of RLHF in Large Language Models Part I: PPO).

    `ppo` with the choices that the authors found to stabilise it (section 5.4). Scores are normalised by their running
    mean and standard deviation over all batches so far, including this one, and clipped (eq. 18); then each action is
    penalised for its log-ratio to the reference policy:

        r <- clip((r - mean) / std, -reward_clip, reward_clip)
        r_t = r 1[t last] - kl_coefficient (logp_old - logp_ref)_t

    reward_scaling: "normalise" as above, "scale" divides by std only, "none" leaves scores as they are and does not
    clip them. The paper tries reward_clip 0.3 and 0.8. Advantages by `gae` with gamma and lam; whiten: standardised
    over the batch (released code: over the micro-batch), with 1e-6 added to the variance; advantage_clip bounds |A|.
    Clipped losses of policy and values with clip_low, clip_high, value_clip and value_coefficient as in `ppo`, plus
    entropy_weight times |mean entropy - entropy_target|: a target, not a bonus.

    The released scripts (preset "code") have reward_scaling "scale", reward_clip None, and kl_coefficient 0.01
    (English) or 0.1 (Chinese). The code has reward_clip 10 and advantage_clip 0.5 when these are on. The paper
    initialises the critic from the reward model (the run's `critic_model`) and trains it before the policy
    (`critic_steps`).

    pretraining_coefficient above 0 adds, to each group, the text in `column` of its row of the data set, which has no
    score and no advantage and counts in no other mean, and to the loss that coefficient times the mean of -log pi over
    the tokens of these texts. The paper takes texts of pretraining, without the prompts.
    """
    texts = not is_off(pretraining_coefficient)
    transform = chain_present(
        demonstrations_apart() if texts else None,
        None if reward_scaling == "none" else running_reward_scaling(reward_scaling == "normalise", reward_clip),
        None if is_off(kl_coefficient) else kl_reward(kl_coefficient),
        generalised_advantages(gamma, lam),
        whiten_advantages(epsilon=1e-6) if whiten else None,
        None if advantage_clip is None else clip_advantages(advantage_clip),
        count_tokens(demonstrated_rows, "text_tokens") if texts else None,
        count_tokens(sampled_rows, "sampled_tokens") if texts else None,
    )
    average = mean_over(sampled_rows, "sampled_tokens") if texts else token_mean()
    objective = clipped_policy(clip_low, clip_high, average) + value_coefficient * value_loss(value_clip, average)
    objective += entropy_weight * distance(entropy(average), entropy_target)
    if not texts:
        return Algorithm(transform, objective)
    objective += pretraining_coefficient * imitation(demonstrated_rows, mean_by("text_tokens"), "pretraining")
    return Algorithm(transform, objective, rollout=with_demonstration(group(), column))


@stateless_part({"demonstrated", "old_logp"})
def demonstrations_apart(batch: Trajectories) -> Trajectories:
    """Demonstrations have no score, so that they count in no baseline and have no advantage, and old_logp as behaviour.

    Needs "demonstrated" and "old_logp".
    """
    rows = demonstrated_rows(batch)
    return batch.replace(
        reward=jnp.where(rows, jnp.nan, batch.scores),
        behaviour_logp=jnp.where(rows[:, None], batch.need("old_logp"), batch.behaviour_logp),
    )


@part
def mean_over(rows: Callable[[Trajectories], Array], name: str) -> Average:
    """Sum over the tokens of the rows where rows(batch) bool[N] / the control `name`, of `count_tokens`; 0 if that is
    0."""
    mean = mean_by(name)
    return Average(lambda values, batch: mean(jnp.where(rows(batch)[:, None], values, 0.0), batch))


@part
def with_demonstration(rollout: Rollout, column: str = "answer") -> Rollout:
    """A rollout's episodes and, as one more row of the group, the prompt's demonstration.

    Provides info["demonstrated"], 1 for the demonstration and 0 for others, beside what the rollout provides.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        shown_one = demonstration(tools, task, column)
        return [*(one.with_info(demonstrated=0.0) for one in await rollout.program(tools, task)), shown_one]

    return altered(
        rollout, program, f"demonstrated({column})", {NEED}, [column],
        variable_size=True, max_episodes=lambda G: rollout.rows(G) + 1,
    )  # fmt: skip


@part
def distance(penalty: Objective, target: Number, name: str = "above_target") -> Objective:
    """|penalty - target| of the batch's penalty, not a mean of per-token distances.

    The control `name` is the sign, -1, 0 or 1, of penalty - target over the whole batch at the current parameters.
    """

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        batch = penalty.refreshed(outputs, batch)
        return batch.with_controls(**{name: jnp.sign(penalty.function(outputs, batch)[0] - target)})

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        value, metrics = penalty.function(outputs, batch)
        # The token shares of the slices add up to 1, so their shares of the target add up to the target.
        share = token_mean()(jnp.ones(outputs.logp.shape), batch)
        return control(batch, name) * (value - share * target), metrics

    return Objective(objective, penalty.needs, refresh)
