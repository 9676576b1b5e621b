"""Evaluation on held-out prompts: greedy accuracy and pass@k, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed.hosts import ALONE, Hosts
from jaxrl_llm.distributed.on_hosts import of_this_host
from jaxrl_llm.errors import unknown
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.process import stop_if
from jaxrl_llm.reporting.run_data import CORRECT
from jaxrl_llm.reporting.statistics import bootstrap_interval, pass_at_k, wilson_interval
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.scoring import Scored, concatenate_groups, rows_of_group, score_batch
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.setup import RunParts
from jaxrl_llm.sampling import sample
from jaxrl_llm.sampling.requests import Stats
from jaxrl_llm.sampling.weights import take_weights


class Evaluation(NamedTuple):
    """Results for summary.json, and the scored completions they summarise."""

    figures: dict[str, Any]
    scored: Scored


def evaluate_policy(
    policy: Policy,
    params: Params,
    prompts: PromptSet,
    rewards: Sequence[Reward],
    *,
    judge: str | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    stop: Sequence[str] = (),
    slots: int = 0,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    hosts: Hosts = ALONE,
) -> Evaluation:
    """Complete every prompt and count correct answers: those with reward 1 from `judge` (default: the first reward).

    Temperature 0 with one sample is greedy accuracy, with Wilson's interval. More samples give pass@k for k = 1, 2, 4
    ... up to `samples` by the unbiased estimator (arXiv 2107.03374), with bootstrap intervals over prompts. Intervals
    are 95 %. mesh: the devices to sample on. hosts: each unit completes its share of the prompts, its first host scores
    them, and all have all results. Raises InputError if `judge` is not the name of one of the rewards,
    KeyboardInterrupt after Ctrl-C.
    """
    names = [reward.name for reward in rewards]
    if judge is not None and judge not in names:
        raise unknown("reward to judge by", judge, names)

    def complete(chosen: Sequence[int]) -> Scored | None:
        stats = Stats()
        batch = sample(
            policy, params, [prompts.ids[i] for i in chosen], jax.random.key(seed), group_size=samples,
            max_new_tokens=max_new_tokens, temperature=temperature, stop=stop, slots=slots, stats=stats, mesh=mesh,
            prompt_ids=chosen,
        )  # fmt: skip
        stop_if(stats.interrupted)  # the completions finished so far are biased towards short answers
        if not hosts.leads:
            return None
        return score_batch(rewards, policy.tokenizer, [prompts.rows[i] for i in chosen], batch)

    scored = _on_all(hosts, len(prompts.ids), samples, complete, lambda: take_weights(policy, params, mesh))
    batch = scored.batch
    assert scored.batch.rewards is not None
    correct = np.asarray(scored.batch.rewards[judge or names[0]]) >= CORRECT
    count = correct.reshape(len(prompts.ids), samples).sum(axis=1)
    lengths, reward = np.asarray(batch.action_mask).sum(axis=1), np.asarray(scored.batch.reward)
    figures: dict[str, Any] = {
        "prompts": len(prompts.ids),
        "samples": samples,
        "temperature": temperature,
        "accuracy": float(correct.mean()),
        "reward": None if np.isnan(reward).all() else float(np.nanmean(reward)),  # None: nothing was scored
        "length": float(lengths.mean()),
        "truncated": float(np.asarray(batch.truncated).mean()),
    }
    if samples == 1:
        low, high = wilson_interval(int(correct.sum()), len(correct))
    else:
        low, high = bootstrap_interval(count / samples)
        figures["pass_at"] = {}
        k = 1
        while k <= samples:
            per_prompt = pass_at_k(count, samples, k)
            low_k, high_k = bootstrap_interval(per_prompt)
            figures["pass_at"][str(k)] = {"value": float(per_prompt.mean()), "low": low_k, "high": high_k}
            k *= 2
    return Evaluation({**figures, "low": low, "high": high}, scored)


def _on_all(
    hosts: Hosts, prompts: int, samples: int, complete: Callable[[Sequence[int]], Scored | None],
    idle: Callable[[], Any],
) -> Scored:  # fmt: skip
    """`complete` of all prompts, a share on each unit. idle: what a unit without prompts does, as others exchange.

    complete: None on hosts that do not lead their unit.
    """
    if hosts.count == 1:
        alone = complete(range(prompts))
        assert alone is not None
        return alone
    own = hosts.share(range(prompts))
    found = complete(own) if own else idle() and None
    parts = [
        [rows_of_group(part, number, samples) for number in range(len(part.texts) // samples)] if part else []
        for part in hosts.gather(None if found is None else found._replace(batch=jax.tree.map(np.asarray, found.batch)))
    ]
    led = parts[:: hosts.together]
    return concatenate_groups([led[place % hosts.units][place // hosts.units] for place in range(prompts)])


def evaluate_run(config: TrainConfig, parts: RunParts, params: Params) -> Evaluation:
    """Greedy accuracy on a run's held-out prompts; see `evaluate_policy`."""
    assert parts.held_out is not None
    return evaluate_policy(
        parts.policy, params, parts.held_out, parts.rewards, judge=config.eval_reward,
        max_new_tokens=config.max_new_tokens, stop=config.stop,
        slots=-(-(config.slots or config.prompts_per_step * config.group_size) // parts.hosts.units),
        mesh=None if parts.mesh.size == 1 else of_this_host(parts.mesh), hosts=parts.hosts,
    )  # fmt: skip
