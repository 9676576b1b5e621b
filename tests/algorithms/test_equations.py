"""The equations of an algorithm, composed of those of its parts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.advantages import clip_advantages, group_relative, revised, whiten_advantages
from jaxrl_llm.algorithms.equations import equations
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import (
    clip,
    entropy,
    kl,
    log_probability,
    policy_gradient,
    sequence_mean,
    token_mean,
    token_ratio,
    unclipped,
)
from jaxrl_llm.objectives.off_policy import importance_correction

STANDARDISED = r"A_{i,t} &= \frac{r_i - \operatorname{mean}_g(r)}{\operatorname{std}_g(r) + 10^{-6}}"
RATIO = r"\rho_{i,t} &= \frac{\pi_\theta(o_{i,t})}{\pi_{\text{behaviour}}(o_{i,t})}"
BY_SEQUENCE, BY_TOKEN = r"\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t", r"\frac{1}{\sum_i |o_i|} \sum_i \sum_t"


def clipped(low: str, high: str, ratio: str = r"\rho_{i,t}") -> str:
    bounded = rf"\operatorname{{clip}}({ratio},\, 1 - {low},\, 1 + {high})"
    return rf"\min\left({ratio} A_{{i,t}},\; {bounded}\, A_{{i,t}}\right)"


def loss(text: str) -> str:
    return rf"\mathcal{{L}}(\theta) &= {text}"


EXPECTED = {
    "grpo": [
        STANDARDISED,
        loss(f"-{BY_SEQUENCE} {clipped('0.2', '0.2')}"),
        rf"&\quad + 0.04\, {BY_SEQUENCE} "
        r"\left(e^{-\ell^{\text{ref}}_{i,t}} - 1 + \ell^{\text{ref}}_{i,t}\right)",
        RATIO,
        r"\ell^{\text{ref}}_{i,t} &= \log \frac{\pi_\theta(o_{i,t})}{\pi_{\text{ref}}(o_{i,t})}",
    ],
    "dapo": [
        r"i &\in \{\, j : \operatorname{std}_{g(j)}(r) > 0 \,\}",
        STANDARDISED,
        loss(f"-{BY_TOKEN} {clipped('0.2', '0.28')}"),
        RATIO,
    ],
    "gspo": [
        STANDARDISED,
        loss(f"-{BY_SEQUENCE} {clipped('0.0003', '0.0004', 's_i')}"),
        r"s_i &= \left(\prod_t \frac{\pi_\theta(o_{i,t})}{\pi_{\text{behaviour}}(o_{i,t})}\right)^{1/|o_i|}",
    ],
    "dr_grpo": [
        r"A_{i,t} &= r_i - \operatorname{mean}_g(r)",
        loss(rf"-\frac{{1}}{{N \cdot 3000}} \sum_i \sum_t {clipped('0.2', '0.2')}"),
        RATIO,
    ],
    "cispo": [
        STANDARDISED,
        loss(
            rf"-{BY_TOKEN} \operatorname{{sg}}\!\left[\min(\rho_{{i,t}},\, 1 + 4)\right] "
            r"A_{i,t} \log \pi_\theta(o_{i,t})"
        ),
        RATIO,
    ],
    "rloo": [
        r"r_{i,t} &= r_i\, \mathbb{1}[t = |o_i|]",
        r"r_{i,t} &\leftarrow r_{i,t} - 0.03\, "
        r"\log \frac{\pi_{\text{behaviour}}(o_{i,t})}{\pi_{\text{ref}}(o_{i,t})}",
        r"R_i &= \textstyle\sum_t r_{i,t}",
        r"A_{i,t} &= R_i - \frac{1}{|g| - 1} \sum_{j \in g,\, j \ne i} R_j",
        loss(r"-\frac{1}{N} \sum_i \sum_t A_{i,t} \log \pi_\theta(o_{i,t})"),
    ],
    "ppo": [
        r"r_{i,t} &= r_i\, \mathbb{1}[t = |o_i|]",
        r"r_{i,t} &\leftarrow r_{i,t} - 0.05\, "
        r"\log \frac{\pi_{\text{behaviour}}(o_{i,t})}{\pi_{\text{ref}}(o_{i,t})}",
        r"\delta_{i,t} &= r_{i,t} + V^{\text{old}}_{i,t+1} - V^{\text{old}}_{i,t}, \quad V_{i,|o_i|+1} = 0",
        r"A_{i,t} &= \delta_{i,t} + 0.95 A_{i,t+1}",
        r"R_{i,t} &= A_{i,t} + V^{\text{old}}_{i,t}",
        r"A_{i,t} &\leftarrow \frac{A_{i,t} - \operatorname{mean}(A)}{\sqrt{\operatorname{var}(A) + 10^{-8}}}",
        loss(f"-{BY_TOKEN} {clipped('0.2', '0.2')}"),
        rf"&\quad + {BY_TOKEN} \tfrac{{1}}{{2}} "
        r"\max\left((V^\theta_{i,t} - R_{i,t})^2,\; (\bar V_{i,t} - R_{i,t})^2\right)",
        RATIO,
        r"\bar V_{i,t} &= V^{\text{old}}_{i,t} + "
        r"\operatorname{clip}(V^\theta_{i,t} - V^{\text{old}}_{i,t},\, -0.2,\, 0.2)",
    ],
}


def lines_of(algorithm: algorithms.Algorithm) -> list[str]:
    first, *lines, last = equations(algorithm).split("\n")
    assert (first, last) == (r"\begin{aligned}", r"\end{aligned}")
    return [line.removesuffix(r" \\") for line in lines]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_whole_equation_of_a_known_method(name: str) -> None:
    assert lines_of(algorithms.get(name)) == EXPECTED[name]


def test_hyperparameters_are_in_it() -> None:
    lines = lines_of(algorithms.get("dapo", average="prompt", max_length=100, overlong_buffer=20, dual_clip=10.0))
    assert r"r_i &\leftarrow r_i + \operatorname{clip}\left(\frac{100 - 20 - |o_i|}{20},\, -1,\, 0\right)" in lines
    average = r"\frac{1}{P} \sum_g \frac{1}{\sum_{i \in g} |o_i|} \sum_{i \in g} \sum_t"
    bounded = r"\max\left(m_{i,t},\, 10 A_{i,t}\right)"
    cases = rf"\begin{{cases}} {bounded} & A_{{i,t}} < 0 \\ m_{{i,t}} & A_{{i,t}} \ge 0 \end{{cases}}"
    assert loss(f"-{average} {cases}") in lines
    assert rf"m_{{i,t}} &= {clipped('0.2', '0.28')}" in lines


def test_sums_signs_and_factors() -> None:
    gain = policy_gradient(token_ratio("old"), unclipped(), 0.5 * sequence_mean() / 4)
    penalty = (kl("old", "k2+", reverse=True) - 2 * entropy(token_mean())) / 3
    lines = lines_of(algorithms.Algorithm(group_relative("none"), -gain - "beta_1" * penalty - 1e-5 * kl("old", "k1")))
    assert lines[1] == loss(rf"\frac{{1}}{{4}} 0.5\, {BY_SEQUENCE} \rho_{{i,t}} A_{{i,t}}")
    own = r"\ell^{\text{old}}_{i,t}"
    half = rf"\tfrac{{1}}{{2}} ({own})^2"
    value = rf"{half} + \operatorname{{sg}}\!\left[\tfrac{{1}}{{2}} (-{own})^2 - {half}\right]"
    both = rf"\left({BY_TOKEN} \left({value}\right) - 2\, {BY_TOKEN} H_{{i,t}}\right)"
    assert lines[2] == rf"&\quad - \lambda_{{\text{{beta\_1}}}}\, \frac{{1}}{{3}} {both}"
    assert lines[3] == rf"&\quad - 10^{{-5}}\, {BY_TOKEN} \left({own}\right)"


def test_a_part_without_a_form_appears_by_its_name() -> None:
    def halved(batch: Trajectories):
        return batch.need("advantages") / 2

    grpo = algorithms.get("grpo", kl_coefficient=0)
    mine = replace(
        grpo,
        transform=chain(group_relative(), revised(halved)),
        objective=policy_gradient(token_ratio(), log_probability(lambda ratio, batch: ratio), token_mean()),
    )
    assert r"A_{i,t} &\leftarrow \operatorname{halved}\left(A\right)" in lines_of(mine)
    weight = r"\operatorname{f}\left(\rho_{i,t}\right)"
    score = rf"\operatorname{{sg}}\!\left[{weight}\right] A_{{i,t}} \log \pi_\theta(o_{{i,t}})"
    assert loss(f"-{BY_TOKEN} {score}") in lines_of(mine)
    assert r"\operatorname{threshold\_penalty}" in equations(algorithms.get("safe_entropy_aware"))
    assert r"B &\leftarrow \operatorname{above\_greedy}\left(B\right)" in lines_of(algorithms.get("remax"))


def test_credit_of_other_settings() -> None:
    steps = chain(
        group_relative("sum", epsilon=0.5, baseline="leave_one_out"),
        whiten_advantages("sequences", epsilon=1e-6, shift=False),
        importance_correction("sequence", "mask", 0.5, 2.0),
        clip_advantages(3),
    )
    mean = r"\operatorname{mean}_{\text{sequences}}(A)"
    quotient = r"\frac{\pi_{\text{old}}(o_{i,t})}{\pi_{\text{behaviour}}(o_{i,t})}"
    lines = lines_of(algorithms.Algorithm(steps, policy_gradient(token_ratio(), clip(0.1), token_mean())))
    assert lines[:5] == [
        r"A_{i,t} &= \frac{r_i - \frac{1}{|g| - 1} \sum_{j \in g,\, j \ne i} r_j}"
        r"{\operatorname{std}_g(r) + \operatorname{std}(r) + 0.5}",
        rf"A_{{i,t}} &\leftarrow \frac{{A_{{i,t}} - {mean}}}"
        rf"{{\sqrt{{\operatorname{{var}}_{{\text{{sequences}}}}(A) + 10^{{-6}}}}}} + {mean}",
        r"A_{i,t} &\leftarrow x_{i,t}\, \mathbb{1}\left[0.5 \le x_{i,t} \le 2\right]\, A_{i,t}, "
        rf"\quad x_{{i,t}} = \prod_t {quotient}",
        r"A_{i,t} &\leftarrow \operatorname{clip}(A_{i,t},\, -3,\, 3)",
        loss(f"-{BY_TOKEN} {clipped('0.1', '0.1')}"),
    ]


@pytest.mark.parametrize("name", algorithms.names())
def test_every_method_has_well_formed_equations(name: str) -> None:
    text = equations(algorithms.get(name))
    assert text.count("{") == text.count("}")
    assert text.count(r"\left") - text.count(r"\leftarrow") == text.count(r"\right")
    for environment in ("aligned", "cases"):
        assert text.count(rf"\begin{{{environment}}}") == text.count(rf"\end{{{environment}}}")
    assert r"\mathcal{L}(\theta) &= " in text
    assert not any(sign in text for sign in ("None", "--", "+ -"))
    assert not re.search(r"\^\{[^{}]*(\{[^{}]*\})?[^{}]*\}(_\{[^{}]*\})?\^", text), "LaTeX allows no double superscript"


def test_a_notebook_shows_equations_rules_and_code() -> None:
    algorithm = algorithms.get("dapo")
    shown = algorithm._repr_markdown_()
    assert shown.startswith("$$\n\\begin{aligned}\n")
    assert "Rollouts: `DynamicSampling(informative=mixed_groups)`" in shown
    assert shown.endswith(f"```python\n{algorithm!r}\n```\n")
