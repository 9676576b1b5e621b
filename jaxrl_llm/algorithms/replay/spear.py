"""Self-imitation with Progressive Exploration for Agentic RL (SPEAR)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.group import group_relative, truncated_rows
from jaxrl_llm.advantages.replayed import drop_least_varied, keep_stored_advantages, warm_up_replay
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import (
    CODE,
    PAPER,
    RUN,
    AtLeastOne,
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
)
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import by_rows, policy_gradient, sequence_sum, token_ratio
from jaxrl_llm.objectives.covariance import clip_and_detach, count_batches, draw_covariant
from jaxrl_llm.replay.base import own_good_rows, with_call_reward
from jaxrl_llm.rewards.transforms import leave_out


@method(
    paper="arXiv 2509.22601",
    year=2025,
    test="test_replayed.py::test_spear_is_the_loop",
    beside={"filters": ("filters of empty turns and repetitions", "a reward of the run")},
)
def spear(
    replay_rows: Annotated[NonNegativeInt, CODE] = 32,
    baselines: Annotated[Count, CODE] = 32,
    replay_age: Annotated[NonNegativeInt, CODE] = 10,
    surplus: Annotated[NonNegative, CODE] = 1.5,
    warm_up: Annotated[Positive, PAPER] = 200,
    replay_weight: Annotated[NonNegative, PAPER] = 1.0,
    share: Annotated[float, CODE] = 0.02,
    covariance_low: Annotated[float, CODE] = 1.0,
    covariance_high: Annotated[float, CODE] = 40.0,
    varied: Annotated[Fraction, CODE] = 0.75,
    call_reward: Annotated[NonNegative, PAPER] = 0.1,
    call_steps: Annotated[Positive, PAPER] = 200,
    clip_low: Annotated[NonNegative, PAPER] = 0.2,
    clip_high: Annotated[NonNegative, PAPER] = 0.28,
    max_length: Annotated[AtLeastOne | None, RUN] = None,
) -> Algorithm:
    """Self-imitation with Progressive Exploration for Agentic RL (SPEAR).

    loss = L(fresh) + g(t) L(replayed) in step t = 0, 1, ..., of which L(B) is

        -1/(|B| max_length) sum_i sum_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
        g(t) = replay_weight (1 - cos(pi min(t, warm_up)/warm_up))/2

    Fresh: A = r - mean_g; truncated completions are left out, and of the groups the share `varied` stays whose rewards
    vary most; |B| counts those that stay. Replayed: completions better than their group are stored for replay_age
    steps. P is the median of the last `baselines` group means. Once more than surplus * replay_rows stored ones have r
    > P, a random subset joins the batch, of min(replay_rows, the largest power of two that is at most their number),
    with A = r - P, and the store is emptied. rho is relative to the policy that sampled the token.

    In both, a `share` of the tokens is detached, at random among those that are not clipped with covariance_low < cov <
    covariance_high, see `clip_cov`; here covariances are over the batch with its replayed rows. The released code takes
    the replayed step after the others, with a gradient step of its own. max_length None: the run's. Its documentation
    has replay_rows 2048 and baselines 10240, its script for mathematics 32 and 32.

    In runs with --tools or --environment, rewards of episodes with n calls of tools, right or wrong, are raised in step
    t <= call_steps (the paper's is 100 to 200) by

        (cos(pi t/call_steps) + 1)/2 min(call_reward n, 1)

    which stored episodes keep; their observations are masked, as in fresh ones. Not here: filters of empty turns and
    repetitions.
    """
    rho, mean = token_ratio(), sequence_sum() / (8192.0 if max_length is None else max_length)
    draw = draw_covariant(rho, covariance_low, covariance_high, share, clip_low, clip_high)
    fresh = by_rows(otherwise=mean, replayed=0.0 * mean)
    past = by_rows(otherwise=0.0 * mean, replayed=mean)
    surrogate = clip_and_detach(clip_low, clip_high)
    objective = policy_gradient(rho, surrogate, fresh, refresh=draw)
    objective += "replay_weight" * policy_gradient(rho, surrogate, past, refresh=draw)
    transform = chain(
        leave_out(truncated_rows),
        drop_least_varied(varied),
        group_relative("none"),
        keep_stored_advantages(),
        count_batches(),
        warm_up_replay(warm_up, replay_weight),
    )
    replay = with_call_reward(own_good_rows(replay_rows, baselines, replay_age, surplus), call_reward, call_steps)
    return Algorithm(transform, objective, replay=replay)
