"""The comparisons: each family of methods with the task that is made for it.

Results are of e, f, g and j. Of a to d there were short trials only, see RESULTS.md.
"""

from __future__ import annotations

from experiments.experience import sampling_tasks, tasks
from experiments.experience.compare import Family, Method

FAMILIES = {
    family.key: family
    for family in (
        Family(
            "a", "curricula",
            "400 prompts, of which 360 are never right, whatever the answer. For the other 40 the policy guesses among "
            "four digits, of which one is right. Those 40 are measured.",
            sampling_tasks.mostly_impossible,
            [Method("vade")],
        ),
        Family(
            "b", "counts",
            "4 prompts are right once in 100 guesses, and 28 whatever the answer. Those 4 are measured.",
            tasks.few_hard,
            [Method("dars"), Method("gdro", {"controller": "samples", "most_samples": 32, "kl_coefficient": 0.0})],
        ),
        Family(
            "c", "hints and repair",
            "A lock: each prompt has a key of four digits, and only the whole key is right. The policy was taught to "
            "copy from a hint and to guess the rest.",
            tasks.sparse_lock,
            [
                Method("nurl", {"source": "column"}),
                Method("ghpo", {"stages": 1}),
                Method("scaf_grpo", {"hints_from": 0}),
            ],
        ),
        Family(
            "d", "given prefixes",
            "The lock of c; the key is stored as a trace, whose first digits are given to half of the samples.",
            tasks.sparse_lock,
            [Method("prefixrl")],
        ),
        Family(
            "e", "trees",
            "Answers of eighteen digits, of which only the last two matter: they must be a key, the same for all "
            "prompts, right once in 100 guesses. Trees fork after the first sixteen, which are then sampled once.",
            sampling_tasks.late_key,
            [
                Method(
                    "treepo",
                    {"segment": 16, "depth": 2, "first_least": 1, "first_most": 1, "branches": 16,
                     "dynamic_sampling": False},
                ),
                Method("branchgrpo", {"forks": 2, "spacing": 16, "branches": 4}),
                Method(
                    "spo_segment",
                    {"form": "tree", "segment": 16, "levels": 2, "branches": 4, "kl_coefficient": 0},
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
