"""Built-in verifiers on answers worked out by hand."""

from __future__ import annotations

import doctest
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.rewards import Reward, score, verifiers
from jaxrl_llm.utils.errors import InputError


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(verifiers) == (0, 6)


def test_text_of_strings_and_messages() -> None:
    assert verifiers.text_of("plain") == "plain"
    tool_use = [
        {"role": "assistant", "content": "calling"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": [{"type": "text", "text": "it is "}, {"type": "text", "text": "7"}]},
    ]
    assert verifiers.text_of(tool_use) == "it is 7"
    assert verifiers.text_of([{"role": "assistant", "content": None}]) == ""
    assert verifiers.text_of([]) == ""
    for wrong in (3, None, ["a"]):
        with pytest.raises(InputError, match="a completion is a string or a list of messages"):
            verifiers.text_of(wrong)


def test_exact_match() -> None:
    completions = [" Paris\n", "paris", "5", [{"role": "assistant", "content": "Paris"}]]
    assert verifiers.exact_match(completions, answer=["Paris", "Paris", 5, "Paris "]) == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "text, answer",
    [
        ("The answer is 42.", "42"),
        ("so 6 * 7 = 42", 42),
        ("it costs $1,234.50", "1234.5"),
        ("1,000,000 people", 1_000_000),
        ("that is -3", "-3"),
        ("that is \N{MINUS SIGN}3 degrees", "-3"),
        ("a loss of -$5", -5),
        ("three quarters, 3/4.", "0.75"),
        ("6 / 8", "3/4"),
        ("-1/2", -0.5),
        ("probability .5", "0.50"),
        ("well...7", 7),
        ("from 10-20", 20),
        ("3,14159", 14159),
        ("about 1e-3", "0.001"),
        ("about 2.5E2", 250),
        (r"\boxed{17}", 17),
        ("**9**", 9),
        ("_9_", 9),
        ("x2 = 8", 8),
        ("答案是12。", 12),
        ("5 apples (or pears)", "#### 5"),
        ("version 1.2.3", "1.2"),
    ],
)
def test_number_match_right(text: str, answer: object) -> None:
    assert verifiers.number_match([text], answer=[answer]) == [1.0]


@pytest.mark.parametrize(
    "text, answer",
    [
        ("42 and then 43", 42),
        ("no number", 0),
        ("", 0),
        ("1/0", 0),
        ("5-3", -3),
        ("0.3333", "1/3"),
        ("1e999999999", 10),
        ("9" * 5000, 9),
        ("-7", 7),
        ("see x7", 7),
        ("12345", 12),
    ],
)
def test_number_match_wrong(text: str, answer: object) -> None:
    assert verifiers.number_match([text], answer=[answer]) == [0.0]


def test_number_match_refuses_an_answer_without_a_number() -> None:
    with pytest.raises(InputError, match="'Paris' has no number"):
        verifiers.number_match(["4", "5"], answer=["4", "Paris"])


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.0", "{:,}.", "({})", "${}$", "= {}"]))
def test_number_match_reads_every_way_to_write_an_integer(value: int, form: str) -> None:
    assert verifiers.number_match(["7 then " + form.format(value)], answer=[value]) == [1.0]
    assert verifiers.number_match(["7 then " + form.format(value)], answer=[value + 1]) == [0.0]


@given(st.fractions(max_denominator=999), st.integers(1, 9))
def test_number_match_compares_fractions_by_value(value: Fraction, factor: int) -> None:
    text = f"{value.numerator * factor}/{value.denominator * factor}"
    assert verifiers.number_match([f"it is {text}."], answer=[str(value)]) == [1.0]


def test_format_match() -> None:
    reward = verifiers.format_match("<think>.*</think>\\s*<answer>.*</answer>")
    assert reward.__name__ == "format_match"
    right = "<think>a\nb</think>\n<answer>4</answer>"
    completions = [right, right + "!", "x" + right, [{"role": "assistant", "content": right}]]
    assert reward(completions, answer=["4"] * 4) == [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(InputError, match="is not a regular expression"):
        verifiers.format_match("(")


def test_formats_where_the_prompt_has_opened_the_tag() -> None:
    """As with DeepSeek-R1's template, which ends with <think>, and Qwen3's without thoughts, which closes it too."""
    text, starts = "2 + 2\n</think>\n<answer>4</answer>", ["<think>\n", "", "<think>\n\n</think>\n\n"]
    completions = [text, text, "<answer>4</answer>"]
    whole = verifiers.format_match("<think>.*</think>\\s*<answer>.*</answer>")
    for reward in (whole, verifiers.think_format_reward, verifiers.answer_format_reward, verifiers.answer_tags):
        assert reward(completions, reply_start=starts) == [1.0, 0.0, 1.0]
        assert reward(completions) == [0.0, 0.0, 0.0]
        assert reward([f"<think>{text}"] * 2, reply_start=starts[:2])[1] == 1.0
    assert verifiers.format_match(".*</think>.*")(completions, reply_start=starts) == [1.0, 1.0, 1.0]
    assert whole([[{"role": "assistant", "content": "<answer>4</answer>", "reasoning_content": "2 + 2"}]]) == [1.0]
    found = score([Reward(whole), Reward(lambda completions, **columns: [float(len(columns))], name="rest")], [text], {
        "reply_start": ["<think>"], "answer": ["4"],
    })  # fmt: skip
    assert {name: x.tolist() for name, x in found.components.items()} == {"format_match": [1.0], "rest": [1.0]}


@pytest.mark.parametrize(
    ("text", "thinks", "answers"),
    [
        ("<think>\nThis is my reasoning.\n</think>\nThis is my answer.", 1.0, 0.0),
        ("<think>\nThis is my reasoning.\nThis is my answer.", 0.0, 0.0),
        ("<think>a</think>", 1.0, 0.0),
        ("<think>a<think>b</think>c", 0.0, 0.0),
        ("<think>a</think>b<think>c</think>", 0.0, 0.0),
        (" <think>a</think>b", 0.0, 0.0),
        ("so <think>a</think>b", 0.0, 0.0),
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        ("<think>\na\n</think>\n<answer>\nb\n</answer>\n", 1.0, 1.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 1.0, 0.0),
        ("<think>a</think>b<answer>c</answer>", 1.0, 0.0),
        ("<answer>b</answer>", 0.0, 0.0),
    ],
)
def test_formats_of_trl(text: str, thinks: float, answers: float) -> None:
    for completion in (text, [{"role": "assistant", "content": text}]):
        assert verifiers.think_format_reward([completion]) == [thinks]
        assert verifiers.answer_format_reward([completion]) == [answers]


def test_math_verify_in_the_main_thread_and_in_another() -> None:
    pytest.importorskip("math_verify")
    completions = ["so $\\boxed{\\frac{2}{4}}$", "it is 0.5", "it is 0.6", "$1 + x^2$", "no idea"]
    answer = ["1/2", "$\\frac{1}{2}$", "1/2", "x^2+1", "3"]
    expected = [1.0, 1.0, 0.0, 1.0, 0.0]
    assert verifiers.math_verify(completions, answer=answer) == expected
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(verifiers.math_verify, completions, answer).result() == expected
    scores = score([Reward(verifiers.math_verify, time_limit=60.0)], completions, {"answer": answer})
    assert scores.total.tolist() == expected
    assert scores.failures == {"math_verify": 0}
    with pytest.raises(InputError, match="cannot parse the answer"):
        verifiers.math_verify(["3"], answer=[""])


def test_reasoning_gym_scores_with_the_scorer_of_the_task() -> None:
    pytest.importorskip("reasoning_gym")
    entry = {"question": "2 + 2?", "answer": "4", "metadata": {"source_dataset": "basic_arithmetic"}}
    completions = ["4", "<answer>9</answer> no, <answer>\n4 </answer>.", "five", "<answer>5</answer> or 4"]
    columns = {"reasoning_gym_task": ["basic_arithmetic"] * 4, "reasoning_gym_entry": [entry] * 4}
    scores = score([Reward(verifiers.reasoning_gym, time_limit=60.0)], completions, columns)
    assert scores.failures == {"reasoning_gym": 0}
    assert scores.total[:2].tolist() == [1.0, 1.0]
    assert (scores.total[2:] < 1.0).all()


@pytest.mark.parametrize(
    "package, module, call",
    [
        ("math-verify", "math_verify", lambda: verifiers.math_verify(["1"], answer=["1"])),
        ("reasoning-gym", "reasoning_gym", lambda: verifiers.reasoning_gym(["1"], ["no task"], [{}])),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str, module: str, call) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"{package}.*pip install 'jaxrl_llm\[verifiers\]'"):
        call()
