"""Averages of token values, independent of how the batch is split, padded or ordered.

Each is a sum over the rows of a micro-batch, divided by a total of the whole batch (`trajectory.totals_of`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate

import jax.numpy as jnp

from jaxrl_llm.core.annotations import AverageName, AverageOver, PositiveNumber
from jaxrl_llm.core.arguments.checks import makes, names_of
from jaxrl_llm.core.arguments.ranges import check_divisor, check_number
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.objective import Refresh, in_turn
from jaxrl_llm.core.parts import Array, Metrics, Objective, Settings, control, settings_first, stateless_part
from jaxrl_llm.core.repr import Negation, Operation, layout, part, recorded
from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, row_means, totals_of, weighted
from jaxrl_llm.utils.errors import InputError, require_choice

Mean = Callable[[Array, Trajectories], Array]  # (values f32[N, L], batch) -> f32[]


@dataclass(frozen=True, repr=False)
class Average:
    """A function `(values f32[N, L], batch) -> f32[]`, and what it needs in the batch.

    needs: names of batch fields that the loop must provide. refresh: computes what the average reads of the whole
    batch; see `Objective`. Objectives that use the average inherit both.
    """

    function: Mean
    needs: frozenset[str] = frozenset()
    refresh: Refresh | None = None

    def __call__(self, values: Array, batch: Trajectories) -> Array:
        return self.function(values, batch)

    def __mul__(self, scale: float | Array) -> Average:
        """The average times a number."""
        return recorded(self._times(scale), Operation("*", self, scale))

    def __rmul__(self, scale: float | Array) -> Average:
        return recorded(self._times(scale), Operation("*", scale, self))

    def __truediv__(self, divisor: float | Array) -> Average:
        check_divisor("an average", divisor)
        return recorded(self._times(1 / divisor), Operation("/", self, divisor))

    def __neg__(self) -> Average:
        return recorded(self._times(-1.0), Negation(self))

    __repr__ = layout

    def _times(self, scale: float | Array) -> Average:
        check_number("the scale of an average", scale)
        return Average(lambda values, batch: scale * self.function(values, batch), self.needs, self.refresh)


def takes_positional(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments; True where Python cannot tell, as of some builtins."""
    try:
        inspect.signature(function).bind(*range(count))
        return True
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)


def as_average(average: Average | Mean | None) -> Average:
    """Convert to an `Average`: a plain function becomes one without needs, None becomes `token_mean()`.

    Raises InputError for anything else, such as an average's factory that was not called.
    """
    if isinstance(average, Average):
        return average
    if average is None:
        return token_mean()
    name: Any = getattr(average, "__name__", in_words(average))
    if makes(average, Average):
        raise InputError(f"the average is the function {name}, which makes one: call it, {name}(...)")
    if not callable(average) or not takes_positional(average, 2):
        raise InputError(f"the average is {name}, but must be an Average, or a function of (values, batch)")
    return Average(average)


def averaged(
    function: Callable[[PolicyOutputs, Trajectories], tuple[Array, Metrics]],
    average: Average,
    needs: Iterable[str] = (),
    refresh: Refresh | None = None,
) -> Objective:
    """The objective of a function that uses `average`, with the needs and refreshes of both."""
    return Objective(function, average.needs | names_of(needs), in_turn(average.refresh, refresh))


def average_part(
    needs: Iterable[str] = (), refresh: Refresh | None = None
) -> Callable[[Callable[Concatenate[Array, Trajectories, Settings], Array]], Callable[Settings, Average]]:
    """Decorate a function of values f32[N, L], a batch and settings that returns f32[]: given the settings, it is an
    `Average` with these needs and this refresh."""
    made = partial(Average, needs=names_of(needs), refresh=refresh)
    return lambda function: settings_first(function, 2, made, Average)


def mean_of(
    values: Callable[[PolicyOutputs, Trajectories], Array],
    average: Average | Mean | None,
    metric: str,
    needs: Iterable[str] = (),
) -> Objective:
    """The mean of a function f32[N, L] of outputs and batch, which is the metric too. average: default token_mean()."""
    mean = as_average(average)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        value = mean(values(outputs, batch), batch)
        return value, {metric: value}

    return averaged(objective, mean, needs)


@average_part()
def token_mean(values: Array, batch: Trajectories) -> Array:
    """Sum over all tokens / number of tokens in the batch: every token has the same weight (DAPO)."""
    return jnp.sum(weighted(values, batch)) / totals_of(batch)["tokens"]


@average_part()
def sequence_mean(values: Array, batch: Trajectories) -> Array:
    """Mean over sequences of the mean over their tokens: every sequence has the same weight (GRPO)."""
    return jnp.sum(row_means(values, batch)) / totals_of(batch)["sequences"]


@average_part()
def sequence_sum(values: Array, batch: Trajectories) -> Array:
    """Mean over sequences of the sum over their tokens: the gradient of the sequence's log-probability (REINFORCE)."""
    return jnp.sum(weighted(values, batch)) / totals_of(batch)["sequences"]


@part
def constant(length: PositiveNumber | str | None) -> Average:
    """Sum over all tokens / (sequences * length), length a constant: no length bias (Dr. GRPO, 2503.20783).

    Counts every sequence with an action, even if all of its tokens were dropped. length: a number above 0 (else
    InputError), the name of a control, or None for the longest row of the batch.
    """
    name = "longest" if length is None else length

    def average(values: Array, batch: Trajectories) -> Array:
        number = control(batch, name) if isinstance(name, str) else name
        return jnp.sum(weighted(values, batch)) / (totals_of(batch)["rows"] * number)

    return Average(average, refresh=find_longest if length is None else None)


def find_longest(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
    """A `Refresh`: write the control "longest", the maximum number of actions of a row, at least 1."""
    return batch.with_controls(longest=jnp.maximum(jnp.max(batch.lengths, initial=0.0), 1.0))


def find_prompt_shares(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
    """A `Refresh`: write info["prompt_share"] f32[N], the 1 / (P T_g) of `prompt_mean` for each row."""
    tokens, rows = bucket_sums(batch.group, jnp.sum(batch.loss_weights, axis=1), jnp.ones(batch.group.shape))
    some = tokens > 0
    groups = jnp.maximum(jnp.sum(jnp.where(some, 1 / rows, 0.0)), 1e-9)
    return batch.with_info(prompt_share=jnp.where(some, 1 / (groups * jnp.where(some, tokens, 1.0)), 0.0))


@average_part(refresh=find_prompt_shares)
def prompt_mean(values: Array, batch: Trajectories) -> Array:
    """Mean over prompts of the mean over the tokens of a prompt's group: equal weights of prompts (DAPO, eq. 8).

    sum_g 1/P 1/T_g sum_{i in g} sum_t v_it, with T_g the sum of the group's token weights, P the number of groups with
    T_g > 0.
    """
    return jnp.sum(jnp.sum(weighted(values, batch), axis=1) * batch.need("prompt_share"))


@average_part()
def slice_token_mean(values: Array, batch: Trajectories) -> Array:
    """Mean over the tokens of each micro-batch, weighted by its share of the sequences (TRL's "bnpo").

    The only average that depends on how the batch is split into micro-batches; for comparisons only.
    """
    here = totals_of(batch.replace(totals=None))
    share = here["sequences"] / totals_of(batch)["sequences"]
    return share * jnp.sum(weighted(values, batch)) / here["tokens"]


def average_by_name(name: AverageName, length: float | Array | None = None) -> Average:
    """An average by name:

        sequence   mean over sequences of the mean over their tokens
        token      mean over all tokens of the batch
        prompt     mean over prompts of the mean over the tokens of their group
        sum        mean over sequences of the sum over their tokens
        constant   that sum / length; length None: / the longest row of the batch
        slice      mean over the tokens of each micro-batch, see `slice_token_mean`

    Raises InputError for another name.
    """
    makers: dict[str, Callable[[], Average]] = {
        "sequence": sequence_mean, "token": token_mean, "prompt": prompt_mean, "sum": sequence_sum,
        "constant": lambda: constant(length), "slice": slice_token_mean,
    }  # fmt: skip
    require_choice("average", name, makers)
    return makers[name]()


@stateless_part()
def count_tokens(batch: Trajectories, rows: Callable[[Trajectories], Array], name: str) -> Trajectories:
    """Write the control `name`: the sum of the token weights, times rows(batch) f32[N].

    Chain it after transforms that change the weights.
    """
    return batch.with_controls(**{name: jnp.sum(rows(batch)[:, None] * batch.loss_weights)})


@average_part()
def mean_by(values: Array, batch: Trajectories, name: str) -> Array:
    """Sum over all tokens / the control `name`; 0 if that is 0. Values must be 0 on tokens that it does not count."""
    count = control(batch, name)
    return jnp.where(count > 0, jnp.sum(weighted(values, batch)) / jnp.where(count > 0, count, 1.0), 0.0)


Tokens = Callable[[Trajectories], Array]  # batch -> bool[N, L]


@part
def token_groups(groups: Mapping[str, tuple[float | Array, Tokens]], over: AverageOver = "sequence") -> Average:
    """sum_k alpha_k mean_k(v) over groups of tokens, given by name as (alpha_k, batch -> bool[N, L]).

    over "sequence": mean_k is the mean over sequences of the mean over their tokens in the group (0 if a sequence has
    none); "token": the mean over all tokens in the group (0 if there are none).
    """

    def masked(batch: Trajectories, tokens: Tokens) -> Trajectories:
        return batch.replace(weights=batch.loss_weights * tokens(batch), totals=totals_of(batch))

    def average(values: Array, batch: Trajectories) -> Array:
        means = {name: sequence_mean() if over == "sequence" else mean_by(f"tokens/{name}") for name in groups}
        terms = [alpha * means[name](values, masked(batch, tokens)) for name, (alpha, tokens) in groups.items()]
        return jnp.sum(jnp.stack(terms))

    def count(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        counts = {name: jnp.sum(batch.loss_weights * tokens(batch)) for name, (_, tokens) in groups.items()}
        return batch.with_controls(**{f"tokens/{name}": value for name, value in counts.items()})

    return Average(average, refresh=count if over == "token" else None)
