"""POLCA."""

from collections.abc import Sequence

from jaxrl_llm.algorithms.method import beside, method
from jaxrl_llm.core.annotations import Count, Fraction, Ours
from jaxrl_llm.texts.candidates import Candidate, State, apart, initial_state, observed, replaced, top
from jaxrl_llm.texts.engine import Answer, Engine, Row
from jaxrl_llm.texts.method import TextMethod
from jaxrl_llm.texts.proposer import REWRITE, By, accepted, brief_of, check_slots, fill_template, propose

SUMMARY = "These instructions were tried:\n{notes}\n\nSay in one or two sentences what works and what does not."


@method(paper="arXiv 2603.14769", test="test_polca.py::test_a_step_by_hand")
@beside(
    "embeddings",
    "texts are compared by the counts of their words, not by a model's embeddings",
    "a model of embeddings",
)
@beside("code", "text parameters that are programs", "tasks that run them")
def polca(
    best: Ours[Count] = 2,
    proposals: Ours[Count] = 2,
    epsilon: Ours[Fraction] = 0.05,
    by: Ours[By] = "words",
    shots: Ours[Count] = 3,
    rewrite: Ours[str] = "",
) -> TextMethod:
    """POLCA: a pool of texts by mean reward, tried again and again, that are far enough apart.

    Q has texts with the sum of their rewards, the number of these and notes. In a step, on its tasks:

        1. the `best` texts of Q by mean reward answer the tasks again, and their sums grow
        2. the policy sums up the notes on all of Q, and makes `proposals` new texts of each of the best
        3. a new text stays if its distance to every text of Q and to those kept before it is above epsilon
        4. those that stay answer the same tasks and join Q

    The text is the one of the largest mean. The distance of two texts is 1 - cosine of the counts of their words. By
    "words" the policy writes another instruction, asked by `rewrite`, a text with the slots {text}, {summary}, {right}
    and {wrong} ("": our own); by "examples" `shots` of its right answers become examples; by "both" they alternate.
    """
    rewrite = rewrite or REWRITE
    check_slots("rewrite", rewrite, ("text",))

    def step(state: State, tasks: Sequence[Row], engine: Engine) -> State:
        memory = state.candidates
        memory, answers = tried(engine, memory, [one.text for one in top(memory, best)], tasks)
        summary = _summary(engine, memory) if by != "examples" else ""
        briefs = [brief_of(text, found, summary) for text, found in answers.items()]
        new = accepted(engine, propose(engine, briefs, proposals, by, shots, rewrite), [x.text for x in memory])
        kept = apart(new, [one.text for one in memory], epsilon)
        engine.counts["texts/too_near"] += len(new) - len(kept)
        memory, _ = tried(engine, memory, kept, tasks)
        return State(state.first, memory)

    return TextMethod(initial_state, step, lambda state: top(state.candidates, 1)[0].text)


def tried(
    engine: Engine, memory: Sequence[Candidate], texts: Sequence[str], tasks: Sequence[Row]
) -> tuple[tuple[Candidate, ...], dict[str, list[Answer]]]:
    """The memory with the texts' answers to the tasks, which are one batch, in their statistics; and the answers."""
    groups = engine.answers([(text, row) for text in texts for row in tasks])
    known = {one.text: one for one in memory}
    answers: dict[str, list[Answer]] = {}
    new: list[Candidate] = []
    for at, text in enumerate(texts):
        own = [one for group in groups[at * len(tasks) : (at + 1) * len(tasks)] for one in group]
        answers[text] = own
        right = sum(one.reward > 0 for one in own)
        before = known.get(text, Candidate(text))
        new.append(observed(before, [x.reward for x in own], [f"{right} of {len(own)} right"], keep=3))
    return replaced(memory, new), answers


def _summary(engine: Engine, memory: Sequence[Candidate], most: int = 6) -> str:
    """What the policy says of the best and the worst texts of the memory; "" where there is one only."""
    ordered = top([one for one in memory if one.count], len(memory))
    if len(ordered) < 2:
        return ""
    shown = ordered if len(ordered) <= most else (*ordered[: most // 2], *ordered[-most // 2 :])
    notes = "\n".join(f"- {' '.join(one.text.split())} ({'; '.join(one.feedback)})" for one in shown)
    (replies,) = engine.replies([fill_template(SUMMARY, notes=notes)])
    return replies[0] if replies else ""
