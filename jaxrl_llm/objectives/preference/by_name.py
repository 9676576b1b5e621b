"""Losses on pairs by name: the table of `losses`, and `pair_loss`, which calls one on plain arrays."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Number, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.objectives.preference import losses
from jaxrl_llm.objectives.preference.divergences import DIVERGENCES, alpha_divergence
from jaxrl_llm.objectives.preference.losses import PairLoss, Pairs, is_of_each_pair, of_each_pair
from jaxrl_llm.utils.errors import InputError, unknown
from jaxrl_llm.utils.keywords import unknown_keyword

PAIR_LOSSES: dict[str, PairLoss] = {
    one.__name__: one
    for one in (
        losses.sigmoid, losses.sigmoid_norm, losses.robust, losses.hinge, losses.ipo, losses.exo_pair, losses.nca_pair,
        losses.bco_pair, losses.sppo_hard, losses.aot, losses.aot_unpaired, losses.apo_zero, losses.apo_down,
        losses.discopop, losses.simpo, losses.orpo,
    )
}  # fmt: skip
ALIASES = {"f_alpha_divergence_coef": "alpha", "discopop_tau": "tau", "simpo_gamma": "gamma", "tpo_l_gamma": "gamma"}
_WITH_LENGTHS = (losses.sigmoid_norm,)
_WITHOUT_MARGIN = (losses.nca_pair, losses.bco_pair, losses.sppo_hard, losses.apo_zero, losses.apo_down, losses.orpo)


@part
def loss_named(
    name: str, label_smoothing: Number | None = None, f_divergence: str | None = None, **others: Number
) -> PairLoss:
    """The loss `(pairs, beta) -> f[P]` of a name with its further numbers; those that are None have their defaults.

    others: alpha of the alpha-divergence and of AlphaPO, tau of discopop, gamma of simpo, shift of bco_pair, also by
    TRL's names. InputError for an unknown name, for what the loss does not have, and for numbers out of range.
    """
    if name not in PAIR_LOSSES:
        raise unknown("loss of pairs", name, PAIR_LOSSES)
    loss = PAIR_LOSSES[name]
    has = inspect.signature(loss).parameters
    given = dict[str, Any]()
    own = {ALIASES.get(key, key): value for key, value in others.items()}
    if f_divergence not in (None, "reverse_kl"):
        if f_divergence not in DIVERGENCES:
            raise unknown("divergence", str(f_divergence), DIVERGENCES)
        if "divergence" not in has:
            able = [key for key, one in PAIR_LOSSES.items() if "divergence" in inspect.signature(one).parameters]
            raise InputError(f"{name} has no f-divergence: leave f_divergence out, or take one of {', '.join(able)}")
        by_alpha = f_divergence == "alpha_divergence"
        given["divergence"] = alpha_divergence(own.pop("alpha", 0.5)) if by_alpha else DIVERGENCES[f_divergence]
    if label_smoothing is not None:
        if "label_smoothing" in has:
            given["label_smoothing"] = label_smoothing
        elif not isinstance(label_smoothing, int | float) or label_smoothing:
            able = [key for key, one in PAIR_LOSSES.items() if "label_smoothing" in inspect.signature(one).parameters]
            raise InputError(f"{name} has no label smoothing: leave it out, or take one of {', '.join(able)}")
    for key, value in own.items():
        if key not in has or key == "divergence":
            raise unknown_keyword(key, sorted({*has} - {"pairs", "divergence"}), f"argument of the loss {name}")
        given[key] = value

    def named(pairs: Pairs, beta: Number) -> jax.Array:
        return loss(pairs, beta, **given)

    return of_each_pair(named) if is_of_each_pair(loss) else named


def pair_loss(
    name: str,
    chosen_logp: jax.Array,
    rejected_logp: jax.Array,
    ref_chosen_logp: jax.Array | None = None,
    ref_rejected_logp: jax.Array | None = None,
    *,
    chosen_length: jax.Array | None = None,
    rejected_length: jax.Array | None = None,
    beta: Number = 0.1,
    label_smoothing: Number | None = None,
    f_divergence: str = "reverse_kl",
    margin: jax.Array | float | None = None,
    **others: Number,
) -> jax.Array:
    """A loss of `PAIR_LOSSES` by its name, f[n], one number a pair (of aot and aot_unpaired: one a quantile).

    The log-probabilities f[n] are sums over the tokens of each response. ref_*: the same under the reference, None for
    none. *_length: numbers of tokens, by which ipo, sigmoid_norm, simpo and orpo divide; None where that is done, or
    for IPO as its paper prints it. beta > 0; label_smoothing from 0, below 0.5 (None: the loss's own, 0 but for
    exo_pair); f_divergence: reverse_kl, forward_kl, js_divergence or alpha_divergence. margin: by how much the chosen
    response should be ahead, subtracted inside the loss. others: see `loss_named`.

    InputError for an unknown name, arguments that the loss does not have, numbers out of range, and arrays of different
    shapes.
    """
    loss = loss_named(name, label_smoothing, f_divergence, **others)
    check_number("beta", beta, above=0)
    if (ref_chosen_logp is None) != (ref_rejected_logp is None):
        raise InputError("ref_chosen_logp and ref_rejected_logp go together: give both, or none")
    if (chosen_length is None) != (rejected_length is None):
        raise InputError("chosen_length and rejected_length go together: give both, or none")
    if chosen_length is None and PAIR_LOSSES[name] in _WITH_LENGTHS:
        raise InputError(f"{name} divides by the numbers of tokens: give chosen_length and rejected_length")
    if margin is not None and PAIR_LOSSES[name] in _WITHOUT_MARGIN:
        raise InputError(
            f"{name} does not compare the two responses with each other, so it has no margin: leave it out"
        )
    arrays = {
        "chosen_logp": chosen_logp, "rejected_logp": rejected_logp, "ref_chosen_logp": ref_chosen_logp,
        "ref_rejected_logp": ref_rejected_logp, "chosen_length": chosen_length, "rejected_length": rejected_length,
    }  # fmt: skip
    known = {key: jnp.asarray(x) for key, x in arrays.items() if x is not None}
    for key, x in known.items():
        if x.ndim != 1 or x.shape != known["chosen_logp"].shape:
            raise InputError(
                f"{key} has the shape {list(x.shape)}, but chosen_logp {list(known['chosen_logp'].shape)}: "
                "all are f[n], one number a pair"
            )
    if margin is not None:
        known["margin"] = jnp.asarray(margin)
    return loss(Pairs(**known), beta)
