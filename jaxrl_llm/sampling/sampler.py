"""`sample`: prompts in, Trajectories out."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.data.chat.encode import encode_prompt, prompt_text
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.models.checks import check_key, check_params, check_policy
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.quantised import kind_of
from jaxrl_llm.sampling import checks
from jaxrl_llm.sampling.batch import BatchRow, assemble
from jaxrl_llm.sampling.draw import DrawSettings, seed_of
from jaxrl_llm.sampling.engine import CHUNK as LONG_CHUNK
from jaxrl_llm.sampling.engine import Cut
from jaxrl_llm.sampling.filters import Filters
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.routed_experts import in_order
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.utils.keywords import checked_keywords
from jaxrl_llm.utils.process import stop_if

logger = logging.getLogger("jaxrl_llm.sampling")

CHUNK = 16  # tokens between two checks for stop strings


class StreamArguments(NamedTuple):
    """Arguments of `stream`."""

    requests: list[Request]  # those of one prompt are next to each other
    settings: DrawSettings
    cut: Cut | None  # finds where a stop string ends a completion; None without stop strings


@checked_keywords()
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
    format: PromptFormat | None = None,
    prompt_ids: Sequence[int] | None = None,
    policy_step: int = 0,
    slots: int = 0,
    allowed: Sequence[int] | np.ndarray | None = None,
    cache_dtype: Any = None,
    weight_dtype: Any = None,
    speculative_tokens: int = 0,
    drafts: Drafts | None = None,
    record_experts: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    stats: Stats | None = None,
    on_completion: Callable[[Completion], None] | None = None,
) -> Trajectories:
    """Sample `group_size` completions of each prompt.

    prompts: strings (formatted with the chat template if the model has one), lists of chat messages, or lists of token
    ids, which are used as they are. The samples of a prompt share one prefill.
    key: a JAX random key. A token depends only on (key, prompt id, sample number, position), not on the batch, its
    order, or how it is split. Use another key for each step, e.g. fold the step number into it.
    temperature: 0 is greedy, with `behaviour_logp` under the untempered distribution.
    top_k, top_p, min_p: applied in this order. `behaviour_logp` is under the truncated distribution, which the trainer
    reconstructs from `support_floor`.
    stop: strings that end a completion at the token which completes them. stop_token_ids: by default the model's
    end-of-sequence tokens; [] for none. The last token is part of the completion, and an action.
    format: options of the chat template, or plain or rendered texts; see `data.PromptFormat`.
    prompt_ids: an int for each prompt, its index in the data set, on which the noise is keyed; by default 0, 1, 2 ...
    slots: decode at most this many samples at a time (0: all); when one ends, the next takes its slot. This changes
    memory and speed only.
    allowed: token ids, or bool[V], that may be sampled; None: all. `behaviour_logp` is under the distribution over
    them. With `allowed` or filters, `untruncated_logp` is under the model's own distribution.
    cache_dtype: dtype of keys and values, e.g. jnp.bfloat16, or int8 or float8_e4m3fn with a scale for each vector; by
    default that of the policy's activations.
    weight_dtype: int8 or float8 rounds the projections of layers, int8_blocks or float8_blocks what they are multiplied
    with too; `behaviour_logp` is under the rounded weights. By
    default the policy's own rounding, if any.
    speculative_tokens: once few completions are unfinished, draft this many tokens of each and verify them in one pass;
    0 is off. Drafts are what followed the last tokens before: in the completion, in others of the prompt, and in
    `drafts`, completions of earlier calls, to which those of this call are added. No token changes, but where two
    scores tie within rounding; log-probabilities are those of the verifying pass.
    With a hook (`Policy.hook`) tokens are drawn through it, with its first numbers, which are then in info.
    record_experts: of a mixture of experts, also give `experts`, those that each token went through, prompts included;
    an update with them replays this routing. They take layers x k bytes a token (2 of more than 128 experts).
    mesh: shards rows over its axes but "tensor", and heads and vocabulary over "tensor"; the parameters must be on it.
    stats: filled in with counts and times. on_completion: called with each completion as it ends.

    Returns Trajectories of len(prompts) * group_size rows, those of a prompt next to each other; after Ctrl-C, of the
    finished rows only, or KeyboardInterrupt if there is none.
    Raises InputError for settings out of range, empty prompts, and prompts that leave no room in the context.
    """
    check_params(policy, params)
    checks.check_running(slots, policy_step, cache_dtype, mesh, stats, on_completion)
    kind_of(weight_dtype)
    check_number("speculative_tokens", speculative_tokens, least=0, most=64, whole=True)
    asked = requests_of(
        policy, prompts, key, group_size=group_size, max_new_tokens=max_new_tokens, temperature=temperature,
        top_p=top_p, top_k=top_k, min_p=min_p, stop=stop, stop_token_ids=stop_token_ids, system_prompt=system_prompt,
        prompt_ids=prompt_ids, allowed=allowed, format=format,
    )  # fmt: skip
    requests, settings, cut = asked
    hook = policy.hook
    truncating = settings.filters is not None or (hook is not None and hook.remember is not None)
    found: dict[int, Completion] = {}
    has_stats, stats = stats is not None, Stats() if stats is None else stats
    weights = take_weights(policy, params, mesh, weight_dtype)
    completions = stream(
        policy, weights, requests, settings, slots=slots, cache_dtype=cache_dtype, cut=cut,
        chunk=CHUNK if stop else LONG_CHUNK, policy_step=policy_step, stats=stats,
        speculative_tokens=speculative_tokens, drafts=drafts, record_experts=record_experts,
    )  # fmt: skip
    with closing(completions):  # also where `on_completion` raises
        for completion in completions:
            if not completion.unfinished:
                found[completion.index] = completion
                if on_completion is not None:
                    on_completion(completion)
    if stats.interrupted:
        stop_if(not found)
        if not has_stats:  # else the caller reads it from `stats`
            logger.warning("interrupted: %d of %d completions are finished", len(found), len(requests))
    rows = [
        BatchRow(
            requests[i].prompt, found[i].tokens, found[i].truncated, requests[i].prompt_id, i // group_size,
            experts=in_order(len(requests[i].prompt), found[i].prompt_experts, found[i].tokens),
        )
        for i in sorted(found)
    ]  # fmt: skip
    batch = assemble(rows, temperature or 1.0, truncating, policy_step)
    if hook is not None and hook.state:
        batch = batch.with_info(**{name: jnp.full(len(rows), x, jnp.float32) for name, x in hook.state})
    return jax.device_put(batch)


def requests_of(
    policy: Policy,
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
    allowed: Sequence[int] | np.ndarray | None = None,
    format: PromptFormat | None = None,
) -> StreamArguments:
    """The arguments of `stream` for these arguments of `sample`. Raises InputError as `sample` does."""
    check_policy(policy)
    check_key(key)
    checks.check_numbers(group_size, max_new_tokens, temperature, top_p, top_k, min_p)
    checks.check_prompts(policy, prompts, stop)
    ids = [encode_prompt(policy.tokenizer, one, system_prompt=system_prompt, format=format) for one in prompts]
    checks.check_ids(policy, ids, max_new_tokens)
    names = checks.checked_prompt_ids(prompt_ids, len(ids))
    settings = settings_of(policy, key, temperature, top_p, top_k, min_p, stop_token_ids, allowed)
    # A prompt id that occurs twice gets new sample numbers, hence new noise.
    seen: Counter[int] = Counter()
    requests = []
    for prompt, name in zip(ids, names, strict=True):
        for number in range(group_size):
            requests.append(Request(tuple(prompt), max_new_tokens, name, seen[name] * group_size + number))
        seen[name] += 1
    return StreamArguments(requests, settings, cut_at(policy.tokenizer, stop) if stop else None)


def settings_of(
    policy: Policy,
    key: jax.Array,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop_token_ids: Sequence[int] | None = None,
    allowed: Sequence[int] | np.ndarray | None = None,
) -> DrawSettings:
    """The engine's `DrawSettings`; the arguments are those of `sample`."""
    truncating = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
    mask = None if allowed is None else checks.allowed_tokens(allowed, policy.config.vocab_size)
    limits: Any = np.int32(top_k), np.float32(top_p), np.float32(min_p)
    return DrawSettings(
        seed=seed_of(key),
        temperature=jax.device_put(np.float32(temperature)),
        filters=jax.device_put(Filters(*limits)) if truncating else None,
        allowed=mask,
        stop_tokens=jax.device_put(np.asarray(checks.checked_stop_tokens(stop_token_ids, policy), np.int32)),
    )


def cut_at(tokenizer: Any, stop: Sequence[str]) -> Cut:
    """A `Cut` that ends a completion after the token that completes the first stop string."""

    def cut(tokens: np.ndarray) -> int | None:
        ids = tokens.tolist()
        if not any(s in prompt_text(tokenizer, ids) for s in stop):
            return None
        low, high = 1, len(ids)  # the text of a prefix grows with the prefix
        while low < high:
            middle = (low + high) // 2
            text = prompt_text(tokenizer, ids[:middle])
            low, high = (low, middle) if any(s in text for s in stop) else (middle + 1, high)
        return low

    return cut


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled; see `sampling.sample` for the fields."""

    max_new_tokens: int = 128
    """Longest completion, tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling: above 0, at most 1 (off)."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Sample among tokens of at least this fraction of the greatest probability; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    slots: int = 0
    """Completions decoded at a time; 0: all of a step."""
    cache_dtype: Any = None
    """Dtype of keys and values; None: the policy's."""
    speculative_tokens: int = 0
    """Tokens drafted and verified in one pass once few completions are unfinished; 0 is off."""
    weight_dtype: Any = None
    """int8, float8, int8_blocks or float8_blocks, to which projections are rounded; None: as the policy has it."""

    @property
    def truncating(self) -> bool:
        """Whether top-k, top-p or min-p truncates the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
