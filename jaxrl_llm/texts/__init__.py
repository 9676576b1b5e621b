"""Texts that a policy is given with every prompt, optimised by the policy itself; its weights stay as they are.

A method is a step (state, tasks, engine) -> state, composed of candidates with their statistics, proposers, a judge and
rules of selection; the engine samples what the policy answers and replies.
"""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.texts.candidates import Candidate, Experience, State, apart, distance, observed, softmax, top
    from jaxrl_llm.texts.engine import Answer, Engine, StepEngine
    from jaxrl_llm.texts.method import TextMethod, get, names
    from jaxrl_llm.texts.proposer import Verdicts, compare, worked_example
    from jaxrl_llm.texts.run import optimise

__all__ = [
    "Answer", "Candidate", "Engine", "Experience", "State", "StepEngine", "TextMethod", "Verdicts", "apart", "compare",
    "distance", "get", "names", "observed", "optimise", "softmax", "top", "worked_example",
]  # fmt: skip
_MODULES = {
    "candidates": "Candidate Experience State apart distance observed softmax top",
    "engine": "Answer Engine StepEngine",
    "method": "TextMethod get names",
    "proposer": "Verdicts compare worked_example",
    "run": "optimise",
}
__getattr__ = imported_at_first_use(__name__, _MODULES)
