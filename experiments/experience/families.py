"""The comparisons: each family of methods with the task that is made for it."""

from __future__ import annotations

from experiments.experience import tasks
from experiments.experience.compare import Family, Method

FAMILIES = {
    family.key: family
    for family in (
        Family(
            "c", "hints and repair",
            "A lock: each prompt has a key of four digits out of six, and only the whole key is right, once in 1,296 "
            "guesses. The policy was taught to copy from a hint and to guess the rest; hints show two digits (`nurl`, "
            "`ghpo`), or one to three (`scaf_grpo`). Measured without hints.",
            tasks.sparse_lock,
            [
                Method("nurl", {"source": "column"}),
                Method("ghpo", {"stages": 1}),
            ],
        ),
        Family(
            "d", "given prefixes",
            "The lock of c, with its key as a trace whose first digits are given.",
            tasks.sparse_lock,
            [Method("prefixrl")],
        ),
        Family(
            "f", "replay",
            "Answers of three digits, right once in 1,000 guesses at first: a success is a rare event, and seen once.",
            tasks.rare,
            [Method("arpo_replay")],
        ),
        Family(
            "g", "rewards that say more",
            "Answers of four digits of which only the whole is right, once in 10,000 guesses; the verifier also returns "
            "which digits pass, as tests of a program do.",
            tasks.all_tests,
            [Method("verpo")],
        ),
    )
}  # fmt: skip
