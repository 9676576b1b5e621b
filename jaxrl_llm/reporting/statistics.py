"""Statistics for evaluations: confidence intervals of a success rate and of a mean, and pass@k."""

import math
from collections.abc import Callable, Iterable
from numbers import Real
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.utils.errors import InputError, shown


def wilson_interval(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success rate, for one yes-or-no answer per prompt.

    `level` in (0, 1) is the confidence. Without trials the interval is (0, 1). Raises InputError for impossible counts.
    Source: Wilson 1927, Journal of the American Statistical Association 22:209.

    >>> low, high = wilson_interval(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)
    """
    _check_level(level)
    check_number("successes", successes, whole=True)
    check_number("trials", trials, least=0, whole=True)
    if not 0 <= successes <= trials:
        raise InputError(f"{successes} successes of {trials} trials: the successes must lie between 0 and the trials")
    if trials == 0:
        return 0.0, 1.0
    return _wilson(successes / trials, trials, level)


def pass_at_k(correct: npt.ArrayLike, samples: int, k: int) -> npt.NDArray[np.float64]:
    """Unbiased estimate, for each prompt, of the probability that at least one of k samples is correct.

    `correct`: int[n_prompts], how many of the prompt's `samples` (n) are correct (c); 1 <= k <= n.
    Returns f64[n_prompts].

        1 - C(n - c, k) / C(n, k)  =  1 - prod_{j < k} (n - c - j) / (n - j)

    The factors are the probabilities that each further draw without replacement is wrong too; nothing overflows.
    Raises InputError for counts out of range. Source: Chen et al. 2021, arXiv 2107.03374, equation 1.

    >>> pass_at_k([0, 1, 4], samples=4, k=2).tolist()
    [0.0, 0.5, 1.0]
    """
    check_number("k", k, whole=True)
    check_number("samples", samples, least=1, whole=True)
    counts = _numbers("correct", correct)
    if not 1 <= k <= samples:
        raise InputError(f"pass@{k} of {samples} samples: k must lie between 1 and the number of samples")
    if counts.ndim != 1:
        raise InputError(f"correct has shape {counts.shape}: pass one count for each prompt")
    if not np.all(counts == np.floor(counts)):
        raise InputError(f"correct holds {counts[counts != np.floor(counts)][0]}: counts are whole numbers")
    if counts.size and (counts.min() < 0 or counts.max() > samples):
        raise InputError(f"correct has counts {counts.min():g} to {counts.max():g}: they must lie in 0 to {samples}")
    drawn = np.arange(k)
    wrong_left = np.maximum(samples - counts[:, None].astype(np.float64) - drawn, 0.0)
    return 1.0 - np.prod(wrong_left / (samples - drawn), axis=1)


def clustered_interval(values: npt.ArrayLike, trials: float = 1, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of the mean of `values` f[n_prompts], one success rate per prompt, each of `trials` samples.

    Samples of one prompt are not independent. They are worth n / r independent ones, where r is the share of the
    variance of a single outcome that lies between prompts: 1 if a prompt is always right or always wrong, 1 / trials
    (the least that is taken) if all prompts are alike.

        r = var(values') / (mean(values') (1 - mean(values')))

    values' are the values and two more, 0 and 1: where all prompts fail, nothing tells how alike their samples are, and
    r is then 1, so that the interval is that of n answers. So it is with one sample per prompt. `level` in (0, 1).
    Raises InputError for no values, or values outside of 0 to 1. Sources: Kish 1965, Survey Sampling (the effective
    number of samples); Franco et al. 2019, Journal of Survey Statistics and Methodology 7:334 (Wilson's interval with
    it); the two added values are ours.

    >>> [round(x, 3) for x in clustered_interval([0.0, 0.0], trials=8)]
    [0.0, 0.658]
    >>> [round(x, 3) for x in clustered_interval([0.5, 0.5, 0.5, 0.25], trials=8)]
    [0.199, 0.709]
    """
    _check_level(level)
    check_number("trials", trials, least=1)
    data = _numbers("values", values)
    if data.ndim != 1 or data.size == 0 or not np.all((data >= 0) & (data <= 1)):
        raise InputError(f"values of shape {data.shape}: pass at least one value, all from 0 to 1, in one dimension")
    padded = np.append(data, (0.0, 1.0))
    share = float(padded.var() / (padded.mean() * (1 - padded.mean())))
    return _wilson(float(data.mean()), data.size / max(share, 1 / trials), level)


def _wilson(rate: float, trials: float, level: float) -> tuple[float, float]:
    """Wilson's interval; trials may be a fraction, which scipy's (whose import takes seconds) may not."""
    z = NormalDist().inv_cdf(0.5 + level / 2)
    middle = rate + z * z / (2 * trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    ends = [(middle + side * half) / (1 + z * z / trials) for side in (-1, 1)]
    return (0.0 if rate == 0 else max(ends[0], 0.0)), (1.0 if rate == 1 else min(ends[1], 1.0))


def paired_difference(
    right: int, fixed: int, broken: int, wrong: int, level: float = 0.95
) -> tuple[float, float, float, float]:
    """The change of a success rate on the same prompts: (difference, low, high, p).

    Prompts are counted by success before and after: `right` both times, `fixed` (wrong, then right), `broken` (right,
    then wrong) and `wrong` both times. The interval is Newcombe's hybrid score interval for paired proportions (1998,
    Statistics in Medicine 17:2635, method 10), p that of McNemar's exact two-sided test: the probability, if a change
    were as likely in one direction as in the other, of a split of fixed and broken prompts at least as uneven.
    Raises InputError for counts that are not whole numbers, or no prompts.

    >>> [round(x, 3) for x in paired_difference(right=12, fixed=61, broken=1, wrong=54)]
    [0.469, 0.372, 0.553, 0.0]
    """
    _check_level(level)
    counts = {"right": right, "fixed": fixed, "broken": broken, "wrong": wrong}
    for name, value in counts.items():
        check_number(name, value, least=0, whole=True)
    trials = sum(counts.values())
    if not trials:
        raise InputError("a difference needs at least one prompt")
    from scipy import stats

    product = (right + broken) * (fixed + wrong) * (right + fixed) * (broken + wrong)
    excess = float(right * wrong - fixed * broken)
    excess = max(excess - trials / 2, 0.0) if excess > 0 else excess  # his continuity correction
    correlation = excess / math.sqrt(product) if product else 0.0
    low, high = _score_interval((right + broken, trials), (right + fixed, trials), correlation, level)
    p = stats.binomtest(fixed, fixed + broken).pvalue if fixed + broken else 1.0
    return (fixed - broken) / trials, low, high, float(p)


Trials = tuple[int, int]  # successes, trials


def difference_interval(before: Trials, after: Trials, level: float = 0.95) -> tuple[float, float, float]:
    """The change of a success rate between independent trials: (difference, low, high).

    before, after: (successes, trials). Newcombe's hybrid score interval (1998, Statistics in Medicine 17:873, method
    10). For the same prompts twice, `paired_difference` has a narrower one. Raises InputError for impossible counts.
    """
    if not before[1] or not after[1]:
        raise InputError("a difference needs at least one trial on each side")
    return (after[0] / after[1] - before[0] / before[1], *_score_interval(before, after, 0.0, level))


def _score_interval(before: Trials, after: Trials, correlation: float, level: float) -> tuple[float, float]:
    """The interval of a difference of rates from Wilson's intervals of both."""
    (low1, high1), (low2, high2) = wilson_interval(*before, level), wilson_interval(*after, level)
    rate1, rate2 = before[0] / before[1], after[0] / after[1]

    def size(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))

    difference = rate2 - rate1
    return difference - size(rate2 - low2, high1 - rate1), difference + size(high2 - rate2, rate1 - low1)


def _check_level(level: float) -> None:
    if not isinstance(level, Real) or isinstance(level, bool) or not 0 < level < 1:
        raise InputError(f"confidence level {shown(level)}: it must lie between 0 and 1, such as 0.95")


def _numbers(name: str, values: Any) -> npt.NDArray[np.float64]:
    """The values as an array; InputError unless they are a list of numbers."""
    if values is not None:
        try:
            return np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            pass
    raise InputError(f"{name} is {shown(values)}, but must be a list of numbers")


def thin(values: npt.ArrayLike, points: int, how: Callable[..., Any] = np.mean) -> npt.NDArray[np.float64]:
    """Reduce a series f[n] to at most `points` numbers: `how` (mean, minimum ...) of each run of neighbours.

    Non-finite values are ignored; a run without finite values gives NaN. Raises InputError for points below 1.

    >>> thin([1.0, 3.0, float("nan"), 5.0], points=2).tolist()
    [2.0, 5.0]
    """
    check_number("points", points, least=1, whole=True)
    series = _numbers("values", values)
    if series.ndim != 1:
        raise InputError(f"values of shape {series.shape}: pass a series in one dimension")
    parts = [part[np.isfinite(part)] for part in np.array_split(series, max(1, min(series.size, points)))]
    return np.array([how(part) if part.size else np.nan for part in parts], dtype=np.float64)


def typical_size(values: Iterable[Any], percentile: float = 98.0) -> float:
    """A percentile (0 to 100) of the absolute values, as a scale that is robust to outliers; 1 if there are none.

    Zeros, and entries that are not finite numbers, are ignored.

    >>> typical_size([0.0, -3.0, None, 1.0], percentile=50)
    2.0
    """
    check_number("percentile", percentile, least=0, most=100)
    if not isinstance(values, Iterable):
        raise InputError(f"values is {shown(values)}, but must be a list of numbers")
    sizes = [size for value in values if (size := abs(as_number(value))) > 0]
    return float(np.percentile(sizes, percentile)) if sizes else 1.0


def as_number(value: Any) -> float:
    """A JSON value as a number to plot; NaN for null, text, and numbers of 1e30 and more, which no axis can show."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e30 else math.nan
