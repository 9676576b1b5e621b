import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import generalised_advantages, needs_turns, whiten_advantages
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy, entropy, huber, value_loss


@method(paper="arXiv 2405.15821", test="test_turn_values.py::test_poad_worked_example_and_loop")
@run_needs(turns="episodes of several turns")
@beside("stop", "the stop of minibatches once the divergence exceeds 0.02", "gradient steps that can end early")
def poad(
    gamma: Code[float] = 0.95,
    lam: Code[float] = 0.95,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    value_clip: Code[Positive | None] = 0.2,
    value_coefficient: Ours[NonNegative] = 1.0,
    huber_width: Code[float] = 10.0,
    entropy_coefficient: Code[NonNegative] = 0.01,
    whiten: Code[bool] = True,
) -> Algorithm:
    """Policy Optimization with Action Decomposition (POAD).

    PPO of tokens in which time passes between turns, not between the tokens of one: rewards come with the last token
    of a turn, and the discount is gamma from there to the next turn, and 1 within a turn.

        delta = V_{t+1} - V_t                    within a turn,    A_t = delta + lam A_{t+1}
        delta = r_k + gamma V_{t+1} - V_t        at its end,       A_t = delta + gamma lam A_{t+1}

    with V = 0 after the episode. The loss is PPO's clip (clip_low, clip_high) and value_coefficient times a clipped
    (value_clip) Huber loss of the critic, quadratic up to huber_width, less entropy_coefficient times the entropy, all
    averaged over tokens. whiten: advantages are standardised over the actions of the batch, the code over those that
    are not 0. With gamma 1 it is PPO of tokens. The code skips minibatches of a divergence above 0.02, which is not
    done here.
    """
    credit = chain(needs_turns(), generalised_advantages(between_turns(gamma), lam))
    objective = clipped_policy(clip_low, clip_high)
    objective += value_coefficient * value_loss(value_clip, error=huber(huber_width))
    objective -= entropy_coefficient * entropy()
    return Algorithm(chain(credit, whiten_advantages()) if whiten else credit, objective)


@batch_part
def between_turns(batch: Trajectories, gamma: Fraction) -> Array:
    """A function `batch -> f32[N, L]`: gamma from the last action of a turn to the next turn, else 1 (POAD)."""
    turn = jnp.where(batch.action_mask, batch.turn, 2**30)
    following = jnp.pad(jax.lax.cummin(turn, axis=1, reverse=True), ((0, 0), (0, 1)), constant_values=2**30)[:, 1:]
    return jnp.where(batch.action_mask & (following == batch.turn), 1.0, gamma)
