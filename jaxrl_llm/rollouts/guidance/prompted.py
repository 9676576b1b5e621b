"""Programs with several prompts for one group: examples, budgets, and answers of teachers."""

from asyncio import gather
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.rollouts.guidance.hints import texts_of
from jaxrl_llm.rollouts.guidance.repair import Succeeds, marked_episodes, none_succeed, repair
from jaxrl_llm.rollouts.programs import program_part, scored_samples
from jaxrl_llm.utils.errors import InputError

BUDGET = "<think> I will answer the question with {} tokens"


@program_part("in_context({column})", {"guided"}, ["{column}"], lambda samples, **_: Demands(min_samples=samples + 1))
async def in_context(
    tools: Tools,
    task: Task,
    column: str = "examples",
    samples: Count = 1,
    keep: Succeeds | None = None,
    text: str = "{}\n\n",
) -> list[Episode]:
    """Sample some of a group with a worked example in the prompt, and train on these too under the plain prompt.

    column: of the data set; a text, or a list of texts of which each sample gets a random one. samples: how many of a
    group get one, fewer than the group has. keep: a function of a scored episode, see `repair.succeeds`; a sample with
    an example for which it is false is replaced by one without. text: how an example is written before the prompt.

    Provides info["guided"], 1 for samples with an example, and info["off_prompt"] (`Episode.trained_under`).
    info["unhinted"]: 1 in a group whose row has no example, which is sampled without.
    """
    G = task.samples
    examples = texts_of(task.row.get(column), column)
    if samples >= G:
        raise InputError(f"{samples} of {G} samples are to have an example: raise group_size")
    count = samples if examples else 0
    random = np.random.default_rng([tools.first_step, task.prompt_id])
    prompts = [
        tools.prompt_with(text.format(examples[i]), first=True)
        for i in (random.integers(len(examples), size=count) if examples else ())
    ]
    plain = [tools.sample(task.prompt, number=i) for i in range(G - count)]
    helped = [tools.sample(prompt, number=G - count + i) for i, prompt in enumerate(prompts)]
    found = await tools.score(await gather(*plain, *helped))
    own = found[: G - count]
    others = [episode.with_info(guided=1.0) for episode in found[G - count :]]
    if keep is not None:
        others = [episode for episode in others if keep(episode)]
    own += await scored_samples(tools, task.prompt, range(G, 2 * G - len(own) - len(others)))
    return marked_episodes([e.trained_under(task.prompt) for e in (*own, *others)], not examples)


@part
def with_budgets(*budgets: Count, text: str = BUDGET) -> Rollout:
    """Samples of one prompt that are told different budgets of tokens, in equal shares in this order.

    text: what follows the prompt, with {} for the budget; the policy goes on from it, and is trained on with it.
    Provides info["budget"]. Raises InputError unless budgets are whole numbers, at least 1, and for groups with fewer
    samples than there are budgets.
    """
    if not budgets:
        raise InputError("with_budgets takes the budgets of tokens, but found none")

    async def program(tools: Tools, task: Task) -> list[Episode]:
        G, k = task.samples, len(budgets)
        if k > G:
            raise InputError(f"a group of {G} samples has fewer than the {k} budgets: raise group_size")
        told = [budgets[i * k // G] for i in range(G)]
        prompts = {budget: (*task.prompt, *tools.encode(text.format(budget))) for budget in told}
        found = await gather(*(tools.sample(prompts[budget], number=i) for i, budget in enumerate(told)))
        return [episode.with_info(budget=float(budget)) for episode, budget in zip(found, told, strict=True)]

    name = f"with_budgets({', '.join(map(str, budgets))})"
    return Rollout(program, name, frozenset({"budget"}), demands=Demands(min_samples=len(budgets)))


@part
def taught(
    succeeds: Succeeds, column: str = "teachers", most: Count = 4, replaced: Count = 2, answer: str = "answer"
) -> Rollout:
    """Add right answers of teachers to a group in which no sample succeeds, and leave out `replaced` of its samples.

    column: of the data set; the teachers' answers to the prompt, a list of texts, or of {"text", "quality"}, of which
    the `most` with the highest quality are taken. Those with more tokens than a completion may have are not. As many
    samples are left out, but one stays, as there are answers, at most `replaced`. An episode of a teacher's answer is
    trained on in all its tokens, whose `behaviour_logp` is 0, and has info["guided"] 1 and info["off_prompt"] 1.

    Provides guided, and info["reference_span"], first and last + 1 of the answer's tokens with the text of the column
    `answer`, where that is last in it; both 0 for all others. info["unhinted"]: 1 in a group that failed and has no
    teacher's answer.
    """

    async def teach(tools: Tools, task: Task, found: list[Episode]) -> list[Episode] | None:
        value = task.row.get(column)
        if isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value):
            ordered = sorted(value, key=lambda one: -float(one.get("quality", 0.0)))
            value = [one.get("text", "") for one in ordered]
        texts = texts_of(value, column)[:most]
        made = [one_taught(tools, task, text, str(task.row.get(answer, "")), i) for i, text in enumerate(texts)]
        fitting = [episode for episode in made if episode.size <= task.limit]
        if not fitting:
            return None
        out = min(replaced, len(fitting), task.samples - 1)
        return [*found[out:], *await tools.score(fitting)]

    return replace(
        repair((none_succeed(succeeds), teach), reference_span=[0.0, 0.0], off_prompt=0.0),
        name=f"taught({column})",
        provides=frozenset({"guided", "reference_span"}),
        columns=(column, answer),
        demands=Demands(variable_size=True, max_episodes=lambda G: G + most - min(replaced, most, G - 1)),
    )


def one_taught(tools: Tools, task: Task, text: str, answer: str, number: int) -> Episode:
    """The episode of a teacher's answer; see `taught`."""
    at = text.rfind(answer) if answer else -1
    pieces = [text] if at < 0 else [text[:at], text[at : at + len(answer)], text[at + len(answer) :]]
    ids = [tools.encode(piece) for piece in pieces]
    span = [0.0, 0.0] if at < 0 else [float(len(ids[0])), float(len(ids[0]) + len(ids[1]))]
    stop = getattr(tools.tokenizer, "eos_token_id", None)
    actions = given([*chain.from_iterable(ids), *([] if stop is None else [int(stop)])], tools.first_step)
    episode = Episode(tuple(task.prompt), task.prompt_id, task.samples + number) + actions._replace(sampled=True)
    return episode.with_info(guided=1.0, off_prompt=1.0, reference_span=span)
