"""Credit from several rewards of one completion: named components, or many pass/fail checks."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.filters import uniform_groups
from jaxrl_llm.advantages.group import group_advantage, on_actions, standardised
from jaxrl_llm.advantages.normalisation import whiten
from jaxrl_llm.core.annotations import Fraction, NonNegative, Positive
from jaxrl_llm.core.buckets import bucket_moments, bucket_sums
from jaxrl_llm.core.parts import Trajectories, Transform, part, stateless_part
from jaxrl_llm.utils.errors import InputError, unknown


def parse_weights(text: str) -> dict[str, float]:
    """Parse "NAME=NUMBER,NAME=NUMBER" into weights of reward components; InputError for any other form.

    >>> parse_weights("correct=1,format=0.5")
    {'correct': 1.0, 'format': 0.5}
    """
    found = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, _, value = entry.rpartition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise InputError(f"the weights {text!r} are not of the form NAME=NUMBER,NAME=NUMBER: see {entry!r}")
    return found


def components(batch: Trajectories, weights: str = "") -> tuple[jax.Array, jax.Array]:
    """The reward components f32[N, K], by name in alphabetical order, and their weights f32[K].

    weights: "NAME=NUMBER,..."; components that it does not name have weight 1. A batch without components has a single
    one, the reward. NaN where a component did not score a row, and for every component of an unscored row.
    """
    given = parse_weights(weights)
    scores = batch.scores
    rewards = batch.rewards or {"reward": scores}
    for name in given:
        if name not in rewards:
            raise unknown("reward component", name, rewards)
    values = jnp.stack([rewards[name] for name in sorted(rewards)], axis=1).astype(jnp.float32)
    known = jnp.where(jnp.isnan(scores)[:, None], jnp.nan, values)
    return known, jnp.asarray([given.get(name, 1.0) for name in sorted(rewards)], jnp.float32)


def component(batch: Trajectories, name: str) -> jax.Array:
    """One reward component f32[N]; InputError, with the nearest name, for an unknown name."""
    if name not in (batch.rewards or {}):
        raise unknown("reward component", name, batch.rewards or {})
    return (batch.rewards or {})[name]


@part
def uniform_by(name: str) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> bool[N]`: `uniform_groups` by one component of the rewards."""
    return lambda batch: uniform_groups(batch.replace(reward=component(batch, name)))


@part
def mixed_by(name: str) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> bool[N]`: samples of groups whose rewards of one component are not all equal."""
    return lambda batch: ~uniform_by(name)(batch)


def decoupled_advantage(
    values: jax.Array, weights: jax.Array, group: jax.Array, *, ddof: int = 1, epsilon: float = 1e-4
) -> jax.Array:
    """s_i = sum_k w_k (r_ik - mean_g r_k) / (std_g r_k + epsilon), f32[N] (GDPO, 2601.05242).

    values f32[N, K], NaN where not scored: ignored in the component's moments, and adds 0. A component that is constant
    in the group adds 0. (Summing rewards before normalising gives many combinations of rewards the same advantage.)
    """
    one = functools.partial(group_advantage, group=group, ddof=ddof, epsilon=epsilon)
    return jnp.sum(jax.vmap(one, in_axes=1, out_axes=1)(values) * weights, axis=1)


def variance_weighted_advantage(
    values: jax.Array, weights: jax.Array, group: jax.Array, *, ddof: int = 0, epsilon: float = 1e-6
) -> jax.Array:
    """A_i = sum_k w_k (r_ik - mean_g r_k) / (sum_k |w_k| std_g r_k + epsilon), f32[N] (DVAO, 2605.25604).

    Equals the sum of each component's normalised advantage with weights w_k std_k / sum_l w_l std_l. The deviation of a
    sum is at most the sum of the deviations, so |A| is at most that of the combined reward. NaN as in
    `decoupled_advantage`.
    """
    moments = functools.partial(bucket_moments, group, ddof=ddof)
    _, mean, deviation = jax.vmap(moments, in_axes=1, out_axes=1)(values)
    varies = deviation > 1e-7 * jnp.maximum(jnp.abs(mean), 1.0)  # more than rounding
    centred = jnp.where(varies & ~jnp.isnan(values), values - mean, 0.0)
    spread = jnp.sum(jnp.abs(weights) * jnp.where(varies, deviation, 0.0), axis=1)
    return jnp.sum(weights * centred, axis=1) / (spread + epsilon)


@stateless_part()
def decoupled(
    batch: Trajectories,
    weights: str = "",
    over: Literal["sequences", "tokens", "none"] = "sequences",
    ddof: int = 1,
    epsilon: float = 1e-4,
    batch_epsilon: float = 1e-4,
) -> Trajectories:
    """`decoupled_advantage`, normalised over the batch so that its scale does not grow with the number of components.

    over: "sequences", (s - mean)/(std + batch_epsilon) over sequences, skipped for a single component; "tokens",
    (s - mean)/sqrt(var + batch_epsilon) over tokens; "none", not normalised over the batch.
    """
    values, w = components(batch, weights)
    s = decoupled_advantage(values, w, batch.group, ddof=ddof, epsilon=epsilon)
    mask = batch.action_mask & ~jnp.isnan(batch.scores)[:, None]
    if over == "sequences" and values.shape[1] > 1:
        s = standardised(jnp.where(jnp.isnan(batch.scores), jnp.nan, s), ddof, batch_epsilon)
    tokens = jnp.where(mask, s[:, None], 0.0)
    if over == "tokens":
        tokens = whiten(tokens, mask, ddof=ddof, epsilon=batch_epsilon)
    return batch.replace(advantages=tokens)


@part
def variance_weighted(weights: str = "", ddof: int = 0, epsilon: float = 1e-6) -> Transform:
    """Write `variance_weighted_advantage` of the components on every action token of the sample."""

    def advantage(batch: Trajectories) -> jax.Array:
        values, w = components(batch, weights)
        return variance_weighted_advantage(values, w, batch.group, ddof=ddof, epsilon=epsilon)

    return on_actions(advantage)


def check_rewards(
    passed: jax.Array,
    attempted: jax.Array,
    group: jax.Array,
    *,
    difficulty: float | jax.Array = 2.0,
    width: float | jax.Array = 0.1,
    epsilon: float = 1e-6,
) -> jax.Array:
    """R_it = sum_j w_j p_itj, f32[N, T]: the weighted sum of the checks that an attempt passed (2601.03525).

    passed f32[N, T, U] in [0, 1]: result of attempt t of row i at check j, NaN: no such check; attempted bool[N, T].
    With rho_j the mean of p_j over all attempts of the group, and checks of similar pass rates sharing their weight,

        w_j = exp(-difficulty rho_j) / (n_j + epsilon),  n_j = sum_k exp(-(rho_j - rho_k)^2 / (2 width^2))
    """
    known = attempted[:, :, None] & ~jnp.isnan(passed)
    p = jnp.where(known, jnp.clip(passed, 0.0, 1.0), 0.0)
    attempts, passes, rows = bucket_sums(
        group, jnp.sum(attempted, axis=1), jnp.sum(p, axis=1), jnp.any(known, axis=1).astype(jnp.float32)
    )
    exists = rows > 0
    rate = passes / jnp.maximum(attempts, 1)[:, None]
    near = jnp.exp(-((rate[:, :, None] - rate[:, None, :]) ** 2) / (2 * jnp.square(width)))
    crowd = jnp.sum(jnp.where(exists[:, None, :], near, 0.0), axis=2)
    worth = jnp.where(exists, jnp.exp(-difficulty * rate) / (crowd + epsilon), 0.0)
    return jnp.sum(worth[:, None, :] * p, axis=2)


def checks_of(batch: Trajectories) -> tuple[jax.Array, jax.Array]:
    """Results f32[N, T, U] of each attempt at each check, and which attempts exist, bool[N, T].

    info["tests"] is [N, U] for a single attempt, [N, K, U] for one per turn; without it the reward components are the
    checks.
    """
    scored = ~jnp.isnan(batch.scores)
    tests = (batch.info or {}).get("tests")
    passed = components(batch)[0] if tests is None else tests.astype(jnp.float32)
    passed = passed[:, None] if passed.ndim == 1 else passed  # no completion of the step was tested
    if passed.ndim == 2:
        return passed[:, None, :], scored[:, None]
    turns = jnp.arange(passed.shape[1])
    acted = jnp.any((batch.turn[:, :, None] == turns) & batch.action_mask[:, :, None], axis=1)
    return passed, acted & scored[:, None]


def passes_all(passed: jax.Array, attempted: jax.Array) -> jax.Array:
    """f32[N]: 1 where the last attempt has a check and passed all of its checks; arguments as in `check_rewards`."""
    last = passed.shape[1] - 1 - jnp.argmax(attempted[:, ::-1], axis=1)
    final = jnp.take_along_axis(passed, last[:, None, None], axis=1)[:, 0]
    known = ~jnp.isnan(final)
    success = jnp.all(~known | (final >= 1), axis=1) & jnp.any(known, axis=1) & jnp.any(attempted, axis=1)
    return success.astype(jnp.float32)


@stateless_part({"tests"})
def check_credit(
    batch: Trajectories,
    difficulty: NonNegative = 2.0,
    width: Positive = 0.1,
    partial: float = 0.5,
    gamma: Fraction = 0.95,
    epsilon: float = 1e-6,
) -> Trajectories:
    """A_it = (S_i - mean S) + partial (R_it - mean R) on the tokens of attempt t, with group means (2601.03525).

    R: `check_rewards`. S_i = gamma^(turns of row i) if the row `passes_all`, else 0.
    """
    passed, attempted = checks_of(batch)
    turns = jnp.max(jnp.where(batch.action_mask, batch.turn, 0), axis=1) + 1
    success = jnp.where(jnp.isnan(batch.scores), jnp.nan, passes_all(passed, attempted) * gamma**turns)
    whole = group_advantage(success, batch.group, scale="none")
    worth = check_rewards(passed, attempted, batch.group, difficulty=difficulty, width=width, epsilon=epsilon)
    total, count = bucket_sums(batch.group, jnp.sum(worth, axis=1), jnp.sum(attempted, axis=1))
    part = jnp.where(attempted, worth - (total / jnp.maximum(count, 1))[:, None], 0.0)
    here = jnp.take_along_axis(part, jnp.clip(batch.turn, 0, part.shape[1] - 1), axis=1)
    return batch.replace(advantages=(whole[:, None] + partial * here) * batch.action_mask)
