from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import softmax

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Count, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import batch_part
from jaxrl_llm.core.source import ONLY_MEASURED, Step
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.records import PromptFacts, Prompts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome
from jaxrl_llm.rollouts.guidance.hints import problem_of
from jaxrl_llm.rollouts.programs import Demands, Episode, Task, Tools, program_part, samples
from jaxrl_llm.utils.errors import InputError, shown

FIRST = (
    "Think step by step, then say the answer.|Answer in as few words as possible.|Check your answer before you say it."
)
REFLECT = """An assistant answers questions under this instruction:
{instruction}

It was wrong here:
{failures}

Write a better instruction for such questions, one or two sentences. Reply with the instruction only."""
SHOWN = 400  # characters of a failed answer in the question to reflect
LONGEST = 600  # characters of an instruction


@method(paper="arXiv 2512.01945", test="test_inspo.py::test_the_population_by_hand")
@beside("agents", "instructions of an agent that searches; here of answers in one turn", "a rollout around agents")
def inspo(
    instructions: Ours[str] = FIRST,
    temperature: Ours[Positive] = 0.1,
    every: Ours[Count] = 10,
    proposals: Ours[Count] = 2,
    checks: Ours[Count] = 4,
    failures: Ours[Count] = 3,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.001,
) -> Algorithm:
    """Instruction-Policy co-evolution (INSPO).

    A population of instructions evolves while the policy learns. Each question of a step gets one, I_j with probability
    softmax(w / temperature)_j, before its text; its samples are a group, whose loss is GRPO's (clip_low, clip_high,
    kl_coefficient). w_j is the mean of the mean rewards of all groups under I_j.

    Every `every` steps: in one step the policy also reads up to `failures` of the answers with the lowest rewards under
    the best instruction, and writes other instructions; in the next, `proposals` of those are tried on `checks` more
    questions each, those that failed first. Neither is trained on. A proposal whose mean reward there is above the
    lowest weight takes the place of that instruction, with this mean as its first weight.

    instructions: the first ones, with | between them. The paper's forms of the update of w and of pruning were not
    read: both are ours. Held-out questions are evaluated without an instruction. Metrics: curriculum/best_weight,
    curriculum/replaced.
    """
    texts = tuple(text.strip() for text in instructions.split("|"))
    if not all(texts) or len(set(texts)) != len(texts) or len(texts) < 2:
        raise InputError(f"instructions is {shown(instructions)}, but must be two or more texts with | between them")
    rule = instruction_population(texts, temperature, every, proposals, checks, failures)
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=choose_prompts(rule), rollout=instructed())


@program_part("instructed", demands=Demands(at_once=True))
async def instructed(tools: Tools, task: Task) -> list[Episode]:
    """Samples of each prompt with the instruction before it that its row has, from `instruction_population`."""
    if question := task.row.get("reflect"):
        return await samples(tools, tools.prompt(question), range(task.samples))
    instruction = task.row.get("instruction")
    prompt = tools.prompt_with(f"{instruction}\n\n", first=True) if instruction else task.prompt
    return await samples(tools, prompt, range(task.samples))


@batch_part
def instruction_population(
    facts: PromptFacts, texts: tuple[str, ...], temperature: Positive = 0.1, every: Count = 10, proposals: Count = 2,
    checks: Count = 4, failures: Count = 3,
) -> Machine:  # fmt: skip
    """The population of `inspo`, as a rule of a curriculum: rows get their instruction, in the column of this name, the
    question to reflect, "reflect", and `ONLY_MEASURED` where they are not trained on."""

    start: State = {
        "step": 0, "texts": list(texts), "total": [0.0] * len(texts), "count": [0.0] * len(texts), "trial": [],
        "failed": [], "replaced": 0,
    }  # fmt: skip

    def extra(state: State) -> list[int]:
        """The prompts that the next step draws beside its own."""
        phase = state["step"] % every
        random = np.random.default_rng([facts.seed, 5, state["step"]])
        if phase == every - 2 and state["failed"]:
            return [state["failed"][0]["id"]]
        if phase != every - 1 or not state["trial"]:
            return []
        wanted = min(checks * len(state["trial"]), facts.size // 2)
        known = list(dict.fromkeys(one["id"] for one in state["failed"]))
        others = facts.order[random.permutation(facts.size)[: wanted + len(known)]].tolist()
        return list(dict.fromkeys([*known, *others]))[:wanted]

    def weights(state: State) -> list[float]:
        return [total / max(count, 1.0) for total, count in zip(state["total"], state["count"], strict=True)]

    def drawn(state: State, prompt: int) -> int:
        random = np.random.default_rng([facts.seed, 6, state["step"], int(facts.rank[prompt])])
        return int(random.choice(len(state["texts"]), p=softmax(np.divide(weights(state), temperature))))

    def columns(state: State, ids: np.ndarray) -> list[dict[str, Any]]:
        apart = extra(state)

        def of(prompt: int) -> dict[str, Any]:
            row = {"instruction": "", "reflect": "", ONLY_MEASURED: prompt in apart}
            if prompt not in apart:
                return {**row, "instruction": state["texts"][drawn(state, prompt)]}
            if trial := state["trial"]:
                return {**row, "instruction": trial[apart.index(prompt) % len(trial)]}
            return {**row, "reflect": _question(state, int(np.argmax(weights(state))))}

        return [of(int(prompt)) for prompt in ids]

    def observe(state: State, outcome: Outcome) -> State:
        after = {name: (list(x) if isinstance(x, list) else x) for name, x in state.items()}
        after["step"] = state["step"] + 1
        tried: dict[str, list[float]] = {}
        for row, prompt, rewards, said in _groups(outcome.step):
            if row.get("reflect"):
                after["trial"] = _new(said, state["texts"])[:proposals]
            elif row.get(ONLY_MEASURED):
                tried.setdefault(row["instruction"], []).append(float(np.mean(rewards)))
            elif row.get("instruction") in state["texts"]:
                j = state["texts"].index(row["instruction"])
                after["total"][j] += float(np.mean(rewards))
                after["count"][j] += 1.0
                worst = int(np.argmin(rewards))
                answer = {"id": prompt, "text": problem_of(facts.rows[prompt]), "said": said[worst][:SHOWN]}
                after["failed"].append({**answer, "instruction": row["instruction"], "reward": rewards[worst]})
        after["failed"] = sorted(after["failed"], key=lambda one: one["reward"])[: failures * len(texts)]
        if state["trial"]:
            after |= _inserted({**after, "trial": []}, tried, weights(after))
        return after

    def metrics(state: State) -> dict[str, float]:
        return {"best_weight": max(weights(state)), "replaced": float(state["replaced"])}

    def score(state: State, prompts: Prompts, random: np.random.Generator) -> np.ndarray:
        return np.where(np.isin(prompts.ids, extra(state)), 1e12, 0.0)

    def size(state: State, count: int) -> int:
        return count + len(extra(state))

    return Machine(start, score=score, size=size, observe=observe, metrics=metrics, columns=columns)


def _question(state: State, best: int) -> str:
    """The question to reflect on the failures under an instruction, or under any where it has none."""
    own = [one for one in state["failed"] if one["instruction"] == state["texts"][best]] or state["failed"]
    shown = "\n".join(f"- {one['text']}\n  It said: {one['said']}" for one in own)
    return REFLECT.format(instruction=state["texts"][best], failures=shown)


def _groups(step: Step) -> list[tuple[Mapping[str, Any], int, list[float], list[str]]]:
    """Of each group its row, prompt, rewards that are known, and completions; none that has no known reward."""
    batch = step.scored.batch
    group, prompt = np.asarray(batch.group), np.asarray(batch.prompt_id)
    reward = np.nan_to_num(np.asarray(batch.need("reward"), np.float64))
    out: list[tuple[Mapping[str, Any], int, list[float], list[str]]] = []
    for number, row in enumerate(step.rows):
        own = np.flatnonzero(group == number)
        if len(own):
            out.append((row, int(prompt[own[0]]), reward[own].tolist(), [step.scored.texts[i] for i in own]))
    return out


def _new(said: Sequence[str], known: Sequence[str]) -> list[str]:
    """The instructions among replies: not empty, not too long, and none that is there already."""
    texts = [text.strip().strip('"').strip() for text in said]
    return [text for text in dict.fromkeys(texts) if text and len(text) <= LONGEST and text not in known]


def _inserted(state: State, tried: Mapping[str, Sequence[float]], weights: Sequence[float]) -> State:
    """The state with proposals in place of the instructions of the lowest weights, where these are lower."""
    texts, total, count, replaced = list(state["texts"]), list(state["total"]), list(state["count"]), state["replaced"]
    weights = list(weights)
    for text, found in sorted(tried.items(), key=lambda one: -float(np.mean(one[1]))):
        worst, mean = int(np.argmin(weights)), float(np.mean(found))
        if mean > weights[worst]:
            texts[worst], weights[worst], total[worst], count[worst] = text, mean, mean, 1.0
            replaced += 1
    return {**state, "texts": texts, "total": total, "count": count, "replaced": replaced}
