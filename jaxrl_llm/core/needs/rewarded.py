"""Needs that reward functions provide, as scores or beside them."""

from __future__ import annotations

from jaxrl_llm.core.needs.placeholders import StandIn, uniform, whole
from jaxrl_llm.core.needs.types import Need, in_info, reward_entry

REWARDED = (
    in_info(
        "answer_key", "[N]", "equal for equal answers to a prompt, -1 without an answer",
        StandIn("whole completions are compared", whole(3)),
        provider=reward_entry("answer_key", "number_match", "math_verify", "exact_match", "tagged_match"),
    ),
    in_info(
        "tests", "[N, U]", "results of U tests of the completion; [N, K, U] of each turn's",
        StandIn("the components of the reward", whole(2, 3)), provider=reward_entry("tests"),
    ),
    Need(
        "spans", "batch.token_rewards", "[N, L]", "rewards of parts of the completion, each where its part ends",
        StandIn("none", lambda random, logp: random.integers(0, 2, logp.shape) * 0.25),
        provider=reward_entry("spans", "'coverage(COLUMN)'", "steps:PATH"),
    ),
    in_info(
        "distance", "[N]", "how far a failure is from the successes of its prompt",
        StandIn("failures are not graded", uniform(0, 2, rows=True)),
        provider=reward_entry("distance", "'distances(number_match)'"),
    ),
    Need(
        "sound", "rewards['sound']", "[N]", "above 0.5 where the derivation of the answer is sound",
        StandIn("every derivation is sound", whole(2)), provider="--rewards ... 'FILE.py:sound*0', a judge",
    ),
    in_info(
        "votes", "[N, C]", "how close each of C clients says that the row is to its own texts",
        StandIn("the reward is the vote of one client", uniform(-1, 1, 3, rows=True)), provider=reward_entry("votes"),
    ),
    *(
        Need(
            name, f"rewards['{name}']", "[N]", meaning, StandIn("the combined reward", whole(2)),
            provider=f"--rewards {name}",
        )
        for name, meaning in {
            "one_answer": "how nearly the completion has one answer between tags",
            "gui_action": "1 where the action on the screen is the expected one",
            "gui_format": "1 where the answer is a list of well-formed actions",
            "box_overlap": "mean overlap of the answer's boxes with the expected ones",
            "box_confidence": "mean confidence in the boxes that match, and doubt of those that do not",
            "box_format": "1 where the answer is a list of boxes with confidences",
            "class_match": "1 where the answer is the expected name",
            "answer_tags": "1 where the completion has its thoughts and its answer between tags",
        }.items()
    ),
)  # fmt: skip
