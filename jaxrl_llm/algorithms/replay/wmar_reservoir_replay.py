import numpy as np

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.filters import keep_stored_advantages
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Fraction, NonNegative, NonNegativeInt, Ours, ZeroOrOne
from jaxrl_llm.core.parts import chain, part
from jaxrl_llm.core.source import Replay
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.replay import buffers
from jaxrl_llm.replay.base import TOLERANCE, group_moments, mixed
from jaxrl_llm.replay.buffers import Store, count, join, keep, take, to_rows, with_columns
from jaxrl_llm.rewards.scoring import Scored


@method(paper="arXiv 2401.16650", test="test_replayed.py::test_wmar_is_the_loop_over_replayed_rows")
@beside("world_model", "the world model that learns from the replay", "a model of the world")
def wmar_reservoir_replay(
    recent: Ours[NonNegativeInt] = 512,
    reservoir: Ours[NonNegativeInt] = 512,
    replay_share: Ours[Fraction] = 1.0,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """WMAR's replay (Augmenting Replay in World Models for Continual Reinforcement Learning).

    Two stores: the newest `recent` completions, and a uniform sample of `reservoir` of all so far. Each completion gets
    a key u ~ U(0, 1), and the largest keys stay, so that after n completions each is kept with probability reservoir/n
    and the early prompts of a curriculum stay represented. round(replay_share N) completions join the N of a step, half
    from each store, uniformly.

    The paper learns a world model. Here a completion keeps the advantage that it had in its own group, A =
    (r - mean_g)/(std_g + epsilon) (ddof), those with A = 0 for the whole group are not stored, and the loss is the
    token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho relative to the policy that sampled the
    token.
    """
    objective = clipped_policy(clip_low, clip_high)
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), keep_stored_advantages())
    return Algorithm(transform, objective, replay=recent_and_reservoir(replay_share, recent, reservoir, ddof, epsilon))


@part
def recent_and_reservoir(
    share: NonNegative = 1.0,
    recent: NonNegativeInt = 512,
    reservoir: NonNegativeInt = 512,
    ddof: ZeroOrOne = 1,
    epsilon: NonNegative = 1e-6,
) -> Replay:
    """Add single rows, round(share N) to the N of a step: half of the newest, half of a uniform sample of all so far.

    The one store has the `recent` newest rows, the other `reservoir` rows that are a uniform sample of all rows ever
    added. Rows of groups with equal rewards are not added. info["replay_advantage"] f32[N] is the row's reward relative
    to its own group, (r - mean_g)/(std_g + epsilon); each replayed row is a group of its own.
    """

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        random, fresh, group = np.random.default_rng(seed), to_rows(scored), np.asarray(scored.batch.group)
        of_recent, of_all = buffers.part_of(state, "recent"), buffers.part_of(state, "reservoir")
        wanted = round(share * len(group))
        first, second = (
            take(store, random.permutation(count(store))[:number]) if count(store) else {}
            for store, number in ((of_recent, wanted - wanted // 2), (of_all, wanted // 2))
        )
        past = join(first, second)
        mean, deviation = group_moments(scored, ddof)
        advantage = (np.asarray(scored.batch.need("reward")) - mean) / (deviation + epsilon)
        item = buffers.next_item(of_recent) + np.arange(len(group))
        rows = with_columns(fresh, item=item, step=step, advantage=advantage.astype(np.float32))
        rows = keep(with_columns(rows, key=random.random(len(group))), deviation > TOLERANCE)
        every = join(of_all, rows)
        if count(every) > reservoir:  # a uniform sample of all rows ever added, since their keys are uniform
            largest = np.argsort(-every["of:key"], kind="stable")[:reservoir]
            every = keep(every, np.isin(np.arange(count(every)), largest))
        new = {"recent": buffers.newest(join(of_recent, rows), recent), "reservoir": every}
        numbers = group.max() + 1 + np.arange(count(past))
        return mixed(scored, fresh, past, group, numbers, with_advantage=True), buffers.together(new)

    provides = frozenset({"replayed", "replay_advantage"})
    return Replay(
        dict, mix, provides, lambda state: buffers.parts_metrics(state, ("recent", "reservoir")),
        lambda rows: rows + min(round(share * rows), recent + reservoir), True,
    )  # fmt: skip
