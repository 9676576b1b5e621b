"""Separate averages for different kinds of rows or tokens: the policy's own, a teacher's, replayed ones."""

from typing import Any

import jax.numpy as jnp

from jaxrl_llm.core.parts import Array, PolicyOutputs, Trajectories, part, totals_of
from jaxrl_llm.objectives.averages import Average, as_average
from jaxrl_llm.utils.errors import InputError


@part
def by_rows(otherwise: Average, **kinds: Average) -> Average:
    """The sum of averages, each over one kind of rows: `by_rows(guided=sequence_mean(), otherwise=token_mean())`.

    Each keyword names an entry of `batch.info`, bool[N] or bool[N, L], that is true on the rows or tokens of its kind;
    a kind without an entry is empty. A token of several kinds belongs to the first of them, a token of none to
    `otherwise`. Each average normalises by the tokens and rows of its kind in the whole batch, and is 0 if there are
    none. Averages can be scaled: `0.5 * token_mean()`.
    """
    averages = {name: as_average(average) for name, average in {**kinds, "otherwise": otherwise}.items()}
    # Terms of one objective may divide the rows differently: what a kind excludes is part of its label.
    labels = {name: " not ".join([name, *list(kinds)[:number]]) for number, name in enumerate(averages)}

    def function(values: Array, batch: Trajectories) -> Array:
        terms = []
        for name, tokens in _tokens(batch, [*kinds]).items():
            prefix = f"{labels[name]} rows/"
            controls, info = (
                {key.removeprefix(prefix): x for key, x in (entries or {}).items() if key.startswith(prefix)}
                for entries in (batch.controls, batch.info)
            )
            totals = {total[1:]: controls.pop(total) for total in [*controls] if total.startswith("#")}
            if not totals and batch.totals is not None:
                raise InputError("by_rows counts rows of the whole batch: refresh it before it is split, see Objective")
            totals = totals or _totals(batch, tokens)
            kind = _only(batch, tokens).with_controls(**controls).with_info(**info).replace(totals=totals)
            terms.append(averages[name](values, kind))
        return jnp.sum(jnp.stack(terms))

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        whole = batch
        for name, tokens in _tokens(whole, [*kinds]).items():
            kind = _only(whole, tokens).replace(totals=_totals(whole, tokens))
            find = averages[name].refresh
            found = kind if find is None else find(outputs, kind)
            counts = {f"#{total}": count for total, count in (kind.totals or {}).items()}
            controls = {**_new(found.controls, kind.controls), **counts}
            new = _new(found.info, kind.info)
            batch = batch.with_controls(**{f"{labels[name]} rows/{key}": x for key, x in controls.items()})
            batch = batch.with_info(**{f"{labels[name]} rows/{key}": x for key, x in new.items()})
        return batch

    needs = frozenset[str]().union(*(average.needs for average in averages.values()))
    return Average(function, needs, refresh)


def _tokens(batch: Trajectories, kinds: list[str]) -> dict[str, Array]:
    """Partition the actions by kind, bool[N, L] each; "otherwise" has the rest."""
    left, found = batch.action_mask, {}
    for name in kinds:
        marked = (batch.info or {}).get(name)
        if marked is None:
            here = jnp.zeros(left.shape, bool)
        else:
            here = (marked if marked.ndim == 2 else marked[:, None]).astype(bool) & left
        found[name], left = here, left & ~here
    return {**found, "otherwise": left}


def _only(batch: Trajectories, tokens: Array) -> Trajectories:
    """The batch restricted to the actions of one kind."""
    return batch.replace(action_mask=tokens, weights=jnp.where(tokens, batch.loss_weights, 0.0))


def _totals(batch: Trajectories, tokens: Array) -> dict[str, Array]:
    return totals_of(_only(batch, tokens).replace(totals=None))


def _new(after: dict[str, Any] | None, before: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of `after` that are missing from `before` or differ from it."""
    return {key: x for key, x in (after or {}).items() if (before or {}).get(key) is not x}
