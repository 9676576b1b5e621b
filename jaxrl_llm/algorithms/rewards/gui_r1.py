from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import Code, NonNegative, Ours
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.rewards.transforms import component_of, rescore


@method(paper="arXiv 2504.10458", test="test_of_screens.py::test_gui_r1_is_the_loop_over_answers")
@run_needs(gui_action="whether the action is the expected one", gui_format="whether the answer is well-formed")
@beside("vision", "screens or images as they are; a prompt describes them", "a policy that sees")
def gui_r1(
    action_weight: Code[float] = 0.8,
    format_weight: Code[float] = 0.2,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.01,
) -> Algorithm:
    """GUI-R1 (A Generalist R1-Style Vision-Language Action Model For GUI Agents).

    GRPO with a reward for one action on a screen, of one space of actions for all platforms:

        R = action_weight accuracy + format_weight format

    accuracy, `--rewards gui_action`: 1 if the kind of the action is the expected one, and a click is within 140 pixels
    of the expected point, or inside the expected box; the words of type, select and scroll have a token F1 of at least
    0.5 with the expected ones; other actions count by their kind. format, `gui_format`: 1 if thoughts and answer are
    tagged, and the answer is a list of actions with all that they need. The expected action is the data set's column
    `action`. Weights of the run's rewards have no effect. A = (R - mean_g)/std_g, with clip_low, clip_high and the k3
    penalty kl_coefficient. Screenshots are out of scope: a prompt describes the screen.
    """
    weights = {"gui_action": action_weight, "gui_format": format_weight}
    return by_rewards(weights, grpo(clip_low, clip_high, kl_coefficient))


def by_rewards(weights: dict[str, float], base: Algorithm) -> Algorithm:
    """The method with the weighted sum of these components as its reward, which it then needs."""
    return replace(base, transform=chain(rescore(weighted_components(weights), weights), base.transform))


@batch_part
def weighted_components(batch: Trajectories, weights: Mapping[str, float]) -> Array:
    """A function `batch -> f32[N]`: the weighted sum of these components, whatever weights the run gives them.

    The combined reward where the batch lacks one of them, as in a run that goes without it.
    """
    if not set(weights) <= set(batch.rewards or {}):
        return batch.scores
    return sum((w * component_of(batch, name) for name, w in weights.items()), jnp.zeros(batch.group.shape))
