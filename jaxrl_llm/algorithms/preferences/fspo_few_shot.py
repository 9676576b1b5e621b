from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import Code, Positive, check_number
from jaxrl_llm.core.parts import chain
from jaxrl_llm.data.columns import CHOSEN, REJECTED
from jaxrl_llm.objectives import loss_named, pairwise
from jaxrl_llm.objectives.preference.losses import of_sums
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected
from jaxrl_llm.utils.errors import InputError, several, shown


@method(paper="arXiv 2502.19312", test="test_few_shots.py::test_fspo_few_shot_by_loop")
@run_settings(*given_responses(2))
def fspo_few_shot(beta: Code[Positive] = 0.01) -> Algorithm:
    """Few-Shot Preference Optimization (FSPO).

    A pair is learnt behind labelled pairs of the same user, so that one model adapts to a user in its context.
    `few_shot_rows` makes such rows of pairs with a column that names the user. With h the difference of the log-ratios
    to the reference, sums over tokens, of the preferred and the other response,

        loss = mean over pairs of (h - 1 / (2 beta))^2

    The supervised stage before it is a run of `sft` with the preferred responses, on whose model this one begins.
    """
    return Algorithm(chain(), pairwise(of_sums(loss_named("ipo")), beta), rollout=chosen_and_rejected())


def few_shot_rows(
    rows: Sequence[Mapping[str, Any]], user: str = "user", shots: int = 4, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows with prompt, chosen and rejected, each behind `shots` other ones of its user with other questions.

    rows: with the same columns, texts, and the user's name in the column `user`. The shots are drawn by `seed` and the
    place of the row. A row of a user with fewer questions besides its own has as many as there are. InputError for
    rows without these texts, and if no user has two questions.
    """
    check_number("shots", shots, least=1, whole=True)
    of_user = defaultdict[Any, list[int]](list)
    for number, row in enumerate(rows):
        for column in ("prompt", CHOSEN, REJECTED, user):
            if not isinstance(row.get(column), str) and (column != user or row.get(column) is None):
                raise InputError(f"row {number} has no text in the column {column!r}: found {shown(row.get(column))}")
        of_user[row[user]].append(number)
    made, alone = [], 0
    for number, row in enumerate(rows):
        others = {rows[at]["prompt"]: at for at in of_user[row[user]] if rows[at]["prompt"] != row["prompt"]}
        alone += not others
        order = np.random.default_rng([seed, number]).permutation(len(others))[:shots]
        examples = [rows[list(others.values())[at]] for at in order]
        made.append({**row, "prompt": in_context(examples, row["prompt"])})
    if alone == len(rows):
        raise InputError(f"{several(alone, 'row')}, but no user has two questions: there are no examples to learn from")
    return made


def in_context(examples: Sequence[Mapping[str, Any]], question: str) -> str:
    """The prompt of a question behind labelled pairs, as in the released code.

    >>> print(in_context([{"prompt": "a?", "chosen": "b", "rejected": "c"}], "d?"))
    # Example 1
    ## Question
    a?
    ## Preferred Response
    b
    ## Dispreferred Response
    c
    <BLANKLINE>
    # Task
    ## Question
    d?
    """
    parts = [
        f"# Example {number}\n## Question\n{one['prompt']}\n## Preferred Response\n{one[CHOSEN]}\n"
        f"## Dispreferred Response\n{one[REJECTED]}\n"
        for number, one in enumerate(examples, start=1)
    ]
    return "\n".join([*parts, f"# Task\n## Question\n{question}"])
