"""Reward models as reward functions: whole completions scored on a run's devices, in batches of few sizes."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.shapes import bucket, pad_rows
from jaxrl_llm.data.chat.encode import encode_plain, has_chat_template, is_conversation
from jaxrl_llm.data.chat.inert import guarded
from jaxrl_llm.data.chat.rendering import Rendering
from jaxrl_llm.distributed import mesh_of, shardings_over
from jaxrl_llm.distributed.mesh import on_rows
from jaxrl_llm.models import Policy, load_reward_model
from jaxrl_llm.models.io.reward_model import read_scoring
from jaxrl_llm.models.mesh_axes import row_shards
from jaxrl_llm.models.policy import Params
from jaxrl_llm.models.scores import token_scores
from jaxrl_llm.utils.errors import several
from jaxrl_llm.utils.threads import DISPATCH

BATCH_TOKENS = 2**14  # that a batch has for each shard of rows, padding included, if it has more than one row


class Scorer(NamedTuple):
    """A reward model on its devices."""

    model: Policy
    params: Params

    def scores(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Scores f32[N] of sequences of token ids; NaN for one that is longer than the model's context."""
        found = np.full(len(sequences), np.nan, np.float32)
        for places, scores in self._batches(sequences, Policy.scores):
            found[places] = scores[:, 0]
        return found

    def of_tokens(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray | None]:
        """Scores f32[len, labels] at the tokens of each sequence; None for one that is longer than the context."""
        found: list[np.ndarray | None] = [None] * len(sequences)
        for places, scores in self._batches(sequences, token_scores):
            for place, own in zip(places, scores, strict=True):
                found[place] = own[: len(sequences[place])]
        return found

    def _batches(
        self, sequences: Sequence[Sequence[int]], function: Callable[..., jax.Array]
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """function(model, params, tokens, mask) of batches, each with the places of its sequences.

        They are of bucketed lengths and numbers of rows, so that few programs are compiled. What is longer than the
        model's context is in none.
        """
        context, of_length = self.model.config.max_positions, defaultdict[int, list[int]](list)
        for place, ids in enumerate(sequences):
            if not context or len(ids) <= context:
                of_length[bucket(len(ids), least=32, per_octave=1)].append(place)
        shards = row_shards(self.model.mesh)
        for length, places in sorted(of_length.items()):
            most = shards * max(BATCH_TOKENS // length, 1)
            for first in range(0, len(places), most):
                some = places[first : first + most]
                rows = shards * bucket(-(-len(some) // shards), least=1, per_octave=1)
                filled = [list(sequences[place]) for place in some] + [[0]] * (rows - len(some))
                arrays: Any = pad_rows(filled, length)
                with DISPATCH:  # programs of several devices must reach all of them in one order
                    if self.model.mesh is not None:
                        arrays = jax.device_put(arrays, on_rows(self.model.mesh))
                    found = function(self.model, self.params, *arrays)
                yield some, np.asarray(found)[: len(some)]


logger = logging.getLogger("jaxrl_llm.rewards")


@dataclass(frozen=True, eq=False)
class ModelReward:
    """The reward function of a reward model: the score of prompt and completion, unbounded.

    Both are written by the reward model's own chat template and tokenizer, a prompt that is a text as a message of the
    user. Without a template texts are read as they are, up to the end token. A conversation that is longer than the
    model's context is not scored.
    """

    name: str  # path or name on the hub
    tokenizer: Any
    scorer: Scorer | None = None
    own_limits: ClassVar[bool] = True  # compiling takes long, and a call ends by itself

    def refuses(self, prompt: Any, turns: bool) -> str:
        """Why it cannot score completions of a prompt, which have tools or an environment if `turns`; "" if it can."""
        if has_chat_template(self.tokenizer) or not (turns or is_conversation(prompt)):
            return ""
        return (
            "has no chat template, but scores conversations here: set the chat_template of its tokenizer, or give "
            "prompts that are texts"
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the model's files."""
        total = hashlib.sha256()
        for file in sorted(read_scoring(self.name)[0].iterdir()):
            if file.suffix in (".json", ".safetensors", ".jinja", ".model"):
                with file.open("rb") as opened:
                    total.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def __call__(
        self, prompts: list[Any], completions: list[Any], reply_start: list[str] | None = None
    ) -> list[float | None]:
        """The scores; None: not scored. InputError for conversations without a chat template."""
        starts = reply_start or [""] * len(prompts)
        ids = [encoded(self.tokenizer, *one) for one in zip(prompts, completions, starts, strict=True)]
        scores = self.ready.scores(ids)
        self.say_unscored(int(np.isnan(scores).sum()))
        return [None if np.isnan(score) else float(score) for score in scores]

    @property
    def ready(self) -> Scorer:
        """The model on its devices."""
        return self.scorer or self._here

    def say_unscored(self, count: int) -> None:
        """Log that `count` conversations are too long."""
        if count:
            logger.warning("%s: %s longer than its context, and not scored", self.name, several(count, "conversation"))

    @cached_property
    def _here(self) -> Scorer:
        return Scorer(*load_reward_model(self.name)[:2])

    def on_mesh(self, mesh: jax.sharding.Mesh, dtype: Any) -> ModelReward:
        """The function with its model on the devices of a run, sharded as the policy is; of several hosts, each has a
        whole one on its own devices. InputError where the mesh does not divide the model."""
        if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
            mesh = mesh_of(f"fsdp={jax.local_device_count()}", jax.local_devices())
        model, params, _ = load_reward_model(self.name, dtype=dtype, shardings=shardings_over(mesh))
        model = model if mesh.size == 1 else dataclasses.replace(model, mesh=mesh)
        return dataclasses.replace(self, scorer=Scorer(model, params))


def encoded(tokenizer: Any, prompt: Any, completion: Any, start: str = "") -> list[int]:
    """The token ids of a prompt and its completion, texts or messages, as a reward model reads them.

    start: what the prompt already holds of the reply. The prompt may be [] where the completion holds all. InputError
    for messages without a chat template.
    """
    if not (has_chat_template(tokenizer) or is_conversation(prompt) or is_conversation(completion)):
        ids, end = encode_plain(tokenizer, prompt + start + completion), tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    if said and isinstance(said[0].get("content"), str):
        continued = bool(asked) and asked[-1]["role"] == "assistant" == said[0]["role"]
        if continued and isinstance(begun := asked[-1].get("content"), str):
            start, asked = begun + start, asked[:-1]
        said[0] = {**said[0], "content": start + said[0]["content"]}
    rendering = Rendering(tokenizer)
    messages: list[Mapping[str, Any]] = guarded([*asked, *said], rendering.control)
    return rendering.encode(rendering.render(messages, reply=False))
