import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import reward_to_go, scored_actions, terminal_rewards
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import AverageName, Recalled
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Trajectories, stateless_part
from jaxrl_llm.objectives import average_by_name, log_probability, policy_gradient, token_ratio


@method(paper="arXiv 2307.13372", test="test_reward_composed.py::test_subpo_is_the_loop")
@run_needs(spans="gains of single parts; without them the score is the only gain")
def subpo(average: Recalled[AverageName] = "sum") -> Algorithm:
    """Submodular Policy Optimization (SubPO; Submodular Reinforcement Learning).

    The reward of a trajectory is a set function F of what it visits, with diminishing returns; each step earns what it
    adds, F(S and s) - F(S), which depends on all before it. REINFORCE with the gains still to come:

        loss = -1/N sum_i sum_t (sum_{j >= t} gain_j - b_t) log pi(a_t)

    Gains are the rewards of spans of the completion, each where its span ends: `--rewards 'coverage(COLUMN)'` gives 1/n
    for the first mention of each of n items of a column of the data set. b_t is the mean of the gains still to come of
    the prompt's other samples at the same token number, 0 where they have ended. The score, if there is one, is a gain
    of the last token. With an additive F this is REINFORCE with rewards to go. The paper leaves b open. average: see
    `average_by_name`.
    """
    return Algorithm(gains_to_come(), policy_gradient(token_ratio(), log_probability(), average_by_name(average)))


def above_mates(returns: jax.Array, index: jax.Array, known: jax.Array, group: jax.Array) -> jax.Array:
    """Returns f32[N, L] minus the mean of the mates' at the same action index int32[N, L]; 0 where index is -1.

    Mates are the other known rows bool[N] of the group. One that has ended has the return 0. A row without mates has
    the baseline 0.

    >>> returns, index = jnp.array([[3.0, 1.0], [1.0, 0.0]]), jnp.array([[0, 1], [0, -1]])
    >>> print(above_mates(returns, index, jnp.ones(2, bool), jnp.zeros(2, jnp.int32)).tolist())
    [[2.0, 1.0], [-2.0, 0.0]]
    """
    N, L = returns.shape
    place = jnp.where(index >= 0, index, L)
    by_index = jnp.zeros((N, L + 1)).at[jnp.arange(N)[:, None], place].add(jnp.where(index >= 0, returns, 0.0))
    by_index = jnp.where(known[:, None], by_index, 0.0)
    total, rows = bucket_sums(group, by_index, known.astype(jnp.float32))
    others = (total - by_index) / jnp.maximum(rows - known, 1)[:, None]
    return jnp.where(index >= 0, returns - jnp.take_along_axis(others, place, axis=1), 0.0)


@stateless_part({"spans"})
def gains_to_come(batch: Trajectories) -> Trajectories:
    """The undiscounted rewards still to come, those of the score and of spans, `above_mates`."""
    known = ~jnp.isnan(batch.scores)
    returns = reward_to_go(terminal_rewards(batch), batch.action_mask)
    index = jnp.where(scored_actions(batch), batch.action_index, -1)
    return batch.replace(advantages=above_mates(returns, index, known, batch.group))
