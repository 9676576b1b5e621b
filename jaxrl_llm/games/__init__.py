"""Games with known solutions: trees, exact best responses, regret minimisers, and mixtures over populations."""

from jaxrl_llm.games.extensive import (
    FORFEIT,
    Node,
    Strategy,
    advice_game,
    average_strategy,
    best_response,
    expected_payoffs,
    exploitability,
    information_sets,
    kuhn_poker,
    matrix_game,
    nash_conv,
    payoff_range,
    uniform_strategy,
    with_forfeits,
)
from jaxrl_llm.games.meta_solvers import (
    MetaSolver,
    Population,
    fictitious_play,
    psro,
    regret_matching_mixture,
    shor,
    uniform,
)
from jaxrl_llm.games.regret import (
    RegretRule,
    cfr,
    regret_matching,
    regret_matching_plus,
    regret_policy,
    volatility_adaptive,
)

__all__ = [
    "FORFEIT", "MetaSolver", "Node", "Population", "RegretRule", "Strategy", "advice_game", "average_strategy",
    "best_response", "cfr", "expected_payoffs", "exploitability", "fictitious_play", "information_sets", "kuhn_poker",
    "matrix_game", "nash_conv", "payoff_range", "psro", "regret_matching", "regret_matching_mixture",
    "regret_matching_plus", "regret_policy", "shor", "uniform", "uniform_strategy", "volatility_adaptive",
    "with_forfeits",
]  # fmt: skip
