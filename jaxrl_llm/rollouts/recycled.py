"""Groups whose second questions are made of the answers to the first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.auxiliary_prompts import Question, also_ask, problem_text
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, sampled_ids
from jaxrl_llm.rollouts.guidance.repair import succeeds


def final_answer(text: str) -> str | None:
    r"""The answer that a response states last: \boxed{...}, else <answer>...</answer>, else its last number; or None.

    >>> final_answer(r"so \boxed{\frac{1}{2}}, that is 0.5"), final_answer("it is 4, or 5."), final_answer("no")
    ('\\frac{1}{2}', '5', None)
    """
    if (start := text.rfind(r"\boxed{")) >= 0:
        depth, first = 0, start + len(r"\boxed{")
        for place in range(first - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[first:place].strip() or None
    for pattern in (r"<answer>\s*(.*?)\s*</answer>", r"(-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?)"):
        if found := re.findall(pattern, text, flags=re.DOTALL):
            return found[-1] or None
    return None


def recycled_items(
    random: Any, problem: str, texts: Sequence[str], right: Sequence[bool], pointwise: float = 0.3, whole: float = 0.5
) -> tuple[Question | None, Question | None]:
    """A question that judges scored responses, and one that corrects a wrong response; None where there is none.

    All right: whether the first stated answer is right (yes). All wrong: whether a random one is (no). Mixed: with
    probability `pointwise` whether a random one is, right or wrong alike, else which of a right and a wrong one is
    right (A or B). Any wrong: to solve the problem again after a wrong response, of which `whole` of the questions show
    the text, the others the stated answer. Responses without a stated answer are not judged.

    random: a NumPy generator.
    """

    def pick(options: Sequence[Any]) -> Any:
        return options[int(random.integers(len(options)))]

    stated = [final_answer(text) for text in texts]
    good = [a for a, is_so in zip(stated, right, strict=True) if is_so and a is not None]
    bad = [a for a, is_so in zip(stated, right, strict=True) if not is_so and a is not None]
    judge: Question | None = None
    if good and bad and random.random() >= pointwise:
        first = random.random() < 0.5
        pair = (pick(good), pick(bad)) if first else (pick(bad), pick(good))
        text = pick(COMPARE).format(problem=problem, first=pair[0], second=pair[1])
        judge = Question(text, "A" if first else "B")
    elif good or bad:
        is_good = bool(good) and (not bad or random.random() < 0.5)
        answer = pick(bad) if not is_good else good[0] if all(right) else pick(good)
        judge = Question(pick(JUDGE).format(problem=problem, answer=answer), "yes" if is_good else "no")
    wrong = [text for text, is_so in zip(texts, right, strict=True) if not is_so]
    attempt = pick(wrong) if wrong and (random.random() < whole or not bad) else pick(bad) if bad else None
    reflect = None if attempt is None else Question(pick(REFLECT).format(problem=problem, attempt=attempt), None)
    return judge, reflect


@part
def recycled(share: float = 0.5, pointwise: float = 0.3, whole: float = 0.5, success: float = 0.5) -> Rollout:
    """A scored group, and groups of questions about it that are made by `recycled_items`.

    share: the probability with which a judging question is asked, and likewise a correcting one; 0: this is `group`.
    Judgements are group 1 and corrections group 2, see `also_ask`. A response is right with a reward above `success`.
    """
    for name, value in {"share": share, "pointwise": pointwise, "whole": whole}.items():
        check_number(name, value, least=0, most=1)
    is_right = succeeds(success)

    async def questions(tools: Tools, task: Task, group: list[Episode]) -> dict[int, Question]:
        random, texts = tools.random("recycled"), [tools.decode(sampled_ids(one)) for one in group]
        kept, right = random.random(2) < share, list(map(is_right, group))
        items = recycled_items(random, problem_text(tools, task), texts, right, pointwise, whole)
        return {part: item for part, item in enumerate(items, start=1) if item is not None and kept[part - 1]}

    return replace(also_ask(questions, 2 if share else 0), name="recycled")


JUDGE = (
    "{problem}\n\nA proposed answer: {answer}\n\nIs it right? Think, then write \\boxed{{yes}} or \\boxed{{no}}.",
    "Judge the answer {answer} to this problem:\n\n{problem}\n\nEnd with \\boxed{{yes}} if it is right, \\boxed{{no}} "
    "if it is wrong.",
)
COMPARE = (
    "{problem}\n\nAnswer A: {first}\nAnswer B: {second}\n\nWhich one is right? Think, then write \\boxed{{A}} or "
    "\\boxed{{B}}.",
    "One of two answers to this problem is right:\n\n{problem}\n\nA: {first}\nB: {second}\n\nEnd with \\boxed{{A}} or "
    "\\boxed{{B}}.",
)
REFLECT = (
    "{problem}\n\nA wrong attempt:\n{attempt}\n\nFind the mistake, then solve the problem.",
    "This attempt at a problem is wrong.\n\nProblem: {problem}\n\nAttempt: {attempt}\n\nSolve the problem again.",
)
