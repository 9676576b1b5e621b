from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, Ours, Paper
from jaxrl_llm.core.parts import chain, part
from jaxrl_llm.objectives import clip, distillation, token_ratio, towards_teacher
from jaxrl_llm.objectives.distillation.sampled_tokens import minillm_advantage
from jaxrl_llm.objectives.distillation.teachers import Gain


@method(paper="arXiv 2306.08543", test="test_distilled.py::test_minillm_is_its_loop")
@beside(
    "teacher_mixed_sampling",
    "samples of a mixture of teacher and student, with importance weights",
    "the student's own samples",
)
@beside("pretraining_loss", "a language-modelling loss on pre-training texts", "an objective added to this one")
def minillm(
    gamma: Paper[Fraction] = 1.0,
    length_normalised: Paper[bool] = True,
    single_step: Paper[NonNegative] = 1.0,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    top_k: Ours[int] = 0,
) -> Algorithm:
    """MiniLLM: the policy gradient of the reverse divergence from a teacher.

    With R_t = log t - log s of the sampled tokens, by the student s that sampled them and the run's teacher t,

        A_t = sum_(i >= t) gamma^(i - t) R_i,  divided by sum_(i >= t) gamma^(i - t) if length_normalised
        loss = -mean over tokens of min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + single_step KL(s || t)

    where rho is the ratio to the policy that sampled, and the last term is of whole distributions (top_k: of the
    student's most probable tokens and of all others as one). Rewards are reported only.
    """
    gradient = towards_teacher(gains_to_go(gamma, length_normalised), token_ratio(), clip(clip_low, clip_high))
    return Algorithm(chain(), gradient + single_step * distillation(1.0, top_k))


@part
def gains_to_go(gamma: float = 1.0, length_normalised: bool = True) -> Gain:
    """A function (student, teacher, mask) -> `minillm_advantage`."""

    return lambda student, teacher, mask: minillm_advantage(
        student, teacher, mask, gamma, length_normalised=length_normalised
    )
