"""Training-Free GRPO."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from jaxrl_llm.algorithms.method import beside, method
from jaxrl_llm.core.annotations import Count, Ours
from jaxrl_llm.texts.candidates import Candidate, Experience, State, initial_state, observed
from jaxrl_llm.texts.engine import Answer, Engine, Row
from jaxrl_llm.texts.method import TextMethod
from jaxrl_llm.texts.proposer import LONGEST, fill_template, join_text, split_text, worked_example

SUMMARY = "Question: {question}\n\nAnswer: {answer}\n\nSay in one sentence how this answer was found."
LESSONS = (
    "Lessons so far:\n{experiences}\n\nQuestion: {question}\n\nRight: {right}\n\nWrong: {wrong}\n\n"
    "What should be learned from this? Reply with one line: ADD: a new lesson, or MODIFY 1: a better text of lesson 1, "
    "or DELETE 1, or KEEP."
)


class Operation(NamedTuple):
    """A change of the list of experiences. number: of the experience that is modified or deleted, from 1."""

    kind: Literal["add", "modify", "delete", "keep"]
    text: str = ""
    number: int = 0


def operations_of(reply: str) -> list[Operation]:
    """The operations in a reply, one a line; [] where none can be read.

    >>> operations_of("ADD: Write the sum first.\\nDELETE 2")
    [Operation(kind='add', text='Write the sum first.', number=0), Operation(kind='delete', text='', number=2)]
    """
    found = list[Operation]()
    for line in reply.replace("*", "").splitlines():
        if made := re.match(r"\W*ADD\W*:\s*(.*\S)", line, flags=re.IGNORECASE):
            found.append(Operation("add", made[1][:LONGEST]))
        elif made := re.match(r"\W*MODIFY\W+(\d{1,6})\W*:\s*(.*\S)", line, flags=re.IGNORECASE):
            found.append(Operation("modify", made[2][:LONGEST], int(made[1])))
        elif made := re.match(r"\W*DELETE\W+(\d{1,6})\b", line, flags=re.IGNORECASE):
            found.append(Operation("delete", "", int(made[1])))
        elif re.match(r"\W*KEEP\W*$", line, flags=re.IGNORECASE):
            found.append(Operation("keep"))
    return found


def consolidated(
    experiences: Sequence[Experience], operations: Sequence[Operation], most: int
) -> tuple[Experience, ...]:
    """The experiences after the operations of a batch, whose numbers are those before it.

    Of several changes of one experience the last holds, and DELETE before MODIFY. Equal lessons are one; those with
    numbers that there are not are left out. Of more than `most` the newest stay.
    """
    changed = dict(enumerate(experiences, start=1))
    gone = {one.number for one in operations if one.kind == "delete"}
    for one in operations:
        if one.kind == "modify" and one.number in changed:
            changed[one.number] = replace(experiences[one.number - 1], text=one.text)
    kept = [one for number, one in changed.items() if number not in gone]
    kept += [Experience(one.text) for one in operations if one.kind == "add"]
    return tuple({one.text: one for one in kept}.values())[-most:]


def with_experiences(instruction: str, experiences: Sequence[Experience]) -> str:
    """The text of an instruction and experiences: lessons as a numbered list, worked examples after it."""
    lessons = [one.text for one in experiences if split_text(one.text)[0]]
    listed = "\n".join(f"{number}. {text}" for number, text in enumerate(lessons, start=1))
    return join_text(
        "\n".join(filter(None, [instruction, listed])), [x.text for x in experiences if x.text not in lessons]
    )


def contrasts(groups: Sequence[Sequence[Answer]]) -> list[tuple[Answer, Answer]]:
    """The best and the worst answer of each group whose rewards differ; of equal ones the shortest."""
    found = []
    for group in groups:
        known = sorted((one for one in group if one.reward == one.reward), key=lambda one: len(one.text))
        if known and max(x.reward for x in known) - min(x.reward for x in known) > 1e-6:
            best = max(known, key=lambda one: one.reward)
            found.append((best, min(known, key=lambda one: one.reward)))
    return found


@method(paper="arXiv 2510.08191", test="test_training_free_grpo.py::test_operations_by_hand")
@beside(
    "consolidation by the model",
    "the operations of a batch are put together by a rule, where the paper asks the model",
    "its prompt",
)
@beside("tools", "lessons from episodes with tools", "an engine that plays episodes")
def training_free_grpo(
    lessons: Ours[Literal["words", "examples"]] = "words", most: Ours[Count] = 16, summarise: Ours[bool] = True
) -> TextMethod:
    """Training-Free GRPO: lessons from groups of answers, in the prompt, instead of updates.

    The text is the first one followed by a list of experiences E. In a step each task has a group of answers under it:

        groups whose rewards are all equal are skipped
        operations = policy(E, the best answer, the worst one): add, modify, delete or keep
        E <- E after the operations of all groups

    By lessons "words" the policy says what is to be learned from the two answers, each summarised by it before where
    `summarise` holds. By "examples" the lesson is the best answer itself, the shortest of equal ones, as a worked
    example: it is added, or replaces that of the same question; this is for policies too small to write lessons. Of
    more than `most` experiences the newest stay.
    """

    def step(state: State, tasks: Sequence[Row], engine: Engine) -> State:
        (now,) = state.candidates
        groups = engine.answers([(now.text, row) for row in tasks])
        pairs = contrasts(groups)
        engine.counts["texts/skipped_groups"] += len(groups) - len(pairs)
        found = _examples(state, pairs) if lessons == "examples" else _words(engine, state, pairs, summarise)
        after = consolidated(state.experiences, found, most)
        text = with_experiences(state.first, after)
        while after and not engine.fits(text):
            engine.counts["texts/too_long"] += 1
            after = after[1:]
            text = with_experiences(state.first, after)
        if text != now.text:
            return State(state.first, (Candidate(text),), after)
        return State(state.first, (observed(now, [one.reward for group in groups for one in group]),), after)

    return TextMethod(initial_state, step, lambda state: state.candidates[0].text)


def _words(engine: Engine, state: State, pairs: Sequence[tuple[Answer, Answer]], summarise: bool) -> list[Operation]:
    """What the policy says is to be learned from each pair."""
    texts = [one.text.strip() for pair in pairs for one in pair]
    if summarise:
        answers = [one for pair in pairs for one in pair]
        asked = [fill_template(SUMMARY, question=one.question, answer=one.text[:LONGEST]) for one in answers]
        said = [replies[0].strip() if replies else "" for replies in engine.replies(asked)]
        texts = [f"{text[:LONGEST]} ({summary[:LONGEST]})" for text, summary in zip(texts, said, strict=True)]
    listed = "\n".join(f"{n}. {one.text}" for n, one in enumerate(state.experiences, start=1)) or "none"
    asked = [
        fill_template(
            LESSONS, experiences=listed, question=pair[0].question, right=texts[2 * at], wrong=texts[2 * at + 1]
        )
        for at, pair in enumerate(pairs)
    ]
    found = [operations_of("\n".join(replies)) for replies in engine.replies(asked)]
    engine.counts["texts/proposed"] += len(found)
    engine.counts["texts/unreadable"] += sum(not one for one in found)
    return [one for each in found for one in each]


def _examples(state: State, pairs: Sequence[tuple[Answer, Answer]]) -> list[Operation]:
    """The best answer of each pair as a worked example."""
    questions = {one.text.partition("\n")[0]: number for number, one in enumerate(state.experiences, start=1)}
    found = list[Operation]()
    for best, _ in pairs:
        text = worked_example(best.question, best.text)
        number = questions.get(text.partition("\n")[0])
        found.append(Operation("add", text) if number is None else Operation("modify", text, number))
    return found
