r"""The equations of transforms in LaTeX, in the order of a chain; see `part_equations` for the notation.

A transform without an equation appears by its name, as an operator on the batch B.
"""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.algorithms.part_equations import ESTIMATORS, POLICIES, A, factory_of, latex, operator

Line = tuple[str, str, str]  # left side, the sign with its place of alignment, right side
IS, BECOMES = "&=", r"&\leftarrow"


def credit(transform: Any) -> list[Line]:
    """The equations of a transform, one a line."""
    lines, rewards = list[Line](), False
    for step in _steps(transform):
        name, of = factory_of(step)
        if name in TOKEN_REWARDS and not rewards:  # the rewards of tokens, of which the score is the last one's
            lines.append(("r_{i,t}", IS, r"r_i\, \mathbb{1}[t = |o_i|]"))
            rewards = True
        lines += STEPS[name](of) if name in STEPS else [("B", BECOMES, operator(name, "B"))]
    return lines


def _steps(transform: Any) -> list[Any]:
    """The transforms of a chain, inner chains unfolded."""
    name, of = factory_of(transform)
    return [step for one in of.get("transforms", ()) for step in _steps(one)] if name == "chain" else [transform]


BASELINES = {
    "mean": r"\operatorname{mean}_g(r)",
    "leave_one_out": r"\frac{1}{|g| - 1} \sum_{j \in g,\, j \ne i} r_j",
    "median": r"\operatorname{median}_g(r)",
    "best": r"\max_g r",
    "weighted": r"\frac{\sum_{j \in g} w_j r_j}{\sum_{j \in g} w_j}",
    "quantile": r"\operatorname{median}_g(r)",
    "none": "",
}
SCALES = {
    "std": r"\operatorname{std}_g(r)",
    "batch": r"\operatorname{std}(r)",
    "sum": r"\operatorname{std}_g(r) + \operatorname{std}(r)",
    "mean": r"\operatorname{mean}_g(r)",
}


def _group_relative(of: dict[str, Any]) -> list[Line]:
    above = f"r_i - {BASELINES[of['baseline']]}".removesuffix(" - ")
    if of["scale"] != "none":
        above = rf"\frac{{{above}}}{{{SCALES[of['scale']]} + {latex(of['epsilon'])}}}"
    lines = [(A, IS, above)]
    if of["baseline"] == "weighted":
        lines.append(("w_j", IS, operator(factory_of(of["weights"])[0], "j") if of["weights"] is not None else "1"))
    return lines


def _kl_reward(of: dict[str, Any]) -> list[Line]:
    quotient = rf"\log \frac{{{POLICIES[of['of']]}(o_{{i,t}})}}{{{POLICIES[of['to']]}(o_{{i,t}})}}"
    if of["estimator"] == "k1":
        return [("r_{i,t}", BECOMES, rf"r_{{i,t}} - {latex(of['coefficient'])}\, {quotient}")]
    l = r"\ell_{i,t}"
    value = ESTIMATORS[of["estimator"].removesuffix("+")].format(l=l)
    penalty = rf"{latex(of['coefficient'])} \left({value}\right)"
    return [("r_{i,t}", BECOMES, rf"r_{{i,t}} - {penalty}, \quad {l} = {quotient}")]


def _generalised(of: dict[str, Any]) -> list[Line]:
    if of["heads"] != 1 or of["bootstrap_truncated"] or callable(of["gamma"]):
        return [(rf"{A},\, R_{{i,t}}", IS, operator("generalised_advantages", "r", "V"))]
    gamma = "" if _is_one(of["gamma"]) else latex(of["gamma"]) + r"\, "
    lam = operator(factory_of(of["lam"])[0], "|o_i|") if callable(of["lam"]) else latex(of["lam"])
    V = r"V^{\text{old}}_{i,t}"
    lines = [
        (r"\delta_{i,t}", IS, rf"r_{{i,t}} + {gamma}V^{{\text{{old}}}}_{{i,t+1}} - {V}, \quad V_{{i,|o_i|+1}} = 0"),
        (A, IS, rf"\delta_{{i,t}} + {gamma}{'' if lam == '1' else lam + ' '}A_{{i,t+1}}"),
    ]
    if of["lam_critic"] is None:
        return [*lines, ("R_{i,t}", IS, f"{A} + {V}")]
    critic = gamma + ("" if _is_one(of["lam_critic"]) else f"{latex(of['lam_critic'])} ")
    own = r"A^{\text{critic}}_{i,t}"
    return [
        *lines,
        (own, IS, rf"\delta_{{i,t}} + {critic}A^{{\text{{critic}}}}_{{i,t+1}}"),
        ("R_{i,t}", IS, f"{own} + {V}"),
    ]


def _is_one(value: Any) -> bool:
    """Whether a factor need not be written."""
    return latex(value) == "1"


def _returns(of: dict[str, Any]) -> list[Line]:
    gamma = "" if _is_one(of["gamma"]) else rf"{latex(of['gamma'])}^{{u - t}}\, "
    return [(A, IS, rf"\sum_{{u \ge t}} {gamma}r_{{i,u}}")]


def _whiten(of: dict[str, Any]) -> list[Line]:
    over = "" if of["over"] == "tokens" else r"_{\text{sequences}}"
    mean = rf"\operatorname{{mean}}{over}(A)"
    scaled = rf"\frac{{{A} - {mean}}}{{\sqrt{{\operatorname{{var}}{over}(A) + {latex(of['epsilon'])}}}}}"
    return [(A, BECOMES, scaled if of["shift"] else f"{scaled} + {mean}")]


def _clip_advantages(of: dict[str, Any]) -> list[Line]:
    limit = latex(of["limit"])
    return [(A, BECOMES, rf"\operatorname{{clip}}({A},\, -{limit},\, {limit})")]


def _overlong(of: dict[str, Any]) -> list[Line]:
    longest, buffer = latex(of["max_tokens"]), latex(of["buffer"])
    penalty = rf"\operatorname{{clip}}\left(\frac{{{longest} - {buffer} - |o_i|}}{{{buffer}}},\, -1,\, 0\right)"
    return [("r_i", BECOMES, f"r_i + {penalty}")]


def _correction(of: dict[str, Any]) -> list[Line]:
    old = rf"\frac{{{POLICIES['old']}(o_{{i,t}})}}{{{POLICIES['behaviour']}(o_{{i,t}})}}"
    if of["normalise"] != "none" or of["leave_count"]:
        return [(A, BECOMES, operator("importance_correction", A, old))]
    x = {"token": old, "sequence": rf"\prod_t {old}", "geometric": rf"\left(\prod_t {old}\right)^{{1/|o_i|}}"}[
        of["level"]
    ]
    inside = rf"\mathbb{{1}}\left[{latex(of['low'])} \le x_{{i,t}} \le {latex(of['high'])}\right]"
    w = {"truncate": rf"\min(x_{{i,t}},\, {latex(of['high'])})", "mask": rf"x_{{i,t}}\, {inside}", "reject": inside}
    return [(A, BECOMES, rf"{w[of['mode']]}\, {A}, \quad x_{{i,t}} = {x}")]


def _leave_one_out(of: dict[str, Any]) -> list[Line]:
    own = r"\textstyle\sum_t r_{i,t}"
    lines = [("R_i", IS, own), (A, IS, r"R_i - \frac{1}{|g| - 1} \sum_{j \in g,\, j \ne i} R_j")]
    if of["normalise"]:
        deviation = rf"\operatorname{{std}}(A) + {latex(of['epsilon'])}"
        lines.append((A, BECOMES, rf"\frac{{{A} - \operatorname{{mean}}(A)}}{{{deviation}}}"))
    return lines


def _on_actions(of: dict[str, Any]) -> list[Line]:
    name, inner = factory_of(of["advantage"])
    return _leave_one_out(inner) if name == "leave_one_out" else [(A, IS, operator(name, "i"))]


def _dropped(of: dict[str, Any]) -> list[Line]:
    """The samples that averages go over."""
    name = factory_of(of["dropped"])[0] if "dropped" in of else "uniform_groups"
    kept = r"\operatorname{std}_{g(j)}(r) > 0" if name == "uniform_groups" else rf"\neg\, {operator(name, 'j')}"
    return [("i", r"&\in", rf"\{{\, j : {kept} \,\}}")]


STEPS: dict[str, Callable[[dict[str, Any]], list[Line]]] = {
    "group_relative": _group_relative,
    "kl_reward": _kl_reward,
    "generalised_advantages": _generalised,
    "discounted_returns": _returns,
    "whiten_advantages": _whiten,
    "clip_advantages": _clip_advantages,
    "soft_overlong_penalty": _overlong,
    "importance_correction": _correction,
    "on_actions": _on_actions,
    "revised": lambda of: [(A, BECOMES, operator(factory_of(of["advantages"])[0], "A"))],
    "rescore": lambda of: [("r_i", BECOMES, operator(factory_of(of["reward"])[0], "i"))],
    "stateless": lambda of: [("B", BECOMES, operator(factory_of(of["f"])[0], "B"))],
    "counted": lambda of: [("B", BECOMES, operator(factory_of(of["apply"])[0], "B"))],
    "drop_uniform_groups": _dropped,
    "drop_rows": _dropped,
}
TOKEN_REWARDS = ("kl_reward", "generalised_advantages", "discounted_returns")
