import math
from typing import Literal

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, RunSetting, method, run_settings
from jaxrl_llm.core.annotations import AboveOne, Code, NonNegative, Ours, Paper, Scale, Span, ZeroOrOne
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import clip, importance_correction, policy_gradient, span_ratio, token_mean
from jaxrl_llm.objectives.off_policy import interpolated_proximal
from jaxrl_llm.utils.errors import InputError


@method(paper="arXiv 2505.24298", test="test_mismatch.py::test_decoupled_ppo_is_the_loop")
@run_settings(
    RunSetting(
        "max_staleness", lambda given: 4, lambda config, given: config.max_staleness > 0, "sampling beside its updates"
    )
)
def decoupled_ppo(
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    cap: Code[float] = 5.0,
    correction: Code[Literal["mask", "truncate", "none"]] = "mask",
    proximal: Code[Literal["old", "interpolated"]] = "old",
    leave_count: Code[bool] = False,
    span: Paper[Span] = "token",
    dual_clip: Paper[AboveOne | None] = None,
    scale: Ours[Scale] = "std",
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Decoupled PPO (AReaL).

    The trust region is centred on a recent policy, the old one, and a weight corrects for the behaviour policy, whose
    version may differ between tokens: with w = sg(pi_old / pi_behaviour), rho = pi / pi_old,

        loss = -1/T sum_i sum_t w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    over the T tokens of the batch. The paper's objective uses w unbounded (correction "none"). The released code masks
    tokens with w > cap ("mask"), or takes min(w, cap) ("truncate"); masked tokens stay in T unless leave_count.

    proximal "interpolated" saves the forward pass for pi_old: of a token that is d steps stale

        log pi_old = sg((log pi_behaviour + d log pi) / (d + 1))

    so that w is known only in the update, and leave_count cannot be. span "sequence": rho is GSPO's sequence ratio.
    dual_clip c > 1 bounds the loss of bad actions by c |A|. The method works with any A; here it is GRPO's (scale,
    ddof, epsilon). With pi_old = pi_behaviour it is PPO. A run samples beside its updates, with a staleness of at most
    4 unless --max-staleness says otherwise; the paper's is 4 or 8.
    """
    mode, high = (correction, cap) if correction != "none" else ("truncate", math.exp(LARGEST))
    if proximal == "interpolated" and leave_count:
        raise InputError("leave_count needs the weights before the update: give it with proximal='old'")
    advantages = group_relative(scale, ddof=ddof, epsilon=epsilon)
    ratio = span_ratio(span, "old" if proximal == "old" else "behaviour")
    objective = policy_gradient(ratio, clip(clip_low, clip_high, dual_clip), token_mean())
    if proximal == "interpolated":
        return Algorithm(chain(advantages), interpolated_proximal(objective, mode, high))
    corrected = importance_correction("token", mode, high=high, leave_count=leave_count)
    return Algorithm(chain(advantages, corrected), objective)
