"""Episodes of a policy with an environment, sampled inside a compiled program.

N rows, P prompt tokens, K turns of O tokens of an observation and A tokens of a reply, T = K (O + A), L = P + T.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.in_jax.tasks.task import Environment, Played, Task, final_scores, observed, play
from jaxrl_llm.models.forward import empty_cache
from jaxrl_llm.models.policy import Params, Policy


def converse(
    policy: Policy, params: Params, task: Task, prompts: Array, key: Array, greedy: bool = False
) -> tuple[Completions, Played]:
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
    return Completions(played.tokens, played.acted, played.real, logp, entropy), played


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
    drawn, played = converse(policy, params, task, repeated, for_tokens)
    N = repeated.shape[0]
    components, final = final_scores(environment, played)
    of_turns = jnp.sum(played.rewards, axis=1)
    total = final + of_turns
    components, final = observed(task, jax.random.fold_in(key, 2), components, final)
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
    task: Task, prompts: Array, drawn: Completions, turn: Array, step: Array | int, group_size: int, **scores: Any
) -> Trajectories:
    """The batch of completions [N, T] of prompts int32[N, P + H], as groups of adjacent rows: [N, L].

    turn: int32[N, T] of each place, which counts where the policy chose the token. scores: further fields.
    """
    beside = lambda x: jnp.pad(x, ((0, 0), (task.prompt_length, 0)))  # noqa: E731
    actions, N = beside(drawn.mask), prompts.shape[0]
    return Trajectories(
        tokens=jnp.concatenate([prompts[:, : task.prompt_length], drawn.tokens], axis=1),
        token_mask=beside(drawn.real) | (jnp.arange(actions.shape[1]) < task.prompt_length),
        action_mask=actions,
        behaviour_logp=beside(drawn.logp),
        policy_step=jnp.full(actions.shape, step, jnp.int32),
        turn=jnp.where(actions, beside(turn), -1).astype(jnp.int32),
        group=jnp.repeat(jnp.arange(N // group_size, dtype=jnp.int32), group_size),
        prompt_id=jax.vmap(task.number)(prompts).astype(jnp.int32),
        temperature=jnp.ones(N),
        entropy=beside(drawn.entropy),
        **scores,
    )


def greedy_return(
    policy: Policy, params: Params, task: Task, environment: Environment, prompts: Array, key: Array | None = None
) -> Array:
    """f32[n]: the return of the most probable replies (token by token) to each prompt; key: see `greedy_reward`."""
    _, played = converse(policy, params, task, prompts, jax.random.key(0), greedy=True)
    components, final = final_scores(environment, played)
    if key is not None:
        final = observed(task, key, components, final)[1]
    return final + jnp.sum(played.rewards, axis=1)


class Completions(NamedTuple):
    """Of N prompts, a row for each completion."""

    tokens: Array  # int32[N, T], the end token from its first place on
    mask: Array  # bool[N, T] true where the policy chose the token: up to its end token, inclusive
    real: Array  # bool[N, T] true there, and at the environment's tokens between
    logp: Array  # f32[N, T]
    entropy: Array  # f32[N, T]
