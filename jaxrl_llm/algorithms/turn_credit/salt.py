import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import of_episode, same_state, turn_advantages, where_given
from jaxrl_llm.advantages.turns import OfTurns, turn_mask, turn_numbers
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Divisor, NonNegative, NonNegativeInt, Ours
from jaxrl_llm.core.buckets import bucket_moments, joint_key
from jaxrl_llm.core.parts import Array, Trajectories, batch_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.selection.rows import mix


@method(paper="arXiv 2510.20022", test="test_turn_credit.py::test_salt_worked_example")
@run_needs(state_key="turns with the same transition", turns="episodes of several turns")
def salt(
    history: Ours[int] = 0,
    scale: Ours[Divisor] = "std",
    epsilon: Ours[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
) -> Algorithm:
    """Step-level Advantage assignment via Trajectory graph (SALT).

    A turn that several episodes of a group have in common says little about which of them was better. With A the
    advantages of the episodes, as in GRPO (scale, epsilon), a turn gets the mean

        A_t = mean of A over the turns of the group with the same transition,

    which are equal in their state, the `history` states before that, the tokens of the turn, and the state after it.
    A turn of one episode alone keeps its A, one of all episodes has 0. An episode that repeats a transition counts each
    time. Then PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens. The rule is that of
    summaries of the paper; tokens, not texts, are compared.
    """
    episode = of_episode(scale, epsilon=epsilon)
    credit = where_given("state_key", mean_over_equal(episode, history), episode)
    return Algorithm(
        turn_advantages(credit, needs={"state_key"}), clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient)
    )


@batch_part
def mean_over_equal(batch: Trajectories, advantage: OfTurns, history: NonNegativeInt = 0) -> Array:
    """Advantages of turns: the mean over the turns of the group with the same transition (SALT).

    A transition is the state before the turn with the `history` states before that, the tokens of the turn, and the
    state after it; the last turn of a row has none after it. Needs `state_key`.
    """
    mask, keys = turn_mask(batch), same_state(history + 1)(batch)
    after = jnp.pad(batch.need("state_key").astype(jnp.uint32), ((0, 0), (0, 1)))[:, 1:]
    followed = jnp.pad(mask, ((0, 0), (0, 1)))[:, 1:]
    own = jnp.where(followed, jax.lax.bitcast_convert_type(after, jnp.int32), 0)
    keys = joint_key(keys, _of_tokens(batch, mask.shape[1]), own, followed.astype(jnp.int32))
    flat = jnp.where(mask, advantage(batch), jnp.nan).reshape(-1)
    return jnp.where(mask, bucket_moments(keys.reshape(-1), flat)[1].reshape(mask.shape), 0.0)


def _of_tokens(batch: Trajectories, turns: int) -> Array:
    """int32[N, K]: a hash of the tokens of each turn, in their order."""
    own = turn_numbers(batch)[:, :, None] == jnp.arange(turns)
    start = jnp.min(jnp.where(own, batch.action_index[:, :, None], 2**30), axis=1)
    place = batch.action_index - jnp.take_along_axis(start, jnp.clip(turn_numbers(batch), 0, turns - 1), axis=1)
    word = mix(mix(batch.tokens.astype(jnp.uint32)) + place.astype(jnp.uint32))
    total = jnp.sum(jnp.where(own, word[:, :, None], 0), axis=1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(total, jnp.int32)
