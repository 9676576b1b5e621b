"""Evaluation on held-out prompts: greedy accuracy and pass@k, with confidence intervals."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import map_rows
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.data.load import load_prompts
from jaxrl_llm.data.prompt_set import PromptSet, encode_rows
from jaxrl_llm.distributed.hosts import ALONE, Hosts
from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.reporting.html.run_data import CORRECT
from jaxrl_llm.reporting.statistics import clustered_interval, pass_at_k
from jaxrl_llm.rewards import Reward, require_columns
from jaxrl_llm.rewards.entries import entries_at
from jaxrl_llm.rewards.of_batch import RewardLike, as_rows, loaded, reward_columns
from jaxrl_llm.rewards.scoring import Scored, concatenate_groups, score_batch, some_rows
from jaxrl_llm.rewards.specs import judge as judge_reward
from jaxrl_llm.rollouts.agents.metrics import FAILED_ENVIRONMENT, last_rows
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience, state_of
from jaxrl_llm.rollouts.runtime.sources import same_prompts
from jaxrl_llm.sampling import sample
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.checks import is_agent
from jaxrl_llm.training.evaluation.evaluate_given import evaluate_given
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.training.rollout.agents import agent_of
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.utils.errors import InputError, require_choice, several
from jaxrl_llm.utils.keywords import checked_keywords
from jaxrl_llm.utils.process import stop_if

EVALUATION = 2**31 - 1  # step of the episodes of evaluations, which keys the seeds of environments; no run has it


class Evaluation(NamedTuple):
    """Results for summary.json, and the scored completions they summarise."""

    figures: dict[str, Any]
    scored: Scored

    @property
    def accuracy(self) -> float:
        """The fraction of the scored completions that are correct; 0 if none was scored."""
        return float(self.figures["accuracy"])

    def __repr__(self) -> str:
        low, value, high = (100 * self.figures[name] for name in ("low", "accuracy", "high"))
        samples = f", {self.figures['samples']} samples each" if self.figures["samples"] > 1 else ""
        prompts = several(self.figures["prompts"], "prompt")
        left_out = f", {self.figures['unscored']} not scored" if self.figures["unscored"] else ""
        return f"accuracy {value:.1f} % ({low:.1f} to {high:.1f}) on {prompts}{samples}{left_out}"


@checked_keywords(peers={"num_generations": "samples", "eval_dataset": "prompts", "max_samples": "size"})
def evaluate(
    policy: Policy,
    params: Params,
    prompts: str | Sequence[Any],
    rewards: RewardLike | Sequence[RewardLike],
    *,
    size: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    max_new_tokens: int = 128,
    stop: Sequence[str] = (),
    system_prompt: str | None = None,
    format: PromptFormat | None = None,
    judge: str | None = None,
    slots: int = 128,
    seed: int = 0,
) -> Evaluation:
    """Complete prompts and count correct answers: those with a reward of 1, among those that it scores.

    prompts: rows, or prompts alone, as for `jaxrl_llm.score`; or a source, as for `data.load_prompts`. rewards: as for
    `jaxrl_llm.score`; `judge` names the one that marks correct answers, by default the first. size: at most this many
    prompts. samples: completions of each; more than one gives pass@k. temperature: by default 0 (greedy) for one
    sample, 1 for more. format: see `data.PromptFormat`. slots: completions decoded at the same time.

    The result prints as one line; its `figures` have accuracy, interval, pass@k, lengths and the number of completions
    that were not scored, `scored` the completions.
    Raises InputError for prompts or rewards that cannot be read, and prompts that do not fit into the context.
    """
    check_params(policy, params)
    tokenizer = policy.tokenizer
    if tokenizer is None:
        raise InputError("the policy has no tokenizer: take the policy that load_policy gives")
    check_number("size", size, least=1, whole=True, or_none=True)
    rows = load_prompts(prompts, limit=size) if isinstance(prompts, str) else as_rows(prompts)[:size]
    encoded = encode_rows(
        tokenizer, rows, max_tokens=2**31, long_prompts="error", system_prompt=system_prompt, format=format
    )
    context, longest = policy.config.max_positions, max(map(len, encoded.ids))
    if context and longest + max_new_tokens > context:
        raise InputError(
            f"a prompt has {longest} tokens, and max_new_tokens is {max_new_tokens}, but the model's context length is "
            f"{context} tokens"
        )
    with loaded(rewards) as ready:
        require_columns(ready, reward_columns(rows))
        return evaluate_policy(
            policy, params, encoded, ready, judge=judge, samples=samples, stop=stop, slots=slots, seed=seed,
            temperature=float(samples > 1) if temperature is None else temperature, max_new_tokens=max_new_tokens,
        )  # fmt: skip


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
    watch: Callable[[Stats], object] = lambda stats: None,
    state: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Complete every prompt and count correct answers: those with reward 1 from `judge` (default: the first reward).

    Temperature 0 with one sample is greedy accuracy. More samples give pass@k for k = 1, 2, 4 ... up to `samples` by
    the unbiased estimator (arXiv 2107.03374). Intervals are 95 %, Wilson's, over prompts (`clustered_interval`). mesh:
    the devices to sample on, of all hosts. hosts: each unit completes its share of the prompts, its first host scores
    them, and all have all results. watch: called with the counts of the engine, which it goes on to fill in. state: of
    the run, for reward functions that read it. Raises InputError if `judge` is not the name of one of the rewards,
    KeyboardInterrupt after Ctrl-C.
    """
    names = [reward.name for reward in rewards]
    if judge is not None:
        require_choice("reward to judge by", judge, names)

    def complete(chosen: Sequence[int]) -> Scored | None:
        stats = Stats()
        watch(stats)
        batch = sample(
            policy, params, [prompts.ids[i] for i in chosen], jax.random.key(seed), group_size=samples,
            max_new_tokens=max_new_tokens, temperature=temperature, stop=stop, slots=slots, stats=stats, mesh=mesh,
            prompt_ids=chosen,
        )  # fmt: skip
        stop_if(stats.interrupted)  # the completions finished so far are biased towards short answers
        if not hosts.leads:
            return None
        return score_batch(rewards, policy.tokenizer, [prompts.rows[i] for i in chosen], batch, state=state)

    scored = _on_all(hosts, len(prompts.ids), samples, complete, lambda: take_weights(policy, params, mesh))
    return _evaluation(scored, len(prompts.ids), samples, temperature, judge or names[0])


def _evaluation(scored: Scored, prompts: int, samples: int, temperature: float, judge: str) -> Evaluation:
    """What scored completions say, `samples` of each prompt."""
    batch = scored.batch
    assert batch.rewards is not None
    marks = np.asarray(batch.rewards[judge]).reshape(prompts, samples)
    right, known = (marks >= CORRECT).sum(axis=1), (~np.isnan(marks)).sum(axis=1)  # of each prompt
    lengths, reward = np.asarray(batch.action_mask).sum(axis=1), np.asarray(batch.reward)
    some = known > 0
    rates, trials = right[some] / known[some], float(known[some].mean()) if some.any() else 1.0
    low, high = clustered_interval(rates, trials) if some.any() else (0.0, 1.0)
    figures: dict[str, Any] = {
        "prompts": prompts,
        "samples": samples,
        "temperature": temperature,
        "accuracy": float(right.sum() / max(known.sum(), 1)),  # of the scored ones
        "unscored": int((samples - known).sum()),
        "reward": None if np.isnan(reward).all() else float(np.nanmean(reward)),  # None: nothing was scored
        "length": float(lengths.mean()),
        "truncated": float(np.asarray(batch.truncated).mean()),
        "low": low,
        "high": high,
    }
    if failed := scored.failures.get(judge, 0):
        figures["failed"] = failed
    if worlds := int(np.sum((batch.info or {}).get(FAILED_ENVIRONMENT, 0))):
        figures[FAILED_ENVIRONMENT] = worlds
    if samples > 1:
        figures["pass_at"] = {}
        for k in (2**power for power in range(samples.bit_length())):
            enough = known >= k
            if enough.any():
                each = np.concatenate([pass_at_k(right[i : i + 1], int(known[i]), k) for i in np.flatnonzero(enough)])
                low_k, high_k = clustered_interval(each, max(float(known[enough].mean()) / k, 1.0))
                figures["pass_at"][str(k)] = {"value": float(each.mean()), "low": low_k, "high": high_k}
    return Evaluation(figures, scored)


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
        [some_rows(part, n, slice(n * samples, (n + 1) * samples)) for n in range(len(part.texts) // samples)]
        if part
        else []
        for part in hosts.gather(None if found is None else found._replace(batch=jax.tree.map(np.asarray, found.batch)))
    ]
    led = parts[:: hosts.together]
    return concatenate_groups([led[place % hosts.units][place // hosts.units] for place in range(prompts)])


def _play(
    config: TrainConfig,
    policy: Policy,
    params: Params,
    prompts: PromptSet,
    rewards: Sequence[Reward],
    *,
    samples: int = 1,
    temperature: float = 0.0,
    state: Mapping[str, Any] | None = None,
    **where: Any,
) -> Evaluation:
    """`evaluate_policy` of a run with an environment or tools: whole episodes, as the run samples them.

    Seeds of environments are none of those of training, and the same in each evaluation. Of an episode of several rows
    the last stands for all, and of a game of several players that of the first. where: mesh, hosts and watch.
    """
    sampling = dataclasses.replace(
        config.sampling, temperature=temperature or 1.0, top_p=1.0, top_k=0, min_p=0.0,
        slots=config.slots or config.prompts_per_step * config.group_size,
    )  # fmt: skip
    every = np.arange(len(prompts.ids), dtype=np.int32)
    source = experience(
        Experience(
            policy, prompts, rewards, same_prompts(every), sampling, agent_of(config, greedy=temperature == 0),
            prompts_per_step=len(every), group_size=samples, time_limit=config.rollout_time_limit,
            state=lambda _: dict(state or {}), **where,
        )
    )  # fmt: skip
    found, _ = source.next(source.init(), params, jax.random.key(config.seed), EVALUATION)
    kept = np.flatnonzero(last_rows(found.scored.batch))
    batch = map_rows(lambda x: np.asarray(x)[kept], found.scored.batch)
    batch = batch.replace(group=np.unique(np.asarray(batch.group), return_inverse=True)[1].astype(np.int32))
    logged = found.scored.logged._replace(extras=entries_at(found.scored.logged.extras, kept.tolist()))
    scored = found.scored._replace(batch=batch, texts=[found.scored.texts[i] for i in kept], logged=logged)
    return _evaluation(scored, len(every), samples, temperature, config.eval_reward or rewards[0].name)


def evaluate_as(
    config: TrainConfig, policy: Policy, params: Params, prompts: PromptSet, rewards: Sequence[Reward], **how: Any
) -> Evaluation:
    """`evaluate_policy` as a run's settings say, or `_play` if it has an environment or tools. how: of either."""
    if is_agent(config):
        return _play(config, policy, params, prompts, rewards, **how)
    usual: dict[str, Any] = {
        "judge": config.eval_reward, "max_new_tokens": config.max_new_tokens, "stop": config.stop,
        "slots": config.slots or 128, "seed": config.seed,
    }  # fmt: skip
    return evaluate_policy(policy, params, prompts, rewards, **usual | how)


def evaluate_run(
    config: TrainConfig, parts: RunParts, params: Params, watch: Callable[[Stats], object] = lambda stats: None,
    step: int = 0,
) -> Evaluation:  # fmt: skip
    """Greedy accuracy on a run's held-out prompts after `step` steps; see `evaluate_policy`.

    A policy whose samples think softly does so here, without noise.
    """
    assert parts.held_out is not None
    rollout = rollout_of(config, parts.algorithm)
    if rollout.demands.given:
        return Evaluation(*evaluate_given(config, parts, params))
    state = state_of(step, config.steps, config.prompts_per_step, len(parts.prompts.rows))
    where: dict[str, Any] = {"hosts": parts.hosts, "watch": watch, "state": state}
    where["mesh"] = None if parts.sampler.size == 1 else parts.sampler
    if is_agent(config):
        return _play(config, parts.policy, params, parts.held_out, parts.rewards, **where)
    rewards = [one for one in parts.rewards if one.function is not judge_reward]  # which reads groups of training
    policy = dataclasses.replace(parts.policy, thinking=rollout.thinking)
    where["slots"] = -(-(config.slots or config.prompts_per_step * config.group_size) // parts.hosts.units)
    return evaluate_as(config, policy, params, parts.held_out, rewards, seed=0, **where)
