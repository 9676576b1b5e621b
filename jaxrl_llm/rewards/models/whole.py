"""Reward models as reward functions: whole completions scored on a run's devices."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax
import numpy as np

from jaxrl_llm.data.chat.encode import encode_plain, has_chat_template, is_conversation
from jaxrl_llm.data.chat.inert import guarded
from jaxrl_llm.data.chat.rendering import Rendering
from jaxrl_llm.distributed import mesh_of, shardings_over
from jaxrl_llm.models import load_reward_model
from jaxrl_llm.models.io.reward_model import read_scoring
from jaxrl_llm.rewards.models.scorer import Scorer
from jaxrl_llm.utils.errors import several

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
        """On the default device."""
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
