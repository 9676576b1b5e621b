"""Needs that the learner computes, with one forward pass of each policy; how many directions hidden states span."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.needs import placeholders as like
from jaxrl_llm.core.needs.placeholders import StandIn
from jaxrl_llm.core.needs.types import Compute, Models, Need
from jaxrl_llm.core.trajectory import Array, Trajectories


def effective_rank(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """exp of the entropy of the normalised singular values of the centred masked rows of f32[T, D], f32[] (2509.23808).

    1 where the rows are all the same, 0 where there are fewer than two.
    """
    count = jnp.sum(mask)
    # Less its first row, a matrix of equal rows is exactly 0.
    shifted = jnp.where(mask[:, None], hidden - hidden[jnp.argmax(mask)], 0.0)
    centred = jnp.where(mask[:, None], shifted - jnp.sum(shifted, axis=0) / jnp.maximum(count, 1), 0.0)
    values = jnp.linalg.svd(centred, compute_uv=False)
    total = jnp.sum(values)
    p = values / jnp.where(total > 0, total, 1.0)
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0))
    return jnp.where(count < 2, 0.0, jnp.exp(entropy))


def prefix_ranks(hidden: jax.Array, count: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """Effective rank f32[J] of rows 0 .. j stride, for j = 1 .. J, and which of these are among the first `count`."""
    ends = jnp.arange(stride, hidden.shape[0], stride)
    place = jnp.arange(hidden.shape[0])
    ranks = jax.lax.map(lambda end: effective_rank(hidden, place <= jnp.minimum(end, count - 1)), ends)
    return ranks, ends < count


def growth(series: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of d_j = m_j - mean(m_1 .. m_j-1), j >= 2, and of d_j - d_j-1, j >= 3, over the known leading m f32[J]."""
    number = jnp.sum(known)
    before = jnp.cumsum(series) - series
    change = (series - before / jnp.maximum(jnp.arange(series.size), 1))[1:]
    there = known[1:]
    velocity = jnp.sum(jnp.where(there, change, 0.0)) / jnp.maximum(number - 1, 1)
    turn = jnp.where(there[1:], change[1:] - change[:-1], 0.0)
    return velocity, jnp.sum(turn) / jnp.maximum(number - 2, 1)


def rank_measures(hidden: jax.Array, mask: jax.Array, stride: int = 40, max_length: int = 512) -> jax.Array:
    """f32[3]: effective rank of the masked rows of hidden f32[T, D], its mean growth, and the growth's (2509.23808).

    Growth is along prefixes that get longer by `stride` rows, within the last `max_length` masked rows; 0 where there
    are too few. All rows count in the rank itself.
    """
    T, D = hidden.shape
    order = jnp.argsort(~mask, stable=True)  # masked rows first, whatever stands between them
    count = jnp.sum(mask)
    rows = jnp.where((jnp.arange(T) < count)[:, None], hidden[order], 0.0).astype(jnp.float32)
    if D > T:  # the same singular values, also of any subset of rows, with fewer columns
        rows = jnp.linalg.qr(rows.T, mode="r").T
    whole = effective_rank(rows, jnp.arange(T) < count)
    width = min(max_length, T)
    if width <= stride:
        return jnp.stack([whole, jnp.float32(0), jnp.float32(0)])
    window = jax.lax.dynamic_slice_in_dim(rows, jnp.clip(count - width, 0, T - width), width)
    return jnp.stack([whole, *growth(*prefix_ranks(window, jnp.minimum(count, width), stride))])


def _read(name: str) -> Compute:
    """What the forward pass of the weights before the update measured."""

    def compute(models: Models, batch: Trajectories, number: float | None) -> Array:
        return (models.old.extras or {})[name if number is None or name != "tempered_logp" else f"{name}:{number:g}"]

    return compute


def _of_teacher(name: str) -> Compute:
    """What the forward pass of the teacher found."""
    return lambda models, batch, number: (models.teacher.extras or {})[name]


def _reduced(function: Callable[[Array, Array], Array]) -> Compute:
    """A function of the last hidden states, which the forward pass measures as "hidden"."""
    return lambda models, batch, number: models.of_states(function)


def _squares(hidden: Array, mask: Array) -> Array:
    """f32[N, L]: squared norms of states [N, L, D]."""
    return jnp.sum(hidden**2, axis=-1)


def _ranks(hidden: Array, mask: Array) -> Array:
    """f32[N, 3], a row at a time: its singular values need all its states at once."""
    return jax.lax.map(lambda row: rank_measures(*row), (hidden, mask))


_DISTRIBUTION = "sum over the vocabulary of"

COMPUTED = (
    Need(
        "old_logp", "batch.old_logp", "[N, L]",
        "log-probabilities under the weights before the update", like.behaviour(like.near(0.05)),
        lambda models, batch, number: models.old.logp,
    ),
    Need(
        "reference_logp", "batch.reference_logp", "[N, L]",
        "log-probabilities under the frozen initial policy", like.behaviour(like.near(0.2)),
        lambda models, batch, number: models.reference.logp,
    ),
    Need(
        "previous_logp", "batch.previous_logp", "[N, L]",
        "log-probabilities under the weights before the last update; at first, under the initial ones",
        like.behaviour(like.near(0.1)), lambda models, batch, number: models.previous.logp,
    ),
    Need(
        "values", "batch.values", "[N, L]",
        "a critic's value of each state, before the update; with several heads [N, L, H]",
        StandIn("0", like.normal(), like.no_values), _read("values"), "values", by_outputs="values",
    ),
    Need(
        "implicit_logp", "info['implicit_logp']", "[N, L]",
        "log-probabilities under an implicit reward model, a copy of the policy that learns beside it, before the "
        "update", like.behaviour(like.near(0.2)), _read("implicit_logp"), "implicit_logp", by_outputs="implicit_logp",
    ),
    Need(
        "scores", "info['scores']", "[N, L, S]",
        "a reward model's scores of the token before each action, before the update",
        StandIn("0", like.normal(1), like.no_scores), _read("scores"), "scores", by_outputs="scores",
    ),
    Need(
        "target_values", "info['target_values']", "[N, L, H]",
        "values of the target critic, whose weights follow the critic's; one for each head",
        StandIn("0", like.normal(4), like.no_values), lambda models, batch, number: models.target_values,
    ),
    Need(
        "feedback", "batch.feedback", "[] each",
        "metrics of the last update by name; 'updates' counts the updates",
        StandIn("none, as before the first update", lambda random, logp: np.zeros(())),
    ),
    Need(
        "squared_probability", "info['squared_probability']", "[N, L]", f"{_DISTRIBUTION} pi_old^2",
        like.power(2, like.uniform(0.2, 0.9)), _read("squared_probability"), "squared_probability",
    ),
    Need(
        "cubed_probability", "info['cubed_probability']", "[N, L]", f"{_DISTRIBUTION} pi_old^3",
        like.power(3, like.uniform(0.1, 0.8)), _read("cubed_probability"), "cubed_probability",
    ),
    Need(
        "hidden_square", "info['hidden_square']", "[N, L]",
        "squared norm of the last hidden state before each action",
        like.ones(lambda random, logp: random.gamma(2.0, 0.5, logp.shape)), _reduced(_squares), "hidden",
    ),
    Need(
        "effective_rank", "info['effective_rank']", "[N, 3]",
        "effective rank of a row's hidden states, its growth and the growth's growth",
        StandIn("rank 1 without growth", like.uniform(1, 5, 3, rows=True), like.flat_rank), _reduced(_ranks), "hidden",
    ),
    Need(
        "reference_affinity", "info['reference_affinity']", "[N, L]",
        f"{_DISTRIBUTION} sqrt(pi_old pi_reference)", like.ones(like.uniform(0.8, 1.0)),
        lambda models, batch, number: models.affinity,
    ),
    Need(
        "tempered_logp", "info['tempered_logp:T']", "[N, L]",
        "log-probabilities of the old weights at T times their temperature", like.behaviour(like.near(0.1)),
        _read("tempered_logp"), "tempered_logp",
    ),
    Need(
        "mean_logp", "info['mean_logp']", "[N, L]",
        "mean over the vocabulary of log pi at each action, of the old weights",
        like.behaviour(like.uniform(-5, -3)), _read("mean_logp"), "mean_logp", by_outputs="mean_logp",
    ),
    Need(
        "heated_logp", "info['heated_logp']", "[N, L]",
        "log-probabilities at T times the temperature, of the old weights",
        like.behaviour(like.near(0.1)), _read("heated_logp"), "heated_logp", by_outputs="heated_logp",
    ),
    Need(
        "internal_logp", "info['internal_logp']", "[N, L]",
        "log-probabilities of the policy that unembeds the hidden state after layer K, of the old weights",
        like.behaviour(like.near(0.5)), _read("internal_logp"), "internal_logp", by_outputs="internal_logp",
    ),
    Need(
        "greedy", "info['greedy']", "[N, L]",
        "1 where the action is the most probable token (up to rounding one of them), else 0, of the old weights",
        like.ones(like.integers(0, 2)), _read("greedy"), "greedy", by_outputs="greedy",
    ),
    Need(
        "top_tokens", "info['top_tokens']", "[N, L, K]",
        "ids of the K most probable tokens at each action, of the old weights",
        like.tokens_of_top, _read("top_tokens"), "top_tokens",
    ),
    Need(
        "top_logp", "info['top_logp']", "[N, L, K]",
        "log-probabilities of info['top_tokens'], of the old weights",
        like.of_top, _read("top_logp"), "top_logp", by_outputs="top_logp",
    ),
    Need(
        "teacher_logp", "info['teacher_logp']", "[N, L, K]",
        "log-probabilities of info['top_tokens'] under the teacher", like.of_top, _of_teacher("top_logp"),
    ),
    Need(
        "teacher_entropy", "info['teacher_entropy']", "[N, L]",
        "entropy of the teacher, nats", StandIn("1", like.uniform(0, 2), like.of_tokens(1.0)),
        lambda models, batch, number: models.teacher.entropy,
    ),
    Need(
        "answer_logp", "info['answer_logp']", "[N, K]",
        "mean log-probability of the reference answer before each turn, of the old weights; NaN without turn or answer",
        StandIn("no turn changes it", like.of_turns(-3.0, -0.1), like.no_turns),
        lambda models, batch, number: models.answers,
    ),
    Need(
        "blanked_logp", "info['blanked_logp']", "[N, L]",
        "log-probabilities of each turn with the observation before it blanked, of the old weights",
        like.behaviour(like.near(0.3)), lambda models, batch, number: models.blanked,
    ),
    Need(
        "drift", "info['drift']", "[N]",
        "how far the policy moved since it last answered the prompt: mean |log-ratio| over that response's tokens, "
        "a row with info['measured']; NaN without one",
        StandIn("trackers forget at their fastest", like.uniform(0, 0.1, rows=True)),
        lambda models, batch, number: models.of_logp(drift_of),
    ),
    Need(
        "teacher_token_logp", "info['teacher_token_logp']", "[N, L]", "log-probabilities under the teacher",
        like.behaviour(like.near(0.3)), lambda models, batch, number: models.teacher.logp,
    ),
    Need(
        "teacher_top", "info['teacher_top']", "[N, L, 2, K]",
        "ids of the K most probable tokens of the teacher at each action, and their log-probabilities under it",
        like.top_of_teacher, _of_teacher("most_probable"),
    ),
    Need(
        "teacher_top_logp", "info['teacher_top_logp']", "[N, L, K]", "log-probabilities of the tokens of teacher_top",
        like.of_top, by_outputs="teacher_top_logp",
    ),
    Need(
        "teacher_states", "info['teacher_states']", "[N, L, D]", "states that the teacher's unembedding multiplies",
        like.teacher_states, _of_teacher("head_states"),
    ),
    Need(
        "elbo_terms", "info['elbo_terms']", "[N, n]",
        "n samples of the bound on a row's log-likelihood under a masked-diffusion model, before the update",
        StandIn("0", like.uniform(-30, -5, 4, rows=True), lambda batch, n: like.of_rows(0.0, int(n or 1))(batch, n)),
        _read("elbo_terms"), "elbo_terms", by_outputs="elbo_terms",
    ),
    Need(
        "teacher_divergence", "info['teacher_divergence']", "[N, L]",
        "generalised Jensen-Shannon divergence (beta after a colon) from the teacher of teacher_states",
        StandIn("0", like.uniform(0, 1), like.of_tokens(0.0)), by_outputs="teacher_divergence",
    ),
    Need(
        "adam_step", "info['adam_step']", "[N, L, 2]",
        "what Adam's step on an action alone would do to the logits u there: by how much it raises the action's above "
        "their mean, and their variance",
        StandIn("0", lambda random, logp: random.uniform(0, 1, (*logp.shape, 2)), like.of_tokens(0.0, 2)),
        by_outputs="adam_step",
    ),
    Need(
        "perturbation", "info['perturbation']", "[N]",
        "inner product of the policy's projections with what the row's member of a population adds to them",
        StandIn("0", like.uniform(-1, 1, rows=True), like.of_rows(0.0)), by_outputs="perturbation",
    ),
)  # fmt: skip


def drift_of(logp: Array, batch: Trajectories) -> Array:
    """f32[N]: the mean over the tokens of a prompt's earlier responses of |logp - behaviour_logp|; NaN without one.

    logp f32[N, L]: under the policy now. The earlier responses are the rows of the batch with info["measured"]; several
    of a prompt count alike.
    """
    measured = (batch.info or {}).get("measured")
    if measured is None:
        return jnp.full(logp.shape[:1], jnp.nan)
    moved = jnp.sum(jnp.where(batch.action_mask, jnp.abs(logp - batch.behaviour_logp), 0.0), axis=1)
    known = (measured > 0) & (batch.lengths > 0)
    mean = jnp.where(known, moved / jnp.maximum(batch.lengths, 1), 0.0)
    count, total = bucket_sums(batch.prompt_id, known.astype(jnp.float32), mean)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)
