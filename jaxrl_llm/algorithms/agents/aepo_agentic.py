from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, needs_turns, revised
from jaxrl_llm.advantages.multipliers import entropy_scaled, standard_scores
from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.algorithms.method import Algorithm, method, presets, run_needs
from jaxrl_llm.core.annotations import AboveOne, Code, NonNegative, Ours, Paper, ZeroOrOne
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import gradient_preserving_clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.agents.fork import by_chance, forking_agents


@batch_part
def scaled_by_entropy(batch: Trajectories, strength: float, over: str, ddof: int, clamp: bool) -> Array:
    """A function `batch -> f32[N, L]`: the advantages times 1 + strength z, see `aepo_agentic`."""
    keys = batch.group if over == "group" else jnp.zeros_like(batch.group)
    z = standard_scores(batch.need("entropy"), scored_actions(batch), keys, ddof, 0.0)
    return entropy_scaled(batch.need("advantages"), z, strength, clamp)


@method(paper="arXiv 2510.14545", test="test_entropy_credit.py::test_agentic_aepo_against_a_loop")
@run_needs(turns="episodes of several turns, which fork after observations")
@presets(paper={"over": "group", "ddof": 0, "dual_clip": None}, code={"over": "batch", "ddof": 1, "dual_clip": 3.0})
def aepo_agentic(
    strength: Code[NonNegative] = 0.2,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.28,
    over: Paper[Literal["group", "batch"]] = "group",
    ddof: Ours[ZeroOrOne] = 0,
    clamp: Paper[bool] = False,
    dual_clip: Paper[AboveOne | None] = None,
    beta: Code[NonNegative] = 0.5,
    branches: Code[int] = 2,
    probability: Code[float] = 0.5,
    entropy_weight: Code[NonNegative] = 0.2,
    damping: Code[float] = 0.05,
    first_tokens: Code[int] = 20,
) -> Algorithm:
    """Agentic Entropy-Balanced Policy Optimization (AEPO).

    Two changes of the update: credit grows with a token's entropy H, and the upper clip keeps a scaled gradient.

        A_t = A_grpo (1 + strength z_t),  z = (H - mean H) / std H
        loss = -mean over tokens of min(rho A, clip(rho, 1 - clip_low, (1 + clip_high) rho / sg(rho)) A)

    so that the gradient is F A grad log pi, F = 1 + clip_high where rho > 1 + clip_high and A > 0, 0 where
    rho < 1 - clip_low and A < 0, else rho. H is the entropy at sampling; its moments are over the tokens of the group.
    The released code takes those of the current policy over the tokens of the micro-batch: over "batch", ddof 1, and
    dual_clip 3 where A < 0 (preset "code"). clamp: no negative factor of A (z < -1 / strength). The paper's strength
    and clip range were not available to us; the range is DAPO's.

    Of the k episodes of a group m begin at the question. A first one, of these, is played to its end: with the entropy
    H_root of its first reply, H_tool the mean of its replies', and H_t that after an observation,

        m = floor(k sigmoid(beta (H_root - H_tool))) + 1, at most k
        fork if clip((u + entropy_weight (H_t - H_root)) max(0, 1 - damping l), 0, 1) >= 1 - probability,  u ~ U(0, 1)

    `branches` - 1 times after each reply to an observation, until there are k; l counts the rounds before in which the
    group forked. H is the sum over the first `first_tokens` tokens / log |V| (the code: of the parts that the ten most
    probable tokens have). Missing episodes begin at the question. Rollout: `rollouts.agents.fork`.
    """
    surrogate = gradient_preserving_clip(clip_low, clip_high, dual_clip)
    forks = by_chance(probability, entropy_weight, damping)
    return Algorithm(
        chain(needs_turns(), group_relative(), revised(scaled_by_entropy(strength, over, ddof, clamp))),
        policy_gradient(token_ratio(), surrogate, token_mean()),
        rollout=forking_agents(forks, None, branches, first_tokens, beta, summed=True),
    )
