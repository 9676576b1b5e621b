"""`sample`: prompts in, Trajectories out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.buckets import bucket, pad_rows
from jaxrl_llm.data.chat import encode_prompt, prompt_text
from jaxrl_llm.distributed import shard_rows
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.decode import Requests, Settings, decode, prefill, split_layers
from jaxrl_llm.sampling.filters import Filters
from jaxrl_llm.trajectory import Trajectories

CHUNK = 16  # tokens between two looks for stop strings


def sample(
    policy: Policy,
    params: Params,
    prompts: Sequence[Any],
    key: jax.Array,
    *,
    group_size: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] | None = None,
    system_prompt: str | None = None,
    prompt_ids: Sequence[int] | None = None,
    policy_step: int = 0,
    rows_at_once: int = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> Trajectories:
    """Sample `group_size` completions of each prompt.

    prompts: strings (through the chat template where the model has one), lists of chat messages, or lists of token
    ids, which are taken as they are. Prompts of one group share one prefill.
    key: a JAX random key. A token depends on (key, prompt id, sample number, position) and on nothing else: not on
    the batch, its order, or how it is split. Use another key for each step, e.g. fold the step number into it.
    temperature: 0 is greedy; then `behaviour_logp` is of the untempered distribution.
    top_k, top_p, min_p: applied in this order. `behaviour_logp` is of the truncated distribution, and
    `support_floor` lets the trainer compute the same one.
    stop: strings that end a completion at the token which completes them. stop_token_ids: by default the model's
    end-of-sequence tokens. The ending token is part of the completion, and an action.
    prompt_ids: int per prompt, naming its randomness and its place in the data set; by default 0, 1, 2 ...
    rows_at_once: decode at most this many samples at a time (0: all); only memory and speed depend on it.
    mesh: spread the rows over its devices, where their number divides the rows; the parameters must be on it.

    Returns Trajectories of len(prompts) * group_size rows, those of a prompt next to each other.
    Raises InputError for settings out of range, empty prompts, and prompts that leave no room in the context.
    """
    _check(group_size, max_new_tokens, temperature, top_p, top_k, min_p, rows_at_once)
    if isinstance(prompts, str) or not len(prompts):
        raise InputError("prompts must be a list with at least one prompt")
    if isinstance(stop, str) or not all(stop):
        raise InputError("stop must be a list of strings, none of them empty")
    if policy.tokenizer is None and not all(_is_ids(prompt) for prompt in prompts):
        raise InputError("prompts of text need a tokenizer: take the policy from load_policy, or give token ids")
    ids = [encode_prompt(policy.tokenizer, prompt, system_prompt=system_prompt) for prompt in prompts]
    _check_ids(policy, ids, max_new_tokens)
    if stop and policy.tokenizer is None:
        raise InputError("stop strings need a tokenizer: take the policy from load_policy")
    names = list(range(len(ids))) if prompt_ids is None else [int(i) for i in prompt_ids]
    if len(names) != len(ids):
        raise InputError(f"{len(names)} prompt_ids for {len(ids)} prompts: give one for each")
    ends = policy.config.eos_token_ids if stop_token_ids is None else stop_token_ids
    truncating = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
    settings = Settings(
        key=key,
        temperature=jnp.float32(temperature or 1.0),
        filters=Filters(jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p)) if truncating else None,
        stop_tokens=jnp.asarray(list(ends), jnp.int32),
    )
    # A prompt that comes twice is sampled anew, not repeated.
    seen: Counter[int] = Counter()
    repeat = np.zeros(len(names), np.int32)
    for i, name in enumerate(names):
        repeat[i], seen[name] = seen[name], seen[name] + 1
    total, length = len(ids) * group_size, bucket(max(map(len, ids)))
    at_once = min(rows_at_once or total, total)
    weights = split_layers(params)
    parts = []
    for first in range(0, total, at_once):
        # The last part repeats row 0 as dead rows rather than have a shape of its own.
        rows = np.arange(first, first + at_once)
        live = rows < total
        rows = np.where(live, rows, 0)
        used, prompt_of_row = np.unique(rows // group_size, return_inverse=True)
        used = np.resize(used, min(at_once, -(-at_once // group_size) + 1, len(ids)))
        tokens, mask = pad_rows([ids[p] for p in used], length)
        requests = Requests(
            prompts=jnp.asarray(tokens),
            prompt_mask=jnp.asarray(mask),
            prompt_of_row=jnp.asarray(prompt_of_row, jnp.int32),
            prompt_id=jnp.asarray(np.asarray(names, np.int32)[rows // group_size]),
            sample=jnp.asarray(repeat[rows // group_size] * group_size + rows % group_size, jnp.int32),
            live=jnp.asarray(live),
        )
        if mesh is not None and len(used) % mesh.size == 0 and len(rows) % mesh.size == 0:
            requests = shard_rows(requests, mesh)
        parts.append(_run(policy, weights, requests, settings, max_new_tokens, temperature == 0, stop))
    drawn = [np.concatenate([part[i] for part in parts])[:total] for i in range(6)]
    return _assemble(ids, names, group_size, drawn, temperature or 1.0, truncating, policy_step)


def _run(
    policy: Policy,
    weights: Params,
    requests: Requests,
    settings: Settings,
    new_tokens: int,
    greedy: bool,
    stop: Sequence[str],
) -> list[np.ndarray]:
    state = prefill(policy, weights, requests, settings, new_tokens=new_tokens, greedy=greedy)
    step = CHUNK if stop else new_tokens
    for until in range(step, new_tokens + step, step):
        state = decode(policy, weights, state, requests, settings, jnp.int32(min(until, new_tokens)), greedy=greedy)
        if stop:
            length = np.asarray(state.length)
            cut = _stop_lengths(policy.tokenizer, np.asarray(state.drawn.token), length, stop)
            done = np.asarray(state.done) | (cut <= length)
            state = state._replace(length=jnp.asarray(np.minimum(cut, length)), done=jnp.asarray(done))
        if bool(jnp.all(state.done)):
            break
    return [np.asarray(x) for x in (*state.drawn, state.length, ~state.done)]


def _stop_lengths(tokenizer: Any, tokens: np.ndarray, length: np.ndarray, stop: Sequence[str]) -> np.ndarray:
    """int[N]: tokens up to and with the one that completes a stop string; larger than any length where none does."""
    out = np.full(length.shape, np.iinfo(np.int32).max, np.int32)
    for row, count in enumerate(length):
        ids = tokens[row, :count].tolist()
        if any(s in prompt_text(tokenizer, ids) for s in stop):
            low, high = 1, int(count)  # the text of a prefix grows with the prefix
            while low < high:
                middle = (low + high) // 2
                text = prompt_text(tokenizer, ids[:middle])
                low, high = (low, middle) if any(s in text for s in stop) else (middle + 1, high)
            out[row] = low
    return out


def _assemble(
    ids: list[list[int]],
    names: list[int],
    group_size: int,
    drawn: list[np.ndarray],
    temperature: float,
    truncating: bool,
    policy_step: int,
) -> Trajectories:
    """Prompt and completion side by side in right-padded rows."""
    new, logp, entropy, floor, lengths, truncated = drawn
    N = len(new)
    owner = np.arange(N) // group_size
    L = bucket(max(len(ids[p]) + int(n) for p, n in zip(owner, lengths, strict=True)))
    tokens, real = pad_rows([ids[p] for p in owner], L)
    action = np.zeros((N, L), bool)
    fields = {"logp": np.zeros((N, L), np.float32), "entropy": np.zeros((N, L), np.float32)}
    floors = np.full((N, L), -np.inf, np.float32)
    for row in range(N):
        start, count = len(ids[owner[row]]), int(lengths[row])
        place = slice(start, start + count)
        tokens[row, place], real[row, place], action[row, place] = new[row, :count], True, True
        fields["logp"][row, place], fields["entropy"][row, place] = logp[row, :count], entropy[row, :count]
        floors[row, place] = floor[row, :count]
    return Trajectories(
        tokens=jnp.asarray(tokens),
        token_mask=jnp.asarray(real),
        action_mask=jnp.asarray(action),
        behaviour_logp=jnp.asarray(fields["logp"]),
        policy_step=jnp.full((N, L), policy_step, jnp.int32),
        turn=jnp.asarray(np.where(action, 0, -1).astype(np.int32)),
        group=jnp.asarray(owner.astype(np.int32)),
        prompt_id=jnp.asarray(np.asarray(names, np.int32)[owner]),
        truncated=jnp.asarray(truncated),
        temperature=jnp.full(N, temperature, jnp.float32),
        support_floor=jnp.asarray(floors) if truncating else None,
        entropy=jnp.asarray(fields["entropy"]),
    )


def completion_ids(trajectories: Trajectories) -> list[list[int]]:
    """The sampled token ids of each row, the ending token included."""
    tokens, action = np.asarray(trajectories.tokens), np.asarray(trajectories.action_mask)
    return [row[chosen].tolist() for row, chosen in zip(tokens, action, strict=True)]


def completion_texts(tokenizer: Any, trajectories: Trajectories) -> list[str]:
    """The completions as text, without special tokens."""
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids(trajectories)]


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and not any(isinstance(entry, str | dict) for entry in prompt)


def _check(
    group_size: int, new: int, temperature: float, top_p: float, top_k: int, min_p: float, rows_at_once: int
) -> None:
    ranges = [
        ("group_size", group_size, group_size >= 1, "at least 1"),
        ("max_new_tokens", new, new >= 1, "at least 1"),
        ("temperature", temperature, temperature >= 0, "0 (greedy) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("top_k", top_k, top_k >= 0, "0 (off) or more"),
        ("min_p", min_p, 0 <= min_p <= 1, "between 0 and 1"),
        ("rows_at_once", rows_at_once, rows_at_once >= 0, "0 (all) or more"),
    ]
    for name, value, good, wanted in ranges:
        if not good:
            raise InputError(f"{name} is {value}, but must be {wanted}")


def _check_ids(policy: Policy, ids: list[list[int]], max_new_tokens: int) -> None:
    vocabulary = policy.config.vocab_size
    for number, prompt in enumerate(ids):
        if max(prompt) >= vocabulary:
            raise InputError(
                f"prompt {number} holds token id {max(prompt)}, but the model's vocabulary has {vocabulary}: "
                "was it encoded with another tokenizer?"
            )
    room = policy.config.max_positions
    longest = max(map(len, ids))
    if room and longest + max_new_tokens > room:
        raise InputError(
            f"prompt {ids.index(max(ids, key=len))} has {longest} tokens and max_new_tokens is {max_new_tokens}, but "
            f"the model's context is {room}: shorten the prompt or lower max_new_tokens"
        )
