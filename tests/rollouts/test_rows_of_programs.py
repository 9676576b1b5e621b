"""How many episodes a program returns, against what it declares: the bound is kept, and reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fake_engine
import pytest
from fake_engine import Ran, begin

from jaxrl_llm.algorithms.policy_loss.ppo_max import with_demonstration
from jaxrl_llm.algorithms.prompts.dars import topped_up
from jaxrl_llm.algorithms.regularisation.aepo_arbitrary_entropy import with_tempered
from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.auxiliary_prompts import recycled, with_predictions
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.candidates import with_candidates
from jaxrl_llm.rollouts.guidance.prefixes import prefixed_groups
from jaxrl_llm.rollouts.guidance.prompted import taught
from jaxrl_llm.rollouts.guidance.repair import succeeds
from jaxrl_llm.rollouts.guidance.responses import demonstrated
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.trees import entropy_forks, tree

ROW = {"trace": "1 2 3 4 5 6 7 8", "teacher": ["1 2"], "teachers": ["1 2", "3 4", "5", "6"], "answer": "6"}
BOUNDS: dict[str, tuple[Rollout, int]] = {  # of four samples
    "group": (group(), 4), "tree": (tree(0, 1), 4), "larger tree": (tree(0, 1, branches=3), 9),
    "forks": (entropy_forks(2, 1, 2), 6), "prefixes": (prefixed_groups(prefixes=2), 12),
    "predictions": (with_predictions(3), 7), "predictions, as many": (with_predictions(), 8),
    "recycled": (recycled(1.0), 12), "not recycled": (recycled(0.0), 4), "candidates": (with_candidates(), 12),
    "topped up": (topped_up(9), 9), "tempered": (with_tempered(1.2, 1.0), 8), "taught": (taught(succeeds()), 6),
    "demonstrated": (demonstrated(), 1), "with a demonstration": (with_demonstration(tree(0, 1)), 5),
}  # fmt: skip


class Speaker(fake_engine.Words):
    """Every completion states an answer."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(text), *map(len, text.split())]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "it is 9"


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_is_kept_and_reached(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of which no sample succeeds, so that all is done for them that can be."""

    async def score(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        return [episode.scored(0.0, {"right": 0.0}) for episode in episodes]

    monkeypatch.setattr(fake_engine, "score", score)
    monkeypatch.setattr(fake_engine, "Words", Speaker)
    rollout, bound = BOUNDS[name]
    assert rollout.rows(4) == bound
    found: Any = Ran(begin(range(8), 4), Rule(), rollout, row=ROW).found.groups
    assert not any(one.failed for one in found)
    sizes = [len(one.episodes) for one in found]
    assert max(sizes) <= bound
    assert max(sizes) == (bound if name != "candidates" else 8), "of the teacher's responses none is right here"
