from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.multipliers import capped_bonus
from jaxrl_llm.advantages.schedules import fade, progress
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AtLeastOne, Code, Fraction, NonNegative, OfRun, Paper, Positive
from jaxrl_llm.core.parts import Array, Trajectories, chain, counted, part, step_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.selection.rows import keep_weighted, late_tokens, token_noise, top_tokens


@method(paper="arXiv 2605.25381", test="test_token_credit.py::test_rlvr_schedule_against_a_loop")
@beside("prefix", "the fourth rule, prefixes of given solutions", "a rollout with prefixes")
def rlvr_temporal_schedule(
    rule: Paper[Literal["percentile", "forking", "bonus"]] = "percentile",
    magnitude: Code[Fraction] = 0.99,
    shape: Code[Literal["linear", "power", "sigmoid"]] = "linear",
    start: Code[Fraction] = 0.0,
    end: Code[Fraction] = 0.8,
    power: Code[Positive] = 2.0,
    alpha: Code[NonNegative] = 0.4,
    kappa: Code[NonNegative] = 2.0,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.28,
    total_steps: OfRun[AtLeastOne | None] = None,
) -> Algorithm:
    """RLVR-Schedule (Not only where, But when: Temporal Scheduling for RLVR).

    A rule that selects or weights tokens fades during training: its strength x falls from M = magnitude to 0 between
    the shares `start` and `end` of total_steps (100 where None). With p the progress between the two, shape is
    "linear", M (1 - p); "power", (M (1 - p))^power; or "sigmoid". With T the number of tokens of a row and H their
    entropies, rule is one of

        "percentile"  drop the first min(floor(T x), T - 1) tokens: training proceeds from the end backwards
        "forking"     keep the ceil(T (1 - x)) tokens of highest entropy of each row
        "bonus"       A_t <- A_t + x min(alpha H, |A_t| / kappa)

    on GRPO's advantages. The loss is PPO's clip (clip_low, clip_high), averaged over the remaining tokens. The released
    code moves the dropped tokens into the prompt instead of masking them; its fourth rule, a prefix of a given solution
    as context, requires a special rollout. alpha and kappa are those of its scripts (its library has 1 and 1).
    """
    steps = 100 if total_steps is None else total_steps

    x = fading(steps, start, end, magnitude, shape, power)
    chosen = counted(entropy_bonus(x, alpha, kappa)) if rule == "bonus" else keep_weighted(chosen_tokens(x, rule))
    return Algorithm(transform=chain(group_relative(), chosen), objective=clipped_policy(clip_low, clip_high))


Schedule = Callable[[Array], Array]  # step int32[] -> f32[]


@part
def fading(
    steps: float, start: float, end: float, magnitude: float, shape: Literal["linear", "power", "sigmoid"], power: float
) -> Schedule:
    """A function `step -> f32[]`: `fade` of the progress between two shares of the steps."""
    return lambda step: fade(progress(step, steps, start, end), magnitude, shape, power)


@step_part
def chosen_tokens(step: Array, batch: Trajectories, strength: Schedule, rule: str) -> Array:
    """A function `(step, batch) -> bool[N, L]`: the tokens of rule "percentile" or "forking"."""
    x = strength(step)
    if rule == "percentile":
        return late_tokens(batch.action_index, batch.lengths, x)
    return top_tokens(batch.need("entropy"), batch.action_mask, 1 - x, token_noise(batch, step), "row")


@step_part
def entropy_bonus(step: Array, batch: Trajectories, strength: Schedule, alpha: float, kappa: float) -> Trajectories:
    """A function `(step, batch) -> batch` with the advantages of rule "bonus"."""
    A, H = batch.need("advantages"), jnp.where(batch.action_mask, batch.need("entropy"), 0.0)
    return batch.replace(advantages=A + strength(step) * (capped_bonus(A, alpha * H, 1 / kappa) - A))
