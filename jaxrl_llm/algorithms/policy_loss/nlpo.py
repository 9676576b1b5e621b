"""Natural Language Policy Optimization (NLPO)."""

from jaxrl_llm.advantages import generalised_advantages, kl_reward, stepwise_kl, whiten_advantages
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, Count, NonNegative, Positive, Share
from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.parts import Array, Transform, chain, part
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.objectives import clipped_policy, entropy, value_loss
from jaxrl_llm.rollouts.programs import group, hooked
from jaxrl_llm.sampling.filters import Filters, kept_tokens, support
from jaxrl_llm.utils.errors import is_off


@method(paper="arXiv 2210.01241", year=2023, test="test_masked.py::test_nlpo_is_its_loop")
@beside("top_k", "masks of the most probable tokens, a variant", "another support of the sampler")
def nlpo(
    mask_top_p: Code[float] = 0.9,
    mask_min_keep: Code[int] = 100,
    mask_every: Code[int] = 5,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    value_clip: Code[Positive | None] = None,
    value_coefficient: Code[NonNegative] = 1.0,
    gamma: Code[float] = 0.99,
    lam: Code[float] = 0.95,
    whiten: Code[bool] = True,
    kl_coefficient: Code[NonNegative] = 0.1,
    kl_target: Code[Positive | None] = 0.1,
    kl_rate: Code[float] = 0.1,
    entropy_coefficient: Code[NonNegative] = 0.0,
) -> Algorithm:
    """Natural Language Policy Optimization (NLPO, Is Reinforcement Learning (Not) for Natural Language Processing,
    ICLR).

    `ppo` over fewer actions. A mask policy psi, at first the initial policy, is replaced by the current one after every
    mask_every updates. A token may be chosen if it is in the nucleus of psi after the same tokens: the fewest most
    probable ones whose mass is at least mask_top_p, but at least mask_min_keep. The masked policy is the policy on
    these tokens, renormalised:

        p(v) = 1[v in S] pi(v) / sum_{u in S} pi(u),    S = nucleus of psi
        rho = p / p_old;   r_t = r 1[t last] - kl_coefficient (log pi - log pi_ref)_t

    The sampler draws from p (`lagged_nucleus`), ratios and the entropy are those of p, on the set S of the rollout. The
    divergence in the reward is of the policies without the mask, of the sampling and the initial policy. kl_target: the
    coefficient moves after each batch, with KL the mean of these log-ratios over its tokens, by

        kl_coefficient <- kl_coefficient (1 + kl_rate clip(KL / kl_target - 1, -0.2, 0.2))

    None: it stays. clip_low, clip_high, value_clip, value_coefficient (1: half the squared error), gamma, lam, whiten
    and entropy_coefficient as in `ppo`. With mask_top_p 1 this is `ppo`.

    The run keeps a copy of the weights for psi beside that of the reference, and computes psi's states at each token
    that is drawn and in each pass of the update. Released code replaces psi before the update of that step, not after
    it, and whitens within minibatches; one of its configurations has kl_target 1.
    """
    penalty: list[Transform] = [] if is_off(kl_coefficient) else [kl_reward(kl_coefficient, of="untruncated")]
    if kl_target is not None:
        step = stepwise_kl(kl_coefficient, kl_target, kl_rate, of="untruncated")
        penalty = [step, kl_reward("kl_coefficient", of="untruncated")]
    parts = [*penalty, generalised_advantages(gamma, lam), *([whiten_advantages()] if whiten else [])]
    objective = clipped_policy(clip_low, clip_high) + value_coefficient * value_loss(value_clip)
    return Algorithm(
        chain(*parts), objective - entropy_coefficient * entropy(),
        rollout=hooked(group(), lagged_nucleus(mask_top_p, mask_min_keep, mask_every)),
    )  # fmt: skip


@part
def lagged_nucleus(top_p: Share = 0.9, min_keep: Count = 1, every: int = 5) -> Hook:
    """The policy on the nucleus of its own lagged copy psi (NLPO, 2210.01241): the most probable tokens under psi.

    These are the fewest whose mass under psi is at least top_p, and at least min_keep. psi is the initial policy, and
    is replaced by the current one after every `every` updates. Tokens that tie with the last of them are allowed, too.
    Raises InputError unless top_p is above 0 and at most 1, and min_keep and every are whole numbers, at least 1.
    """

    def kept(logits: Array) -> Array:
        nucleus = kept_tokens(logits, Filters(top_p=top_p))
        return nucleus | kept_tokens(logits, Filters(top_k=min_keep)) if min_keep > 1 else nucleus

    return support(kept, "lagged_nucleus", periodic_reset(every))
