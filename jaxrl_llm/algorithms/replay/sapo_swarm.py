from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Count, NonNegative, NonNegativeInt, Ours, Paper, ZeroOrOne, check_number
from jaxrl_llm.core.parts import part
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.replay.base import Swarm
from jaxrl_llm.rollouts.runtime.sources import unchanged


@method(paper="arXiv 2509.08721", test="test_replayed.py::test_sapo_learns_from_another_node")
@beside("network", "nodes with different models, and a network between them", "several processes")
def sapo_swarm(
    nodes: Ours[int] = 2,
    own: Paper[int] = 4,
    foreign: Paper[int] = 4,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.28,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Swarm sAmpling Policy Optimization (SAPO, Sharing is Caring).

    Nodes with policies of their own share completions and not weights. In a step each samples groups for its prompts,
    publishes them, and trains on `own` of its groups and `foreign` of the others', drawn uniformly after groups of the
    others with equal rewards are dropped. With rho = pi/pi_old, pi_old the node's own policy before the update, also
    for what others sampled,

        loss = -token mean of min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  A = (r - mean_g)/(std_g + epsilon)

    without a KL; ddof is of the deviation. A run trains `nodes` policies in one process, all from its model; its
    metrics, evaluation and result are those of the first, "swarm/reward_K" is the mean reward of another.
    prompts_per_step should be at least `own`. Tokens and rewards of others stay as they are, because the nodes share
    tokenizer and reward functions. Not here: nodes with different models, and a network between them. The paper has 8
    nodes.
    """
    objective = policy_gradient(token_ratio("old"), clip(clip_low, clip_high), token_mean())
    return Algorithm(group_relative(ddof=ddof, epsilon=epsilon), objective, replay=swarm(nodes, own, foreign))


@part
def swarm(nodes: Count = 2, own: NonNegativeInt = 4, foreign: NonNegativeInt = 4) -> Swarm:
    """Each of `nodes` policies samples its prompts, and trains on `own` of its groups and on `foreign` of the others'.

    See `shared`. Nothing is stored.
    """
    check_number("own + foreign", own + foreign, least=1)
    return Swarm(dict, unchanged, frozenset({"replayed"}), nodes=nodes, own=own, foreign=foreign)
