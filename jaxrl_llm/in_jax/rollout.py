"""Sampling inside a compiled program: prompts of a task, completions of a policy or episodes with an environment, their
rewards, and its success.

N rows, P prompt tokens, T completion tokens, L = P + T; of episodes K turns of O tokens of an observation and A tokens
of a reply, T = K (O + A).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.shapes import INTEGERS, check_array
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.in_jax.settings import LabSettings, make_policy
from jaxrl_llm.in_jax.tasks.task import Environment, Played, Task, final_scores, play, told_rewards
from jaxrl_llm.models.by_row import with_members
from jaxrl_llm.models.checks import check_key, check_params
from jaxrl_llm.models.forward import empty_cache
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.rewards.specs import GIVEN


def roll_out(
    policy: Policy, params: Params, task: Task, prompts: Array, key: Array, group_size: int = 1, greedy: bool = False
) -> _Completions:
    """Continue each of the prompts int32[n, P] `group_size` times, each in a row; rows of a prompt are adjacent.

    The prompt goes through the model token by token too, so that the decoder is compiled only once. Always
    draws T tokens: those after a row's end are masked. Raises InputError for
    prompts of another shape or dtype. In a task of several turns (`Task.given`) the environment's tokens are put in
    their places, and end a row as the policy's do; those of a `Task.environment` are played with it, `converse`.
    """
    check_array("prompts", prompts, INTEGERS, ("prompts", task.prompt_length + task.hidden))
    P, T = task.prompt_length, task.completion_length
    prompts = jnp.repeat(prompts, group_size, axis=0)
    if task.environment is not None:
        return _converse(policy, params, task, prompts, key, greedy)[0]
    N = prompts.shape[0]
    cache = empty_cache(policy.config, N, P + T - 1, policy.activation_dtype, isinstance(params["layers"], dict))
    ones = jnp.ones((N, 1), jnp.int32)

    def advance(carry: tuple[Any, Array, Array, Any], at: tuple[Array, Array, Array]) -> tuple[Any, _Completions]:
        cache, newest, done, said = carry
        place, given, key = at
        hidden, cache = policy.forward(params, newest[:, None], jnp.full((N, 1), place), ones, cache)
        logits = jax.nn.log_softmax(policy.logits_of(params, hidden[:, 0]))
        chosen = jnp.argmax(logits if greedy else logits + jax.random.gumbel(key, logits.shape), axis=-1)
        token = jnp.where(done, task.end, chosen).astype(jnp.int32)
        acts = ~done
        if task.given is not None:
            answered = jax.vmap(task.given, (0, 0, None))(prompts, said, place - (P - 1))
            acts &= answered < 0
            token = jnp.where(done | acts, token, answered)
            said = jnp.where(jnp.arange(T) == place - (P - 1), token[:, None], said)
        logp = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(logits) * logits, axis=-1)
        drawn = _Completions(token, acts, ~done, jnp.where(acts, logp, 0.0), jnp.where(acts, entropy, 0.0))
        in_prompt = place < P - 1
        done = jnp.where(in_prompt, False, done | (token == task.end))
        return (cache, jnp.where(in_prompt, given, token), done, said), drawn

    following = jnp.pad(prompts[:, 1:], ((0, 0), (0, T))).T  # int32[P + T - 1, N]
    steps = (jnp.arange(P + T - 1), following, jax.random.split(key, P + T - 1))
    said = None if task.given is None else jnp.full((N, T), task.end, jnp.int32)
    _, drawn = jax.lax.scan(advance, (cache, prompts[:, 0], jnp.zeros(N, bool), said), steps)
    return jax.tree.map(lambda x: x[P - 1 :].T, drawn)


def sample_batch(
    policy: Policy, params: Params, task: Task, key: Array, step: Array | int, prompts: int, group_size: int,
    by_turn: bool = False, seed: Array | None = None,
) -> tuple[Trajectories, Array]:  # fmt: skip
    """A scored batch: `group_size` completions of each of so many fresh prompts; and those prompts, int32[n, P].

    seed: of the noise of the policy's population, uint32[]; then row n is of its member n, which is greedy.

    Rewards are what training is told (`Task.observe`); `true_reward` tells the truth. by_turn: with an environment the
    rewards of turns are apart from the rest; see `sample_episodes`.
    """
    if task.environment is not None:
        return sample_episodes(policy, params, task, task.environment, key, step, prompts, group_size, by_turn)
    for_prompts, for_tokens = jax.random.split(key)
    shown = jax.vmap(task.sample)(jax.random.split(for_prompts, prompts))
    own, info = params, dict[str, Array]()
    if seed is not None:
        number = jnp.arange(prompts * group_size)
        own = with_members(policy, params, number, seed)
        info = {"member": number.astype(jnp.float32), "member_seed": jnp.full(number.shape, seed, jnp.float32)}
    drawn = roll_out(policy, own, task, shown, for_tokens, group_size, greedy=seed is not None)
    repeated = jnp.repeat(shown, group_size, axis=0)
    components, reward = jax.vmap(task.score)(repeated, drawn.tokens)
    if task.observe is not None:
        info["true_reward"] = reward
    components, reward = told_rewards(task, jax.random.fold_in(key, 2), components, reward)

    turn = jnp.zeros(drawn.tokens.shape, jnp.int32)
    if task.given is not None:  # the environment's tokens part one turn from the next
        turn = jnp.cumsum(drawn.mask & ~jnp.pad(drawn.mask[:, :-1], ((0, 0), (1, 0))), axis=1) - 1
    truncated = jnp.all(drawn.real, axis=1) & (drawn.tokens[:, -1] != task.end)
    scores: dict[str, Any] = {"rewards": components, "reward": reward, "truncated": truncated, "info": info or None}
    return batch_of(task, repeated, drawn, turn, step, group_size, **scores), shown


def given_pairs(task: Task, key: Array, step: Array | int, prompts: int) -> Trajectories:
    """The chosen and the rejected response of a task to each of `prompts` fresh prompts, as adjacent rows with the
    rewards 1 and 0, or NaN where both are equal. They were not sampled: their `behaviour_logp` is 0."""
    assert task.pairs is not None
    for_prompts, for_pairs = jax.random.split(key)
    shown = jax.vmap(task.sample)(jax.random.split(for_prompts, prompts))
    chosen, rejected = jax.vmap(task.pairs)(jax.random.split(for_pairs, prompts), shown)
    same = jnp.all(chosen == rejected, axis=1, keepdims=True)
    said = jnp.stack([chosen, rejected], axis=1).reshape(2 * prompts, -1)
    reward = jnp.where(same, jnp.nan, jnp.array([1.0, 0.0])).reshape(-1)
    ends = said == task.end
    before_end = jnp.cumsum(ends, axis=1) - ends == 0  # the first end counts
    zeros = jnp.zeros(said.shape)
    given = _Completions(said, before_end, before_end, zeros, zeros)
    scores: dict[str, Any] = {"rewards": {GIVEN: reward}, "reward": reward, "truncated": jnp.zeros(2 * prompts, bool)}
    return batch_of(task, jnp.repeat(shown, 2, axis=0), given, zeros, step, 2, **scores).replace(entropy=None)


def true_reward(batch: Trajectories) -> Array:
    """f32[N]: what the rows of a batch of `sample_batch` are worth, whatever training is told."""
    return (batch.info or {}).get("true_reward", batch.need("reward"))


def greedy_reward(policy: Policy, params: Params, task: Task, prompts: Array, key: Array | None = None) -> Array:
    """f32[n]: the reward of the most probable completion (token by token) of each prompt.

    key: of what training is told where that is random (`Task.observe`); None: the truth.
    """
    if task.environment is not None:
        return greedy_return(policy, params, task, task.environment, prompts, key)
    drawn = roll_out(policy, params, task, prompts, jax.random.key(0), greedy=True)
    components, reward = jax.vmap(task.score)(prompts, drawn.tokens)
    return reward if key is None else told_rewards(task, key, components, reward)[1]


def evaluate_task(
    params: Params, task: Task, settings: LabSettings, key: Array, prompts: int = 1024, samples: int = 1
) -> dict[str, Array]:
    """f32[prompts * samples] each: "reward" and its components, the true ones, of so many sampled completions of each
    of fresh prompts, those of a prompt next to each other; compiled."""
    policy = make_policy(task, settings)
    check_params(policy, params)
    check_key(key)
    return _evaluate(policy, params, task._replace(observe=None), key, prompts, samples)


@partial(jax.jit, static_argnums=(0, 2, 4, 5))
def _evaluate(policy: Policy, params: Params, task: Task, key: Array, prompts: int, samples: int) -> dict[str, Array]:
    batch, _ = sample_batch(policy, params, task, key, 0, prompts, samples)
    return {"reward": batch.need("reward"), **(batch.rewards or {})}


def _converse(
    policy: Policy, params: Params, task: Task, prompts: Array, key: Array, greedy: bool = False
) -> tuple[_Completions, Played]:
    """An episode of each prompt int32[N, P + H]: the cache goes on over turns, and observations go through the model as
    given tokens."""
    P, T, environment = task.prompt_length, task.completion_length, task.environment
    assert environment is not None
    told, K = environment.observation, environment.turns
    length = told + environment.reply
    N, shown = prompts.shape[0], prompts[:, :P]
    cache = empty_cache(policy.config, N, P + T - 1, policy.activation_dtype, isinstance(params["layers"], dict))
    ones = jnp.ones((N, 1), jnp.int32)
    if P > 1:
        before = jnp.broadcast_to(jnp.arange(P - 1), (N, P - 1))
        _, cache = policy.forward(params, shown[:, :-1], before, jnp.ones((N, P - 1), jnp.int32), cache)

    def advance(carry: tuple[Any, Array], at: tuple[Array, Array, Array, Array]) -> tuple[Any, Any]:
        cache, newest = carry
        place, is_told, seen, key = at
        hidden, cache = policy.forward(params, newest[:, None], jnp.full((N, 1), place), ones, cache)
        logits = jax.nn.log_softmax(policy.logits_of(params, hidden[:, 0]))
        chosen = jnp.argmax(logits if greedy else logits + jax.random.gumbel(key, logits.shape), axis=-1)
        token = jnp.where(is_told, seen, chosen).astype(jnp.int32)
        logp = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        return (cache, token), (token, logp, -jnp.sum(jnp.exp(logits) * logits, axis=-1))

    def act(carry: Any, state: Any, seen: Array, given: tuple[Array, Array]) -> tuple[Any, Array, Any]:
        first, keys = given
        place = jnp.arange(length)
        said = jnp.pad(seen, ((0, 0), (0, environment.reply))).T
        carry, (tokens, *numbers) = jax.lax.scan(advance, carry, (first + place, place < told, said, keys))
        return carry, tokens[told:].T, numbers

    keys = jax.random.split(key, T).reshape(K, length)
    first = P - 1 + length * jnp.arange(K)
    played = play(environment, prompts, task.end, act, (cache, shown[:, -1]), (first, keys))
    logp, entropy = (jnp.where(played.acted, x.reshape(T, N).T, 0.0) for x in played.kept)
    return _Completions(played.tokens, played.acted, played.real, logp, entropy), played


def sample_episodes(
    policy: Policy, params: Params, task: Task, environment: Environment, key: Array, step: Array | int, prompts: int,
    group_size: int, by_turn: bool = False,
) -> tuple[Trajectories, Array]:  # fmt: skip
    """A scored batch of so many episodes of each of so many fresh prompts; and those prompts, int32[n, P + H].

    by_turn: rewards of turns are the batch's `turn_rewards`, and its reward is the rest; otherwise the reward is the
    return and there are no `turn_rewards`. The batch has `state_key`, and in its info `episode`, `first_turn`, the
    return as `true_reward`, and with tools `calls` and `failed_calls`.
    """
    for_prompts, for_tokens = jax.random.split(key)
    fresh = jax.vmap(task.sample)(jax.random.split(for_prompts, prompts))
    repeated = jnp.repeat(fresh, group_size, axis=0)
    drawn, played = _converse(policy, params, task, repeated, for_tokens)
    N = repeated.shape[0]
    components, final = final_scores(environment, played)
    of_turns = jnp.sum(played.rewards, axis=1)
    total = final + of_turns
    components, final = told_rewards(task, jax.random.fold_in(key, 2), components, final)
    zeros = jnp.zeros(N)
    info = {"true_reward": total, "episode": jnp.arange(N) % group_size + zeros, "first_turn": zeros}
    if environment.calls is not None:
        info["calls"], info["failed_calls"] = jax.vmap(environment.calls)(played.last)
    batch = batch_of(
        task,
        repeated,
        drawn,
        played.turns_of(jnp.broadcast_to(jnp.arange(environment.turns), played.played.shape)),
        step,
        group_size,
        truncated=~played.done,
        rewards=components,
        reward=final if by_turn else final + of_turns,
        turn_rewards=played.rewards if by_turn else None,
        state_key=played.states,
        info=info,
    )
    return batch, fresh


def batch_of(
    task: Task, prompts: Array, drawn: _Completions, turn: Array, step: Array | int, group_size: int, **scores: Any
) -> Trajectories:
    """The batch of completions [N, T] of prompts int32[N, P + H], as groups of adjacent rows: [N, L].

    turn: int32[N, T] of each place, which counts where the policy chose the token. scores: further fields.
    """
    N = prompts.shape[0]

    def after_prompt(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (task.prompt_length, 0)))

    actions = after_prompt(drawn.mask)
    return Trajectories(
        tokens=jnp.concatenate([prompts[:, : task.prompt_length], drawn.tokens], axis=1),
        token_mask=after_prompt(drawn.real) | (jnp.arange(actions.shape[1]) < task.prompt_length),
        action_mask=actions,
        behaviour_logp=after_prompt(drawn.logp),
        policy_step=jnp.full(actions.shape, step, jnp.int32),
        turn=jnp.where(actions, after_prompt(turn), -1).astype(jnp.int32),
        group=jnp.repeat(jnp.arange(N // group_size, dtype=jnp.int32), group_size),
        prompt_id=jax.vmap(task.number)(prompts).astype(jnp.int32),
        temperature=jnp.ones(N),
        entropy=after_prompt(drawn.entropy),
        **scores,
    )


def greedy_return(
    policy: Policy, params: Params, task: Task, environment: Environment, prompts: Array, key: Array | None = None
) -> Array:
    """f32[n]: the return of the most probable replies (token by token) to each prompt; key: see `greedy_reward`."""
    _, played = _converse(policy, params, task, prompts, jax.random.key(0), greedy=True)
    components, final = final_scores(environment, played)
    if key is not None:
        final = told_rewards(task, key, components, final)[1]
    return final + jnp.sum(played.rewards, axis=1)


class _Completions(NamedTuple):
    """Of N prompts, a row for each completion."""

    tokens: Array  # int32[N, T], the end token from its first place on
    mask: Array  # bool[N, T] true where the policy chose the token: up to its end token, inclusive
    real: Array  # bool[N, T] true there, and at the environment's tokens between
    logp: Array  # f32[N, T]
    entropy: Array  # f32[N, T]
