import dataclasses

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Code, Count, NonNegative, OfRun, Ours, Paper, Positive, Share
from jaxrl_llm.core.soft_thinking import Density, SoftThinking
from jaxrl_llm.rollouts.programs import soft_thoughts


@method(paper="arXiv 2511.06411", test="test_soft_grpo.py::test_the_worked_example_of_soft_grpo")
def soft_grpo(
    top_k: Paper[Count] = 5,
    top_p: Paper[Share] = 0.95,
    gumbel_temperature: Paper[Positive] = 0.1,
    end: Ours[str] = "</think>",
    density: Code[Density] = "mean",
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.001,
    average: Paper[AverageName] = "sequence",
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Gumbel-reparameterised GRPO for soft thinking (SofT-GRPO).

    Until a sample writes the token `end`, it thinks in mixtures. With p the probabilities of the top_k most probable
    tokens, of these the fewest that have the share top_p, renormalised, and E the embeddings,

        g_j = log p_j + eps_j,  eps_j ~ Gumbel(0, 1);    y = softmax(g / gumbel_temperature);    s = sum_j y_j E[id_j]

    and s is what the model sees next. The action is g: the ratio of a thinking token is one of Gumbel densities,

        log f(g | theta) = sum_j [-u_j - exp(-u_j)],  u_j = g_j - log p_theta_j;    rho = f(g | theta) / f(g | old)

    with p_theta renormalised over the same tokens, and that of a token of the answer is of probabilities. g and ids are
    data, s is made of the current E, and the loss is that of `grpo` (clip_low, clip_high, average, max_length), with
    kl_coefficient times k3 of the same log-densities. Rewards see the most heavily weighed token of each mixture.

    density: "sum" is the paper's, above. "mean" is that of the released code, which trained the models: the mean over
    the j with log p_j > -3, with log(p + 1e-6) in place of log p, and u clipped to [-1.5, 3], as is eps in sampling.
    The code asks for log p_j > -3 of each policy anew; here the rollout's p decides, for both.

    end is one token of the model, at whose mixture the thoughts end. The paper has groups of 8, at temperature 1, which
    are a run's defaults; a gumbel_temperature of 0.25 or 1 with top_p 1 collapsed there.
    """
    thinking = SoftThinking(top_k, top_p, gumbel_temperature, end, density)
    base = grpo(clip_low, clip_high, kl_coefficient, average=average, max_length=max_length)
    return dataclasses.replace(base, rollout=soft_thoughts(thinking))
