"""Reports of verifiers: formulas, numbers, choices, formats, programs, and what rewards return."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from experiments.attacks.public_reports import MENDED, NONE, RIGHT, Report, refuses
from jaxrl_llm.rewards import Reward, score
from jaxrl_llm.rewards.code import case_of, passed
from jaxrl_llm.rewards.verifiers import (
    answer_format_reward,
    exact_match,
    math_verify,
    math_verify_strict,
    number_match,
    think_format_reward,
)

Judged = tuple[str, Any, int]  # a completion, the expected answer, and the right score


def _all(function: Callable[..., list[float]], *cases: Judged) -> Callable[[], bool]:
    """Whether a reward gives the right score to each."""

    def check() -> bool:
        return all(function([text], answer=[answer])[0] == right for text, answer, right in cases)

    return check


def _maths(*cases: Judged) -> Callable[[], bool]:
    return _all(math_verify, *cases)


def _formats(function: Callable[..., list[float]], **cases: int) -> Callable[[], bool]:
    return lambda: all(function([text])[0] == right for text, right in cases.items())


def _scored(function: Callable[..., Any], count: int = 3, **columns: Any) -> tuple[list[float], int, list[float]]:
    """A reward's values, how many failed, and the totals."""
    found = score([Reward(function, name="own")], ["a"] * count, columns)
    return found.components["own"].tolist(), found.failures["own"], found.total.tolist()


async def _judge(completions: Sequence[Any], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [0.5] * len(completions)


VERIFY, OPEN_R1, VERIFIERS = "huggingface/Math-Verify", "huggingface/open-r1", "PrimeIntellect-ai/verifiers"
_TWICE = "so \\boxed{004}.\nBut 2,552,004 ends in 004. So \\boxed{004} is it.\n**Final Answer**\n\\boxed{004}"
_FOUR = "$4\\sqrt(2)$"
_LINES = ("3x + 4y + 14 = 0", "y = -\\frac{1}{2}x + \\frac{3}{4}")

REPORTS = [
    Report(
        f"{VERIFY}#41", "4\\sqrt(2) passes for 4", MENDED, "brackets for braces are read as meant",
        _maths((_FOUR, "4", 0), (_FOUR, "4\\sqrt{2}", 1), ("\\boxed{\\sqrt(x^2+1)}", "\\sqrt{x^2+1}", 1)),
    ),
    Report(
        f"{VERIFY}#37", "\\text{13} is not 13", RIGHT, "",
        _maths(("\\boxed{\\text{13}}", "13", 1)),
    ),
    Report(
        f"{VERIFY}#60", "two different lines pass for each other", RIGHT, "answers without $ are one formula",
        _maths(("\\boxed{3*x-1*y+13=0}", _LINES[0], 0), ("\\boxed{3*x-1*y+13=0}", "3x - y + 13 = 0", 1)),
    ),
    Report(
        f"{VERIFY}#64", "\\sqrt{1/n} is not 1/\\sqrt{n}", RIGHT, "for negative n they differ",
        _maths(
            ("\\boxed{\\sqrt{1/n}}", "\\frac{1}{\\sqrt{n}}", 0), ("\\boxed{\\sqrt{1/4}}", "\\frac{1}{\\sqrt{4}}", 1)
        ),
    ),
    Report(
        f"{VERIFY}#14", "1/2006! passes for 1/2004!, 1 + 1/e for 1 - 1/e, 1:4:9:... for 1:2:3:...",
        MENDED, "small numbers by their ratio, no formula that is cut, dots as text",
        _maths(
            ("\\boxed{\\frac{1}{2006!}}", "\\frac{1}{2004!}", 0),
            ("\\boxed{\\frac{1}{2^{98}}}", "\\frac{1}{2^{99}}", 0),
            ("\\boxed{\\frac{1}{3\\cdot 2^{2006}}}", "\\frac{2^{2005}+1}{3\\cdot 2^{2006}}", 0),
            ("\\boxed{1+\\frac{1}{\\mathrm{e}}}", "1-\\frac{1}{\\mathrm{e}}", 0),
            ("\\boxed{1-\\frac{1}{e}}", "1-\\frac{1}{\\mathrm{e}}", 1),
            ("\\boxed{1:4:9:\\ldots}", "1:2:3:\\ldots", 0),
            ("\\boxed{1: 2:3:\\dots}", "1:2:3:\\ldots", 1),
            ("\\boxed{2021}", "\\pm 2021", 0),
            ("\\boxed{21, 36, \\text{ and } 82}", "19, 46, \\text{ and } 82", 0),
            ("\\boxed{1:00}", "12:00", 0),
        ),
    ),
    Report(
        f"{VERIFY}#26", "an equation and its rearrangement differ", RIGHT, "",
        _maths((f"\\boxed{{{_LINES[1]}}}", "2x + 4y - 3 = 0", 1)),
    ),
    Report(
        f"{VERIFY}#56", "a tuple without $ is read as its first number", MENDED, "a formula alone needs no delimiters",
        _maths(
            ("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)", 1),
            ("(3, \\frac{2\\pi}{3})", "\\left( 3, \\frac{\\pi}{2} \\right)", 0),
        ),
    ),
    Report(
        f"{VERIFY}#69", "pi/2, -2*pi, -1 + exp(16) and 14.0 + -1.0i get 0", MENDED, "plain notation is read as LaTeX",
        _maths(
            ("\\boxed{pi/2}", "\\dfrac{\\pi}{2}", 1),
            ("\\boxed{-2*pi}", "-2\\pi", 1),
            ("\\boxed{-1 + exp(16)}", "e^{16} - 1", 1),
            ("\\boxed{14.0 + -1.0i}", "14 - i", 1),
            ("\\boxed{x**2 + sqrt(3)}", "x^2+\\sqrt{3}", 1),
            ("\\boxed{\u221a2}", "\\sqrt{2}", 1),
            ("\\boxed{pi/3}", "\\dfrac{\\pi}{2}", 0),
            ("\\boxed{sin(x)}", "\\cos x", 0),
        ),
    ),
    Report(
        f"{VERIFY}#25", "an inequality matches an interval in one direction", MENDED, "in both",
        _maths(
            ("\\boxed{m \\geq \\sqrt{2}}", "m \\in [\\sqrt{2}, +\\infty)", 1),
            ("\\boxed{m \\in [\\sqrt{2}, +\\infty)}", "m \\geq \\sqrt{2}", 1),
            ("\\boxed{m > \\sqrt{2}}", "m \\in [\\sqrt{2}, +\\infty)", 0),
        ),
    ),
    Report(
        f"{VERIFY}#16", "the letter in a box is not found", RIGHT, "",
        _maths(("So \\boxed{A}", "A", 1), ("So \\boxed{B}", "A", 0)),
    ),
    Report(
        "NVIDIA-NeMo/Gym#1844", "\\boxed{\\text{E}} and \\boxed{E: its text} are no answers",
        MENDED, "an answer that is a letter is looked for as one",
        _maths(
            ("\\boxed{\\text{E}}", "E", 1),
            ("\\boxed{E: a cat}", "E", 1),
            ("\\boxed{\\textbf{(E)}\\ 12}", "E", 1),
            ("The answer is **(E)**.", "E", 1),
            ("\\boxed{D: E is wrong}", "E", 0),
            ("E. coli is harmless: D", "D", 0),
        ),
    ),
    Report(
        f"{VERIFY}#44", "a box that is repeated becomes 840840", RIGHT, "the last counts",
        _maths(("so\\boxed{840}., but\n**Final Answer**\n\\boxed{840}", "840", 1), (_TWICE, "4", 1)),
    ),
    Report(
        f"{VERIFY}#76", "**73** is read as 234", RIGHT, "",
        _maths(("2*234 = 468\n\nThus it is **73**.\n\n---\n\nFinal Answer: **73**", "73", 1)),
    ),
    Report(
        f"{VERIFY}#70", "\\dfrac{9}{7} without $ is not parsed", RIGHT, "",
        _maths(("\\boxed{9/7}", "\\dfrac{9}{7}", 1)),
    ),
    Report(
        f"{VERIFY}#47", "one of two answers passes for both", RIGHT, "",
        _maths(
            ("\\boxed{1728}", "1331 and 1728", 0),
            ("\\boxed{1331 and 1728}", "1331 and 1728", 1),
            ("\\boxed{1331} and \\boxed{1728}", "1331, 1728", 1),
        ),
    ),
    Report(
        f"{VERIFY}#57", "a unit in a box, and an earlier box", RIGHT, "",
        _maths(("\\boxed{35 cm} ++ \\boxed{4}", "4", 1), ("\\boxed{35 cm}", "35", 1)),
    ),
    Report(
        f"{VERIFY}#2", "0.08333 is not 1/12, nor (1,4.5) (1,9/2), nor a matrix itself", RIGHT, "",
        _maths(
            ("\\boxed{0.0833333333333333}", "\\frac{1}{12}", 1),
            ("\\boxed{(1,4.5)}", "(1,\\frac{9}{2})", 1),
            ("\\boxed{\\sec^2(y)}", "\\tan^2(y)+1", 1),
            ("\\boxed{-34x-45y+20z-100=0}", "34x+45y-20z+100=0", 1),
            ("\\boxed{\\begin{pmatrix}1&-2\\\\4&3\\end{pmatrix}}", "\\begin{pmatrix}1&-2\\\\4&3\\end{pmatrix}", 1),
        ),
    ),
    Report(
        f"{VERIFY}#20", "a number as the answer never matches", RIGHT, "by its value",
        lambda: math_verify(["\\boxed{1/4}"], answer=[0.25]) == exact_match(["7"], answer=[7.0]) == [1.0],
    ),
    Report(
        "EleutherAI/lm-evaluation-harness#3477", "the word \\boxed in a sentence is taken for the answer", RIGHT, "",
        _maths(("Mark it with \\boxed. It is \\boxed{5}", "5", 1), ("It is \\boxed{5}, marked with \\boxed", "5", 1)),
    ),
    Report(
        "OpenRLHF/OpenRLHF#1285", "\\fbox{\\frac{1}{2}} is lost", RIGHT, "",
        _maths(("\\fbox{\\frac{1}{2}}", "0.5", 1), ("\\fbox{\\frac{1}{2}", "0.5", 0)),
    ),
    Report(
        "THUDM/slime#543", "a bare answer fails where a box is wanted",
        RIGHT, "math_verify takes it, its strict form not",
        lambda: math_verify(["5"], answer=["5"]) == [1.0] and math_verify_strict(["5"], answer=["5"]) == [0.0],
    ),
    Report(
        f"{VERIFIERS}#1028", "without a box, any number of the text passes", RIGHT, "math_verify_strict wants the box",
        _all(math_verify_strict, ("It is 5", "5", 0), ("\\boxed{5}", "5", 1)),
    ),
    Report(
        "verl-project/verl#7274", "#### 42 is lost before 300 characters of text", RIGHT, "",
        _all(number_match, (f"\\boxed{{42}}{' and this holds.' * 40}", "42", 1)),
    ),
    Report(
        "google-deepmind/proeval#19", "the sign of #### -3 is stripped", RIGHT, "",
        _all(number_match, ("-3", "from 2\n#### -3", 1), ("3", "from 2\n#### -3", 0), ("-1,234.5", "####-1234.5", 1)),
    ),
    Report(
        "modelscope/ms-swift#10163", "Reward: 10 is read as 1, 1e-1 as 1, -2 not at all",
        RIGHT, "whole numbers are read",
        _all(number_match, ("Reward: 10", "1", 0), ("Reward: 1e-1", "0.1", 1), ("Reward: -2", "-2", 1)),
    ),
    Report(
        "NVIDIA-NeMo/RL#3635", "a completion without an answer adds a second score", RIGHT, "one score for each",
        lambda: math_verify(["I do not know.", "", "\\boxed{2}"], answer=["1", "1", "2"]) == [0.0, 0.0, 1.0],
    ),
    Report(
        f"{OPEN_R1}#293", "an answer that cannot be parsed gives everyone 1", RIGHT, "it is refused, and not scored",
        lambda: refuses(lambda: math_verify(["\\boxed{1}"], answer=[""]), "cannot parse", "exact_match"),
    ),
    Report(
        f"{OPEN_R1}#557", "verify gets the answer before the truth", RIGHT, "the truth is first",
        _maths(("\\boxed{x \\in (1, 2)}", "1 < x < 2", 1)),
    ),
    Report(
        "NVIDIA-NeMo/RL#3416", "the answers proof and notfound of NuminaMath are verified",
        NONE, "no data set is built in; such rows are the user's to leave out",
    ),
    Report(
        f"{VERIFIERS}#116", "<think>...</tool> has the right format", RIGHT, "",
        _formats(think_format_reward, **{"<think>a</tool><answer>b</answer>": 0, "<think>a</think>b": 1}),
    ),
    Report(
        f"{VERIFIERS}#207", "a thought that is not closed has the right format", RIGHT, "",
        _formats(answer_format_reward, **{"<think>\n[[1, 2]].\n\n<answer>\n1\n</answer>": 0}),
    ),
    Report(
        f"{OPEN_R1}#237", "line breaks in a thought break the format", RIGHT, "",
        _formats(answer_format_reward, **{"<think>\n1. a\n2. b\n</think>\n<answer>9</answer>": 1}),
    ),
    Report(
        f"{OPEN_R1}#418", "several thoughts and answers have the right format", RIGHT, "each once",
        _formats(
            answer_format_reward,
            **{"<think>a</think><answer>1</answer><answer>2</answer>": 0, "<think>a</think><think>b</think>c": 0},
        ),
    ),
    Report(
        "verl-project/verl#7853", "a program that raises passes where nothing is expected", RIGHT, "",
        lambda: (
            passed("def f(x): raise ValueError", [case_of({"call": "f(1)", "value": value}) for value in (None, "")])
            == [0.0, 0.0]
        ),
    ),
    Report(
        f"{OPEN_R1}#504", "white space at the ends of lines fails a program", RIGHT, "",
        lambda: passed("print('1 2 ')\nprint()", [case_of({"stdin": "", "stdout": "1 2\r\n"})]) == [1.0],
    ),
    Report(
        "rllm-org/rllm#128", "a selection of tests loses the name of the function", RIGHT, "each test has its call",
        lambda: passed("def g(x): return x", [case_of("assert g(2) == 2"), case_of("assert f(2) == 2")]) == [1.0, 0.0],
    ),
    Report(
        "huggingface/trl#6533", "one reward for three completions goes to all",
        RIGHT, "all of them have failed, in a line",
        lambda: _scored(lambda completions: [1.0])[:2] == ([0.0] * 3, 3),
    ),
    Report(
        "huggingface/trl#3936", "rewards that are all None fail on trainer_state", RIGHT, "",
        lambda: all(map(math.isnan, _scored(lambda completions, trainer_state: [None] * 3)[0])),
    ),
    Report(
        "huggingface/trl#5775", "one None makes its group NaN", RIGHT, "it alone is not scored",
        lambda: _scored(lambda completions: [1.0, None, 0.0])[2][::2] == [1.0, 0.0],
    ),
    Report(
        "huggingface/trl#4130", "async reward functions are not supported", RIGHT, "",
        lambda: _scored(_judge)[0] == [0.5] * 3,
    ),
]  # fmt: skip
