"""What a method may need beyond a sampled and scored batch: each need as a value.

A transform or an objective names its needs as texts, "old_logp"; a name may carry a number after a colon:
"internal_logp:6". A `Need` says what that is, how the learner computes it or what else provides it, and what stands in
for it where it is neither computed nor provided: in a report, a comparison, a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.effective_rank import rank_measures
from jaxrl_llm.errors import InputError, unknown
from jaxrl_llm.providers import own_rollout, own_source, reward_entry
from jaxrl_llm.stand_ins import (
    StandIn,
    behaviour,
    flat_rank,
    near,
    no_state_values,
    no_values,
    ones,
    own_nodes,
    pairs,
    power,
    uniform,
    whole,
)
from jaxrl_llm.trajectory import Array, PolicyOutputs, Trajectories, bucket_moments


class Models(Protocol):
    """What the policies at hand say of the actions of a batch. Each forward pass is made once, and only if read."""

    @property
    def old(self) -> PolicyOutputs:
        """Of the weights before the update; `extras` has what the needs of the method `measure`."""

    @property
    def reference(self) -> PolicyOutputs:
        """Of the reference policy; InputError where there is none."""

    @property
    def affinity(self) -> Array:
        """f32[N, L]: sum over the vocabulary of sqrt(pi_old pi_reference); InputError as `reference`."""

    def of_states(self, function: Callable[[Array, Array], Array]) -> Array:
        """`function` of the last hidden states of the weights before the update [N, L, D] and the actions bool[N, L].

        For needs that measure "hidden".
        """


Compute = Callable[[Models, Trajectories, float | None], Array]


class Need(NamedTuple):
    """One thing that methods ask for."""

    name: str
    where: str  # a field of the batch, or an entry of its info or rewards; ":T" stands for the need's number
    shape: str  # "[N, L]", "[N]" ...
    meaning: str
    stand_in: StandIn
    compute: Compute | None = None  # by the learner; None: it is in the batch when the learner gets it
    measure: str | None = None  # what `compute` reads from `Models.old.extras`, see `models.outputs.Wanted`
    by_outputs: str | None = None  # the entry of outputs.extras with the same under the current weights
    provider: str | None = None  # what of a run provides it; None: the learner or the loop does by itself

    @property
    def text(self) -> str:
        """Where it is, its shape, what it means and what provides it."""
        current = "" if self.by_outputs is None else f" and outputs.extras[{self.by_outputs!r}] of the current weights,"
        provider = "" if self.provider is None else f" (provided by {self.provider})"
        return f"{self.where}{current} f32{self.shape}: {self.meaning}{provider}"

    def of(self, batch: Trajectories, number: float | None = None) -> Any:
        """What a batch has of it, an array or, for "feedback", a dict; None where it has nothing."""
        place, key = self.place(number)
        return getattr(batch, place) if not key else (getattr(batch, place) or {}).get(key)

    def put(self, batch: Trajectories, value: Array, number: float | None = None) -> Trajectories:
        """The batch with a value of it."""
        place, key = self.place(number)
        return batch.replace(**{place: {**(getattr(batch, place) or {}), key: value} if key else value})

    def place(self, number: float | None) -> tuple[str, str]:
        """The field of the batch, and the key in it where that is a dict, else ""."""
        field, _, entry = self.where.removeprefix("batch.").partition("[")
        key, _, carried = entry.strip("'\"]").partition(":")
        return field, f"{key}:{number:g}" if carried and number is not None else key


def _read(name: str) -> Compute:
    """What the forward pass of the weights before the update measured."""

    def compute(models: Models, batch: Trajectories, number: float | None) -> Array:
        return (models.old.extras or {})[name if number is None or name != "tempered_logp" else f"{name}:{number:g}"]

    return compute


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


NEEDS = {
    need.name: need
    for need in (
        Need(
            "old_logp", "batch.old_logp", "[N, L]",
            "log-probabilities under the weights before the update", behaviour(near(0.05)),
            lambda models, batch, number: models.old.logp,
        ),
        Need(
            "reference_logp", "batch.reference_logp", "[N, L]",
            "log-probabilities under the frozen initial policy", behaviour(near(0.2)),
            lambda models, batch, number: models.reference.logp,
        ),
        Need(
            "values", "batch.values", "[N, L]",
            "a critic's value of each state, before the update; with several heads [N, L, H]",
            StandIn("0", lambda random, logp: random.normal(size=logp.shape), no_values),
            _read("values"), "values", by_outputs="values",
        ),
        Need(
            "feedback", "batch.feedback", "[] each",
            "metrics of the last update by name; 'updates' counts the updates",
            StandIn("none, as before the first update", lambda random, logp: np.zeros(())),
        ),
        Need(
            "greedy_reward", "info['greedy_reward']", "[N]", "reward of the greedy completion of the row's prompt",
            StandIn(
                "the mean of the group", whole(2), lambda batch, number: bucket_moments(batch.group, batch.scores)[1]
            ),
            provider="a rollout in rollouts.programs.with_greedy_baseline, as --rollout is by itself",
        ),
        Need(
            "squared_probability", "info['squared_probability']", "[N, L]", f"{_DISTRIBUTION} pi_old^2",
            power(2, uniform(0.2, 0.9)), _read("squared_probability"), "squared_probability",
        ),
        Need(
            "cubed_probability", "info['cubed_probability']", "[N, L]", f"{_DISTRIBUTION} pi_old^3",
            power(3, uniform(0.1, 0.8)), _read("cubed_probability"), "cubed_probability",
        ),
        Need(
            "hidden_square", "info['hidden_square']", "[N, L]",
            "squared norm of the last hidden state before each action",
            ones(lambda random, logp: random.gamma(2.0, 0.5, logp.shape)), _reduced(_squares), "hidden",
        ),
        Need(
            "effective_rank", "info['effective_rank']", "[N, 3]",
            "effective rank of a row's hidden states, its growth and the growth's growth",
            StandIn("rank 1 without growth", uniform(1, 5, 3, rows=True), flat_rank), _reduced(_ranks), "hidden",
        ),
        Need(
            "reference_affinity", "info['reference_affinity']", "[N, L]",
            f"{_DISTRIBUTION} sqrt(pi_old pi_reference)", ones(uniform(0.8, 1.0)),
            lambda models, batch, number: models.affinity,
        ),
        Need(
            "tempered_logp", "info['tempered_logp:T']", "[N, L]",
            "log-probabilities of the old weights at T times their temperature", behaviour(near(0.1)),
            _read("tempered_logp"), "tempered_logp",
        ),
        Need(
            "mean_logp", "info['mean_logp']", "[N, L]",
            "mean over the vocabulary of log pi at each action, of the old weights",
            behaviour(uniform(-5, -3)), _read("mean_logp"), "mean_logp", by_outputs="mean_logp",
        ),
        Need(
            "heated_logp", "info['heated_logp']", "[N, L]",
            "log-probabilities at T times the temperature, of the old weights",
            behaviour(near(0.1)), _read("heated_logp"), "heated_logp", by_outputs="heated_logp",
        ),
        Need(
            "internal_logp", "info['internal_logp']", "[N, L]",
            "log-probabilities of the policy that unembeds the hidden state after layer K, of the old weights",
            behaviour(near(0.5)), _read("internal_logp"), "internal_logp", by_outputs="internal_logp",
        ),
        Need(
            "guided", "info['guided']", "[N]", "1 where the row, or [N, L] the token, was sampled with guidance",
            StandIn("no row is guided", whole(2)), provider="--rollout 'hinted(COLUMN)'",
        ),
        Need(
            "budget", "info['budget']", "[N]", "token budget that the row's prompt states",
            StandIn("one budget for all", lambda random, logp: random.choice([2.0, 4.0, 6.0], logp.shape[0])),
            provider=own_rollout("budget"),
        ),
        Need(
            "rewritten", "info['rewritten']", "[N]", "1 where the row's prompt was rewritten by the policy",
            StandIn("no prompt is rewritten", whole(2)), provider=own_rollout("rewritten"),
        ),
        Need(
            "hard", "info['hard']", "[N]", "1 where the policy seldom solves the row's prompt",
            StandIn("no prompt is hard", whole(2)), provider=own_rollout("hard"),
        ),
        Need(
            "reference_span", "info['reference_span']", "[N, 2]",
            "first and last + 1 of the row's actions that say the reference answer; both 0 where none do",
            StandIn("no row says it", whole(3, 2)), provider=own_rollout("reference_span"),
        ),
        Need(
            "answer_key", "info['answer_key']", "[N]", "equal for equal answers to a prompt, -1 without an answer",
            StandIn("whole completions are compared", whole(3)),
            provider=reward_entry("answer_key", "number_match", "math_verify", "exact_match", "tagged_match"),
        ),
        Need(
            "tests", "info['tests']", "[N, U]", "results of U tests of the completion; [N, K, U] of each turn's",
            StandIn("the components of the reward", whole(2, 3)), provider=reward_entry("tests"),
        ),
        Need(
            "spans", "batch.token_rewards", "[N, L]", "rewards of parts of the completion, each where its part ends",
            StandIn("none", lambda random, logp: random.integers(0, 2, logp.shape) * 0.25),
            provider=reward_entry("spans", "'coverage(COLUMN)'"),
        ),
        Need(
            "distance", "info['distance']", "[N]", "how far a failure is from the successes of its prompt",
            StandIn("failures are not graded", uniform(0, 2, rows=True)),
            provider=reward_entry("distance", "'distances(number_match)'"),
        ),
        Need(
            "demonstrated", "info['demonstrated']", "[N]", "1 where the row is a text of the data set, not a sample",
            StandIn("no row is demonstrated", whole(2)), provider="--rollout 'demonstrated(COLUMN)'",
        ),
        Need(
            "level_tau", "info['level_tau']", "[N]", "how much the temperature of a token followed its entropy",
            StandIn("one temperature", uniform(0, 0.1, rows=True)), provider="a rollout in rollouts.heated",
        ),
        Need(
            "tempered", "info['tempered']", "[N]", "1 where the row was sampled at controls['temperature']",
            StandIn("no row is tempered", whole(2)), provider="a rollout of rollouts.tempered",
        ),
        Need(
            "drift", "info['drift']", "[N]", "how far the policy moved since it last answered the prompt",
            StandIn("trackers forget at their fastest", uniform(0, 0.1, rows=True)),
            provider=own_rollout("drift"),
        ),
        Need(
            "replayed", "info['replayed']", "[N]", "1 where the row comes from a store, or is a copy of another",
            StandIn("no row is replayed", whole(2)), provider="a replay: Algorithm.replay",
        ),
        Need(
            "replay_advantage", "info['replay_advantage']", "[N]", "advantage that a store gives a replayed row",
            StandIn("replayed rows have none", uniform(-1, 1, rows=True)),
            provider="a replay of single rows: Algorithm.replay",
        ),
        Need(
            "copy_weight", "info['copy_weight']", "[N]", "factor of the rows of a group that is there several times",
            StandIn("1", uniform(0.4, 1, rows=True)), provider="rollouts.swaps.valued_groups: Algorithm.replay",
        ),
        Need(
            "turn_factor", "info['turn_factor']", "[N]", "ratio by which updates of later turns changed the row",
            StandIn("1", uniform(0.8, 1.2, rows=True)), provider=own_source("turn_factor"),
        ),
        Need(
            "turns", "batch.turn", "[N, L]", "number of the turn of each action, in episodes of several turns",
            StandIn("one turn", lambda random, logp: np.broadcast_to(np.arange(logp.shape[1]) // 4, logp.shape)),
            provider="--rollout FILE.py:FUNCTION that returns rollouts.programs.conversation(ENVIRONMENT)",
        ),
        Need(
            "segment", "info['segment']", "[N, L]", "number of the segment of each action",
            StandIn("none", lambda random, logp: np.broadcast_to(np.arange(logp.shape[1]) // 2, logp.shape)),
            provider=own_source("segment"),
        ),
        Need(
            "node", "info['node']", "[N, L]", "number of each action's node in the tree of its group",
            StandIn("no completions share tokens", pairs, own_nodes),
            provider="a rollout of rollouts.trees, such as --rollout 'tree(64, 128)'",
        ),
        Need(
            "state_value", "info['state_value']", "[N, L]",
            "mean reward of fresh completions from the state where each action's node begins",
            StandIn("unknown values, without credit", uniform(0, 1), no_state_values),
            provider="--rollout 'valued(9)'",
        ),
        Need(
            "sound", "rewards['sound']", "[N]", "above 0.5 where the derivation of the answer is sound",
            StandIn("every derivation is sound", whole(2)), provider="--rewards ... 'FILE.py:sound*0', a judge",
        ),
    )
}  # fmt: skip


def need_of(need: str) -> Need:
    """The value of a need that is given as a text, "internal_logp:6"; InputError where there is no such name."""
    return NEEDS[value_of(need)[0]]


def value_of(need: str) -> tuple[str, float | None]:
    """Name and number of a need; InputError where there is no such name."""
    name, _, number = need.partition(":")
    if name not in NEEDS:
        raise unknown("need", name, NEEDS)
    try:
        return name, float(number) if number else None
    except ValueError:
        raise InputError(f"the need {need!r} has the value {number!r}, which is not a number") from None


def values_of(needs: Iterable[str], name: str) -> list[float]:
    """The numbers with which `name` is needed, ascending."""
    found = (value_of(need) for need in needs)
    return sorted(number for known, number in found if known == name and number is not None)


def of_reference(needs: Iterable[str]) -> bool:
    """Whether some of them are computed from the reference policy."""
    return any(value_of(need)[0] in ("reference_logp", "reference_affinity") for need in needs)


def fill_in(batch: Trajectories, needs: Iterable[str]) -> tuple[Trajectories, dict[str, Array], dict[str, str]]:
    """The batch with stand-ins for what it lacks of `needs`, the same for outputs.extras, and what each is in words.

    As if old, reference and tempered policies were the behaviour policy, and a critic knew nothing. An unknown entropy
    is 0.
    """
    if batch.entropy is None:
        batch = batch.replace(entropy=jnp.zeros(batch.tokens.shape))
    extras: dict[str, Array] = {}
    words: dict[str, str] = {}
    for text in sorted(needs):
        (name, number), need = value_of(text), need_of(text)
        if name == "feedback":  # absent before the first update
            continue
        if need.of(batch, number) is None:
            words[text] = need.stand_in.words
            if need.stand_in.value is not None:
                batch = need.put(batch, need.stand_in.value(batch, number), number)
        if need.by_outputs is not None:
            extras[need.by_outputs] = need.of(batch, number)
    return batch, extras, words


def check_provided(batch: Trajectories, needs: Iterable[str]) -> None:
    """InputError where a batch, on the host, lacks what its source should have provided; one without actions may."""
    if not np.any(batch.action_mask):  # every rollout of the step failed
        return
    for text in sorted(needs):
        need = need_of(text)
        if need.provider is not None and need.of(batch) is None:
            raise InputError(
                f"the batch has no {need.where}, though the run's rollout or source says that it provides {need.name}"
            )
