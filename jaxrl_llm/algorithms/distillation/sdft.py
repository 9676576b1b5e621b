from dataclasses import replace

from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Fraction, Ours, Paper
from jaxrl_llm.core.parts import chain
from jaxrl_llm.core.reference import exponential_average, periodic_reset
from jaxrl_llm.objectives import distillation
from jaxrl_llm.rollouts.guidance.hints import texts_of
from jaxrl_llm.rollouts.programs import Demands, Episode, Task, Tools, program_part, samples

SHOWN = "\n\nThis is an example of a response:\n\n{}\n\nNow answer with a response of your own."


@method(paper="arXiv 2601.19897", test="test_distilled.py::test_sdft_is_its_loop")
def sdft(
    beta: Paper[Fraction] = 1.0, top_k: Ours[int] = 0, decay: Ours[Fraction] = 0.99, column: Ours[str] = "completion"
) -> Algorithm:
    """Self-distillation fine-tuning (SDFT): the policy learns from itself after a prompt with a demonstration.

    The student s samples responses to the prompt. The teacher t reads them after the prompt and the demonstration in a
    column of the data set. Its weights are a moving average of the student's, decay theta_t + (1 - decay) theta after
    each update (0: the student's own, also with adapters), or those of the run's teacher. The loss is the mean over
    tokens of KL(s || t), and with beta < 1 of the divergence of `gkd`:

        D = beta KL(t || m) + (1 - beta) KL(s || m),  m = beta t + (1 - beta) s

    top_k: 0 for the whole distribution, else the student's most probable tokens (at beta 0 the teacher's, between both)
    and all others as one. A sample that does not fit into the context after the longer prompt has no divergence.
    Rewards are reported only.
    """
    reference = periodic_reset(1) if decay == 0 else exponential_average(decay)
    return Algorithm(chain(), distillation(beta, top_k), rollout=shown_to_teacher(column), reference=reference)


@program_part("shown_to_teacher", {"teacher_tokens"}, ["{column}"], Demands(at_once=True))
async def shown_to_teacher(tools: Tools, task: Task, column: str = "completion", text: str = SHOWN) -> list[Episode]:
    """A group of samples whose teacher reads them after the prompt and a text of a column, the first where a row has
    several. text: how it is written. Provides teacher_tokens (`batch.teacher_tokens`).

    A row without one, and a sample that does not fit into the model's context behind it, have no teacher's prompt.
    """
    known = texts_of(task.row.get(column), column)
    longer = tools.prompt_with(text.format(known[0])) if known else ()
    found = await samples(tools, task.prompt, range(task.samples))
    fitting = (longer if tools.fits((*longer, *one.own.token.tolist())) else () for one in found)
    return [replace(one, teacher_prompt=prompt) for one, prompt in zip(found, fitting, strict=True)]
