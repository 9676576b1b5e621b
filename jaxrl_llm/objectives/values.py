"""Critic losses: error functions, clipped losses, and combinations of several value heads.

Plain functions work on arrays of any shape. An error is a function of x = V - R.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.returns import needed_values
from jaxrl_llm.core.annotations import Count, Number, Positive, PositiveNumber, Range
from jaxrl_llm.core.parts import Array, PolicyOutputs, Trajectories, batch_part, part, totals_of, weighted
from jaxrl_llm.core.transform import Metrics, Objective, control
from jaxrl_llm.objectives.averages import Average, Mean, as_average, average_part, averaged, token_mean
from jaxrl_llm.utils.errors import InputError, require_choice

HEAD = "train a model with a head of scores"
COPY = "give the policy Critic('likelihood') (models.critic)"
Error = Callable[[Array], Array]


def needed_output(
    outputs: PolicyOutputs, name: str, user: str, remedy: str = "give the policy a critic (models.critic)"
) -> Array:
    """outputs.extras[name]; InputError, which says who needs it and the remedy, where there is none."""
    if name not in (outputs.extras or {}):
        raise InputError(f"{user} needs outputs.extras[{name!r}]: {remedy}")
    return (outputs.extras or {})[name]


def half_square(x: Array) -> Array:
    """x^2 / 2, minimised by the mean of the returns; its gradient is x."""
    return 0.5 * x**2


@batch_part
def huber(x: Array, width: PositiveNumber = 1.0) -> Array:
    """x^2 / 2 where |x| <= width, else width (|x| - width / 2): bounds the gradient of outliers (Huber, 1964)."""
    near = jnp.clip(x, -width, width)
    return near * (x - 0.5 * near)


@part
def pinball(quantile: Annotated[Number, Range(above=0, below=1)] = 0.5) -> Error:
    """q (R - V) where R > V, else (1 - q) (V - R): minimised by the quantile q of the returns (1/2: the median)."""
    return lambda x: jnp.where(x < 0, -quantile * x, (1 - quantile) * x)


def clipped_error(
    values: Array,
    before: Array,
    returns: Array,
    clip: Number,
    error: Error = half_square,
    of: Literal["max", "mean"] = "max",
) -> Array:
    """max(e(V - R), e(V_c - R)) with V_c = V_old + clip(V - V_old, -clip, clip) (PPO's code); elementwise.

    of "mean": the mean of the two errors instead of their maximum.
    """
    require_choice("of", of, ("max", "mean"))
    near = before + jnp.clip(values - before, -clip, clip)
    free, held = error(values - returns), error(near - returns)
    # maximum(free, held), NaN where either is, without its derivative, which takes several times the operations.
    return jnp.where(free >= held, free, held) if of == "max" else 0.5 * (free + held)


@average_part()
def last_action_mean(values: Array, batch: Trajectories) -> Array:
    """Mean over sequences of the values at their last action."""
    last = batch.action_index == batch.lengths[:, None].astype(jnp.int32) - 1
    return jnp.sum(jnp.where(last, weighted(values, batch), 0.0)) / totals_of(batch)["sequences"]


def per_row(values: Array, batch: Trajectories) -> Array:
    """Sum over all tokens / number of rows with an action: a mean if the weights add up to that number."""
    return jnp.sum(weighted(values, batch)) / totals_of(batch)["rows"]


def _mean(each: list[Array]) -> Array:
    return jnp.mean(jnp.stack(each), axis=0)


@part
def value_loss(
    clip: PositiveNumber | None = 0.2,
    average: Average | Mean | None = None,
    *,
    error: Error | Sequence[Error] = half_square,
    of: Literal["max", "mean"] = "max",
    combine: Callable[[Array], Array] | None = None,
    heads: Count = 1,
) -> Objective:
    """average(clipped_error) of the critic's values against `batch.returns`; clip None: average(e(V - R)).

    average: default token_mean(). combine: maps several heads to the value that is trained, e.g. soft_minimum(); by
    default each head is trained on the same returns, and the loss is the mean over heads. error: one function for all
    heads, or one per head, e.g. (half_square, pinball(0.5)) for mean and median. heads: number of value heads. Rows
    without a score contribute 0. info["value_weights"] f32[N, L], if given, replaces the loss weights (see
    `advantages.tokens`), and the default average is then `per_row`.
    Metrics: "value/loss", "value/mean", "value/error" (mean |V - R|), "value/clip" (share of tokens with
    |V - V_old| > clip), and "value/explained_variance" from before the update, if a transform wrote it.
    """
    plain = token_mean()
    errors: list[Error] | None = None if callable(error) else list(error)
    same: Error = error if callable(error) else half_square

    def split(values: Array) -> list[Array]:
        """The values of each head, f32[N, L]."""
        values = values if combine is None else combine(values)
        return [values] if values.ndim == 2 else list(jnp.moveaxis(values, -1, 0))

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        values = needed_output(outputs, "values", "the value loss")
        controls = batch.controls or {}
        own = (batch.info or {}).get("value_weights")
        per_token = plain if own is None else per_row
        mean, batch = average or per_token, batch if own is None else batch.replace(weights=own)
        counts = batch.loss_weights != 0
        if batch.reward is not None:
            counts &= ~jnp.isnan(batch.reward)[:, None]
        R = jnp.where(counts, batch.need("returns"), 0.0)
        new, old = ([jnp.where(counts, v, 0.0) for v in split(x)] for x in (values, batch.need("values")))
        if errors is not None and len(errors) != len(new):
            raise InputError(f"the value loss has {len(errors)} errors for {len(new)} heads: give one for each head")
        each = errors or [same] * len(new)
        if clip is None:
            losses = [e(v - R) for e, v in zip(each, new, strict=True)]
        else:
            losses = [clipped_error(v, o, R, clip, e, of) for e, v, o in zip(each, new, old, strict=True)]
        loss, V, V_old = mean(_mean(losses), batch), _mean(new), _mean(old)
        statistics = {"value/mean": V, "value/error": jnp.abs(V - R)}
        if clip is not None:
            statistics["value/clip"] = (jnp.abs(V - V_old) > clip).astype(jnp.float32)
        if "explained_variance" in controls:
            statistics["value/explained_variance"] = jnp.broadcast_to(controls["explained_variance"], V.shape)
        return loss, {"value/loss": loss, **{name: per_token(x, batch) for name, x in statistics.items()}}

    return averaged(objective, plain if average is None else as_average(average), needed_values(heads))


@part
def head_value_loss(heads: Count, clip: Positive | None = 0.2) -> Objective:
    """sum_h mean over the tokens that train head h of 1/2 (V_h - R_h)^2, or its clipped form (`clipped_error`).

    R: info["head_returns"] f32[N, L, H], NaN where a head is not trained. The control "head_turns" f32[H] is how many
    there are in the whole batch, such as `algorithms.turn_credit.hiper.hierarchical_advantages` writes. Metrics:
    "value/loss", "value/error" (mean |V - R| over all heads), and "value/explained_variance" from before the update.
    """

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        new, old = needed_output(outputs, "values", "the value loss"), batch.need("values")
        returns = batch.need("head_returns")
        counts = control(batch, "head_turns")
        trained = ~jnp.isnan(returns) & (batch.loss_weights != 0)[..., None]
        V, V_old, R = (jnp.where(trained, x, 0.0) for x in (new, old, returns))
        error = half_square(V - R) if clip is None else clipped_error(V, V_old, R, clip)
        loss = jnp.sum(jnp.sum(error, axis=(0, 1)) / jnp.maximum(counts, 1))
        away = jnp.sum(jnp.abs(V - R)) / jnp.maximum(jnp.sum(counts), 1)
        metrics = {"value/loss": loss, "value/error": away}
        if (explained := (batch.controls or {}).get("explained_variance")) is not None:
            share = jnp.sum(trained) / jnp.maximum(jnp.sum(counts), 1)  # the slices of a batch add up to 1
            metrics["value/explained_variance"] = explained * share
        return loss, metrics

    return Objective(objective, needed_values(heads))
