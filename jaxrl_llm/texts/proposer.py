"""Proposers of texts, the policy or its own right answers as examples; and a judge of pairs, in both orders."""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxrl_llm.texts.engine import Answer, Engine, one_each
from jaxrl_llm.utils.errors import InputError, shown

By = Literal["words", "examples", "both"]
KINDS: tuple[By, ...] = ("words", "examples", "both")
USER, ASSISTANT = "User: ", "Assistant: "
LONGEST = 600  # characters of an instruction that is proposed, and of an answer that is shown to the proposer
REWRITE = (
    "Here is an instruction for an assistant:\n{text}\n\n{summary}Right answers that it gave:\n{right}\n\n"
    "Wrong answers that it gave:\n{wrong}\n\n"
    "Write a better instruction in one or two sentences. Reply with the instruction only."
)


class Brief(NamedTuple):
    """What a proposer is told: the text to improve, answers given with it, and a summary of all that was tried."""

    text: str
    right: tuple[Answer, ...]
    wrong: tuple[Answer, ...]
    summary: str = ""


def brief_of(text: str, answers: Sequence[Answer], summary: str = "") -> Brief:
    """Answers of the largest reward are right, where it is above 0; the others that were scored are wrong."""
    best = max((one.reward for one in answers if one.reward > 0), default=None)
    right = tuple(one for one in answers if best is not None and one.reward == best)
    return Brief(text, right, tuple(one for one in answers if one.reward == one.reward and one not in right), summary)


def check_slots(name: str, template: str, slots: Sequence[str]) -> None:
    """InputError if a template lacks one of the slots, {text} for "text"."""
    if lacking := [f"{{{slot}}}" for slot in slots if f"{{{slot}}}" not in template]:
        raise InputError(f"the template {name} is {shown(template)}, without {' and '.join(lacking)}: put it in")


def fill_template(template: str, **values: str) -> str:
    """The template with each {name} replaced; other braces stay as they are, and so do those of the values."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)


def worked_example(question: str, answer: str) -> str:
    """A question with an answer, as a part of a text."""
    return f"{USER}{question.strip()}\n{ASSISTANT}{answer.strip()}"


def split_text(text: str) -> tuple[str, list[str]]:
    """The instruction of a text, and its worked examples."""
    first, *rest = f"\n\n{text}".split(f"\n\n{USER}")
    return first.strip(), [USER + one.strip() for one in rest]


def join_text(instruction: str, examples: Sequence[str]) -> str:
    """The text of an instruction and worked examples; see `split_text`."""
    return "\n\n".join(filter(None, [instruction.strip(), *examples]))


def instruction_of(reply: str) -> str:
    """The instruction in a reply: its first paragraph, on one line, without a label or quotes; "" for none.

    >>> instruction_of('Instruction: "Add the tens first."\\n\\nThis is better.')
    'Add the tens first.'
    """
    first = next((part for part in reply.strip().split("\n\n") if part.strip(" \n\"'*:")), "")
    line = re.sub(r"^\W*(?:\w+ )?instructions?\W*:\s*", "", " ".join(first.split()), flags=re.IGNORECASE)
    return line.strip(" \"'*")[:LONGEST]


def shown_answers(answers: Sequence[Answer], most: int = 3) -> str:
    """Some answers for a proposer, a line each."""
    lines = [f"- {one.question.strip()} -> {' '.join(one.text.split())[:LONGEST]}" for one in answers[:most]]
    return "\n".join(lines) or "- none"


def propose(
    engine: Engine, briefs: Sequence[Brief], count: int, by: By, shots: int, template: str = REWRITE
) -> list[str]:
    """`count` texts for each brief, as they come: some may be empty, equal, or too long (see `accepted`).

    by "words" the policy is asked for another instruction, and the worked examples stay; by "examples" the instruction
    stays and `shots` of its right answers, to different questions, are drawn as worked examples; by "both" they
    alternate, examples first. Raises InputError for a template without {text}.
    """
    check_slots("rewrite", template, ("text",))
    plans = [(brief, by == "examples" or (by == "both" and n % 2 == 0)) for brief in briefs for n in range(count)]
    asked = [_question(brief, template) for brief, examples in plans if not examples]
    replies = iter(one_each(engine, asked))
    found = list[str]()
    for brief, examples in plans:
        instruction, own = split_text(brief.text)
        if examples:
            found.append(_with_examples(engine, instruction, brief.right, shots))
            continue
        reply = instruction_of(next(replies))
        found.append(join_text(reply, own) if reply else "")
    engine.counts["texts/proposed"] += len(found)
    return found


def accepted(engine: Engine, texts: Sequence[str], known: Sequence[str]) -> list[str]:
    """The texts that are not empty, not known or equal to one before, and leave room for tasks; others are counted."""
    kept = list[str]()
    for text in texts:
        if not text.strip():
            engine.counts["texts/empty"] += 1
        elif text in known or text in kept:
            engine.counts["texts/duplicates"] += 1
        elif not engine.fits(text):
            engine.counts["texts/too_long"] += 1
        else:
            kept.append(text)
    return kept


def _question(brief: Brief, template: str) -> str:
    summary = f"{brief.summary.strip()}\n\n" if brief.summary.strip() else ""
    right, wrong = shown_answers(brief.right), shown_answers(brief.wrong)
    return fill_template(template, text=split_text(brief.text)[0], summary=summary, right=right, wrong=wrong)


def _with_examples(engine: Engine, instruction: str, right: Sequence[Answer], shots: int) -> str:
    """An instruction with right answers to at most `shots` questions, drawn; "" where there is none."""
    order = [right[i] for i in engine.random.permutation(len(right))]
    by_question = {one.question: one for one in order if one.text.strip()}
    examples = [worked_example(one.question, one.text) for one in list(by_question.values())[:shots]]
    return join_text(instruction, examples) if examples else ""


SLOTS = ("question", "first", "second")
JUDGE = (
    "Question: {question}\n\nAnswer A: {first}\n\nAnswer B: {second}\n\n"
    "Which answer is better? Reply with one letter, A or B."
)


class Verdicts(NamedTuple):
    """Votes of a judge. unreadable: replies that name neither answer."""

    new: int
    old: int
    unreadable: int

    @property
    def wins(self) -> bool:
        """Whether the new one has more votes; a tie keeps the old one."""
        return self.new > self.old


def verdict(reply: str) -> str | None:
    """ "A" or "B", the first that a reply names as an answer, or begins with; None for a reply without one.

    >>> verdict("Answer B is better than A."), verdict("(a)"), verdict("A better one would be short.")
    ('B', 'A', None)
    """
    found = re.match(r"\W*([AB])\b(?!\s+[a-z])", reply) or re.fullmatch(r"\W*([ab])\W*", reply)
    found = found or re.search(r"\b[Aa]nswer\W+(?:is\W+)?([AB])\b", reply)
    return found[1].upper() if found else None


def compare(engine: Engine, pairs: Sequence[tuple[str, str, str]], votes: int, template: str = JUDGE) -> Verdicts:
    """Ask the policy of each (question, old answer, new answer) `votes` times which is better.

    The order of the two alternates, and which comes first at first is drawn for each question. Equal answers are not
    asked about. Raises InputError for a template without the slots {question}, {first} and {second}.
    """
    check_slots("judge", template, SLOTS)
    questions, new_first = list[str](), list[bool]()
    for question, old, new in pairs:
        if old == new:
            continue
        begin = int(engine.random.integers(2))
        for vote in range(votes):
            swap = (begin + vote) % 2 == 1
            first, second = (new, old) if swap else (old, new)
            questions.append(fill_template(template, question=question, first=first, second=second))
            new_first.append(swap)
    letters = [verdict(reply) for reply in one_each(engine, questions)]
    for_new = sum(one == ("A" if first else "B") for one, first in zip(letters, new_first, strict=True))
    unreadable = letters.count(None)
    engine.counts["judge/verdicts"] += len(letters)
    engine.counts["judge/unreadable"] += unreadable
    return Verdicts(for_new, len(letters) - unreadable - for_new, unreadable)
