"""Models of the policy's success rate on each prompt, and rules that draw prompts by what a model predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf


class SuccessModel(NamedTuple):
    """A model over one prompt set. predict: (state, prompts, generator) -> f64[n], success rates within 0 and 1; state
    and the other functions are as those of a `Machine`."""

    predict: Callable[[State, Prompts, np.random.Generator], Array]
    start: Mapping[str, Any] = MappingProxyType({})
    observe: Callable[[State, Outcome], State] | None = None
    metrics: Callable[[State], Mapping[str, float]] | None = None
    on_update: Callable[[State, Trajectories], State] | None = None

    def rule(self, **uses: Any) -> Machine:
        """The rule that learns this model; uses: `score`, `counts` or others, which read the model's state."""
        return Machine(self.start, observe=self.observe, metrics=self.metrics, on_update=self.on_update, **uses)


ModelOf = Callable[[PromptFacts], SuccessModel]


def posterior_mean(facts: PromptFacts) -> SuccessModel:
    """The mean of the prompt's Beta posterior, which is in the record of `choose_prompts`."""
    return SuccessModel(lambda state, prompts, random: prompts.value)


def posterior_sample(facts: PromptFacts) -> SuccessModel:
    """A draw from the prompt's Beta posterior, another each time."""
    return SuccessModel(lambda state, prompts, random: random.beta(prompts.alpha, prompts.beta))


def prefer(score: Callable[[Array], Array], model: ModelOf) -> RuleOf:
    """Draw prompts by scores of predicted success rates; score: f64[n] -> log-weights f64[n]."""

    def make(facts: PromptFacts) -> Machine:
        own = model(facts)
        return own.rule(score=lambda state, prompts, random: score(own.predict(state, prompts, random)))

    return make
