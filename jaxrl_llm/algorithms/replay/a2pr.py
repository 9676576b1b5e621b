import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.filters import replayed_rows
from jaxrl_llm.advantages.group import group_advantage
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import NonNegative, NonNegativeInt, Ours, Paper, Positive, ZeroOrOne
from jaxrl_llm.core.buckets import bucket_best, bucket_moments, bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, part, stateless_part
from jaxrl_llm.core.source import Replay
from jaxrl_llm.objectives import by_rows, clip, imitation, policy_gradient, token_mean, token_ratio
from jaxrl_llm.replay import buffers
from jaxrl_llm.replay.base import TOLERANCE, mixed
from jaxrl_llm.replay.buffers import Store, count, join, keep, take, to_rows, with_columns
from jaxrl_llm.rewards.scoring import Scored


@method(paper="arXiv 2405.19909", test="test_replayed.py::test_a2pr_is_the_loop")
@beside("generator", "twin critics, the generator of actions, and its weight 2", "a critic of actions")
def a2pr(
    alpha: Paper[Positive] = 2.5,
    replay_prompts: Ours[NonNegativeInt] = 4096,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Advantage-guided policy regularisation (A2PR for Offline RL).

    The paper clones the better of two actions, the data set's and one that is generated near the policy, and only where
    it is better than V. For completions, the two are the best stored and the best fresh answer to a prompt:

        loss = token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)  over fresh completions
               - 1/alpha mean over the tokens of all y*_q of log pi,  y*_q the best answer if r(y*_q) > mean_g

    A is GRPO's among fresh completions, with ddof and epsilon; mean_g, in place of V(s), is theirs too, so that the
    present policy is the measure of a stored answer. A fresh answer wins ties, and equal fresh ones share the weight.
    The paper weighs its policy loss by alpha, here the other term by 1/alpha. The store has one answer for each of
    replay_prompts prompts. Not here: twin critics, the generator, and its weight 2 where both advantages are positive.
    """
    fresh = by_rows(otherwise=token_mean(), replayed=0.0 * token_mean())
    cloned = by_rows(otherwise=0.0 * token_mean(), cloned=token_mean())
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), fresh, needs={"replayed"})
    objective += imitation(cloned_rows, cloned) / alpha
    return Algorithm(relative_to_own(ddof, epsilon), objective, replay=best_of_prompt(replay_prompts))


def best_answers(scores: Array, group: Array, stored: Array) -> Array:
    """f32[N]: the weight of each group's best answer if it is better than the mean of the group's own, else 0.

    scores f32[N], NaN where not scored; stored bool[N]: answers that are not the group's own, which count only where
    they are better than all of these. Equal answers share the weight of 1.

    >>> print(best_answers(jnp.array([0.0, 1.0, 0.5]), jnp.zeros(3, jnp.int32), jnp.array([False, False, True])))
    [0. 1. 0.]
    """
    own = jnp.where(stored, jnp.nan, scores)
    count, mean, _ = bucket_moments(group, own)
    better = ~stored | (scores > bucket_best(group, own))
    best = bucket_best(group, jnp.where(better, scores, jnp.nan))
    chosen = better & (scores == best) & (scores - mean > TOLERANCE) & (count > 0)
    (ties,) = bucket_sums(group, chosen.astype(jnp.float32))
    return jnp.where(chosen, 1.0 / jnp.maximum(ties, 1.0), 0.0)


@stateless_part({"replayed"})
def relative_to_own(batch: Trajectories, ddof: int = 1, epsilon: float = 1e-6) -> Trajectories:
    """Group-relative advantages of the rows that are not replayed, among these; 0 for the others.

    Writes info["cloned"] f32[N], the weights of `best_answers`.
    """
    stored = replayed_rows(batch)
    own = jnp.where(stored, jnp.nan, batch.scores)
    advantage = group_advantage(own, batch.group, ddof=ddof, epsilon=epsilon)
    cloned = best_answers(batch.scores, batch.group, stored)
    return batch.replace(advantages=advantage[:, None] * batch.action_mask).with_info(cloned=cloned)


def cloned_rows(batch: Trajectories) -> Array:
    """f32[N]: the weights that `relative_to_own` wrote."""
    return batch.need("cloned")


@part
def best_of_prompt(prompts: NonNegativeInt = 4096) -> Replay:
    """Add to each group the best earlier answer to its prompt, where there is one.

    The store has one row of each prompt, that of the highest reward and the newest among equals, of the `prompts`
    prompts whose best answer is the newest. The row is in the group of its prompt, so a transform must leave it out of
    the group's statistics where it should not count.
    """

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        fresh, group = to_rows(scored), np.asarray(scored.batch.group)
        numbers, first = np.unique(group, return_index=True)
        asked, past, places = np.asarray(scored.batch.prompt_id)[first], dict[str, np.ndarray](), np.zeros(0, int)
        if count(state):
            order = np.argsort(state["row:prompt_id"])
            at = np.searchsorted(state["row:prompt_id"][order], asked)
            at = order[np.minimum(at, len(order) - 1)]
            known = state["row:prompt_id"][at] == asked
            past, places = take(state, at[known]), numbers[known]
        known = ~np.isnan(np.asarray(scored.batch.need("reward")))
        rows = keep(with_columns(fresh, item=buffers.next_item(state) + np.arange(len(group)), step=step), known)
        everything = join(state, rows)
        best = np.zeros(count(everything), bool)
        if len(best):
            order = np.lexsort((np.arange(len(best)), everything["row:reward"], everything["row:prompt_id"]))
            ids = everything["row:prompt_id"][order]
            best[order[np.append(ids[1:] != ids[:-1], True)]] = True
            everything = keep(everything, best)
        return mixed(scored, fresh, past, group, places), buffers.newest(everything, prompts)

    return Replay(dict, mix, frozenset({"replayed"}), buffers.metrics, lambda rows: 2 * rows, True)  # groups of one
