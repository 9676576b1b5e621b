"""What a method may ask the loop for beyond a sampled and scored batch, and where it finds it.

A name may carry a value after a colon: "internal_logp:6".
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxrl_llm.errors import InputError, unknown

NEEDS = {
    "old_logp": "batch.old_logp f32[N, L]: log-probabilities under the weights before the update",
    "reference_logp": "batch.reference_logp f32[N, L]: log-probabilities under the frozen initial policy",
    "values": "a critic: batch.values before the update and outputs.extras['values'], f32[N, L]; with several heads "
    "[N, L, H]",
    "feedback": "batch.feedback: metrics of the last update, f32[] each; 'updates' counts the updates",
    "greedy_reward": "info['greedy_reward'] f32[N]: reward of the greedy completion of the row's prompt",
    "squared_probability": "info['squared_probability'] f32[N, L]: sum over the vocabulary of pi_old^2",
    "cubed_probability": "info['cubed_probability'] f32[N, L]: sum over the vocabulary of pi_old^3",
    "hidden_square": "info['hidden_square'] f32[N, L]: squared norm of the last hidden state before each action",
    "effective_rank": "info['effective_rank'] f32[N, 3]: effective rank of a row's hidden states, its growth and the "
    "growth's growth",
    "reference_affinity": "info['reference_affinity'] f32[N, L]: sum over the vocabulary of sqrt(pi_old pi_reference)",
    "tempered_logp": "info['tempered_logp:T'] f32[N, L]: log-probabilities of the old weights at T times their "
    "temperature",
    "mean_logp": "outputs.extras['mean_logp'] and info['mean_logp'] (old), f32[N, L]: mean over the vocabulary of "
    "log pi at each action",
    "internal_logp": "outputs.extras['internal_logp'] and info['internal_logp'] (old), f32[N, L]: log-probabilities of "
    "the policy that unembeds the hidden state after layer K",
}


def value_of(need: str) -> tuple[str, float | None]:
    """Name and value of a need; InputError where there is no such name."""
    name, _, value = need.partition(":")
    if name not in NEEDS:
        raise unknown("need", name, NEEDS)
    try:
        return name, float(value) if value else None
    except ValueError:
        raise InputError(f"the need {need!r} has the value {value!r}, which is not a number") from None


def values_of(needs: Iterable[str], name: str) -> list[float]:
    """The values with which `name` is needed, ascending."""
    found = (value_of(need) for need in needs)
    return sorted(value for known, value in found if known == name and value is not None)
