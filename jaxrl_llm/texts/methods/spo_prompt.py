"""SPO of prompts."""

from collections.abc import Sequence

from jaxrl_llm.algorithms.method import beside, method
from jaxrl_llm.core.annotations import Count, Ours, Recalled
from jaxrl_llm.texts.candidates import Candidate, State, initial_state, observed
from jaxrl_llm.texts.engine import Engine, Row
from jaxrl_llm.texts.method import TextMethod
from jaxrl_llm.texts.proposer import JUDGE, KINDS, SLOTS, Brief, By, accepted, check_slots, compare, propose

REWRITE = (
    "Here is an instruction for an assistant:\n{text}\n\nAnswers that it gave:\n{right}\n\n"
    "Write a better instruction in one or two sentences. Reply with the instruction only."
)


@method(paper="arXiv 2502.06855", test="test_spo_prompt.py::test_the_winner_stays_by_majority")
@beside(
    "one set of questions",
    "the paper keeps its few questions and the best text's answers; here each step answers its own tasks with "
    "both texts",
    "a run with as many prompts as prompts_per_step",
)
def spo_prompt(
    votes: Recalled[Count] = 4,
    by: Ours[By] = "words",
    shots: Ours[Count] = 3,
    rewrite: Ours[str] = "",
    judge: Ours[str] = "",
) -> TextMethod:
    """SPO: a prompt that wins in pairs of answers is the base of the next rewrite; no rewards.

    With P the best text, Q the tasks of a step and O = {f(P, q)} the policy's answers:

        P' = rewrite(P, O);   O' = {f(P', q) : q in Q}
        P <- P' if judge(O, O') says so more often than not, of `votes` votes for each question

    in which the order of the two answers alternates. The policy is asked all of it; rewards are only logged. `rewrite`
    and `judge` are the texts of what it is asked, with the slots {text} and {right} (its answers), and {question},
    {first} and {second} ("": our own). By "words" it rewrites the text, by "examples" `shots` of its answers become
    worked examples in it, by "both" one or the other, drawn.
    """
    rewrite, judge = rewrite or REWRITE, judge or JUDGE
    check_slots("rewrite", rewrite, ("text",))
    check_slots("judge", judge, SLOTS)

    def step(state: State, tasks: Sequence[Row], engine: Engine) -> State:
        (best,) = state.candidates
        old = [group[0] for group in engine.answers([(best.text, row) for row in tasks], 1)]
        best = observed(best, [one.reward for one in old])
        how = by if by != "both" else KINDS[engine.random.integers(2)]
        proposed = propose(engine, [Brief(best.text, tuple(old), ())], 1, how, shots, rewrite)
        for text in accepted(engine, proposed, [best.text]):
            new = [group[0] for group in engine.answers([(text, row) for row in tasks], 1)]
            pairs = [(a.question, a.text.strip(), b.text.strip()) for a, b in zip(old, new, strict=True)]
            if compare(engine, pairs, votes, judge).wins:
                engine.counts["texts/accepted"] += 1
                best = observed(Candidate(text), [one.reward for one in new])
        return State(state.first, (best,))

    return TextMethod(initial_state, step, lambda state: state.candidates[0].text)
