"""The comparisons: each family of methods with the task that is made for it.

Results are of c, e, f, f2, g and j. Of a, b and d there were short trials only, see RESULTS.md.
"""

from __future__ import annotations

from experiments.experience import locks, tasks
from experiments.experience.compare import Family, Method

FAMILIES = {
    family.key: family
    for family in (
        Family(
            "a", "curricula",
            "24 prompts can be learnt, of 256: others are right whatever the answer, or never. Those 24 are measured.",
            tasks.long_tail,
            [Method("vade"), Method("v0_value")],
        ),
        Family(
            "b", "counts",
            "4 prompts are right once in 100 guesses, and 28 whatever the answer. Those 4 are measured.",
            tasks.few_hard,
            [Method("dars"), Method("gdro", {"controller": "samples", "most_samples": 32, "kl_coefficient": 0.0})],
        ),
        Family(
            "c", "hints and repair",
            "A lock: each prompt has a key of three letters out of twelve, and only the whole key is right, once "
            "in 1,728 guesses. A right answer to each prompt is stored, for a group that fails.",
            locks.lock,
            [Method("ampo_multi_guidance")],
        ),
        Family(
            "d", "given prefixes",
            "The lock of c; the key is stored as a trace, of which the first one or two letters are given to half of "
            "the samples.",
            locks.lock,
            [Method("prefixrl", {"prefix_low": 0.34, "prefix_high": 1.0})],
        ),
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
            "f2", "replay of what came before",
            "The first quarter of the steps has four prompts with an answer of their own out of 0 to 4, the others "
            "have four for which any of 5 to 9 is right. All eight are measured at the end.",
            locks.one_after_the_other,
            [
                Method("wmar_reservoir_replay", {"replay_share": 0.5}),
                Method("symphony_fading_replay", {"replay_share": 0.5}),
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
