r"""The parts of a loss in LaTeX: ratios, surrogates, weights and averages; one without a form appears by its name.

i is a sample, o_i its |o_i| actions, t one of them, g the group of a prompt, N the number of samples; sg is the
stop-gradient. The tables are by the name of a factory: what its part says, given its arguments by name. A new part
needs an entry only if its name does not say enough.
"""

import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_llm.core.repr import Negation, Operation, PartCall, code, expression_of
from jaxrl_llm.objectives import Average

Definitions = dict[str, str]  # symbol -> its definition, in the order of appearance
A, LOGP = r"A_{i,t}", r"\log \pi_\theta(o_{i,t})"
POLICIES = {
    "behaviour": r"\pi_{\text{behaviour}}", "untruncated": r"\pi_{\text{untruncated}}", "old": r"\pi_{\text{old}}",
    "reference": r"\pi_{\text{ref}}", "previous": r"\pi_{\text{prev}}",
}  # fmt: skip
ESTIMATORS = {"k1": "{l}", "k2": r"\tfrac{{1}}{{2}} ({l})^2", "k3": r"e^{{-{l}}} - 1 + {l}", "abs": r"\left|{l}\right|"}


def latex(value: Any) -> str:
    """A number, or what a coefficient is called if it is a control or a function.

    >>> latex(0.0003), latex(1e-06), latex("beta"), latex(2e-08)
    ('0.0003', '10^{-6}', '\\\\lambda_{\\\\text{beta}}', '2 \\\\times 10^{-8}')
    """
    if isinstance(value, str):
        return rf"\lambda_{{\text{{{escaped(value)}}}}}"
    written = code(value)
    try:
        amount = float(written)
    except ValueError:
        return r"c_{\text{batch}}" if callable(value) else r"c"
    if amount == 0 or 1e-4 <= abs(amount) < 1e7:
        return f"{amount:g}"
    digits, _, exponent = f"{amount:e}".partition("e")
    mantissa = f"{float(digits):g}"
    return (f"{mantissa} \\times " if mantissa != "1" else "") + f"10^{{{int(exponent)}}}"


def escaped(name: str) -> str:
    """A name in which LaTeX reads no commands."""
    return name.replace("_", r"\_")


def factory_of(value: Any) -> tuple[str, dict[str, Any]]:
    """The name of the factory of a part and all of its arguments; a plain function has no arguments."""
    expression = expression_of(value)
    if not isinstance(expression, PartCall):
        return getattr(value, "__name__", "function"), {}
    bound = inspect.signature(expression.function).bind(*expression.positional, **expression.keywords)
    bound.apply_defaults()
    return expression.function.__name__, dict(bound.arguments)


def operator(name: str, *of: str) -> str:
    """A function by its name, applied to its arguments."""
    name = "f" if name == "<lambda>" else escaped(name)
    return rf"\operatorname{{{name}}}" + (rf"\left({', '.join(of)}\right)" if of else "")


def ratio_symbol(ratio: Any, defined: Definitions) -> str:
    """The symbol of a ratio, with its definition."""
    name, of = factory_of(ratio)
    if name not in ("token_ratio", "sequence_ratio", "span_ratio"):
        return operator(name)
    other = POLICIES[of["against"]]
    quotient = rf"\frac{{\pi_\theta(o_{{i,t}})}}{{{other}(o_{{i,t}})}}"
    span = {"token_ratio": "token", "sequence_ratio": "sequence"}.get(name) or of["span"]
    if span == "token":
        defined[r"\rho_{i,t}"] = quotient
        return r"\rho_{i,t}"
    if span == "sequence":
        symbol, product = "s_i", rf"\prod_t {quotient}"
        length = "|o_i|"
    else:
        symbol, product = "s_{i,t}", rf"\prod_{{u \in \text{{{span}}}(t)}} {quotient.replace('i,t', 'i,u')}"
        length = rf"|\text{{{span}}}(t)|"
    value = rf"\left({product}\right)^{{1/{length}}}" if of["mean"] else product
    if of["gradient"] == "span":
        defined[symbol] = value
        return symbol
    own = r"\frac{\pi_\theta(o_{i,t})}{\operatorname{sg}[\pi_\theta(o_{i,t})]}"
    defined[r"\tilde s_{i,t}"] = rf"\operatorname{{sg}}\!\left[{value}\right] {own}"
    return r"\tilde s_{i,t}"


def _clip(of: str, low: Any, high: Any, center: str = "1") -> str:
    return rf"\operatorname{{clip}}({of},\, {center} - {latex(low)},\, {center} + {latex(high)})"


def _bounds(of: dict[str, Any]) -> tuple[Any, Any]:
    return of["low"], of["low"] if of["high"] is None else of["high"]


def _dual(value: str, dual: Any, defined: Definitions) -> str:
    """The value, at least `dual` times the advantage where that is negative."""
    if dual is None:
        return value
    defined["m_{i,t}"] = value
    bounded = rf"\max\left(m_{{i,t}},\, {latex(dual)} {A}\right)"
    return rf"\begin{{cases}} {bounded} & {A} < 0 \\ m_{{i,t}} & {A} \ge 0 \end{{cases}}"


def _clipped(r: str, of: dict[str, Any], defined: Definitions) -> str:
    return _dual(rf"\min\left({r} {A},\; {_clip(r, *_bounds(of))}\, {A}\right)", of["dual"], defined)


def _geometric(r: str, of: dict[str, Any], defined: Definitions) -> str:
    low, high = map(latex, _bounds(of))
    cut = rf"\begin{{cases}} \min(\log {r},\, {high}) & {A} > 0 \\ \max(\log {r},\, -{low}) & {A} < 0 \end{{cases}}"
    defined["g_i"] = rf"\exp\left(\frac{{1}}{{|o_i|}} \sum_t {cut}\right)"
    return rf"g_i\, {A}"


def _soft(r: str, of: dict[str, Any], defined: Definitions) -> str:
    high, low = latex(of["positive"]), latex(of["negative"])
    defined[r"\tau_{i,t}"] = rf"\begin{{cases}} {high} & {A} > 0 \\ {low} & {A} \le 0 \end{{cases}}"
    return rf"\frac{{4}}{{\tau_{{i,t}}}}\, \sigma\!\left(\tau_{{i,t}} ({r} - 1)\right) {A}"


def _score(r: str, of: dict[str, Any], defined: Definitions) -> str:
    if of["weight"] is None:
        return rf"{A} {LOGP}"
    return rf"\operatorname{{sg}}\!\left[{weight(of['weight'], r, defined)}\right] {A} {LOGP}"


def _gradient_preserving(r: str, of: dict[str, Any], defined: Definitions) -> str:
    low, high = map(latex, _bounds(of))
    upper = rf"(1 + {high}) \frac{{{r}}}{{\operatorname{{sg}}[{r}]}}"
    return _dual(
        rf"\min\left({r} {A},\; \operatorname{{clip}}({r},\, 1 - {low},\, {upper})\, {A}\right)", of["dual"], defined
    )


def _centred(r: str, of: dict[str, Any], defined: Definitions) -> str:
    defined["c_{i,t}"] = rf"\frac{{{POLICIES[of['of']]}(o_{{i,t}})}}{{{POLICIES[of['over']]}(o_{{i,t}})}}"
    return rf"\min\left({r} {A},\; {_clip(r, *_bounds(of), 'c_{i,t}')}\, {A}\right)"


SURROGATES: dict[str, Callable[[str, dict[str, Any], Definitions], str]] = {
    "clip": _clipped,
    "unclipped": lambda r, of, defined: rf"{r} {A}",
    "log_probability": _score,
    "soft_gate": _soft,
    "geometric_clip": _geometric,
    "gradient_preserving_clip": _gradient_preserving,
    "centred_clip": _centred,
}


def surrogate(value: Any, r: str, defined: Definitions) -> str:
    """A surrogate of a ratio and the advantage."""
    name, of = factory_of(value)
    return SURROGATES[name](r, of, defined) if name in SURROGATES else operator(name, r, A)


def _by_sign(r: str, of: dict[str, Any], defined: Definitions) -> str:
    positive, negative = (weight(of[name], r, defined) for name in ("positive", "negative"))
    return rf"\begin{{cases}} {positive} & {A} \ge 0 \\ {negative} & {A} < 0 \end{{cases}}"


def _weight_clip(r: str, of: dict[str, Any], defined: Definitions) -> str:
    low, high = _bounds(of)
    # A ratio is never negative, so that a lower bound of 1 - 1 is none.
    unbounded = isinstance(low, int | float) and low >= 1
    return rf"\min({r},\, 1 + {latex(high)})" if unbounded else _clip(r, low, high)


def _within(r: str, of: dict[str, Any], defined: Definitions) -> str:
    low, high = map(latex, _bounds(of))
    up, down = rf"\mathbb{{1}}[{r} \le 1 + {high}]", rf"\mathbb{{1}}[{r} \ge 1 - {low}]"
    defined["w_{i,t}"] = rf"\begin{{cases}} {up} & {A} > 0 \\ {down} & {A} < 0 \end{{cases}}"
    return "w_{i,t}"


WEIGHTS: dict[str, Callable[[str, dict[str, Any], Definitions], str]] = {
    "clipped": _weight_clip,
    "capped": lambda r, of, defined: rf"\min({r},\, {latex(of['cap'])})",
    "gamma": lambda r, of, defined: rf"{r}^{{{latex(of['power'])}}} e^{{{latex(of['decay'])} (1 - {r})}}",
    "within": _within,
    "by_sign": _by_sign,
    "product": lambda r, of, defined: r" \cdot ".join(weight(one, r, defined) for one in of.get("weights", ())) or "1",
}


def weight(value: Any, r: str, defined: Definitions) -> str:
    """A weight of the score function."""
    name, of = factory_of(value)
    return WEIGHTS[name](r, of, defined) if name in WEIGHTS else operator(name, r)


AVERAGES = {
    "token_mean": r"\frac{1}{\sum_i |o_i|} \sum_i \sum_t",
    "sequence_mean": r"\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t",
    "sequence_sum": r"\frac{1}{N} \sum_i \sum_t",
    "prompt_mean": r"\frac{1}{P} \sum_g \frac{1}{\sum_{i \in g} |o_i|} \sum_{i \in g} \sum_t",
}


def mean_latex(average: Any, text: str) -> str:
    """The average of a token's value; None is `token_mean()`."""
    expression = expression_of(average)
    if isinstance(expression, Negation):
        return "-" + mean_latex(expression.operand, text)
    if isinstance(expression, Operation):
        left, right = expression.left, expression.right
        if expression.symbol == "/":
            return rf"\frac{{1}}{{{latex(right)}}} {mean_latex(left, text)}"
        scale, inner = (left, right) if isinstance(right, Average) else (right, left)
        return rf"{latex(scale)}\, {mean_latex(inner, text)}"
    name, of = ("token_mean", {}) if average is None else factory_of(average)
    if name == "constant":
        length = r"\max_i |o_i|" if of["length"] is None else latex(of["length"])
        return rf"\frac{{1}}{{N \cdot {length}}} \sum_i \sum_t {text}"
    return f"{AVERAGES[name]} {text}" if name in AVERAGES else rf"{operator(name)}_{{i,t}}\left[{text}\right]"
