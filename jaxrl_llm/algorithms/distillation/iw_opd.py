from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative
from jaxrl_llm.core.parts import chain, part
from jaxrl_llm.objectives.distillation.sampled_tokens import iw_opd_advantage
from jaxrl_llm.objectives.distillation.teachers import Gain, towards_teacher


@method(paper="arXiv 2606.22600", test="test_distilled.py::test_iw_opd_is_its_loop")
def iw_opd(gamma: Code[NonNegative] = 0.5) -> Algorithm:
    """Importance-weighted on-policy distillation (IW-OPD).

    With a_t = log t - log s of the sampled tokens, by the student s that sampled them and the run's teacher t,

        loss = -mean over tokens of sg(w a) log s,  w_t = 1 + gamma (1 - sum_(i < t) |a_i| / sum_i |a_i|)

    so that tokens after which the two already differ much weigh less. With gamma 0 it is on-policy distillation by the
    policy gradient of KL(s || t). It reads a number of the teacher for each token. Rewards are reported only.
    """
    return Algorithm(chain(), towards_teacher(by_position(gamma)))


@part
def by_position(gamma: float = 0.5) -> Gain:
    """A function (student, teacher, mask) -> `iw_opd_advantage`."""
    return lambda student, teacher, mask: iw_opd_advantage(student, teacher, mask, gamma)
