import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.episodes import episode_keys, turns_before
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import NonNegative, Ours, Share
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, sequence_ratio
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.selection.rows import ranks_within


@batch_part
def discounted_by_round(batch: Trajectories, gamma: Share) -> Array:
    """A function `batch -> f32[N]`: gamma^(rows of the episode after this one) times the score.

    Without the numbers of episodes and turns each row is an episode.
    """
    before = turns_before(batch).astype(jnp.float32)
    later = ranks_within(episode_keys(batch), before, before, ~jnp.isnan(batch.scores))
    return gamma**later * batch.scores


@method(paper="arXiv 2511.07327", test="test_turn_shaped.py::test_eapo_iterresearch_worked_example")
@run_needs(
    episode="rounds of one episode as rows",
    first_turn="the order of the rounds",
    fresh_prompts="a prompt of its own for each round; on whole conversations the method is GSPO",
)
def eapo_iterresearch(
    gamma: Ours[float] = 0.995,
    epsilon: Ours[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 3e-4,
    clip_high: Ours[NonNegative] = 4e-4,
) -> Algorithm:
    """Efficiency-Aware Policy Optimization (EAPO of IterResearch).

    In each round of an episode the policy sees a fresh prompt, of the question, its own report and the last result; a
    round is a row of the batch. Of T rounds with the final reward R round t gets

        r_t = gamma^(T - t) R,    A_t = (r_t - mean_g r) / (std_g r + epsilon),

    g: all rounds of all episodes of the question, so that short successes are worth more than long ones, and long
    episodes count more often. The loss is GSPO's, with the ratio of a round's whole sequence and its clip (clip_low,
    clip_high), averaged over rounds (eqs. 5 to 7). The paper drops rows to a multiple of its devices; here batches are
    filled up with rows that count nowhere.

    Rounds come from `rollouts.agents.agent(ENVIRONMENT, fresh=True)`: each observation is a whole prompt. gamma
    in the paper was not in what we read, and 0.995 is an example's.
    """
    rounds = rescore(discounted_by_round(gamma), {"episode", "first_turn", "fresh_prompts"})
    return Algorithm(
        chain(rounds, group_relative(epsilon=epsilon, over="rows")),
        policy_gradient(sequence_ratio(), clip(clip_low, clip_high), sequence_mean()),
    )
