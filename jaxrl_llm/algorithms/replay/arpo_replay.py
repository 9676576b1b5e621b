from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, NonNegative, NonNegativeInt, Ours, ZeroOrOne
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.replay.into_groups import low_and_alike, swapped_successes


@method(paper="arXiv 2505.16282", test="test_replayed.py::test_arpo_is_the_loop_over_steps")
@beside("tasks", "the choice of tasks that the base agent solves sometimes", "a filter of the data")
def arpo_replay(
    stored: Code[NonNegativeInt] = 8,
    success: Code[float] = 0.1,
    spread: Code[NonNegative] = 0.05,
    low: Code[float] = 0.2,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.3,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
    accuracy: Ours[str | None] = None,
) -> Algorithm:
    """Agentic Replay Policy Optimization (ARPO: End-to-End Policy Optimization for GUI Agents).

    GRPO in which a failed group gets a stored success. B[q] has the newest `stored` completions of prompt q with an
    outcome e > success. With e_1 ... e_G the outcomes of a group,

        if std(e) < spread and mean(e) < low and B[q] is not empty: sample 1 is replaced by one of B[q]
        A = (r - mean_g)/(std_g + epsilon) of the mixed group
        loss = -token mean of min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  rho = pi / pi_old

    pi_old is the policy at the start of the update, for stored completions too, so there is no off-policy correction;
    there is no KL. The successes of the step are stored afterwards. accuracy: the reward that is the outcome; None: the
    combined one. r is the run's combination of rewards: the paper adds 0.5 f, f = -1 for a malformed action and else 0,
    as the weight of a format reward does. In runs with --tools or --environment a stored success is an episode, with
    the observations that it had, which stay masked. Not here: the choice of tasks that the base agent can sometimes
    solve.
    """
    objective = policy_gradient(token_ratio("old"), clip(clip_low, clip_high), token_mean())
    replay = swapped_successes(low_and_alike(spread, low), success, stored, component=accuracy)
    return Algorithm(group_relative(ddof=ddof, epsilon=epsilon), objective, replay=replay)
