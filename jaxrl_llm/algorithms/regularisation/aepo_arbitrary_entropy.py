from asyncio import gather

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.group import group_advantage
from jaxrl_llm.advantages.multipliers import last_entropy
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AboveOne, Code, Fraction, NonNegative, Positive
from jaxrl_llm.core.parts import Array, Trajectories, chain, controller, counted, part, step_part
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.programs import Demands, Episode, Rollout, Task, Tools
from jaxrl_llm.selection.rows import ranks_within, row_noise


@step_part
def temperature_by_entropy(
    value: Array, feedback: dict[str, Array], target_entropy: float, hot: float, cold: float
) -> Array:
    """A function `(value, feedback) -> f32[]`: hot where the last entropy is at most the target, else cold."""
    return jnp.where(feedback["entropy"] <= target_entropy, hot, cold)


@step_part
def exchanged_for_tempered(
    step: Array, batch: Trajectories, target_entropy: float, most: float, least_advantage: float
) -> Trajectories:
    """A function `(step, batch) -> batch` that exchanges rows as in `aepo_arbitrary_entropy`."""
    scored = ~jnp.isnan(batch.scores)
    tempered = batch.entry("tempered", 0) == 1  # NaN where a group failed
    _, index = jnp.unique(batch.group, return_inverse=True, size=scored.shape[0])
    A = group_advantage(batch.scores, 2 * index + tempered)
    noise, everywhere = row_noise(batch, step), jnp.zeros(scored.shape, jnp.int32)
    good = tempered & scored & (least_advantage < A)
    K = jnp.minimum(jnp.sum(good), most)
    K = jnp.where(last_entropy(batch) <= target_entropy, K, K // 2)
    taken = good & (ranks_within(everywhere, noise, noise, good) < K)
    normal = scored & ~tempered
    stay = normal & (ranks_within(everywhere, noise, noise, normal) >= K)
    weights = batch.loss_weights * (taken | stay | ~scored & ~tempered)[:, None]
    A = jnp.where(taken, 1.0, jnp.where(tempered, 0.0, A))
    # They were sampled from another distribution than the policy's, whose log-probabilities old_logp are.
    behaviour = jnp.where(tempered[:, None], batch.need("old_logp"), batch.behaviour_logp)
    return batch.replace(advantages=A[:, None] * batch.action_mask, weights=weights, behaviour_logp=behaviour)


@method(
    paper="arXiv 2510.08141", test="test_entropy_credit.py::test_arbitrary_entropy_swaps_rows_for_right_tempered_ones"
)
def aepo_arbitrary_entropy(
    target_entropy: Code[NonNegative] = 0.5,
    hot: Code[Positive] = 1.2,
    cold: Code[Positive] = 0.8,
    most: Code[NonNegative] = 60,
    least_advantage: Code[float] = 0.05,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    dual_clip: Code[AboveOne | None] = 3.0,
    tempered_share: Code[float] = 0.25,
) -> Algorithm:
    """Arbitrary Entropy Policy Optimization (AEPO).

    Some rows of the batch are replaced by correct samples drawn at another temperature and trained on with advantage 1:
    J = J_GRPO + weight E over correct y from pi^T of the mean log pi(y_t), where the weight is the share of such rows.
    Samples at T = hot raise the entropy, samples at T = cold lower it; T = hot if the last update's entropy is at most
    target_entropy, else cold, is in controls["temperature"] for the loop.

    Tempered rows are those that info["tempered"] bool[N] marks; they form groups of their own. Those with
    A_grpo > least_advantage are kept, at most K = `most`, or half as many while entropy is above the target; K normal
    rows are dropped in exchange, so that the batch size is unchanged. Both are chosen at random (released code: the
    first). log pi_old is recomputed at temperature 1 (old_logp). PPO's clip with clip_low, clip_high and dual_clip
    (where A < 0), token mean, no KL.

    Rollout: prompts chosen at random, a quarter of them (`tempered_share`), are sampled a second time at that
    temperature (`with_tempered`; released code: the first quarter of the batch), without top-p. Where no tempered
    row is right in a mixed group, the step is one of GRPO.
    """

    return Algorithm(
        chain(
            controller("temperature", hot, temperature_by_entropy(target_entropy, hot, cold)),
            counted(exchanged_for_tempered(target_entropy, most, least_advantage), {"tempered", "old_logp"}),
        ),
        policy_gradient(token_ratio("old"), clip(clip_low, clip_high, dual_clip), token_mean()),
        rollout=with_tempered(hot, tempered_share),
    )


@part
def with_tempered(start: Positive, share: Fraction = 0.25, control: str = "temperature") -> Rollout:
    """A group, and for a random `share` of the prompts as many samples again at another temperature.

    The temperature is controls[`control`] of the last update, `start` before the first. Which prompts are sampled again
    depends on prompt and step alone. Provides info["tempered"], 1 for the samples of the second set. Raises InputError
    unless start is above 0 and share within [0, 1].
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        count = task.samples
        first = [tools.sample(task.prompt, number=i) for i in range(count)]
        if np.random.default_rng([task.prompt_id, tools.first_step]).uniform() >= share:
            return [episode.with_info(tempered=0.0) for episode in await gather(*first)]
        heat = float(tools.controls.get(control, start))
        again = [tools.sample(task.prompt, number=count + i, temperature=heat) for i in range(count)]
        episodes = await gather(*first, *again)
        return [episode.with_info(tempered=float(i >= count)) for i, episode in enumerate(episodes)]

    demands = Demands(variable_size=share > 0, max_episodes=lambda G: 2 * G if share else G)
    return Rollout(program, f"with_tempered({share:g})", frozenset({"tempered"}), demands=demands)
