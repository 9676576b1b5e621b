r"""The equations of an algorithm in LaTeX, composed of those of its parts; see `part_equations` for the notation."""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.algorithms.credit_equations import credit
from jaxrl_llm.algorithms.part_equations import (
    ESTIMATORS,
    LOGP,
    POLICIES,
    Definitions,
    factory_of,
    latex,
    mean_latex,
    operator,
    ratio_symbol,
    surrogate,
)
from jaxrl_llm.core.repr import Negation, Operation, code, expression_of
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.objectives.values import half_square


def equations(algorithm: Any) -> str:
    """The aligned equations of an algorithm, without dollar signs: credit, loss, and the symbols that the loss uses."""
    defined: Definitions = {}
    terms = objective_terms(algorithm.objective, defined)
    loss = " \\\\\n&\\quad ".join(
        (("-" if sign < 0 else "") if number == 0 else f"{'-' if sign < 0 else '+'} ") + text
        for number, (sign, text) in enumerate(terms)
    )
    lines = [f"{left} {sign} {right}" for left, sign, right in credit(algorithm.transform)]
    lines += [rf"\mathcal{{L}}(\theta) &= {loss}", *(f"{symbol} &= {text}" for symbol, text in defined.items())]
    return "\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}"


def markdown(algorithm: Any) -> str:
    """The equations, the rules for rollouts, and the code of an algorithm, for notebooks."""
    before = algorithm.curriculum, algorithm.strategy, algorithm.rollout, algorithm.replay
    rules = [code(rule) for rule in before if rule is not None]
    about = "Sample $i$ of $N$ has the actions $o_{i,t}$ and belongs to the prompt's group $g$."
    parts = [f"$$\n{equations(algorithm)}\n$$", about, *(f"Rollouts: `{rule}`" for rule in rules)]
    return "\n\n".join([*parts, f"```python\n{algorithm!r}\n```"]) + "\n"


Term = tuple[float, str]  # its sign and its size


def objective_terms(objective: Any, defined: Definitions) -> list[Term]:
    """The terms of an objective's sum."""
    expression = expression_of(objective)
    if isinstance(expression, Negation):
        return [(-sign, text) for sign, text in objective_terms(expression.operand, defined)]
    if isinstance(expression, Operation) and expression.symbol in "+-":
        factor = 1 if expression.symbol == "+" else -1
        left = objective_terms(expression.left, defined)
        return left + [(factor * sign, text) for sign, text in objective_terms(expression.right, defined)]
    if isinstance(expression, Operation):
        inner, scale = expression.left, expression.right
        if not isinstance(inner, Objective):
            inner, scale = scale, inner
        return _scaled(objective_terms(inner, defined), scale, expression.symbol == "/")
    name, of = factory_of(objective)
    return TERMS[name](of, defined) if name in TERMS else [(1, operator(name))]


def _scaled(terms: list[Term], scale: Any, divided: bool) -> list[Term]:
    written, sign = latex(scale), 1
    if written.startswith("-"):
        written, sign = written[1:], -1
    before = "" if written == "1" else rf"\frac{{1}}{{{written}}} " if divided else rf"{written}\, "
    if len(terms) == 1 or not before:
        return [(sign * own, before + text) for own, text in terms]
    total = "".join(f" {'-' if own < 0 else '+'} {text}" for own, text in terms).removeprefix(" + ").strip()
    return [(sign, rf"{before}\left({total}\right)")]


def _policy_gradient(of: dict[str, Any], defined: Definitions) -> list[Term]:
    ratio, others = dict[str, str](), dict[str, str]()
    gain = surrogate(of["surrogate"], ratio_symbol(of["ratio"], ratio), others)
    # A surrogate such as A log pi does not read the ratio.
    defined.update({symbol: x for symbol, x in ratio.items() if any(symbol in y for y in (gain, *others.values()))})
    defined.update(others)
    return [(-1, mean_latex(of["average"], gain))]


def _kl(of: dict[str, Any], defined: Definitions) -> list[Term]:
    value = estimate(of["estimator"], of["to"], defined, of["reverse"])
    if of["sampled"] is not None:
        value = rf"\frac{{\pi_\theta(o_{{i,t}})}}{{{POLICIES[of['sampled']]}(o_{{i,t}})}} \left({value}\right)"
    return [(1, mean_latex(of["average"], rf"\left({value}\right)"))]


def estimate(estimator: str, to: str, defined: Definitions, reverse: bool = False, of: str = r"\pi_\theta") -> str:
    """An estimator of the divergence from a policy, with the definition of its log-ratio."""
    short = {"behaviour": "b", "old": "old", "reference": "ref", "previous": "prev"}[to]
    l = rf"\ell^{{\text{{{short}}}}}_{{i,t}}"
    defined[l] = rf"\log \frac{{{of}(o_{{i,t}})}}{{{POLICIES[to]}(o_{{i,t}})}}"
    base = estimator.removesuffix("+")
    argument = l
    if reverse:
        argument = f"(-{l})" if base == "k3" else f"-{l}"
    text = ESTIMATORS[base].format(l=argument)
    if estimator.endswith("+"):  # its value, with the gradient of k2
        half = rf"\tfrac{{1}}{{2}} ({l})^2"
        text = rf"{half} + \operatorname{{sg}}\!\left[{text} - {half}\right]"
    return text


def _entropy(of: dict[str, Any], defined: Definitions) -> list[Term]:
    defined["H_{i,t}"] = r"-\sum_v \pi_\theta(v \mid o_{i,<t}) \log \pi_\theta(v \mid o_{i,<t})"
    return [(1, mean_latex(of["average"], "H_{i,t}"))]


def _value_loss(of: dict[str, Any], defined: Definitions) -> list[Term]:
    V, old, R = r"V^\theta_{i,t}", r"V^{\text{old}}_{i,t}", "R_{i,t}"
    if of["error"] is not half_square or of["combine"] is not None or of["of"] != "max":
        return [(1, mean_latex(of["average"], operator("value_loss", V, R)))]
    square = rf"({V} - {R})^2"
    if of["clip"] is not None:
        limit = latex(of["clip"])
        defined[r"\bar V_{i,t}"] = rf"{old} + \operatorname{{clip}}({V} - {old},\, -{limit},\, {limit})"
        square = rf"\max\left({square},\; (\bar V_{{i,t}} - {R})^2\right)"
    return [(1, mean_latex(of["average"], rf"\tfrac{{1}}{{2}} {square}"))]


def _ratio_variance(of: dict[str, Any], defined: Definitions) -> list[Term]:
    r = rf"\frac{{\pi_\theta(o_{{i,t}})}}{{{POLICIES[of['against']]}(o_{{i,t}})}}"
    return [(1, mean_latex(of["average"], rf"\left[\left({r} - 1\right)^2 - {latex(of['limit'])}\right]"))]


def _imitation(of: dict[str, Any], defined: Definitions) -> list[Term]:
    rows = "" if of["rows"] is None else operator(factory_of(of["rows"])[0], "i") + " "
    return [(-1, mean_latex(of["average"], rows + LOGP))]


TERMS: dict[str, Callable[[dict[str, Any], Definitions], list[Term]]] = {
    "policy_gradient": _policy_gradient,
    "kl": _kl,
    "entropy": _entropy,
    "value_loss": _value_loss,
    "ratio_variance": _ratio_variance,
    "imitation": _imitation,
}
