"""What counts as a learning signal: every method's own advantages, and rewards where there are none."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from every_method import every_method

sys.path.append(str(Path(__file__).parent.parent / "algorithms"))

from experience import N, case

from jaxrl_llm import algorithms
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.training.metrics import signal

# Their credit depends on more than the rewards of the group: a value or greedy baseline, the whole batch's mean, a
# divergence within the reward, a vote of the answers or their diversity, a budget of tokens, guided rows, rewards of
# single tokens, responses that were given, votes of clients.
NOT_OF_THE_GROUP_ALONE = {
    "agent_r", "archer", "arpo_agentic", "baichuan_m2", "carl_multiplicative_reward", "dapo_direct_advantage", "daslam",
    "dcpo_distribution_centric", "dgrpo_vital", "drpo_dataset_reset", "eapo_iterresearch", "ettrl", "evocua", "fgaif",
    "g_ra", "gigpo", "hbpo", "hgpo", "hila", "hiper", "icpo_in_context", "igpo_information_gain", "infopo", "ipa",
    "istar", "masked_sft", "multi_turn_recipe", "nlpo", "open_rs", "optimal_token_baseline", "otr", "pa_rl",
    "pairwise_rl", "parl", "pav", "pdppo", "pf_ppo", "poad", "polychromic", "popri", "ppo", "ppo_max",
    "ppo_outer_scale", "process_reward_model", "r3l", "ravl", "reinforce", "reinforce_plus_plus", "relic", "remax",
    "resim", "rlgf", "rloo", "safe_entropy_aware", "salsa", "sft", "skywork_r1v2", "spear", "spo_segment",
    "spo_self_play", "srgpo", "subpo", "t_ppo", "trloo", "tscac", "ttrl", "ui_r1", "ui_s1", "vapo", "vc_ppo", "verpo",
    "wmar_reservoir_replay",
}  # fmt: skip
# They learn from a prompt with one sample, here also by rewards of single tokens.
ONE_SAMPLE_A_PROMPT = {
    "agent_r", "archer", "brain", "carl_multiplicative_reward", "daslam", "dcpo_distribution_centric",
    "drpo_dataset_reset", "evocua", "fgaif", "gigpo", "hgpo", "hila", "hiper", "igpo_information_gain", "ipa", "istar",
    "masked_sft", "multi_turn_recipe", "nlpo", "optimal_token_baseline", "otr", "p3o_pairwise", "pa_rl",
    "pairwise_rl", "pav", "pdppo", "pf_ppo", "poad", "ppo", "ppo_max", "ppo_outer_scale", "process_reward_model",
    "r3l", "ravl", "reinforce", "reinforce_plus_plus", "relic", "remax", "resim", "riskpo", "rlgf",
    "safe_entropy_aware", "salsa", "sft", "skywork_r1v2", "spear",
    "spo_segment", "spo_self_play", "spo_single_stream", "srgpo", "subpo",
    "t_ppo", "trloo", "tscac", "vapo", "vc_ppo", "wmar_reservoir_replay",
}  # fmt: skip
# brpo compares with a random member, which may be equal to all others; all sets of passk_grpo may have a right member.
SEEDS = {"brpo": 13, "passk_grpo": 13}
# In its first steps the critic learns alone.
OPTIONS = {"dapo_direct_advantage": {"critic_alone": 0}}


@cache
def signal_of(name: str, reward: Any = None, lone: bool = False) -> tuple[float, bool]:
    """The signal of a made batch, and whether the method's transform gives advantages."""
    algorithm = algorithms.get(name, **OPTIONS.get(name, {}))
    changes = (
        {} if reward is None else {"reward": np.full(N, reward), "rewards": dict.fromkeys("ab", np.full(N, reward))}
    )
    batch = case(SEEDS.get(name, 12), algorithm, **changes).batch
    if lone:
        batch = batch.replace(group=jnp.arange(N, dtype=jnp.int32))
    _, ready = algorithm.transform.apply(algorithm.transform.init(), batch)
    return signal(ready), ready.advantages is not None


@every_method
def test_every_method_s_own_advantages_say(name: str) -> None:
    some, has_advantages = signal_of(name)
    assert 0 < some <= 1
    assert (signal_of(name, 1.0)[0] > 0) == (name in NOT_OF_THE_GROUP_ALONE)
    # Without advantages the rewards of a batch of single samples are compared with each other.
    assert (signal_of(name, lone=True)[0] > 0) == (name in ONE_SAMPLE_A_PROMPT or not has_advantages)


def bare(reward: list[float], group: list[int], **fields: Any) -> Trajectories:
    """Rows of two actions each."""
    rows, zeros = len(reward), jnp.zeros((len(reward), 3), jnp.int32)
    action = jnp.asarray([[False, True, True]] * rows)
    return Trajectories(
        tokens=zeros, token_mask=~action | action, action_mask=action, behaviour_logp=-1.0 * action, policy_step=zeros,
        turn=zeros, group=jnp.asarray(group), prompt_id=jnp.asarray(group), truncated=jnp.zeros(rows, bool),
        reward=jnp.asarray(reward), **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "group", "share"),
    [
        ([0, 1, 1, 1], [0, 0, 1, 1], 0.5),
        ([0.1, 0.1, 0.1, 0.1], [0, 0, 1, 1], 0.0),
        ([0, 1, 0.5, 1], [0, 1, 2, 3], 1.0),
        ([1, 1, 1, 1], [0, 1, 2, 3], 0.0),
        ([0, np.nan, 1, 1], [0, 0, 1, 1], 0.0),
        ([0, 1, np.nan, np.nan], [0, 0, 1, 1], 0.5),
        ([np.nan] * 4, [0, 0, 1, 1], 0.0),
    ],
)
def test_without_advantages_rewards_are_compared(reward: list[float], group: list[int], share: float) -> None:
    assert signal(bare(reward, group)) == share


def test_only_what_counts_in_the_loss_is_a_signal() -> None:
    """An advantage of a token that is dropped, or that is no action, is none; rows without actions are not counted."""
    one = jnp.zeros((4, 3)).at[1, 1].set(-1e-6)
    batch = bare([1, 1, 1, 1], [0, 0, 1, 1], advantages=one)
    assert signal(batch) == 0.25
    assert signal(batch.replace(advantages=jnp.roll(one, -1, axis=1))) == 0
    assert signal(batch.replace(weights=jnp.ones((4, 3)).at[1, 1].set(0.0))) == 0
    assert signal(batch.replace(weights=jnp.ones((4, 3)).at[1, 2].set(0.0))) == 0.25
    half = batch.action_mask & (jnp.arange(4) < 2)[:, None]
    assert signal(batch.replace(action_mask=half)) == 0.5
    assert signal(batch.replace(action_mask=jnp.zeros((4, 3), bool))) == 0
