from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp

from jaxrl_llm.advantages.turns import above_buckets, returns_of_turns, turn_advantages, turn_mask
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, Ours, Paper
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, part
from jaxrl_llm.objectives import clipped_policy, sequence_mean
from jaxrl_llm.rollouts.guidance.hints import texts_of
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools
from jaxrl_llm.rollouts.runtime.answer_likelihood import around


@method(paper="arXiv 2510.14967", test="test_turn_information.py::test_igpo_worked_example")
@run_needs(state_key="how many turns there are", turns="episodes of several turns")
def igpo_information_gain(
    column: Ours[str] = "answer",
    opening: Ours[str] = "<answer>",
    gamma: Code[float] = 1.0,
    epsilon: Ours[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.001,
) -> Algorithm:
    """Information Gain-based Policy Optimization (IGPO).

    A turn is rewarded by how much more probable it makes the reference answer a to the policy. With h_t all that comes
    before turn t, observations included, and p_t the geometric mean of the probabilities of the answer's tokens

        p_t = exp(mean_j log pi(a_j | h_t, opening, a_<j)),    r_t = p_{t+1} - p_t,    r_T = the score
        A_t = sum_{u >= t} gamma^(u - t) z_u,    z = (r - mean_g r) / (std_g r + epsilon)

    over all turns of all episodes of the group. A_t is on all tokens of the turn, in PPO's clip (clip_low, clip_high)
    with kl_coefficient k3, averaged over rows. An episode of one turn has the score alone, so that such groups are
    GRPO's; without an answer in `column` of the data set only the score counts. opening: the text before the answer
    that a reply would have. A row that begins anew in the middle of an episode is an episode of its own.

    The answer is read before the update, by one forward pass for each turn. The released code subtracts means over the
    same token index, without a deviation; this is the paper's form. Rollout: `with_answers`, around the run's agents.
    """
    gains = information_gains(gamma, epsilon)
    return Algorithm(
        turn_advantages(gains, needs={"answer_logp", "answer_tokens", "state_key"}),
        clipped_policy(clip_low, clip_high, sequence_mean(), kl_coefficient=kl_coefficient),
        rollout=with_answers(column, opening),
    )


@batch_part
def information_gains(batch: Trajectories, gamma: Fraction = 1.0, epsilon: float = 1e-6) -> Array:
    """Advantages of turns: returns of gains of the answer's probability, and of the score, standardised together.

    The gain of a turn is p_{t+1} - p_t, p_t = exp of info["answer_logp"] before turn t; the last turn has the score
    instead. Standard scores (n - 1) are over all of these of the group; gains that are not known, without an answer,
    count as 0 after that and in no moment. Needs answer_logp.
    """
    mask = turn_mask(batch)
    number = jnp.where(mask, jnp.arange(mask.shape[1]), -1)
    last = mask & (number == number.max(axis=1, keepdims=True))
    p = jnp.exp(batch.need("answer_logp"))
    gain = jnp.pad(p, ((0, 0), (0, 1)), constant_values=jnp.nan)[:, 1:] - p
    value = jnp.where(last, jnp.nan_to_num(batch.scores)[:, None], gain)
    known = mask & ~jnp.isnan(value)
    group = jnp.broadcast_to(batch.group[:, None], mask.shape)
    return returns_of_turns(above_buckets(value, group, known, "std", epsilon=epsilon), mask, gamma)


@part
def with_answers(column: str = "answer", opening: str = "<answer>") -> Rollout:
    """Episodes that know the reference answer of their prompt, so that its probability can be read after each turn.

    column: of the data set, with the answer, of several the first. opening: a text before it that does not count, with
    which a reply would begin that answers at once. Provides answer_tokens.
    """

    def change(tools: Tools, task: Task) -> Callable[[Episode], Episode]:
        texts = texts_of(task.row.get(column), column)
        own = tuple(tools.encode(texts[0])) if texts else ()
        answer = (tuple(tools.encode(opening)) if own and opening else (), own)
        return lambda episode: replace(episode, answer=answer)

    return around(change, "answers", "answer_tokens", column)
