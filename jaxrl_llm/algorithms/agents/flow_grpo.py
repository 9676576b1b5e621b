from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, needs_turns, of_episode, turn_advantages
from jaxrl_llm.advantages.episodes import EPISODES, episode_keys
from jaxrl_llm.algorithms.method import Algorithm, beside, method, presets, run_needs
from jaxrl_llm.core.annotations import Code, NonNegative, Paper
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Trajectories, chain, control, stateless_part, weighted
from jaxrl_llm.objectives import clipped_policy, token_mean
from jaxrl_llm.objectives.averages import average_part


@method(paper="arXiv 2510.05592", test="test_turn_rows.py::test_flow_grpo_worked_example_and_loop")
@run_needs(
    episode="turns of one episode as rows",
    first_turn="the order of the turns",
    fresh_prompts="a prompt of its own, with the memory, for each turn; whole conversations are one row",
    turns="episodes of several turns",
)
@beside("modules", "the frozen modules beside the planner", "the run's environment")
@presets(paper={"over": "episodes", "average": "episode"}, code={"over": "turns", "average": "token"})
def flow_grpo(
    over: Paper[Literal["episodes", "turns"]] = "episodes",
    average: Paper[Literal["episode", "token"]] = "episode",
    epsilon: Code[NonNegative] = 1e-6,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.3,
    kl_coefficient: Code[NonNegative] = 0.001,
) -> Algorithm:
    """Flow-based group refined policy optimization (Flow-GRPO of AgentFlow).

    The planner of a system of several modules is trained in its own flow: each of its turns is a short sequence with a
    prompt of its own, of the question, the memory so far and the tools, and has the outcome R of its episode:

        A_i = (R_i - mean_g R) / (std_g R + epsilon) on all T_i turns of episode i
        J = 1/G sum_i 1/T_i sum_t 1/|a_i^t| sum_j min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) - beta k3

    beta = kl_coefficient. over: whether an episode counts once in mean and deviation (n - 1), or once a turn. average:
    "episode" as above, or "token" over the tokens of the batch. preset "code" has the turns, so that long episodes
    weigh more, and the tokens.

    Rows of turns come from `rollouts.agents.agent(ENVIRONMENT, fresh=True)`, whose environment is the rest of
    the system and writes each prompt. Episodes whose turns are in one row, as those of --environment, are credited the
    same way, with the conversation so far in place of the memory. The code leaves out over-long prompts after the
    moments are taken; here an episode ends that does not fit.
    """
    credit = group_relative(epsilon=epsilon, needs=EPISODES)
    if over == "turns":
        credit = turn_advantages(of_episode("std", "turns", epsilon, "score"), needs=EPISODES)
    mean = episode_mean() if average == "episode" else token_mean()
    steps = (needs_turns(fresh=True), credit, *((episode_shares(),) if average == "episode" else ()))
    return Algorithm(chain(*steps), clipped_policy(clip_low, clip_high, mean, kl_coefficient=kl_coefficient))


@stateless_part(EPISODES)
def episode_shares(batch: Trajectories) -> Trajectories:
    """Write what `episode_mean` reads: 1 / (tokens of the turn times turns of the episode) on actions, and how many.

    The first is info["token_share"] f32[N, L], the number of episodes in the batch the control "episodes".
    """
    N, L = batch.tokens.shape
    acted = batch.action_mask & (batch.turn >= 0)
    key = jnp.where(acted, jnp.arange(N)[:, None] * L + jnp.clip(batch.turn, 0, L - 1), N * L).reshape(-1)
    tokens = jax.ops.segment_sum(acted.reshape(-1).astype(jnp.float32), key, num_segments=N * L + 1)[key]
    own = jnp.where(acted, 1 / jnp.maximum(tokens.reshape(N, L), 1), 0.0)
    keys, some = episode_keys(batch), jnp.any(acted, axis=1)
    turns, rows = bucket_sums(keys, jnp.sum(own, axis=1), some.astype(jnp.float32))
    count = jnp.sum(jnp.where(some, 1 / jnp.maximum(rows, 1), 0.0))
    return batch.with_info(token_share=own / jnp.maximum(turns, 1)[:, None]).with_controls(episodes=count)


@average_part()
def episode_mean(values: jax.Array, batch: Trajectories) -> jax.Array:
    """Mean over the tokens of each turn, then over the turns of each episode, then over episodes.

    Reads what `episode_shares` writes; chain it before. Dropped tokens count as 0.
    """
    share = jnp.sum(weighted(values, batch) * batch.need("token_share"))
    return share / jnp.maximum(control(batch, "episodes"), 1)
