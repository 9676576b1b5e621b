from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Fraction, Ours, Paper
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import average_by_name, distillation
from jaxrl_llm.objectives.distillation.divergences import SupportOf
from jaxrl_llm.rollouts.guidance.responses import NEED, demonstration
from jaxrl_llm.rollouts.programs import Demands, Episode, Task, Tools, group, program_part


@method(paper="arXiv 2306.13649", test="test_distilled.py::test_gkd_is_its_loop")
def gkd(
    beta: Paper[Fraction] = 0.5,
    student_share: Ours[Fraction] = 1.0,
    column: Ours[str] = "completion",
    top_k: Ours[int] = 0,
    support: Ours[SupportOf | None] = None,
    tail: Ours[bool] = True,
    average: Paper[AverageName] = "token",
) -> Algorithm:
    """Generalised knowledge distillation on the student's own samples (GKD).

    The run's teacher t reads what the student s sampled, at the student's temperature. Over all tokens v, without a
    gradient of t,

        loss = mean over tokens of D,  D = beta KL(t || m) + (1 - beta) KL(s || m),  m = beta t + (1 - beta) s

    At beta 0 D is KL(t || s), and at 1 KL(s || t), as which on-policy distillation is known: there the loss is larger
    by orders of magnitude than next to the ends. student_share: of the prompts, those whose responses the student
    samples (the paper's lambda, 0.5); the others have the text of a column of the data set. top_k: 0 for the whole
    distribution; else the most probable tokens and, with tail, all others as one. support: whose tokens these are; None
    is the teacher's at beta 0, the student's at 1, and both between. average: of tokens. Rewards are reported only.
    """
    objective = distillation(beta, top_k, support=support, tail=tail, average=average_by_name(average))
    return Algorithm(chain(), objective, rollout=None if student_share == 1 else partly_given(student_share, column))


@program_part("partly_given", {NEED}, ["{column}"], Demands(variable_size=True))
async def partly_given(tools: Tools, task: Task, student_share: float, column: str = "completion") -> list[Episode]:
    """Samples of the prompt with a probability of `student_share`, else the text of a column alone.

    Provides info["demonstrated"], 1 for episodes of a text.
    """
    if tools.random("given").random() >= student_share:
        return [demonstration(tools, task, column)]
    return [one.with_info(demonstrated=0.0) for one in await group().program(tools, task)]
