from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, OfRun, Positive, Recalled
from jaxrl_llm.core.parts import part
from jaxrl_llm.core.reference import Params, ReferenceRule, model_names, weighted_mean


def listed_models(models: str | None) -> list[str]:
    """The models that a text lists, separated by commas; none for None.

    >>> listed_models("runs/a, runs/b"), listed_models(None)
    (['runs/a', 'runs/b'], [])
    """
    return [name.strip() for name in (models or "").split(",") if name.strip()]


@method(paper="arXiv 2411.01798", test="test_moving_reference.py::test_salsa_is_ppo_with_the_soup_as_reference")
def salsa(
    other: OfRun[str | None] = None,
    share: Recalled[Fraction] = 0.5,
    kl_coefficient: Code[NonNegative] = 0.05,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    value_clip: Code[Positive | None] = 0.2,
    value_coefficient: Code[NonNegative] = 1.0,
    gamma: Code[float] = 1.0,
    lam: Code[float] = 0.95,
    whiten: Code[bool] = True,
) -> Algorithm:
    """Soup-based Alignment Learning for Stronger Adaptation (SALSA).

    `ppo` whose reference is a model soup, the average of the weights of two models that were fine-tuned from the same
    pretrained one on different seeds or data:

        theta_ref = share theta_0 + (1 - share) theta_other
        r_t = r 1[t last] - kl_coefficient (logp - logp_ref)_t

    theta_0 are the run's initial weights, from which the policy starts. other: name or folder of the second model (or
    of several, separated by commas, which have equal parts of 1 - share); a run needs it. With share 1 this is `ppo`.
    The soup is nearer to good policies than either model, so that more divergence from it is tolerated. clip_low,
    clip_high, value_clip, value_coefficient, gamma, lam and whiten as in `ppo`.
    """
    base = ppo(
        clip_low=clip_low, clip_high=clip_high, value_clip=value_clip, value_coefficient=value_coefficient, gamma=gamma,
        lam=lam, whiten=whiten, kl_coefficient=kl_coefficient,
    )  # fmt: skip
    return replace(base, reference=soup(*listed_models(other), share=share, option="other"))


@part
def soup(*models: str, share: Fraction = 0.5, option: str | None = None) -> ReferenceRule:
    """The average of weights: `share` of the initial policy, and equal parts of the other models.

    option: see `ReferenceRule`. Raises InputError unless share is within [0, 1].
    """

    def init(initial: Params, others: Sequence[Params]) -> Params:
        rest = (1 - share) / max(len(others), 1)
        return jax.jit(lambda *trees: weighted_mean(trees, [share, *[rest] * len(others)]))(initial, *others)

    return ReferenceRule(init, models=model_names(models), option=option)
