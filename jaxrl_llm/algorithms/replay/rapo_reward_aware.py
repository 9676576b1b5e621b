import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.filters import uniform_groups
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Fraction, NonNegative, Ours, Paper, ZeroOrOne
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Trajectories, batch_part, chain, stateless_part
from jaxrl_llm.core.source import Step
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.curriculum.records import Array, mean_by_prompt
from jaxrl_llm.curriculum.scores import drop_solved
from jaxrl_llm.objectives import clipped_policy, sequence_mean
from jaxrl_llm.replay.into_groups import component_scores, none_above, swapped_successes


@method(paper="arXiv 2509.24107", test="test_replayed.py::test_rapo_worked_example_and_loop")
def rapo_reward_aware(
    solved: Paper[Fraction] = 0.9,
    success: Paper[float] = 0.5,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    ddof: Paper[ZeroOrOne] = 0,
    epsilon: Ours[NonNegative] = 1e-6,
    accuracy: Ours[str | None] = None,
) -> Algorithm:
    """Reward-Aware Policy Optimization (RAPO, Fathom-DeepResearch).

    GRPO with three repairs for groups of equal rewards:

        at the end of an epoch prompts are dropped whose share of samples with r > success is at least `solved`
        A = N/N_good (r - mean_g)/(std_g + epsilon), N_good of the N groups with std_g > 0
        if no sample of prompt q has r > success, a random one is replaced by the latest earlier one that has

    before advantages are computed. A stored completion keeps the log-probabilities of the policy that sampled it, to
    which rho is relative; loss: the sequence mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). ddof 0: the
    population's deviation. The paper writes G/G_good with G_good a number of groups, so G must be their number too. Its
    solve rate counts r > 0, which with its reward for format is true of any well-formed answer: here it is r > success.
    accuracy: the reward that r stands for in these rules; None: the combined one. In runs with --tools or --environment
    a stored success is an episode with its observations, which stay masked.

    The paper has two stages, which are two runs, the second from the model of the first. The first one's reward is 0.1
    R_format + 0.9 R_answer (--rewards answer_tags*0.1 exact_match*0.9). The second one's judges each call of a search
    tool (--rewards answer_tags*0.1 'useful_calls(exact_match)'): with rho the share of redundant calls, dS the unique
    less the redundant searches, and dQ the pages explored and verified less those queried in vain,

        r = 0.1 R_format + max(1 - rho, 1/2)                                      where the answer is right
        r = 0.1 R_format + 0.2 min(1, dS / C_S) + 0.2 min(1, dQ / C_Q)            where it is wrong

    C_S 8, C_Q 16 and B_v 1, the verifications of a page that count, are numbers of the reward. Labels are by rules, or
    a judge's, see `rewards.tool_calls`; the paper's judge sees claims, which B_v limits there. With them r > success
    says that the answer is right, unless half of the calls or more are redundant and the format is wrong.
    """
    objective = clipped_policy(clip_low, clip_high, sequence_mean())
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), rescale_to_informative())
    replay = swapped_successes(none_above(success), success, 1, "random", accuracy)
    easy = drop_solved(solved, measure=solve_rate(success, accuracy))
    return Algorithm(transform, objective, in_epochs(easy, at_end=True, restart=True), replay=replay)


@stateless_part()
def rescale_to_informative(batch: Trajectories) -> Trajectories:
    """Multiply the advantages by the number of groups over that of groups with different rewards.

    Groups without a scored row do not count.
    """
    known = ~jnp.isnan(batch.scores)
    (size,) = bucket_sums(batch.group, known.astype(jnp.float32))
    each = jnp.where(known, 1.0 / jnp.maximum(size, 1.0), 0.0)  # sums to 1 over a group
    good = jnp.sum(jnp.where(uniform_groups(batch), 0.0, each))
    factor = jnp.sum(each) / jnp.where(good > 0, good, 1.0)
    return batch.replace(advantages=batch.need("advantages") * factor)


@batch_part
def solve_rate(step: Step, success: float = 0.0, component: str | None = None) -> tuple[Array, Array]:
    """The share of a prompt's samples with an outcome above `success`; those without an outcome do not count.

    component: the reward that is the outcome; None: their combination.
    """
    outcome = component_scores(step.scored, component)
    succeeds = np.where(np.isnan(outcome), np.nan, outcome > success)
    ids, _, rate = mean_by_prompt(np.asarray(step.scored.batch.prompt_id), succeeds)
    return ids, rate
