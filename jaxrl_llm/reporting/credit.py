"""Compare credit assignment: the advantages and gradients that several algorithms give the same completions."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import constructor, get
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.needs import fill_in
from jaxrl_llm.core.shapes import check_batch, check_outputs, in_words
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.reporting.html.credit_page import credit_page, residual
from jaxrl_llm.sampling.checks import check_tokenizer
from jaxrl_llm.utils.errors import InputError, require_choice, unknown

SHADES = ("push", "advantage")
Which = str | Algorithm | Sequence[str | Algorithm] | Mapping[str, str | Algorithm]


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
    tokenizer: Any = None  # of the tokens' texts; None shows ids
    where: str = ""  # the policy at which the gradient was taken, in words
    later: str = ""  # what compares at a later policy, where that would differ
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
        rows += [[label, "", "", "", *values] for label, values in self.summary().items()]
        if not sequences:
            head, *rows = ([row[0].replace("row", ""), *row[4:]] for row in [head, *rows])
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        return "\n".join(lines + self.notes())

    def summary(self) -> dict[str, list[str]]:
        """What each algorithm does on the whole batch, as text: a column of the values of all algorithms by label."""
        first = self.pushes[self.names[0]].ravel()
        labels = ("loss", "tokens up", "tokens down", "mean |push|", "cosine")
        rows: list[list[str]] = []
        actions = max(int(self.action_mask.sum()), 1)
        for name in self.names:
            push = self.pushes[name].ravel()
            sizes = float(np.linalg.norm(first) * np.linalg.norm(push))
            rows.append(
                [
                    f"{self.losses[name]:.4g}",
                    f"{(push > 0).sum() / actions:.0%}",
                    f"{(push < 0).sum() / actions:.0%}",
                    f"{np.abs(push).sum() / actions:.4g}",
                    f"{float(first @ push) / sizes:.3f}" if sizes > 0 else "-",
                ]
            )
        return dict(zip(labels, map(list, zip(*rows, strict=True)), strict=True))

    def alike(self, values: Mapping[str, np.ndarray] | None = None) -> list[tuple[str, ...]]:
        """The algorithms in groups whose pushes (or other values) are the same but for a factor, in order."""
        values = self.pushes if values is None else values
        groups: list[list[str]] = []
        for name in self.names:
            for group in groups:
                left = residual(values[group[0]], values[name])[1]
                size = float(np.abs(values[name]).max(initial=0.0))
                if np.abs(left).max(initial=0.0) <= 1e-4 * size and (size > 0 or not np.any(values[group[0]])):
                    group.append(name)
                    break
            else:
                groups.append([name])
        return [tuple(group) for group in groups]

    def notes(self) -> list[str]:
        """Lines of text: where the gradient is taken, which algorithms coincide there, and what stood in for what."""
        later = f"; {self.later} compares later" if self.later else ""
        lines = [f"The gradient is taken {self.where}{later}."] if self.where else []
        for first, *others in self.alike():
            for name in others:
                factor = residual(self.pushes[first], self.pushes[name])[0]
                how = "the same" if abs(factor - 1) < 1e-3 else f"{factor:.3g} times as large, and otherwise the same"
                lines.append(f"{name} coincides with {first} here: its pushes are {how}.")
        return lines + [
            f"{name}: the batch has no {', no '.join(f'{need} ({by} stands in)' for need, by in filled.items())}"
            for name, filled in self.filled.items()
            if filled
        ]

    def to_html(
        self,
        tokens: Sequence[Sequence[str | None]] | None = None,
        shade: str = "push",
        rows: int = 16,
        prompts: Sequence[str] | None = None,
    ) -> str:
        """A self-contained HTML fragment: of each sequence, a line of shaded tokens per algorithm.

        A prompt is folded away above the sequences that share it. Algorithms that coincide (see `alike`) share a line;
        where another differs from the first by more than a factor, a line of its own shows the difference.

        tokens: the text of each position, N lists of at most L; None omits a position. By default the tokenizer's
        texts, or ids. shade: "push" or "advantage": blue above 0, red below, in full at the algorithm's own 98th
        percentile, so that colours compare tokens, not algorithms. Hovering over a token shows its numbers. rows: the
        number of sequences to draw, from the first. prompts: N texts, for sequences whose tokens are the completion
        only. Raises InputError for another shade, for rows below 1, or for texts that do not fit the batch.
        """
        require_choice("shade", shade, SHADES)
        check_number("rows", rows, least=1, whole=True)
        return credit_page(self, tokens, shade, rows, prompts)

    def _repr_html_(self) -> str:
        return self.to_html()


def compare(
    algorithms: Which,
    batch: Trajectories,
    outputs: PolicyOutputs | None = None,
    *,
    tokenizer: Any = None,
    after_steps: int = 0,
    nats_per_step: float = 0.1,
    **hyperparameters: Any,
) -> Comparison:
    """The advantages and d loss / d logp that each algorithm gives every token of a scored batch.

    algorithms: a name or an `Algorithm`, a sequence of them, or a mapping from labels to them. outputs: of the policy
    at which the gradient is taken; by default the behaviour policy, as in the first step after sampling, where all
    importance ratios are 1 and clipping has no effect. after_steps: compare after so many gradient steps of each
    algorithm from there. The steps are on the log-probabilities themselves, as if each token had parameters of its own:
    along its push, scaled so that tokens move by nats_per_step in root mean square, and never above 0. tokenizer: draws
    the tokens as text.

    hyperparameters are passed to the named methods that have them; InputError for one that none has. What an algorithm
    needs and the batch lacks is filled in as if the policy were still the behaviour policy, and is listed in
    `Comparison.filled`. Transforms start from their initial state. Nothing is compiled, so use at most a few hundred
    sequences.
    """
    check_batch(batch)
    if outputs is not None:
        check_outputs(outputs, batch)
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    check_number("after_steps", after_steps, least=0, whole=True)
    check_number("nats_per_step", nats_per_step, above=0)
    chosen = _chosen(algorithms, hyperparameters)
    entropy = jnp.zeros(batch.tokens.shape) if batch.entropy is None else batch.entropy
    advantages, gradients, losses, filled = {}, {}, {}, {}
    for name, algorithm in chosen.items():
        full, extras, filled[name] = fill_in(batch, algorithm.needs)
        at = outputs if outputs is not None else PolicyOutputs(full.behaviour_logp, entropy)
        at = at.replace(extras={**extras, **(at.extras or {})} or None)
        _, full = algorithm.transform.apply(algorithm.transform.init(), full)

        def loss(logp: jax.Array, at: Any = at, full: Any = full, algorithm: Any = algorithm) -> jax.Array:
            return algorithm.objective(at.replace(logp=logp), full)[0]

        logp = at.logp
        for _ in range(after_steps):
            logp = _moved(logp, jnp.where(full.action_mask, jax.grad(loss)(logp), 0.0), nats_per_step)
        value, gradient = jax.value_and_grad(loss)(logp)
        A = full.advantages if full.advantages is not None else jnp.zeros(full.tokens.shape)
        advantages[name] = np.asarray(jnp.where(full.action_mask, A, 0.0))
        gradients[name] = np.asarray(jnp.where(full.action_mask, gradient, 0.0))
        losses[name] = float(value)
    shown = (batch.tokens, batch.token_mask, batch.action_mask, batch.group, batch.scores)
    ids, real, action, group, reward = map(np.asarray, shown)
    where = _where(outputs is not None, after_steps, nats_per_step)
    later = "" if after_steps or outputs is not None else "after_steps=3"
    return Comparison(advantages, gradients, losses, filled, ids, real, action, group, reward, tokenizer, where, later)


def _moved(logp: jax.Array, gradient: jax.Array, nats: float) -> jax.Array:
    """Log-probabilities [N, L] after a step against the gradient; its tokens move by `nats` in root mean square."""
    size = jnp.sqrt((gradient**2).sum() / jnp.maximum((gradient != 0).sum(), 1))
    return jnp.minimum(logp - nats * gradient / jnp.where(size > 0, size, 1.0), jnp.maximum(logp, 0.0))


def _where(given: bool, steps: int, nats: float) -> str:
    """The policy at which the gradient is taken, in words."""
    start = "at the given outputs" if given else "at the policy that sampled"
    if steps:
        many = f"{steps} step{'s' if steps > 1 else ''} of {nats:g} nats"
        return f"{many} from {start.removeprefix('at ')}, each method's own"
    if given:
        return start
    return f"{start}: ratios are 1, where clipping has no effect"


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


def compares_samples(algorithm: Algorithm) -> bool:
    """Whether a method learns nothing from one sample of a prompt: on four groups of one sample with different rewards,
    such a method has zero gradients. A critic with a target says of a single sample too which actions are good."""
    if algorithm.target is not None:
        return False
    action, rows = jnp.ones((4, 3), bool), jnp.arange(4, dtype=jnp.int32)
    logp, zeros = -0.1 * (1 + jnp.arange(12.0).reshape(4, 3)), jnp.zeros((4, 3), jnp.int32)
    reward = jnp.asarray([0.0, 1.0, 0.5, 1.0])
    lone = Trajectories(
        tokens=zeros, token_mask=action, action_mask=action, behaviour_logp=logp, policy_step=zeros, turn=zeros,
        group=rows, prompt_id=rows, truncated=rows < 0, rewards={"probe": reward}, reward=reward,
        info={"greedy_reward": jnp.full(4, 0.25), "demonstrated": jnp.ones(4)},
    )  # fmt: skip
    return not np.any(compare(algorithm, lone).gradients["algorithm 1"])
