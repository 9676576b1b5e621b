"""What a method can work with where one of its needs is neither computed nor provided: in reports and tests."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import Array, Trajectories

Draw = Callable[[np.random.Generator, np.ndarray], np.ndarray]  # from the behaviour's log-probabilities f64[N, L]
Value = Callable[[Trajectories, float | None], Array]  # of a batch and the need's number


class StandIn(NamedTuple):
    """What a method can work with where a need is neither computed nor provided."""

    words: str  # what it is
    draw: Draw  # possible values, for tests
    value: Value | None = None  # None: the method's own default


def near(scale: float) -> Draw:
    """Log-probabilities that differ from the behaviour's by `scale`, never above 0."""
    return lambda random, logp: np.minimum(logp + scale * random.normal(size=logp.shape), 0.0)


def uniform(low: float, high: float, *more: int, rows: bool = False) -> Draw:
    """Numbers between bounds, [N, L], or for rows [N, *more]."""
    return lambda random, logp: random.uniform(low, high, (logp.shape[0], *more) if rows else logp.shape)


def normal(*more: int) -> Draw:
    """Numbers of a normal distribution, [N, L, *more]."""
    return lambda random, logp: random.normal(size=(*logp.shape, *more))


def whole(below: int, *more: int) -> Draw:
    """Whole numbers from 0 on for rows, [N, *more]."""
    return lambda random, logp: random.integers(0, below, (logp.shape[0], *more)).astype(float)


def integers(low: int, below: int) -> Draw:
    """Whole numbers from `low` on for tokens, [N, L]."""
    return lambda random, logp: random.integers(low, below, logp.shape).astype(float)


def of_rows(value: float, *more: int) -> Value:
    """The same number for every row, f32[N, *more]."""
    return lambda batch, number: jnp.full((batch.tokens.shape[0], *more), value, float)


def of_tokens(value: float, *more: int) -> Value:
    """The same number for every token, f32[N, L, *more]."""
    return lambda batch, number: jnp.full((*batch.tokens.shape, *more), value, float)


all_action = of_tokens(5.0)  # a plan of actions without subgoals
no_state_values = of_tokens(jnp.nan)
no_answers = of_rows(-1.0, 3)  # like `answers`


def behaviour(draw: Draw) -> StandIn:
    """Log-probabilities as if the policy were still the one that sampled."""
    return StandIn("the behaviour policy", draw, lambda batch, number: batch.behaviour_logp)


def power(k: int, draw: Draw) -> StandIn:
    """The sum over the vocabulary of pi^k if its expectation under pi were the sampled token's."""

    def value(batch: Trajectories, number: float | None) -> Array:
        return jnp.where(batch.action_mask, jnp.exp(k * batch.behaviour_logp), 0.0)

    return StandIn(f"the sampled token's p^{k}", draw, value)


def ones(draw: Draw) -> StandIn:
    """1 at every position, f32[N, L]."""
    return StandIn("1", draw, of_tokens(1.0))


def no_values(batch: Trajectories, number: float | None) -> Array:
    """Values of a critic that knows nothing, f32[N, L], or [N, L, H] with a number of heads."""
    heads = int(number or 1)
    return jnp.zeros((*batch.tokens.shape, heads) if heads > 1 else batch.tokens.shape)


def no_scores(batch: Trajectories, number: float | None) -> Array:
    """Scores of 0, f32[N, L, K]."""
    return of_tokens(0.0, int(number or 1))(batch, number)


def flat_rank(batch: Trajectories, number: float | None) -> Array:
    """The measures of states that are all the same, f32[N, 3]."""
    return jnp.tile(jnp.asarray([1.0, 0.0, 0.0]), (batch.tokens.shape[0], 1))


def own_nodes(batch: Trajectories, number: float | None) -> Array:
    """A node for each row, f32[N, L]: trees that do not fork after their prompts."""
    return jnp.broadcast_to(jnp.arange(batch.tokens.shape[0], dtype=jnp.float32)[:, None], batch.tokens.shape)


def pairs(random: np.random.Generator, logp: np.ndarray) -> np.ndarray:
    """Nodes of trees [N, L]: rows share three tokens, then every second row those of the row before it."""
    rows, places = np.arange(logp.shape[0])[:, None], np.arange(logp.shape[1])
    return np.where(places < 3, 0, 1 + rows // 2 + 100 * (places > 3) * rows).astype(float)


def turn_rewards(random: np.random.Generator, logp: np.ndarray) -> np.ndarray:
    """Rewards [N, K] of turns of four tokens."""
    return random.integers(0, 3, (logp.shape[0], -(-logp.shape[1] // 4))) * 0.5


def state_keys(random: np.random.Generator, logp: np.ndarray) -> np.ndarray:
    """Keys [N, K] of two states before turns of four tokens."""
    return random.integers(0, 2, (logp.shape[0], -(-logp.shape[1] // 4))).astype(np.uint32)


def episodes(random: np.random.Generator, logp: np.ndarray) -> np.ndarray:
    """Numbers [N] of episodes of two rows each."""
    return (np.arange(logp.shape[0]) // 2).astype(float)


def first_turns(random: np.random.Generator, logp: np.ndarray) -> np.ndarray:
    """The first turns [N] of rows, of which two are an episode."""
    return (np.arange(logp.shape[0]) % 2).astype(float)


def one_each(batch: Trajectories, number: float | None) -> Array:
    """Each row is an episode of its own, f32[N]."""
    return jnp.arange(batch.tokens.shape[0], dtype=jnp.float32)


TOP = 5  # tokens of the stand-ins


def _shares(random: np.random.Generator, logp: np.ndarray) -> np.ndarray:
    """Log-probabilities of TOP tokens [N, L, TOP] whose probabilities add up to less than 1."""
    return np.log(random.dirichlet(np.ones(TOP + 1), logp.shape)[..., :TOP])


def _even(batch: Trajectories, number: float | None) -> Array:
    return jnp.full((*batch.tokens.shape, int(number or TOP)), -jnp.log(1.0 + (number or TOP)))


def _first(batch: Trajectories, number: float | None) -> Array:
    return jnp.broadcast_to(jnp.arange(number or TOP, dtype=jnp.float32), (*batch.tokens.shape, int(number or TOP)))


of_top = StandIn("equal probabilities", _shares, _even)
tokens_of_top = StandIn(
    "the first tokens", lambda random, logp: np.broadcast_to(np.arange(TOP), (*logp.shape, TOP)), _first
)


teacher_states = StandIn("0", normal(2), of_tokens(0.0, 2))
top_of_teacher = StandIn(
    "the first tokens, equally probable",
    lambda random, logp: np.stack([np.broadcast_to(np.arange(TOP), (*logp.shape, TOP)), _shares(random, logp)], axis=2),
    lambda batch, number: jnp.stack([_first(batch, number), _even(batch, number)], axis=2),
)  # fmt: skip


def teachers(random: np.random.Generator, logp: np.ndarray) -> np.ndarray:
    """Rows [N, L + 2] of two tokens of a prompt and as many as the row has; none in every second row."""
    N, L = logp.shape
    return np.where(np.arange(N)[:, None] % 2 == 0, random.integers(0, 3, (N, L + 2)).astype(float), -1.0)


def no_teachers(batch: Trajectories, number: float | None) -> Array:
    """No row has another prompt, f32[N, L + 2], like `teachers`."""
    N, L = batch.tokens.shape
    return jnp.full((N, L + 2), -1.0)


def of_turns(low: float, high: float) -> Draw:
    """Numbers between bounds [N, K] for turns of four tokens."""
    return lambda random, logp: random.uniform(low, high, (logp.shape[0], -(-logp.shape[1] // 4)))


def no_turns(batch: Trajectories, number: float | None) -> Array:
    """0 for each turn, f32[N, K]."""
    known = batch.turn_rewards if batch.turn_rewards is not None else batch.state_key
    return jnp.zeros((batch.tokens.shape[0], 1 if known is None else known.shape[1]))


def answers(random: np.random.Generator, logp: np.ndarray) -> np.ndarray:
    """Answers [N, 3] of two tokens after one that opens them; none in every third row."""
    rows = np.concatenate([-2 - random.integers(0, 3, (logp.shape[0], 1)), random.integers(0, 3, (len(logp), 2))], 1)
    return np.where(np.arange(logp.shape[0])[:, None] % 3 == 2, -1, rows).astype(float)
