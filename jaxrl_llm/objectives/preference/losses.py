"""Losses on pairs of responses, by the names that TRL gives them.

A loss is a function `(pairs, beta, ...) -> f[P]`, one number a pair, of the log-probabilities of whole responses. Their
log-ratios to the reference are u_w of the chosen and u_l of the rejected response; s = divergence(u) are their scores
(`divergences`), and z = beta (s_w - s_l) - margin. Without a reference log-probabilities stand in for log-ratios.
ls = log sigmoid, e = label_smoothing, the probability that a label is wrong.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Number, check_number
from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.repr import part
from jaxrl_llm.objectives.preference.divergences import Divergence, alpha_divergence, reverse_kl


class Pairs(NamedTuple):
    """P pairs of responses to a prompt: sums of their tokens' log-probabilities, and numbers of tokens; f[P] each."""

    chosen_logp: jax.Array
    rejected_logp: jax.Array
    ref_chosen_logp: jax.Array | float = 0.0  # under the reference; 0 without one
    ref_rejected_logp: jax.Array | float = 0.0
    chosen_length: jax.Array | float = 1.0  # by which losses of means over tokens divide; 1 where they are means
    rejected_length: jax.Array | float = 1.0
    margin: jax.Array | float = 0.0  # by how much the chosen response is better, in units of z
    valid: jax.Array | bool = True  # bool[P]: others are no pairs, and must not change the loss of those that are

    @property
    def log_ratios(self) -> tuple[jax.Array, jax.Array]:
        """u_w, u_l."""
        return self.chosen_logp - self.ref_chosen_logp, self.rejected_logp - self.ref_rejected_logp


PairLoss = Callable[..., jax.Array]  # (pairs, beta, ...) -> f[P]
Loss = TypeVar("Loss", bound=PairLoss)


def of_each_pair(loss: Loss) -> Loss:
    """Mark a loss of pairs, `PairLoss`, whose number of a pair depends on that pair alone."""
    loss.__dict__["of_each_pair"] = True
    return loss


def is_of_each_pair(loss: PairLoss) -> bool:
    """Whether a loss is known to be so; False for a function of which nobody said it."""
    return bool(getattr(loss, "of_each_pair", False))


@of_each_pair
def sigmoid(
    pairs: Pairs, beta: Number = 0.1, label_smoothing: Number = 0.0, divergence: Divergence = reverse_kl
) -> jax.Array:
    """DPO (2305.18290): -(1 - e) ls(z) - e ls(-z); with smoothing it is conservative DPO (Mitchell, 2023)."""
    return _smoothed(_logits(pairs, beta, divergence), label_smoothing)


@of_each_pair
def sigmoid_norm(
    pairs: Pairs, beta: Number = 0.1, label_smoothing: Number = 0.0, divergence: Divergence = reverse_kl
) -> jax.Array:
    """DPO with scores divided by the responses' lengths (2405.14734, appendix I): -ls(beta (s_w/|w| - s_l/|l|))."""
    return _smoothed(_logits(pairs, beta, divergence, per_token=True), label_smoothing)


@of_each_pair
def robust(
    pairs: Pairs, beta: Number = 0.1, label_smoothing: Number = 0.0, divergence: Divergence = reverse_kl
) -> jax.Array:
    """Robust DPO (2403.00409): (-(1-e) ls(z) + e ls(-z)) / (1 - 2e), unbiased where a share e of labels is flipped."""
    z = _logits(pairs, beta, divergence)
    e = _smoothing(label_smoothing)
    return ((1 - e) * jax.nn.softplus(-z) - e * jax.nn.softplus(z)) / (1 - 2 * e)


@of_each_pair
def hinge(pairs: Pairs, beta: Number = 0.1, divergence: Divergence = reverse_kl) -> jax.Array:
    """SLiC (2305.10425) and RSO (2309.06657): max(0, 1 - z)."""
    return jax.nn.relu(1 - _logits(pairs, beta, divergence))


@of_each_pair
def ipo(pairs: Pairs, beta: Number = 0.1, divergence: Divergence = reverse_kl) -> jax.Array:
    """IPO (2310.12036): (s_w/|w| - s_l/|l| - 1/(2 beta))^2. As its paper prints it, without lengths."""
    return ((_logits(pairs, beta, divergence, per_token=True) - 0.5) / beta) ** 2


@of_each_pair
def exo_pair(
    pairs: Pairs, beta: Number = 0.1, label_smoothing: Number = 1e-3, divergence: Divergence = reverse_kl
) -> jax.Array:
    """EXO (2402.00856): q (ls(z) - log(1-e)) + (1-q) (ls(-z) - log e), q = sigmoid(z). InputError unless e > 0."""
    check_number("label_smoothing of exo_pair", label_smoothing, above=0, below=0.5)
    z = _logits(pairs, beta, divergence)
    right, wrong = jax.nn.sigmoid(z), jax.nn.sigmoid(-z)
    return right * (jax.nn.log_sigmoid(z) - jnp.log1p(-label_smoothing)) + wrong * (
        jax.nn.log_sigmoid(-z) - jnp.log(label_smoothing)
    )


@of_each_pair
def nca_pair(pairs: Pairs, beta: Number = 0.1) -> jax.Array:
    """NCA (2402.05369): -ls(beta u_w) - ls(-beta u_w)/2 - ls(-beta u_l)/2."""
    w, l = _rewards(pairs, beta)
    return jax.nn.softplus(-w) + 0.5 * jax.nn.softplus(w) + 0.5 * jax.nn.softplus(l)


@of_each_pair
def bco_pair(pairs: Pairs, beta: Number = 0.1, shift: Number = 0.0) -> jax.Array:
    """BCO (2404.04656): -ls(beta u_w - shift) - ls(shift - beta u_l); the paper's shift is the mean reward so far."""
    w, l = _rewards(pairs, beta)
    return jax.nn.softplus(shift - w) + jax.nn.softplus(l - shift)


@of_each_pair
def sppo_hard(pairs: Pairs, beta: Number = 0.1) -> jax.Array:
    """SPPO with certain labels (2405.00675): (u_w - 1/(2 beta))^2 + (u_l + 1/(2 beta))^2."""
    (w, l), half = pairs.log_ratios, 0.5 / _positive(beta)
    return (w - half) ** 2 + (l + half) ** 2


def aot(pairs: Pairs, beta: Number = 0.1, label_smoothing: Number = 0.0) -> jax.Array:
    """AOT (2406.05882): DPO on the k-th smallest margins of policy and reference, for each k, not for each pair."""
    ours = pairs.chosen_logp - pairs.rejected_logp
    theirs = jnp.broadcast_to(jnp.asarray(pairs.ref_chosen_logp - pairs.ref_rejected_logp, ours.dtype), ours.shape)
    return _of_quantiles(pairs, ours, theirs, beta, label_smoothing)


def aot_unpaired(pairs: Pairs, beta: Number = 0.1, label_smoothing: Number = 0.0) -> jax.Array:
    """AOT (2406.05882) of answers that need not be pairs: DPO on the k-th smallest u_w and u_l, for each k."""
    return _of_quantiles(pairs, *pairs.log_ratios, beta, label_smoothing)


@of_each_pair
def apo_zero(pairs: Pairs, beta: Number = 0.1) -> jax.Array:
    """APO (2408.06266) of responses better than the policy's: 1 - sigmoid(beta u_w) + sigmoid(beta u_l)."""
    w, l = _rewards(pairs, beta)
    return jax.nn.sigmoid(-w) + jax.nn.sigmoid(l)


@of_each_pair
def apo_down(pairs: Pairs, beta: Number = 0.1) -> jax.Array:
    """APO (2408.06266) of responses worse than the policy's: sigmoid(beta u_w) + 1 - sigmoid(beta (u_w - u_l))."""
    w, l = _rewards(pairs, beta)
    return jax.nn.sigmoid(w) + jax.nn.sigmoid(l - w)


@of_each_pair
def discopop(pairs: Pairs, beta: Number = 0.05, tau: Number = 0.05, divergence: Divergence = reverse_kl) -> jax.Array:
    """DiscoPOP (2406.08414): -(1 - g) ls(z) + g exp(-z), g = sigmoid(z/tau)."""
    check_number("tau", tau, above=0)
    z = _logits(pairs, beta, divergence)
    # exp(log g - z) as one exponential, since g may be 0 where exp(-z) is infinite.
    damped = jnp.exp(jnp.minimum(jax.nn.log_sigmoid(z / tau) - z, jnp.log(jnp.finfo(z.dtype).max) - 3))
    return jax.nn.sigmoid(-z / tau) * jax.nn.softplus(-z) + damped


@of_each_pair
def simpo(
    pairs: Pairs, beta: Number = 2.5, label_smoothing: Number = 0.0, gamma: Number = 1.375, alpha: Number = 0.0
) -> jax.Array:
    """SimPO (2405.14734): -ls(beta (a_w - a_l) - gamma), a the mean log-probability of a response's tokens.

    alpha: not 0 takes (1 - exp(-alpha a)) / alpha in place of a (AlphaPO, 2501.03884).
    """
    check_number("gamma", gamma)
    z = _logits(pairs, beta, alpha_divergence(1 - alpha), per_token=True, inside=True) - gamma
    return _smoothed(z, label_smoothing)


@of_each_pair
def orpo(pairs: Pairs, beta: Number = 0.1) -> jax.Array:
    """The odds-ratio term of ORPO (2403.07691): -beta ls(log odds(w) - log odds(l)), odds = p / (1 - p).

    p is the exponential of a response's mean log-probability; a reference is not read.
    """
    w, l = pairs.chosen_logp / pairs.chosen_length, pairs.rejected_logp / pairs.rejected_length
    return _positive(beta) * jax.nn.softplus(-(_log_odds(w) - _log_odds(l)))


@part
def of_sums(loss: PairLoss) -> PairLoss:
    """A loss of log-probabilities of whole responses, whatever their lengths: IPO as its paper prints it, say."""
    require_function("a loss of pairs", loss)

    def summed(pairs: Pairs, beta: Number = 0.1) -> jax.Array:
        return loss(pairs._replace(chosen_length=1.0, rejected_length=1.0), beta)

    return of_each_pair(summed) if is_of_each_pair(loss) else summed


@part
def weighted_losses(*losses: tuple[PairLoss, float]) -> PairLoss:
    """The weighted sum of losses, such as `weighted_losses((sigmoid, 0.8), (bco_pair, 0.2))` of MPO (2411.10442)."""
    for loss, _ in losses:
        require_function("a loss of pairs", loss)

    def mixed(pairs: Pairs, beta: Number = 0.1) -> jax.Array:
        return jnp.sum(jnp.stack([weight * loss(pairs, beta) for loss, weight in losses]), axis=0)

    return of_each_pair(mixed) if all(is_of_each_pair(loss) for loss, _ in losses) else mixed


def _positive(beta: Number) -> Number:
    check_number("beta", beta, above=0)
    return beta


def _smoothing(label_smoothing: Number) -> Number:
    check_number("label_smoothing", label_smoothing, least=0, below=0.5)
    return label_smoothing


def _smoothed(z: jax.Array, label_smoothing: Number) -> jax.Array:
    e = _smoothing(label_smoothing)
    return (1 - e) * jax.nn.softplus(-z) + e * jax.nn.softplus(z)


def _rewards(pairs: Pairs, beta: Number) -> tuple[jax.Array, jax.Array]:
    """beta u_w, beta u_l."""
    w, l = pairs.log_ratios
    return _positive(beta) * w, beta * l


def _logits(
    pairs: Pairs, beta: Number, divergence: Divergence, per_token: bool = False, inside: bool = False
) -> jax.Array:
    """z f[P]. per_token: of scores divided by the lengths; inside: of log-ratios that are."""
    w, l = pairs.log_ratios
    if per_token and inside:
        w, l = w / pairs.chosen_length, l / pairs.rejected_length
    w, l = divergence(w), divergence(l)
    if per_token and not inside:
        w, l = w / pairs.chosen_length, l / pairs.rejected_length
    return _positive(beta) * (w - l) - pairs.margin


def _of_quantiles(pairs: Pairs, x: jax.Array, y: jax.Array, beta: Number, label_smoothing: Number) -> jax.Array:
    """DPO on the k-th smallest x less the k-th smallest y of the valid pairs, at the place of the k-th of these."""
    valid = jnp.broadcast_to(jnp.asarray(pairs.valid), x.shape)
    gap = jnp.sort(jnp.where(valid, x, jnp.inf)) - jnp.sort(jnp.where(valid, y, jnp.inf))
    z = _positive(beta) * jnp.where(valid, gap[jnp.clip(jnp.cumsum(valid) - 1, 0)], 0.0) - pairs.margin
    return _smoothed(z, label_smoothing)


def _log_odds(logp: jax.Array) -> jax.Array:
    """log(p / (1 - p)) of log p; of a probability that rounds to 1, that of the next smaller one, without gradient."""
    a = jnp.minimum(logp, -jnp.finfo(logp.dtype).eps)
    small = a > -jnp.log(2.0)
    # Each branch sees only what it is exact for, so that neither has a gradient that is not finite.
    near, far = jnp.where(small, a, -1.0), jnp.where(small, -1.0, a)
    return a - jnp.where(small, jnp.log(-jnp.expm1(near)), jnp.log1p(-jnp.exp(far)))
