"""Process reward models as reward functions, which score steps one by one; and rewards by the name of a model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from jaxrl_llm.data.step_labels import NO_LABEL, SEPARATOR, LabelledSteps, encode_steps
from jaxrl_llm.models.config import ScoreHead
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.models.io.reward_model import read_scoring
from jaxrl_llm.rewards.entries import REWARD, SPANS
from jaxrl_llm.rewards.models.whole import ModelReward
from jaxrl_llm.rewards.specs import DENSE, MODEL, PIECES, ModelName
from jaxrl_llm.rewards.workers.runner import Reward
from jaxrl_llm.utils.errors import InputError, shown

WORTHS = (0.0, 1.0)  # of the classes wrong and right


@dataclass(frozen=True, eq=False)
class StepReward:
    """The reward function of a process reward model.

    Its classes c of a step have worths w_c, and a step is worth sum_c p_c w_c with the p_c that the model gives at the
    separator after it. Of "steps" and "sentences" each earns that where it ends, as a span, and the completion itself
    earns 0; of "worst_step" the completion earns what its worst step is worth, which is the least worth where it has
    no step. Prompt and steps are texts, tokenised one by one as in training (`encode_steps`). What is longer than the
    model's context is not scored.
    """

    model: ModelReward
    kind: str  # a name of `PIECES`
    worths: tuple[float, ...] = WORTHS
    separator: str = SEPARATOR  # after each step
    own_limits: ClassVar[bool] = True  # as of a reward model

    def refuses(self, prompt: Any, turns: bool) -> str:
        """As of `ModelReward`: of conversations it scores replies to one message."""
        if turns or not (isinstance(prompt, str) or len(prompt) == 1):
            return "scores the steps of a text or of a reply to one message, not of conversations: use model:PATH here"
        return ""

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the model's files."""
        return self.model.digest

    @property
    def provides(self) -> frozenset[str]:
        """The entries that it returns."""
        return frozenset({SPANS} if self.kind in DENSE else ())

    def __call__(
        self, prompts: list[Any], completions: list[str], reply_start: list[str] | None = None
    ) -> dict[str, list[Any]]:
        """The rewards, None where a completion is not scored, and the spans of steps. InputError for prompts that are
        neither texts nor one message."""
        starts = reply_start or [""] * len(prompts)
        pieces = [_pieces(self.kind, text, start) for text, start in zip(completions, starts, strict=True)]
        values = self._values([_text(prompt) for prompt in prompts], [[text for *_, text in one] for one in pieces])
        self.model.say_unscored(sum(one is None for one in values))
        if self.kind not in DENSE:
            return {REWARD: [None if one is None else min(one, default=min(self.worths)) for one in values]}
        spans = [
            [(first, last, value) for (first, last, _), value in zip(some, one or [], strict=False) if last > first]
            for some, one in zip(pieces, values, strict=True)
        ]
        return {REWARD: [None if one is None else 0.0 for one in values], SPANS: spans}

    def _values(self, prompts: Sequence[str], steps: Sequence[Sequence[str]]) -> list[list[float] | None]:
        """What the steps of each completion are worth; None for one that is too long."""
        tokenizer = self.model.tokenizer
        rows = [
            encode_steps(tokenizer, prompt, some, [0] * len(some), separator=self.separator) if some else None
            for prompt, some in zip(prompts, steps, strict=True)
        ]
        scores = iter(self.model.ready.of_tokens([row.tokens for row in rows if row is not None]))

        def values(row: LabelledSteps | None) -> list[float] | None:
            if row is None:
                return []
            if (own := next(scores)) is None:
                return None
            ends = own[np.asarray(row.labels) != NO_LABEL]
            odds = np.exp(ends - ends.max(axis=1, keepdims=True))
            return list(odds @ np.asarray(self.worths) / odds.sum(axis=1))

        return [values(row) for row in rows]

    def on_mesh(self, mesh: jax.sharding.Mesh, dtype: Any) -> StepReward:
        """The function with its model on the devices of a run, as `ModelReward.on_mesh`."""
        return dataclasses.replace(self, model=self.model.on_mesh(mesh, dtype))


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    contents = [one.get("content") for one in prompt] if isinstance(prompt, Sequence) else []
    if len(contents) != 1 or not isinstance(contents[0], str):
        raise InputError(f"a process reward model reads prompts that are texts or one message, not {shown(prompt)}")
    return contents[0]


def _pieces(kind: str, text: str, start: str) -> list[tuple[int, int, str]]:
    """(first, end, text) of each step; places are those in the completion, of which `start` is no part."""
    found = [(one.start(), one.end(), one.group()) for one in PIECES[kind].finditer(start + text)]
    at = len(start)
    return [(max(first - at, 0), max(end - at, 0), piece) for first, end, piece in found]


def model_reward(named: ModelName, weight: float, folder: str | os.PathLike[str] = ".") -> Reward:
    """The reward of a model that is in a folder, or on the hub, named as the last part of its path.

    Its weights are read when it is used, or put on a mesh. InputError for a model without scores, with several where
    one is wanted, and with another number of classes of a step than there are worths.
    """
    local = Path(folder, Path(named.path).expanduser())
    name = str(local) if local.is_dir() else named.path
    found, _, config = read_scoring(name)
    head = config.score or ScoreHead((), None)
    labels = head.labels
    model = ModelReward(name, load_tokenizer(found))
    own = Path(named.path).name
    has = f"{named.path} has {len(labels)} labels ({', '.join(labels[:4])})"
    if named.kind == MODEL:
        if len(labels) != 1:
            raise InputError(
                f"{has}, where a reward wants one: steps:{named.path} scores the steps of a completion with them"
            )
        return Reward(model, weight, own)
    worths = named.worths or WORTHS
    if len(labels) == 1:
        raise InputError(f"{named.path} scores whole completions, not steps: write model:{named.path}")
    if len(labels) != len(worths):
        example = ",".join(str(number) for number in range(len(labels)))
        raise InputError(
            f"{has}, but {named.kind} has the worths of {len(worths)}: write {named.kind}({example}):{named.path} with "
            "the worth of each"
        )
    separator = SEPARATOR if head.step_separator is None else head.step_separator
    return Reward(StepReward(model, named.kind, worths, separator), weight, own)


def on_devices(rewards: Sequence[Reward], mesh: jax.sharding.Mesh, dtype: Any) -> list[Reward]:
    """The rewards, with the models among them on the devices of a run."""
    return [
        dataclasses.replace(reward, function=reward.function.on_mesh(mesh, dtype))
        if isinstance(reward.function, ModelReward | StepReward) else reward
        for reward in rewards
    ]  # fmt: skip
