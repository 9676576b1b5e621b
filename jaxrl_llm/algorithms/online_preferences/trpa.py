from jaxrl_llm.algorithms.method import Algorithm, method, one_reward_of, run_settings
from jaxrl_llm.core.annotations import Code, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import kl, preference


@method(paper="arXiv 2504.04524", test="test_preference.py::test_trpa_by_loop_however_it_is_split")
@run_settings(one_reward_of("tagged_levels", why="a reward of several levels, whose order its pairs are"))
def trpa(
    beta: Code[Positive] = 0.1,
    anisotropy: Code[NonNegative] = 2.5,
    trust: Code[NonNegative] = 0.001,
    best: Ours[float] = 1.0,
) -> Algorithm:
    """Trust Region Preference Approximation.

    No advantages: the reward ranks the samples of a prompt, and each pair with r_i > r_j is a preference. The paper's
    four levels, right, wrong, no answer found and bad format, are the rewards 1, 0.4, 0.2 and 0 of `--rewards
    tagged_levels`; only their order counts.

        loss = mean over pairs of -log sigmoid(c beta (h_i - h_j)) + trust mean_t k3

    with h the mean log-ratio to the reference, c = anisotropy where r_i >= best, else 1, and k3 = exp(d) - d - 1 with
    d = log pi_behaviour - log pi: the trust region around the behaviour policy (trust is lambda_tr; a token mean).
    Without any pair the first term is the mean over samples of -log sigmoid(h_i) where r_i >= best and
    -log sigmoid(-h_i) elsewhere. Pairs are formed among the rows of a gradient step.
    """
    return Algorithm(chain(), preference(beta, best, anisotropy) + trust * kl("behaviour", "k3"))
