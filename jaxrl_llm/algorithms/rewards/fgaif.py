import dataclasses

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import NonNegative, Positive, Recalled
from jaxrl_llm.core.parts import Trajectories, chain, stateless_part


@method(paper="arXiv 2404.05046", test="test_process_rewards.py::test_fgaif_is_ppo_on_sub_sentence_rewards")
@run_needs(spans="the rewards of sub-sentences; without them it is PPO")
@beside(
    "images",
    "prompts with images, and a vision-language model that labels sub-sentences",
    "rows of texts, with the labels of another model",
)
def fgaif(
    clip: Recalled[NonNegative] = 0.2,
    value_clip: Recalled[Positive | None] = 0.2,
    value_coefficient: Recalled[NonNegative] = 1.0,
    gamma: Recalled[float] = 1.0,
    lam: Recalled[float] = 0.95,
    kl_coefficient: Recalled[NonNegative] = 0.05,
) -> Algorithm:
    """Fine-Grained Artificial Intelligence Feedback (FGAIF).

    PPO with a reward at the end T_i of each sub-sentence s_i, by one reward model for each kind c of hallucination
    (objects, attributes, relations), with weights w_c:

        r_t = sum_c w_c sum_i [t = T_i] R_c(s_i) - kl_coefficient (log pi_old - log pi_ref)

    A reward model gives the probabilities of three classes after each sub-sentence: none of its kind, right,
    hallucinated. R_c is what they are worth on average. The rewards of a run are

        --rewards 'sentences(0,1,-1):objects*0.3' 'sentences(0,1,-1):attributes*0.3' 'sentences(0,1,-1):relations*0.4'

    with three models that `process_reward_model` trained with 3 classes. Other rewards are earned by the last token.

    Else it is `ppo`: clip bounds the ratio on both sides, value_clip the change of the critic, value_coefficient weighs
    its loss, gamma and lam are those of the advantages. The paper's code has the models' format; the worths of classes,
    w_c and PPO's settings were not read.
    """
    base = ppo(
        clip_low=clip, clip_high=clip, value_clip=value_clip, value_coefficient=value_coefficient, gamma=gamma, lam=lam,
        kl_coefficient=kl_coefficient,
    )  # fmt: skip
    return dataclasses.replace(base, transform=chain(rewards_of_spans(), base.transform))


@stateless_part({"spans"})
def rewards_of_spans(batch: Trajectories) -> Trajectories:
    """No change of a batch, which must have rewards of spans."""
    return batch
