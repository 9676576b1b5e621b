"""The comparisons: each family of methods with the task that is made for it."""

from __future__ import annotations

from experiments.experience import locks, reference_tasks, sampling_tasks, tasks
from experiments.experience.compare import Family, Method

FAMILIES = {
    family.key: family
    for family in (
        Family(
            "a", "curricula",
            "80 prompts, of which 72 are never right, whatever the answer. For the other 8 the policy guesses among "
            "four digits, of which one is right. Those 8 are measured.",
            sampling_tasks.mostly_impossible,
            [Method("vade"), Method("sgpo", {"stage_steps": 15})],
        ),
        Family(
            "b", "counts",
            "4 prompts are right once in 100 guesses, and 28 with any two digits. Those 4 are measured.",
            sampling_tasks.few_hard,
            [
                Method("dars", {"rule": "hard", "most_samples": 64}),
                Method(
                    "gdro",
                    {"controller": "samples", "most_samples": 32, "bandit_rate": 2.0, "kl_coefficient": 0.0},
                    why="2.0 at the end: its seeds differ widely, as the bandit has to find out first which prompts "
                    "need samples.",
                ),
            ],
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
            "All prompts have the same key of three letters, one of twenty for each place, and only the whole key is "
            "right, once in 8,000 guesses. It is stored as a trace, of which the first one or two letters are given to "
            "half of the samples; the policy was taught which letters each place can have.",
            locks.combination_lock,
            [Method("prefixrl", {"prefix_low": 0.34, "prefix_high": 1.0})],
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
            "h", "sampler temperature",
            "Each prompt has a digit that the policy draws in most of its samples and that is worth a half, and one "
            "that is worth 1 and drawn once or twice in a hundred.",
            sampling_tasks.decoys,
            [Method("aepo_arbitrary_entropy", {"target_entropy": 1.0, "hot": 3.0, "tempered_share": 0.5})],
        ),
        Family(
            "i", "moving references",
            "Each prompt has one letter of 36 that is worth 1, and 18 that are worth a half. The policy guesses at "
            "first, and must neither settle on a half nor stay near its guesses.",
            reference_tasks.traps,
            [
                Method(
                    "grpo", {"kl_coefficient": 0.5},
                    why="the coefficient of `remix`, but towards the policy at the start: it cannot become certain.",
                ),
                Method("grpo", {"kl_coefficient": 0.1}),
                Method("remix", {"kl_coefficient": 0.5}),
                Method("remix", {"kl_coefficient": 0.5, "past_share": 0.0}),
                Method("remix", {"kl_coefficient": 0.5, "past_share": 0.0, "switch": 1000}),
            ],
        ),
        Family(
            "j", "supervised rows",
            "The task of g; here the answers are texts to learn from, and their tokens count as if they were sampled.",
            tasks.all_tests,
            [Method("otr", {"penalty": 0.0}, {"group_size": 1, "prompts_per_step": 64})],
        ),
    )
}  # fmt: skip
