"""Checks of the arguments of `sample`: errors of one line that name the argument, before anything is compiled."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.requests import Request, Tokens
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError, shown

INT32_MAX = 2**31 - 1
LEAST_TOP_P = 1e-30  # many devices flush numbers below 1.2e-38 to zero
LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 1e-9, 1e6  # temperatures at which logits stay within float32


def check_numbers(
    group_size: int, max_new_tokens: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """InputError for a number of the wrong type or out of range."""
    check_number("group_size", group_size, least=1, most=2**20, whole=True)
    check_number("max_new_tokens", max_new_tokens, least=1, most=2**24, whole=True)
    check_number("top_k", top_k, least=0, most=INT32_MAX, whole=True)
    check_number("top_p", top_p, above=0, most=1)
    check_number("top_p", top_p, least=LEAST_TOP_P, most=1)
    check_number("min_p", min_p, least=0, most=1)
    check_number("temperature", temperature)
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature <= GREATEST_TEMPERATURE:
        limits = f"0 (greedy) or more, from {LEAST_TEMPERATURE:g} to {GREATEST_TEMPERATURE:g}"
        raise InputError(f"temperature is {shown(temperature)}, but must be {limits}")


def check_running(slots: int, policy_step: int, cache_dtype: Any, mesh: Any, stats: Any, on_completion: Any) -> None:
    """InputError for arguments that do not change what is sampled: slots, mesh, dtype of the cache and the like."""
    if not isinstance(slots, Integral) or isinstance(slots, bool) or slots < 0:
        raise InputError(f"slots is {shown(slots)}, but must be a whole number, 0 (all) or more")
    check_number("policy_step", policy_step, least=0, most=INT32_MAX, whole=True)
    if cache_dtype is not None:
        try:
            known = jnp.dtype(cache_dtype)
        except TypeError:
            known = None
        if known is None or not (jnp.issubdtype(known, jnp.floating) or known == jnp.int8):
            found = shown(cache_dtype) if known is None else known.name
            raise InputError(f"cache_dtype is {found}, but must be floating, such as bfloat16, or int8")
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise InputError(f"mesh is of the type {type(mesh).__name__}, but must be a jax.sharding.Mesh")
    if stats is not None and not isinstance(stats, Stats):
        raise InputError(f"stats is of the type {type(stats).__name__}, but must be sampling.Stats(), to be filled in")
    if on_completion is not None and not callable(on_completion):
        found = type(on_completion).__name__
        raise InputError(f"on_completion is of the type {found}, but must be a function of a Completion")


def check_prompts(policy: Policy, prompts: Any, stop: Any) -> None:
    """InputError unless prompts and stop strings are lists, and the policy has a tokenizer if they contain text."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not len(prompts):
        found = "empty" if isinstance(prompts, list | tuple) else in_words(prompts)
        raise InputError(f"prompts must be a list with at least one prompt, but is {found}")
    if isinstance(stop, str) or not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
        raise InputError(f"stop must be a list of strings, none of them empty, but is {shown(stop)}")
    if policy.tokenizer is None and any(map(_is_text, prompts)):
        raise InputError("text prompts need a tokenizer: use a policy from load_policy, or pass token ids")
    if stop and policy.tokenizer is None:
        raise InputError("stop strings need a tokenizer: use a policy from load_policy")


def _is_text(prompt: Any) -> bool:
    return not isinstance(prompt, list | tuple) or any(isinstance(x, str | dict) for x in prompt)


def check_ids(policy: Policy, ids: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """InputError for token ids outside the vocabulary, and for prompts that leave no room for a completion."""
    vocabulary = policy.config.vocab_size
    for number, prompt in enumerate(ids):
        if max(prompt) >= vocabulary:
            raise InputError(
                f"prompt {number} contains token id {shown(max(prompt))}, but the model's vocabulary has {vocabulary}: "
                "was it encoded with another tokenizer?"
            )
    room = policy.config.max_positions
    longest = max(map(len, ids))
    if room and longest + max_new_tokens > room:
        raise InputError(
            f"prompt {max(range(len(ids)), key=lambda i: len(ids[i]))} has {longest} tokens and max_new_tokens is "
            f"{max_new_tokens}, but the model's context is {room}: shorten the prompt or lower max_new_tokens"
        )


def checked_prompt_ids(prompt_ids: Any, count: int) -> list[int]:
    """The id of each prompt, 0 to 2^31 - 1; by default 0, 1, 2 ..."""
    if prompt_ids is None:
        return list(range(count))
    names = _whole_numbers("prompt_ids", prompt_ids, INT32_MAX + 1)
    if len(names) != count:
        raise InputError(f"{len(names)} prompt_ids for {count} prompts: pass one for each")
    return names


def checked_stop_tokens(stop_token_ids: Any, policy: Policy) -> list[int]:
    """The tokens that end a completion; by default the model's. -1 is allowed and matches no token."""
    if stop_token_ids is None:
        return list(policy.config.eos_token_ids)
    return _whole_numbers("stop_token_ids", stop_token_ids, policy.config.vocab_size, -1)


def allowed_tokens(allowed: Any, vocabulary: int) -> jax.Array:
    """bool[V] from token ids or from a mask."""
    is_mask = getattr(getattr(allowed, "dtype", None), "kind", "") == "b"
    if isinstance(allowed, list | tuple):
        is_mask = len(allowed) > 0 and all(isinstance(x, bool | np.bool_) for x in allowed)
    if is_mask:
        mask = np.asarray(allowed)
        if mask.shape != (vocabulary,):
            raise InputError(f"allowed must be token ids or bool[{vocabulary}], found bool{list(mask.shape)}")
    else:
        mask = np.isin(np.arange(vocabulary), _whole_numbers("allowed", allowed, vocabulary))
    if not mask.any():
        raise InputError("allowed allows no token: give at least one")
    return jnp.asarray(mask)


def _whole_numbers(name: str, values: Any, limit: int, least: int = 0) -> list[int]:
    """The values as a list of Python ints; InputError unless they are whole numbers from least to limit - 1."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise InputError(f"{name} is {shown(values)}, but must be a list of whole numbers")
    found = np.asarray(values).tolist() if hasattr(values, "dtype") else list(values)
    for value in found if isinstance(found, list) else [found]:
        if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) < limit:
            raise InputError(f"{name} contains {shown(value)}, but must be whole numbers from {least} to {limit - 1}")
    return [int(value) for value in found]


def check_tokenizer(tokenizer: Any) -> None:
    """InputError for a value without a `decode` method."""
    if not callable(getattr(tokenizer, "decode", None)):
        raise InputError(f"the tokenizer is {in_words(tokenizer)}, but must be the third result of load_policy")


def check_not_negative(tokens: np.ndarray, mask: np.ndarray) -> None:
    """InputError for a negative token id among the tokens [N, L] that the mask selects."""
    if (wrong := (tokens < 0) & mask).any():
        row, place = np.argwhere(wrong)[0]
        raise InputError(f"row {row} of the batch contains the token id {tokens[row, place]}: ids are 0 or more")


def check_requests(requests: Sequence[Request], vocabulary: int) -> None:
    """InputError for a request that cannot be completed, naming it by its index."""
    if isinstance(requests, Request) or not isinstance(requests, Sequence):
        raise InputError(f"requests is a {type(requests).__name__}, but must be a list of Request")
    seen: set[tuple[int, ...]] = set()
    for number, request in enumerate(requests):
        name = f"request {number}"
        if not isinstance(request, Request):
            raise InputError(f"{name} is a {type(request).__name__}, but must be a Request")
        for of, least in {"limit": 1, "prompt_id": -(2**31), "sample": -(2**31), "pause_at": 0, "adapter": 0}.items():
            value = getattr(request, of)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not (whole and least <= value < 2**31) and not (of == "pause_at" and value is None):
                raise InputError(f"{name}: {of} is {shown(value)}, but must be a whole number from {least} to 2^31 - 1")
        if not isinstance(request.begun, Tokens):
            raise InputError(f"{name}: begun is a {type(request.begun).__name__}, but must be Tokens")
        if not isinstance(request.prompt, tuple) or not request.prompt:
            raise InputError(
                f"{name}: the prompt is {shown(request.prompt)}, but must be a tuple of token ids, not empty"
            )
        if request.prompt not in seen:
            _check_ids(name, np.asarray(request.prompt), vocabulary)
            seen.add(request.prompt)
        if request.begun.size:
            _check_ids(name, request.begun.token, vocabulary)


def _check_ids(name: str, ids: np.ndarray, vocabulary: int) -> None:
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise InputError(
            f"{name}: its tokens are {shown(ids.tolist())}, but must be token ids, which are whole numbers"
        )
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if wrong.size:
        raise InputError(
            f"{name} contains the token id {wrong[0]}, but the model's vocabulary has {vocabulary}: was it encoded "
            "with another tokenizer?"
        )
