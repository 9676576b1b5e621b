"""Losses on single responses that are good or bad: on plain arrays, and on the rows of a batch."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import NonNegativeNumber, Number, PositiveNumber, Source, check_number
from jaxrl_llm.core.log_ratios import log_ratio_sums, needed, source
from jaxrl_llm.core.parts import PolicyOutputs, Trajectories, part, stateless_part, totals_of, weighted
from jaxrl_llm.core.transform import Metrics, Objective, control
from jaxrl_llm.utils.errors import InputError

KL = "sequence_kl"  # control: estimate of KL(policy || reference), nats a response


def kto_loss(
    logp: jax.Array,
    ref_logp: jax.Array,
    label: jax.Array,
    kl: jax.Array | float = 0.0,
    *,
    beta: Number = 0.1,
    desirable_weight: Number = 1.0,
    undesirable_weight: Number = 1.0,
) -> jax.Array:
    """KTO (2402.01306) of n responses, f[n]: w_D sigmoid(beta (z - u)) of good, w_U sigmoid(beta (u - z)) of bad ones.

    u = logp - ref_logp, sums over the tokens of each response, f[n]; label bool[n]: true for good. z = max(kl, 0) has
    no gradient: kl is the batch's estimate of KL(policy || reference), nats a response; at 0 the loss is TRL's
    apo_zero_unpaired. beta > 0, weights >= 0. InputError for numbers out of range and for different shapes.
    """
    check_number("beta", beta, above=0)
    check_number("desirable_weight", desirable_weight, least=0)
    check_number("undesirable_weight", undesirable_weight, least=0)
    logp, ref_logp, label = jnp.asarray(logp), jnp.asarray(ref_logp), jnp.asarray(label)
    for name, x in (("ref_logp", ref_logp), ("label", label)):
        if x.shape != logp.shape:
            raise InputError(f"{name} has the shape {list(x.shape)}, but logp {list(logp.shape)}: all are [n]")
    good = label.astype(bool)
    gain = beta * (logp - ref_logp - jax.lax.stop_gradient(jnp.maximum(kl, 0.0)))
    return jnp.where(good, desirable_weight, undesirable_weight) * jax.nn.sigmoid(jnp.where(good, -gain, gain))


def bco_loss(
    logp: jax.Array, ref_logp: jax.Array, label: jax.Array, shift: jax.Array | float = 0.0, *, beta: Number = 0.1
) -> jax.Array:
    """BCO (2404.04656) of n responses, f[n]: -log sigmoid(beta u - shift) of good, -log sigmoid(shift - beta u) of bad.

    Arguments as of `kto_loss`; shift: the mean reward beta u of the responses so far, without gradient.
    """
    check_number("beta", beta, above=0)
    gain = beta * (jnp.asarray(logp) - ref_logp) - jax.lax.stop_gradient(jnp.asarray(shift))
    return jax.nn.softplus(jnp.where(jnp.asarray(label).astype(bool), -gain, gain))


@stateless_part({"measured", "old_logp", "reference_logp"})
def mismatched_kl(batch: Trajectories) -> Trajectories:
    """Write the control "sequence_kl": the mean over rows with info["measured"] of log pi(y) - log p(y), at least 0.

    Each such row is a prompt with the response to another one; pi is the policy before the update, p the reference.
    Needs "measured", "old_logp" and "reference_logp".
    """
    u = log_ratio_sums(batch.need("old_logp"), batch.need("reference_logp"), batch)
    rows = (batch.entry("measured", 0) > 0) & jnp.any(batch.action_mask, axis=1)  # reports and comparisons have none
    mean = jnp.sum(jnp.where(rows, u, 0.0)) / jnp.maximum(jnp.sum(rows), 1)
    return batch.with_controls(**{KL: jnp.maximum(mean, 0.0)})


@part
def verdicts(
    beta: PositiveNumber = 0.1,
    desirable_weight: NonNegativeNumber = 1.0,
    undesirable_weight: NonNegativeNumber = 1.0,
    *,
    kl: bool = True,
    threshold: Number = 0.5,
    against: Source = "reference",
) -> Objective:
    """The mean over rows of `kto_loss`, of which those with a reward above the threshold are good.

    kl: read the control "sequence_kl" (`mismatched_kl`); otherwise it is 0. Metrics: "verdicts", the loss; "kl" where
    it is read; and as in `objectives.pairwise` "rewards/chosen" and "logps/chosen", means over good rows,
    "rewards/rejected" and "logps/rejected" over bad ones, "rewards/margins", and "rewards/accuracies": the share of
    rows with u > z where they are good, and u < z where they are bad.
    """

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        counts = jnp.any(batch.loss_weights != 0, axis=1)
        good = batch.scores > threshold
        return batch.with_info(**{
            name: rows / jnp.maximum(jnp.sum(rows), 1)
            for name, rows in (("good_share", counts & good), ("bad_share", counts & ~good))
        })  # fmt: skip

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        logp = jnp.sum(weighted(jnp.where(batch.action_mask, outputs.logp, 0.0), batch), axis=1)
        u = log_ratio_sums(outputs.logp, source(batch, against), batch)
        z = control(batch, KL) if kl else 0.0
        losses = kto_loss(
            u, jnp.zeros_like(u), batch.scores > threshold, z, beta=beta, desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
        )  # fmt: skip
        rows, good_rows = jnp.any(batch.loss_weights != 0, axis=1), batch.scores > threshold
        value = jnp.sum(jnp.where(rows, losses, 0.0)) / totals_of(batch)["sequences"]
        good, bad = batch.need("good_share"), batch.need("bad_share")
        metrics = {
            "verdicts": value, "rewards/chosen": jnp.sum(beta * u * good), "rewards/rejected": jnp.sum(beta * u * bad),
            "rewards/margins": jnp.sum(beta * u * (good - bad)), "logps/chosen": jnp.sum(logp * good),
            "logps/rejected": jnp.sum(logp * bad),
            "rewards/accuracies": jnp.sum(rows & ((u > z) == good_rows)) / totals_of(batch)["sequences"],
        }  # fmt: skip
        return value, metrics | ({"kl": z * jnp.sum(rows) / totals_of(batch)["sequences"]} if kl else {})

    return Objective(objective, needed(against), refresh)
