"""What annotations say of an argument of a part or a method: ranges of numbers, choices, and origins of defaults.

A number out of range and a name that is no choice are an InputError at run time.
"""

from typing import Annotated, Literal

import jax

from jaxrl_llm.core.arguments.hyperparameters import Code, OfRun, Origin, Ours, Paper, Recalled
from jaxrl_llm.core.arguments.ranges import (
    AboveOne,
    AtLeastOne,
    AtLeastTwo,
    BelowHalf,
    BelowOne,
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    OpenFraction,
    Positive,
    Range,
    Share,
    ZeroOrOne,
    check_number,
)

__all__ = [
    "CODE", "OURS", "PAPER", "RECALLED", "RUN", "AboveOne", "AtLeastOne", "AtLeastTwo", "AverageName",
    "AverageOver", "Baseline", "BelowHalf", "BelowOne", "Code", "Count", "Divisor", "Estimator", "Fraction",
    "FractionNumber", "Gate", "MomentsOver", "NonNegative", "NonNegativeInt", "NonNegativeNumber", "Number",
    "OfRun", "OpenFraction", "Ours", "Paper", "Positive", "PositiveNumber", "Range", "Recalled", "Replies",
    "Rewrite", "Routing", "Rule", "Scale", "Share", "Source", "Span", "Ties", "ZeroOrOne", "check_number",
]  # fmt: skip

PAPER, CODE, RECALLED, OURS, RUN = Origin  # `Paper[NonNegative]` is `Annotated[NonNegative, PAPER]`
Number = jax.Array | float  # an array, traced or not, passes unchecked
NonNegativeNumber = Annotated[Number, Range(least=0)]
PositiveNumber = Annotated[Number, Range(above=0)]
FractionNumber = Annotated[Number, Range(least=0, most=1)]

Source = Literal["behaviour", "untruncated", "old", "reference", "previous"]  # of log-probabilities
Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]  # of a KL divergence
Span = Literal["token", "turn", "segment", "sequence"]  # over which a ratio is taken
Gate = Literal["turn", "sequence", "token"]
Scale = Literal["std", "none", "batch", "sum", "mean"]  # by which group-relative advantages are divided
Divisor = Literal["none", "std"]  # where there is no other choice
MomentsOver = Literal["rows", "turns"]  # what counts once in moments of episodes
Baseline = Literal["mean", "leave_one_out", "weighted", "median", "quantile", "best", "none"]
AverageName = Literal["sequence", "token", "prompt", "sum", "constant", "slice"]
AverageOver = Literal["sequence", "token"]
Replies = Literal["last", "all"]  # of a conversation, which are learnt
Ties = Literal["content", "first"]  # by which of equal votes the answer is chosen
Routing = Literal["rollout", "recompute", "none"]  # whose choice of experts an update replays
Rewrite = Literal["both", "hard_only", "medium_only"]  # of prompts by their policy
Rule = Literal["length", "difficulty", "or", "and"]  # by which a prompt is promising
