import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AtLeastOne, Code, NonNegative, Number, OfRun, Ours
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy, sequence_mean
from jaxrl_llm.rewards.transforms import component_of, other_components, rescore


@method(paper="arXiv 2503.16219", test="test_reward_composed.py::test_open_rs_is_the_loop")
def open_rs(
    accuracy: Ours[str | None] = None,
    success: Ours[float] = 0.5,
    accuracy_weight: Code[float] = 2.0,
    format_weight: Code[float] = 1.0,
    right: Code[float] = 0.5,
    worst: Code[float] = -0.5,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.04,
    max_length: OfRun[AtLeastOne | None] = None,
) -> Algorithm:
    """Open-RS (Reinforcement Learning for Reasoning in Small LLMs).

    GRPO with a reward that falls along a cosine with the length: with x = min(length / max_length, 1) and
    f = (1 + cos(pi x))/2,

        R = accuracy_weight (right + (1 - right) f          if the answer is right,
                             worst - worst f                if it is wrong)
            + format_weight (sum of the other components)

    so that right answers get 1 where they are short and `right` where they are long, wrong ones 0 and `worst`. An
    answer is right where the component `accuracy`, or the combined reward where it is None, is above `success`; name
    it in runs with a format reward. A = (R - mean_g) / std_g, with clip_low, clip_high and the k3 penalty
    kl_coefficient. The released code measures the length in characters (at most 3584 in the third experiment); here it
    is in tokens, and max_length is the run's limit (3584 where None). Its bare function falls from -1 to -0.5 for wrong
    answers; the training script, whose numbers these are, the other way.
    """
    longest = 3584 if max_length is None else max_length
    composed = length_graded(accuracy, success, accuracy_weight, format_weight, longest, right, worst)
    objective = clipped_policy(clip_low, clip_high, sequence_mean(), kl_coefficient=kl_coefficient)
    return Algorithm(chain(rescore(composed), group_relative()), objective)


def cosine_length(correct: Array, share: Array, best: Number = 1.0, right: Number = 0.5, worst: Number = -0.5) -> Array:
    """A reward that falls along a cosine with the length, f32[N]: from `best` to `right`, if wrong from 0 to `worst`.

    correct: bool[N]. share: f32[N], length / longest length, of which more than 1 counts as 1.

    >>> share = jnp.array([0.0, 0.5, 1.0])
    >>> cosine_length(share >= 0, share).tolist(), cosine_length(share < 0, share).tolist()
    ([1.0, 0.75, 0.5], [0.0, -0.25, -0.5])
    """
    fall = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(share, 0.0, 1.0)))
    return jnp.where(correct, right + fall * (best - right), worst + fall * (0.0 - worst))


@batch_part
def length_graded(
    batch: Trajectories,
    accuracy: str | None,
    success: float,
    weight: float,
    other_weight: float,
    longest: float,
    right: float,
    worst: float,
) -> Array:
    """A function `batch -> f32[N]`: weight `cosine_length` + other_weight (sum of the other components).

    Right is a component `accuracy`, or the combined reward where it is None, above `success`.
    """
    score = batch.scores if accuracy is None else component_of(batch, accuracy)
    graded = cosine_length(score > success, batch.lengths / longest, 1.0, right, worst)
    rest = [] if accuracy is None else other_components(batch, accuracy)
    return weight * graded + other_weight * sum((jnp.nan_to_num(x) for x in rest), jnp.zeros(score.shape))
