from jaxrl_llm.advantages import check_credit
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Fraction, NonNegative, Ours
from jaxrl_llm.objectives import clipped_policy


@method(paper="arXiv 2601.03525", test="test_multi_reward.py::test_verpo_against_a_loop")
@run_needs(tests="results of single tests of code; without it components of the reward are the tests")
def verpo(
    difficulty: Ours[float] = 2.0,
    width: Ours[float] = 0.1,
    partial: Ours[Fraction] = 0.5,
    gamma: Ours[float] = 0.95,
    epsilon: Ours[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
) -> Algorithm:
    """Verifiable Dense Reward Policy Optimization (VeRPO).

    Besides full success, a program is rewarded for each test that it passes: more for tests that few of the group pass,
    and less for tests whose pass rate is shared by many, so that many easy tests do not dominate. With p_itj whether
    attempt t of row i passes test j, rho_j its mean over the attempts of the group, and S_i = gamma^attempts if the
    last attempt passes all tests, else 0,

        w_j = exp(-difficulty rho_j) / (sum_k exp(-(rho_j - rho_k)^2 / (2 width^2)) + epsilon)
        R_it = sum_j w_j p_itj,   A_it = S_i - mean_g S + partial (R_it - mean_g R)

    on the tokens of attempt t, in the clipped loss (clip_low, clip_high) averaged over tokens. The paper's values of
    difficulty (its alpha), width (sigma), partial (beta), gamma and epsilon (delta) were not available to us.

    info["tests"] has the tests, f32[N, U] for a single attempt or [N, K, U] for one attempt per turn (NaN: no such
    test): a reward function returns them as the entry "tests" beside its score. Without it the reward components,
    clipped to [0, 1], are the tests.
    """
    return Algorithm(check_credit(difficulty, width, partial, gamma, epsilon), clipped_policy(clip_low, clip_high))
