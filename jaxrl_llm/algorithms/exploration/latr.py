from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.credit.branchgrpo import numbers_in
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.annotations import AverageName, NonNegative, Ours, Paper
from jaxrl_llm.rollouts.lookahead import near_ties


@method(
    paper="arXiv 2510.24302",
    test="test_own_rollouts.py::test_latr_opens_branches_at_near_ties_alone_and_drops_those_that_go_on_alike",
)
@presets(
    countdown={"absolute": 0.25, "relative": 0.15, "edit": 0.4, "suffix": None, "overlap": None, "until": 512,
               "shares": "0:1,10:0.75,20:0.5,80:0.25,200:0", "greedy": True},
    math={"absolute": 0.15, "relative": 0.25, "edit": None, "suffix": 0.2, "overlap": 0.5, "until": 1024,
          "shares": "0:1,100:0.75,200:0.5,300:0.25", "greedy": True},
)  # fmt: skip
def latr(
    absolute: Paper[float] = 0.25,
    relative: Paper[float] = 0.15,
    windows: Paper[str] = "20,30,50",
    edit: Paper[float | None] = 0.4,
    suffix: Paper[float | None] = None,
    overlap: Paper[float | None] = None,
    until: Paper[int] = 512,
    shares: Paper[str] = "0:1,10:0.75,20:0.5,80:0.25,200:0",
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
    average: Ours[AverageName] = "token",
    greedy: Ours[bool] = False,
) -> Algorithm:
    """Lookahead Tree-Based Rollouts (LATR).

    GRPO on groups that grow as trees. A branch opens where two tokens are nearly as likely,

        p(c_1) > absolute, p(c_2) > absolute, |p(c_1) - p(c_2)| < relative

    among the first `until` tokens, and is dropped if r tokens later, for an r of `windows`, it is too similar to its
    parent: edit distance / r below `edit`, the match of the ends above `suffix`, or ROUGE-L above `overlap`. A share of
    the group is the tree, given by `shares` as STEP:SHARE, from these training steps on; the rest are independent
    samples, and so are the missing ones where fewer branches open (the paper repeats the first). The loss is GRPO's
    (clip_low, clip_high, kl_coefficient, average). The presets "countdown" and "math" are the paper's two settings.

    c_1 and c_2 are the most probable tokens of the place, and p is at the run's temperature. All tokens that begin no
    branch are sampled, an option of the authors' code; a parent that drew neither c_1 nor c_2 keeps its token, and its
    branch begins with c_1. greedy: as in the authors' scripts, and in the presets, such tokens are the most probable
    ones among the first `until`, p is at temperature 1, and what follows is sampled. The scripts may leave a tree that
    is full sooner; here it stays greedy up to `until`. The update treats the first tokens of branches, and greedy ones,
    as drawn, with their log-probabilities. Rollout: `rollouts.lookahead.near_ties`.
    """
    method = grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average)
    lengths = [int(r) for r in numbers_in("windows", windows)]
    steps, parts = (numbers_in("shares", shares)[i::2] for i in (0, 1))
    rollout = near_ties(
        absolute, relative, lengths, edit, suffix, overlap, until, [int(s) for s in steps], parts, greedy
    )  # fmt: skip
    return Algorithm(method.transform, method.objective, rollout=rollout)
