"""The comparisons: each family of methods with the task that is made for it."""

from __future__ import annotations

from experiments.experience import tasks
from experiments.experience.compare import Family, Method

FAMILIES = {
    family.key: family
    for family in (
        Family(
            "e", "trees",
            "Answers of eight digits out of five, of which each right one earns an eighth: the score of a sample says "
            "little of any one digit. Trees fork every two tokens, and tokens before a fork are sampled once.",
            tasks.many_digits,
            [
                Method(
                    "spo_segment",
                    {"form": "tree", "segment": 2, "levels": 4, "branches": 2, "kl_coefficient": 0},
                    why="below GRPO; not explained. Perhaps forks into two give values of too few leaves.",
                ),
                Method(
                    "treepo",
                    {"segment": 2, "depth": 4, "first_most": 2, "dynamic_sampling": False},
                    why="below GRPO; not explained. Perhaps because leaves share digits, so that groups have fewer.",
                ),
            ],
        ),
        Family(
            "f", "replay",
            "Answers of two digits, right once in 100 guesses at first: most groups of a prompt have no success.",
            tasks.rare,
            [
                Method(
                    "arpo_replay",
                    why="2.9 at the end, and 4.6 in the mean of the curve: seeds differ by more than for GRPO.",
                )
            ],
        ),
        Family(
            "g", "rewards that say more",
            "Answers of four digits of which only the whole is right, once in 10,000 guesses; the verifier also says "
            "which digits pass, as tests of a program do.",
            tasks.all_tests,
            [Method("verpo")],
        ),
        Family(
            "j", "supervised rows",
            "The task of g; here the answers are texts to learn from, and their tokens count as if they were sampled.",
            tasks.all_tests,
            [Method("otr", {"penalty": 0.0}, {"group_size": 1, "prompts_per_step": 64})],
        ),
    )
}  # fmt: skip
