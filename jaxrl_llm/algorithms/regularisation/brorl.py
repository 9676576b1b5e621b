from dataclasses import replace

from jaxrl_llm.algorithms.classic.dapo import dapo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Count, NonNegative, Ours
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.objectives import kl, token_mean


@method(paper="arXiv 2510.01180", test="test_curricula.py::test_brorl_against_a_loop")
def brorl(
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.4,
    kl_coefficient: Ours[NonNegative] = 1e-4,
    reset_every: Ours[int] = 200,
    rounds: Ours[Count] = 10,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """BroRL: Scaling Reinforcement Learning via Broadened Exploration.

    Hundreds of samples a prompt: the run's group_size, 512 in the paper. A step on the logits of a softmax changes the
    probability Q of the right answers, to first order, by

        dQ = step/N [(R_c - S) (1 - Q) A2 + (S - R_w) Q B2 + S (Q U_w2 - (1 - Q) U_c2)],    S = sum_{sampled} R_j p_j

    A2, B2, U_c2 and U_w2 being the sums of p^2 over right and wrong sampled, and right and wrong unsampled answers.
    Only the last term can lower Q, and it vanishes as N grows. The loss is DAPO's, with clip_low < clip_high, groups
    without signal replaced for up to `rounds` batches, A = (r - mean_g) / (std_g + epsilon), and kl_coefficient
    times k3 to a reference that becomes the policy after every reset_every updates.

    Micro-batches may be smaller than a group, so that the memory of an update does not grow with it. The paper goes on
    from a model that longer training with few samples improves no more. It scales the learning rate with the root of
    the batch.
    """
    base = dapo(clip_low, clip_high, rounds=rounds, epsilon=epsilon)
    penalty = kl_coefficient * kl(to="reference", estimator="k3", average=token_mean())
    return replace(base, objective=base.objective + penalty, reference=periodic_reset(reset_every))
