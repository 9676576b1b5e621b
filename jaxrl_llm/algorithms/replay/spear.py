import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.filters import drop_rows, keep_stored_advantages, replayed_rows, truncated_rows
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AtLeastOne, Count, Fraction, NonNegative, NonNegativeInt, Positive
from jaxrl_llm.core.arguments.hyperparameters import Code, OfRun, Paper
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Trajectories, batch_part, chain, counted_part, part
from jaxrl_llm.core.source import Replay
from jaxrl_llm.objectives import by_rows, policy_gradient, sequence_sum, token_ratio
from jaxrl_llm.objectives.covariance import clip_and_detach, count_batches, draw_covariant
from jaxrl_llm.replay import buffers
from jaxrl_llm.replay.base import TOLERANCE, group_moments, mixed
from jaxrl_llm.replay.buffers import Store, count, join, keep, take, to_rows, with_columns
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rewards.transforms import leave_out


@method(paper="arXiv 2509.22601", test="test_replayed.py::test_spear_is_the_loop")
@beside("filters", "filters of empty turns and repetitions", "a reward of the run")
def spear(
    replay_rows: Code[NonNegativeInt] = 32,
    baselines: Code[Count] = 32,
    replay_age: Code[NonNegativeInt] = 10,
    surplus: Code[NonNegative] = 1.5,
    warm_up: Paper[Positive] = 200,
    replay_weight: Paper[NonNegative] = 1.0,
    share: Code[float] = 0.02,
    covariance_low: Code[float] = 1.0,
    covariance_high: Code[float] = 40.0,
    varied: Code[Fraction] = 0.75,
    call_reward: Paper[NonNegative] = 0.1,
    call_steps: Paper[Positive] = 200,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.28,
    max_length: OfRun[AtLeastOne | None] = None,
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
        drop_rows(least_varied(varied)),
        group_relative("none"),
        keep_stored_advantages(),
        count_batches(),
        warm_up_replay(warm_up, replay_weight),
    )
    replay = with_call_reward(own_good_rows(replay_rows, baselines, replay_age, surplus), call_reward, call_steps)
    return Algorithm(transform, objective, replay=replay)


def varied_groups(scores: jax.Array, group: jax.Array, share: float) -> jax.Array:
    """bool[N]: rows of the ceil(share n) of n groups whose scores vary most; groups that vary equally go together.

    NaN: not scored. Groups without a scored row are none.
    """
    N = group.shape[0]
    _, index = jnp.unique(group, return_inverse=True, size=N)
    known = ~jnp.isnan(scores)
    first = jax.ops.segment_min(jnp.where(known, jnp.arange(N), N), index, num_segments=N)[index] == jnp.arange(N)
    _, _, deviation = bucket_moments(group, scores, ddof=0)
    above = jnp.sum(first & (deviation > deviation[:, None] + TOLERANCE), axis=1)
    return known & (above < jnp.ceil(share * jnp.sum(first) - 1e-4))


@batch_part
def least_varied(batch: Trajectories, share: Fraction = 0.75) -> jax.Array:
    """A function `batch -> bool[N]`: rows of all but the share of groups whose rewards vary most, none replayed."""
    stored = replayed_rows(batch)
    return ~stored & ~varied_groups(jnp.where(stored, jnp.nan, batch.scores), batch.group, share)


@counted_part()
def warm_up_replay(
    t: jax.Array, batch: Trajectories, steps: Positive = 200.0, weight: NonNegative = 1.0
) -> Trajectories:
    """Write the control "replay_weight", weight (1 - cos(pi min(t, steps)/steps))/2 in step t = 0, 1, ..."""
    done = jnp.minimum(t.astype(jnp.float32) / steps, 1.0)
    return batch.with_controls(replay_weight=0.5 * weight * (1 - jnp.cos(jnp.pi * done)))


@part
def own_good_rows(
    size: NonNegativeInt = 2048, baselines: Count = 10240, max_age: NonNegativeInt = 10, surplus: NonNegative = 1.5
) -> Replay:
    """Collect rows better than their group, and replay them all at once against a running median.

    The median P is that of the mean rewards of the last `baselines` groups. Once more than `surplus * size` stored rows
    have r > P, a random subset of them joins the batch, of the smaller of `size` and the largest power of two that is
    at most their number, with info["replay_advantage"] = r - P; then the store is emptied. Rows leave it after
    `max_age` steps. Each replayed row is a group of its own.
    """

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        fresh, group = to_rows(scored), np.asarray(scored.batch.group)
        store, past = buffers.younger(buffers.part_of(state, "rows"), step, max_age), dict[str, np.ndarray]()
        means = state.get("means", np.zeros(0, np.float32))
        if count(store) and size:
            above = store["row:reward"] - np.median(means)
            good = np.flatnonzero(above > 0)
            if len(good) > surplus * size:
                number = min(size, 2 ** (len(good).bit_length() - 1))
                chosen = np.sort(np.random.default_rng(seed).permutation(good)[:number])
                past = with_columns(take(store, chosen), advantage=above[chosen].astype(np.float32))
                store = {}
        mean, _ = group_moments(scored)
        better = np.asarray(scored.batch.need("reward")) - mean > TOLERANCE
        rows = keep(with_columns(fresh, item=np.arange(len(group)), step=step), better)
        _, first = np.unique(group, return_index=True)
        known = mean[first][~np.isnan(mean[first])]
        new = buffers.together({"rows": join(store, rows) if size else {}})
        new["means"] = np.concatenate([means, known.astype(np.float32)])[-baselines:]
        numbers = group.max() + 1 + np.arange(count(past))
        return mixed(scored, fresh, past, group, numbers, with_advantage=True), new

    provides = frozenset({"replayed", "replay_advantage"})
    return Replay(
        dict, mix, provides, lambda state: buffers.parts_metrics(state, ("rows",)), lambda rows: rows + size, True
    )  # fmt: skip


@part
def with_call_reward(replay: Replay, each: NonNegative = 0.1, steps: Positive = 200.0) -> Replay:
    """The replay after each row's reward is raised by `call_reward` of its episode's calls of tools, which fades.

    Rows that are stored keep the reward that they had. A batch without info["calls"] stays as it is.
    """

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        if (calls := (scored.batch.info or {}).get("calls")) is not None:
            more = call_reward(np.asarray(calls), step, each, steps).astype(np.float32)
            scored = scored._replace(batch=scored.batch.replace(reward=np.asarray(scored.batch.need("reward")) + more))
        return replay.mix(state, scored, step, seed)

    return dataclasses.replace(replay, mix=mix)


def call_reward(calls: np.ndarray, step: int, each: float = 0.1, steps: float = 200.0) -> np.ndarray:
    """mu min(each n, 1) for n calls of tools, with mu = (cos(pi step / steps) + 1)/2, and 0 after `steps` steps.

    >>> call_reward(np.array([0, 3, 20]), 0).round(2), call_reward(np.array([0, 3, 20]), 100).round(2)
    (array([0. , 0.3, 1. ]), array([0.  , 0.15, 0.5 ]))
    """
    fading = 0.5 * (1 + np.cos(np.pi * step / steps)) if step <= steps else 0.0
    return np.asarray(fading * np.minimum(each * np.asarray(calls, np.float64), 1.0))
