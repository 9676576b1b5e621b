from dataclasses import replace

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import NonNegative, Ours
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.scores import staged


@method(paper="arXiv 2508.11360", test="test_curricula.py::test_craft_gui_trains_on_stages")
@beside("vision", "screens or images as they are; a prompt describes them", "a policy that sees")
def craft_gui(
    column: Ours[str] = "stage",
    stage_steps: Ours[int] = 100,
    earlier_share: Ours[float] = 0.0,
    order: Ours[str] = "",
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.04,
) -> Algorithm:
    """Curriculum-Reinforced Agent for GUI Tasks (CRAFT-GUI).

    GRPO (clip_low, clip_high, kl_coefficient) over stages from easy to hard. Each value of a `column` of the data set
    is a stage of stage_steps steps, and the last goes on to the end. They are in ascending order, or in `order`, the
    values with commas between them. earlier_share: the share of prompts from earlier stages.

    The paper's reward is a weighted sum of checks by rule, of format, kind of action and parameters, and a judge's
    score of open answers. They are the run's rewards, with their weights: `--rewards gui_format gui_kind gui_parameter
    FILE.py:JUDGE`, where the judge returns None for what is no answer to a question. The paper's numbers were not
    available. Screens are out of scope: a prompt describes them.
    """
    names = tuple(name.strip() for name in order.split(",") if name.strip())
    curriculum = choose_prompts(staged(column, stage_steps, earlier_share, names))
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=curriculum)
