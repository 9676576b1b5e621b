"""ContextEvolve."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxrl_llm.algorithms.method import beside, method
from jaxrl_llm.core.annotations import Count, Ours, Positive
from jaxrl_llm.texts.candidates import Candidate, Experience, State, draw_places, initial_state, softmax, top
from jaxrl_llm.texts.engine import Answer, Engine, Row
from jaxrl_llm.texts.method import TextMethod
from jaxrl_llm.texts.methods.polca import tried
from jaxrl_llm.texts.proposer import accepted, fill_template, instruction_of, join_text, split_text, worked_example

ABSTRACT = "Question: {question}\n\nAnswer: {answer}\n\nSay in one or two sentences how this answer works."
DIRECTION = (
    "These instructions were tried, with the share of right answers:\n{notes}\n\n"
    "In which direction should the instruction change? Reply with one sentence for the assistant."
)


@method(paper="arXiv 2602.02597", test="test_contextevolve.py::test_exemplars_are_drawn_by_priority")
@beside(
    "programs", "systems code as the solutions that are searched", "tasks whose answers are programs, with code rewards"
)
@beside("recipe", "only the three roles of the abstract were read: the rules here are ours", "the paper's text")
def contextevolve(
    parents: Ours[Count] = 2,
    children: Ours[Count] = 3,
    shots: Ours[Count] = 3,
    directed: Ours[Count] = 2,
    temperature: Ours[Positive] = 0.1,
    pool: Ours[Count] = 8,
    memory: Ours[Count] = 64,
    abstract_above: Ours[Count] = 400,
) -> TextMethod:
    """ContextEvolve: search for solutions by evolving the context under which the policy writes them.

    The recipe follows the paper's abstract, whose three roles the policy plays; the rules are ours. In a step, on its
    tasks:

        1. `parents` contexts answer the tasks: the best by mean, others drawn by softmax(mean / temperature)
        2. summariser: right answers enter a memory of at most `memory`, of each question the best and shortest; one of
           more than `abstract_above` characters as the policy's abstract of it
        3. navigator: the policy says in a sentence where the instruction should go, given the contexts and their means
        4. sampler: `children` contexts have `shots` examples each, drawn with priority reward / (1 + uses); every
           `directed`-th one's instruction ends with a sentence of the navigator's
        5. the children answer the same tasks; the `pool` best contexts by mean stay

    The text is the context of the largest mean.
    """

    def step(state: State, tasks: Sequence[Row], engine: Engine) -> State:
        contexts = state.candidates
        (first,) = top(contexts, 1)
        others = [one for one in contexts if one is not first]
        places = (
            draw_places(engine.random, softmax([x.mean for x in others], temperature), parents - 1) if others else []
        )
        chosen = [first, *(others[place] for place in places)]
        contexts, answers = tried(engine, contexts, [one.text for one in chosen], tasks)
        solved = [one for own in answers.values() for one in own if one.reward > 0]
        known = remembered(state.experiences, _summarised(engine, solved, abstract_above), memory)
        directions = _directions(engine, contexts, len(range(directed - 1, children, directed)))
        base, made = split_text(state.first)[0], list[str]()
        for child in range(children):
            instruction = base
            if child % directed == directed - 1 and directions:
                instruction = f"{base}\n{directions.pop()}".strip()
            examples, known = exemplars(engine.random, known, shots)
            made.append(join_text(instruction, examples) if examples or instruction != base else "")
        engine.counts["texts/proposed"] += len(made)
        contexts, _ = tried(engine, contexts, accepted(engine, made, [one.text for one in contexts]), tasks)
        kept = top(contexts, pool)
        return State(state.first, tuple(one for one in contexts if one in kept), known)

    return TextMethod(initial_state, step, lambda state: top(state.candidates, 1)[0].text)


def remembered(old: Sequence[Experience], new: Sequence[Experience], most: int) -> tuple[Experience, ...]:
    """The memory with new examples: of each question the one of the largest reward, of equal ones the shortest.

    Of more than `most` those of the largest reward stay, of equal ones the newest.
    """
    found = dict[str, Experience]()
    for one in (*old, *new):
        question = one.text.partition("\n")[0]
        held = found.get(question)
        if held is None or (one.weight, -len(one.text)) > (held.weight, -len(held.text)):
            found[question] = replace(one, uses=(held or one).uses)
    kept = sorted(range(len(found)), key=lambda at: (-list(found.values())[at].weight, -at))[:most]
    return tuple(one for at, one in enumerate(found.values()) if at in set(kept))


def exemplars(
    random: np.random.Generator, memory: Sequence[Experience], shots: int
) -> tuple[list[str], tuple[Experience, ...]]:
    """Texts of `shots` examples drawn with priority weight / (1 + uses), and the memory with these uses counted."""
    if not memory:
        return [], ()
    priority = np.array([max(one.weight, 0.0) / (1 + one.uses) for one in memory])
    if not priority.any():
        return [], tuple(memory)
    places = draw_places(random, priority / priority.sum(), shots)
    used = [replace(one, uses=one.uses + (at in places)) for at, one in enumerate(memory)]
    return [memory[place].text for place in places], tuple(used)


def _summarised(engine: Engine, answers: Sequence[Answer], above: int) -> list[Experience]:
    """Right answers as worked examples; long ones by the policy's abstract, where it gave one."""
    long = list({(x.question, x.text): x for x in answers if len(x.text) > above}.values())
    asked = [fill_template(ABSTRACT, question=one.question, answer=one.text) for one in long]
    said = engine.replies(asked) if asked else []
    texts = {(x.question, x.text): replies[0] if replies else "" for x, replies in zip(long, said, strict=True)}
    found = [(one, texts.get((one.question, one.text), one.text)) for one in answers]
    return [Experience(worked_example(one.question, text), one.reward) for one, text in found if text.strip()]


def _directions(engine: Engine, contexts: Sequence[Candidate], count: int) -> list[str]:
    """`count` sentences of the navigator, without those that say nothing."""
    if not count:
        return []
    tried_ones = top([one for one in contexts if one.count], 6)
    notes = "\n".join(f"- {' '.join(one.text.split())} ({one.mean:.2f})" for one in tried_ones)
    (replies,) = engine.replies([fill_template(DIRECTION, notes=notes)], count)
    return [text for text in map(instruction_of, replies) if text]
