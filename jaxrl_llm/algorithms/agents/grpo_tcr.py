import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, needs_turns
from jaxrl_llm.advantages.episodes import episode_keys, turns_before
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, NonNegative
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rewards.transforms import rescore, soft_overlong_penalty


@batch_part
def credit_of_calls(batch: Trajectories, call_credit: float, most: float, success: float) -> Array:
    """A function `batch -> f32[N]`: 1 for a success; else -1 + call_credit for each turn before the last, to `most`."""
    calls = turns_before(batch) + jnp.max(jnp.where(batch.action_mask, batch.turn, 0), axis=1)
    return jnp.where(batch.scores > success, 1.0, jnp.minimum(-1.0 + call_credit * calls, most))


@method(paper="arXiv 2510.11701", test="test_turn_shaped.py::test_grpo_tcr_worked_example_and_loop")
@run_needs(first_turn="how many turns came before", turns="turns with calls of tools")
def grpo_tcr(
    call_credit: Code[float] = 0.1,
    failed_at_most: Code[float] = -0.6,
    success: Code[float] = 0.0,
    longest: Code[int | None] = 20480,
    overlong_buffer: Code[int] = 4096,
    epsilon: Code[NonNegative] = 1e-6,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.28,
) -> Algorithm:
    """GRPO with credit for tool calls (GRPO-TCR of Demystifying RL in Agentic Reasoning).

    Token loss, clip-higher and reward shaping for agents with tools: a failure (score <= success) that tried tools is
    better than one that did not,

        r = 1 for a success,    r = min(failed_at_most, -1 + call_credit * calls) for a failure,

    with a call in each turn but the last; call_credit 0 is the paper's ablation. Episodes of more than longest -
    overlong_buffer sampled tokens, in all of their rows, lose up to 1 (longest None: none do). Then GRPO's advantages
    (epsilon), PPO's clip (clip_low, clip_high) averaged over the tokens of the batch, no penalty and no dynamic
    sampling. Its choice of prompts by the model's own pass rate, and the supervised stage, come before the run.
    """
    steps = [needs_turns(), rescore(credit_of_calls(call_credit, failed_at_most, success), {"first_turn"})]
    if longest is not None:
        steps.append(soft_overlong_penalty(longest, overlong_buffer, episode_lengths))
    return Algorithm(chain(*steps, group_relative(epsilon=epsilon)), clipped_policy(clip_low, clip_high))


def episode_lengths(batch: Trajectories) -> Array:
    """f32[N]: number of actions of each row's episode, in all of its rows."""
    return bucket_sums(episode_keys(batch), batch.lengths)[0]
