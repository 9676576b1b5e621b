"""Decoupled Agentic RL Training for GUI agents (DART)."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.turns.episodes import EPISODES
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.advantages.turns.turns import TURNS, on_tokens, turn_mask, turn_numbers
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.hyperparameters import CODE, OURS, RECALLED
from jaxrl_llm.core.arguments.ranges import Fraction, NonNegative, NonNegativeInt
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Transform, chain, stateless
from jaxrl_llm.objectives.averaging.averages import sequence_mean
from jaxrl_llm.objectives.off_policy import importance_correction
from jaxrl_llm.objectives.policy_gradient import policy_gradient, regularised
from jaxrl_llm.objectives.ratios import span_ratio
from jaxrl_llm.objectives.surrogates import clip
from jaxrl_llm.replay.into_groups import none_above, swapped_successes
from jaxrl_llm.selection.rows import ranks_within


@method(
    paper="arXiv 2509.23866",
    year=2025,
    test="test_of_screens.py::test_dart_gui_is_the_loop_over_steps",
    lacks={
        "adaptive": (
            "fewer samples and steps for tasks that the policy solves, in separate services",
            "sample counts of each task",
        )
    },
    needs={
        "episode": "steps of one episode as rows",
        "first_turn": "the order of the steps",
        "fresh_prompts": "a prompt of its own for each step; whole conversations are one row",
        "state_key": "how many steps there are",
        "turns": "episodes of several steps",
    },
)
def dart_gui(
    kept: Annotated[float, RECALLED] = 0.8,
    success: Annotated[float, OURS] = 0.5,
    stored: Annotated[NonNegativeInt, OURS] = 1,
    weight_cap: Annotated[float, CODE] = 1.0,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
    clip_low: Annotated[NonNegative, CODE] = 0.1,
    clip_high: Annotated[NonNegative, CODE] = 0.28,
    kl_coefficient: Annotated[NonNegative, CODE] = 0.1,
) -> Algorithm:
    """Decoupled Agentic RL Training for GUI agents (DART).

    Steps of episodes have the outcome of the whole. Those of high entropy are trained on, with a ratio for each step
    and weights for the mismatch of sampler and trainer. With R the outcome of the step's episode, which counts once,

        A = (R - mean_g R) / (std_g R + epsilon)
        s = exp(1/|o| sum_t (logp - logp_old)) over the tokens of a step, with the gradient of each token's own logp
        w = min(pi_old / pi_behaviour, weight_cap) of each token
        loss = mean over rows of the mean over tokens of -w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)
               + kl_coefficient k3

    Only the share `kept` of a group's steps is trained on, those of the highest mean entropy. Where no episode of a
    task has R > success, one of its last `stored` successes of earlier steps joins the group, with the
    log-probabilities of the policy that sampled it, to which w is relative.

    Rows are steps with a --rollout that returns `rollouts.agents.agent(ENVIRONMENT, fresh=True)`, whose
    observations are whole prompts, such as a window of the last screens in words. Episodes of --environment are rows,
    whose steps are averaged by their tokens. The released trainer has another filter of steps; the paper's shares and
    thresholds were not available. Not here: fewer samples and steps for tasks that the policy solves, and separate
    services.
    """
    ratio = span_ratio("turn", "old", gradient="token")
    objective = policy_gradient(ratio, clip(clip_low, clip_high), sequence_mean())
    transform = chain(
        needs_turns(fresh=True),
        group_relative(epsilon=epsilon, needs=EPISODES),
        importance_correction("token", "truncate", high=weight_cap),
        keep_uncertain_turns(kept),
    )
    return Algorithm(
        transform,
        regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient),
        replay=swapped_successes(none_above(success), success, stored, "added"),
    )


@part
def keep_uncertain_turns(share: Fraction = 0.8) -> Transform:
    """Keep the turns of the highest mean entropy, ceil(share n) of the n turns of a group; others get weight 0.

    The entropy is that of the weights before the update. Of equal turns the first are kept. Needs `turns` and
    `state_key`.
    """

    def apply(batch: Trajectories) -> Trajectories:
        mask = turn_mask(batch)
        here = jax.nn.one_hot(turn_numbers(batch), mask.shape[1])  # 0 where no action is
        mean = jnp.einsum("nl,nlk->nk", batch.need("entropy"), here) / jnp.maximum(here.sum(axis=1), 1.0)
        keys = jnp.broadcast_to(batch.group[:, None], mask.shape).reshape(-1)
        first = jnp.arange(mask.size, dtype=jnp.float32)
        rank = ranks_within(keys, mean.reshape(-1), first, mask.reshape(-1)).reshape(mask.shape)
        (count,) = bucket_sums(keys, mask.reshape(-1).astype(jnp.float32))
        gone = mask & (rank >= jnp.ceil(share * count.reshape(mask.shape) - 1e-4))
        before = jnp.ones(batch.tokens.shape, jnp.float32) if batch.weights is None else batch.weights
        return batch.replace(weights=before * (1.0 - on_tokens(gone.astype(jnp.float32), batch)))

    return stateless(apply, TURNS | {"state_key"})
