from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.algorithms.rewards.gui_r1 import by_rewards
from jaxrl_llm.core.annotations import Code, NonNegative, Ours


@method(paper="arXiv 2503.01785", test="test_of_screens.py::test_visual_rft_is_the_loop_over_answers")
@run_needs(
    box_confidence="confidences that suit the matches",
    box_format="whether the answer is well-formed",
    box_overlap="overlap with the expected boxes",
)
@beside("vision", "screens or images as they are; a prompt describes them", "a policy that sees")
def visual_rft(
    classification: Ours[bool] = False,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.04,
) -> Algorithm:
    """Visual Reinforcement Fine-Tuning (Visual-RFT).

    GRPO with rewards for what an image shows. Boxes are answered with confidences c_j. In descending order of c each is
    matched to the expected box, of those that are left, with which its IoU is largest; iou_j is that IoU where it is
    above 1/2, else 0:

        R = sum_j iou_j / max(number of boxes, number of expected boxes)
            + mean_j (c_j if iou_j > 0, else 1 - c_j) + [tags and list are well-formed]

    by `--rewards box_overlap box_confidence box_format`, with the data set's column `boxes`. classification: R = [the
    answer and the expected name contain each other] + [tags], by `class_match` and `answer_tags`, with the column
    `answer`. Weights of the run's rewards have no effect. A = (R - mean_g)/std_g, with clip_low, clip_high and the k3
    penalty kl_coefficient. The code's first version divides the overlaps by the number of boxes in the answer. Images
    are out of scope: a prompt describes what they show. The paper has 8 samples of a prompt.
    """
    names = ("class_match", "answer_tags") if classification else ("box_overlap", "box_confidence", "box_format")
    return by_rewards(dict.fromkeys(names, 1.0), grpo(clip_low, clip_high, kl_coefficient))
