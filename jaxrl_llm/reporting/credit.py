"""Compare credit assignment: the advantages and gradients that several algorithms give the same completions."""

from __future__ import annotations

import html
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import Algorithm, constructor, get
from jaxrl_llm.errors import InputError, require_choice, unknown
from jaxrl_llm.needs import fill_in
from jaxrl_llm.part_checks import expect
from jaxrl_llm.reporting.shading import LEVELS, style_rules, visible
from jaxrl_llm.reporting.statistics import typical_size
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories, check_batch, in_words
from jaxrl_llm.transform import check_outputs

SHADES = ("push", "advantage")
Which = str | Algorithm | Sequence[str | Algorithm] | Mapping[str, str | Algorithm]

_STYLE = """
.jaxrl-credit{font:13px/1.6 system-ui,sans-serif;overflow-x:auto}
.jaxrl-credit table{border-collapse:collapse}
.jaxrl-credit th{font-weight:600;text-align:left;vertical-align:top;white-space:nowrap;padding:.1em 1em .1em 0}
.jaxrl-credit td{font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;padding:.1em 0;text-align:left}
.jaxrl-credit .row th{padding-top:.8em}
.jaxrl-credit i{font-style:normal}
.jaxrl-credit .given{opacity:.5}
.jaxrl-credit .note{opacity:.7}
"""


@dataclass(frozen=True, repr=False)
class Comparison:
    """The credit that each algorithm gives each token of a batch; numpy arrays, N sequences of L positions.

    The push of a token is - d loss / d logp: if it is positive, gradient descent makes the token more likely.
    """

    advantages: dict[str, np.ndarray]  # f32[N, L] of each algorithm; 0 where there is no action
    gradients: dict[str, np.ndarray]  # f32[N, L] d loss / d logp
    losses: dict[str, float]
    filled: dict[str, dict[str, str]]  # per algorithm, its needs that the batch lacks: a description of the stand-in
    tokens: np.ndarray  # int32[N, L] ids
    token_mask: np.ndarray  # bool[N, L]
    action_mask: np.ndarray  # bool[N, L]
    group: np.ndarray  # int32[N]
    reward: np.ndarray  # f32[N]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.advantages))

    @property
    def pushes(self) -> dict[str, np.ndarray]:
        """f32[N, L] - d loss / d logp of each algorithm."""
        return {name: -gradient for name, gradient in self.gradients.items()}

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        """The statistics without the sequences, of which there may be many."""
        size = f"{len(self.group)} sequences, {int(self.action_mask.sum())} actions"
        return f"Comparison of {', '.join(self.names)}: {size}\n{self.table(sequences=False)}"

    def table(self, sequences: bool = True) -> str:
        """A text table: the summed push of each sequence by algorithm, and below it summary statistics.

        "cosine" is the cosine similarity of an algorithm's pushes with those of the first algorithm. sequences: whether
        the table has the sequences.
        """
        head = ["row", "group", "reward", "actions", *self.names]
        rows = [
            [str(n), str(self.group[n]), f"{self.reward[n]:.3g}", str(self.action_mask[n].sum())]
            + [f"{self.pushes[name][n].sum():+.4g}" for name in self.names]
            for n in range(len(self.group))
            if sequences
        ]
        first = self.pushes[self.names[0]].ravel()
        summary: dict[str, list[str]] = {
            "loss": [],
            "tokens up": [],
            "tokens down": [],
            "mean |push|": [],
            "cosine": [],
        }
        actions = max(int(self.action_mask.sum()), 1)
        for name in self.names:
            push = self.pushes[name].ravel()
            sizes = float(np.linalg.norm(first) * np.linalg.norm(push))
            values = [
                f"{self.losses[name]:.4g}",
                f"{(push > 0).sum() / actions:.0%}",
                f"{(push < 0).sum() / actions:.0%}",
                f"{np.abs(push).sum() / actions:.4g}",
                f"{float(first @ push) / sizes:.3f}" if sizes > 0 else "-",
            ]
            for column, value in zip(summary.values(), values, strict=True):
                column.append(value)
        rows += [[label, "", "", "", *values] for label, values in summary.items()]
        if not sequences:
            head, *rows = ([row[0].replace("row", ""), *row[4:]] for row in [head, *rows])
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        return "\n".join(lines + self._notes())

    def to_html(self, tokens: Sequence[Sequence[str | None]] | None = None, shade: str = "push") -> str:
        """A self-contained HTML fragment with one line of shaded tokens per sequence and algorithm.

        tokens: the text of each position, N lists of at most L; None omits a position. By default ids are shown.
        shade: "push" or "advantage": blue above 0, red below, in full at the algorithm's own 98th percentile, so that
        colours compare tokens, not algorithms. Hovering over a token shows its numbers; prompts are pale.
        Raises InputError for another shade, or for texts that do not fit the batch.
        """
        require_choice("shade", shade, SHADES)
        texts = self._texts(tokens)
        values = self.pushes if shade == "push" else self.advantages
        limits = {name: typical_size(values[name][self.action_mask].tolist()) for name in self.names}
        lines = []
        for n, text in enumerate(texts):
            about = f"sequence {n}, group {self.group[n]}, reward {self.reward[n]:.3g}"
            lines.append(f'<tr class="row"><th colspan="2">{html.escape(about)}</th></tr>')
            for name in self.names:
                body = "".join(self._token(name, n, t, x, values[name], limits[name]) for t, x in text)
                lines.append(f"<tr><th>{html.escape(name)}</th><td>{body}</td></tr>")
        notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in self._notes())
        style = f"<style>{_STYLE}{style_rules('advantage')}</style>"
        return f'<div class="jaxrl-credit show-advantage">{style}<table>{"".join(lines)}</table>{notes}</div>'

    def _repr_html_(self) -> str:
        return self.to_html()

    def _texts(self, tokens: Sequence[Sequence[str | None]] | None) -> list[list[tuple[int, str]]]:
        N, L = self.tokens.shape
        if tokens is None:
            tokens = [[f"{t} " if real else None for t, real in zip(*row, strict=True)] for row in self._ids()]
        lists = isinstance(tokens, Sequence) and all(isinstance(row, list | tuple) for row in tokens)
        if not lists or len(tokens) != N or any(len(row) > L for row in tokens):
            raise InputError(f"the texts do not fit the batch: pass {N} lists of at most {L} tokens")
        return [[(t, text) for t, text in enumerate(row) if text is not None] for row in tokens]

    def _ids(self) -> list[tuple[list[int], list[bool]]]:
        return list(zip(self.tokens.tolist(), self.token_mask.tolist(), strict=True))

    def _token(self, name: str, n: int, t: int, text: str, values: np.ndarray, limit: float) -> str:
        """The HTML element of a token; only actions have numbers."""
        if not self.action_mask[n, t]:
            return f'<i class="given">{visible(text)}</i>'
        level = round(LEVELS * float(np.clip(values[n, t] / limit, -1.0, 1.0)))
        title = f"advantage {self.advantages[name][n, t]:.4g}, d loss / d logp {self.gradients[name][n, t]:.4g}"
        kind = f'class="a{level}" ' if level else ""
        return f'<i {kind}title="{title}">{visible(text)}</i>'

    def _notes(self) -> list[str]:
        """One line per algorithm with stand-ins."""
        return [
            f"{name}: the batch has no {', no '.join(f'{need} ({by} stands in)' for need, by in filled.items())}"
            for name, filled in self.filled.items()
            if filled
        ]


def compare(
    algorithms: Which, batch: Trajectories, outputs: PolicyOutputs | None = None, **hyperparameters: Any
) -> Comparison:
    """The advantages and d loss / d logp that each algorithm gives every token of a scored batch.

    algorithms: a name or an `Algorithm`, a sequence of them, or a mapping from labels to them. outputs: of the policy
    at which the gradient is taken; by default the behaviour policy, as in the first step after sampling.
    hyperparameters are passed to the named methods that have them; InputError for one that none has. What an algorithm
    needs and the batch lacks is filled in as if the policy were still the behaviour policy, and is listed in
    `Comparison.filled`. Transforms start from their initial state. Nothing is compiled, so use at most a few hundred
    sequences.
    """
    check_batch(batch)
    if outputs is not None:
        check_outputs(outputs, batch)
    chosen = _chosen(algorithms, hyperparameters)
    advantages, gradients, losses, filled = {}, {}, {}, {}
    for name, algorithm in chosen.items():
        full, extras, filled[name] = fill_in(batch, algorithm.needs)
        at = outputs if outputs is not None else PolicyOutputs(full.behaviour_logp, _entropy(batch))
        at = at.replace(extras={**extras, **(at.extras or {})} or None)
        _, full = algorithm.transform.apply(algorithm.transform.init(), full)

        def loss(logp: jax.Array, at: Any = at, full: Any = full, algorithm: Any = algorithm) -> jax.Array:
            return algorithm.objective(at.replace(logp=logp), full)[0]

        value, gradient = jax.value_and_grad(loss)(at.logp)
        A = full.advantages if full.advantages is not None else jnp.zeros(full.tokens.shape)
        advantages[name] = np.asarray(jnp.where(full.action_mask, A, 0.0))
        gradients[name] = np.asarray(jnp.where(full.action_mask, gradient, 0.0))
        losses[name] = float(value)
    shown = (batch.tokens, batch.token_mask, batch.action_mask, batch.group, batch.scores)
    return Comparison(advantages, gradients, losses, filled, *map(np.asarray, shown))


def _chosen(algorithms: Which, hyperparameters: Mapping[str, Any]) -> dict[str, Algorithm]:
    """Algorithms by label; InputError for an empty selection, a repeated label, or an unknown hyper-parameter."""
    if isinstance(algorithms, str | Algorithm):
        algorithms = [algorithms]
    if not isinstance(algorithms, Mapping | Sequence):
        raise InputError(f"compare takes names of algorithms or Algorithms, but found {in_words(algorithms)}")
    if not isinstance(algorithms, Mapping):
        labels = [x if isinstance(x, str) else f"algorithm {i + 1}" for i, x in enumerate(algorithms)]
        if len(set(labels)) < len(labels):
            raise InputError("an algorithm is named twice: pass a mapping from labels to algorithms")
        algorithms = dict(zip(labels, algorithms, strict=True))
    if not algorithms:
        raise InputError("nothing to compare: pass the name of an algorithm")
    for label, x in algorithms.items():
        if not isinstance(x, str):
            expect(f"what is compared as {label!r}", x, Algorithm)
    known = {x: inspect.signature(constructor(x)).parameters for x in algorithms.values() if isinstance(x, str)}
    for given in hyperparameters:
        if not any(given in parameters for parameters in known.values()):
            raise unknown("hyper-parameter", given, {name for parameters in known.values() for name in parameters})
    return {
        label: x
        if isinstance(x, Algorithm)
        else get(x, **{name: value for name, value in hyperparameters.items() if name in known[x]})
        for label, x in algorithms.items()
    }


def _entropy(batch: Trajectories) -> jax.Array:
    return jnp.zeros(batch.tokens.shape) if batch.entropy is None else batch.entropy
