"""Methods with parts that are not implemented yet, or that only some runs provide: what is missing, and the provider.

Without these parts a method is a simpler one than its name says; see `omissions` for the rule, and for parts that
papers have beside. `jaxrl train` therefore refuses it unless the run
excludes each part by name: --algorithm.without PART, several separated by commas. The tables must be literals, because
`jaxrl_llm.core.signatures` reads them from the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import NEEDS, need_of
from jaxrl_llm.rewards.workers.loading import declared
from jaxrl_llm.utils.errors import InputError, unknown

# method -> part -> (what is missing, what would provide it)
UNFINISHED: dict[str, dict[str, tuple[str, str]]] = {
    "brpo": {
        "judge": ("verdicts of a pairwise judge in both orders; scores are compared instead", "a judge of pairs"),
    },
    "capo_curvature": {
        "adam": ("the step model of Adam; a plain gradient step is used", "the optimiser's moments in the loss"),
    },
    "c_morl": {
        "front": (
            "the first policies of the front and the choice of those to extend; a run extends one",
            "runs that share a front",
        ),
    },
    "dart_gui": {
        "adaptive": (
            "fewer samples and steps for tasks that the policy solves, in separate services", "an asynchronous loop",
        ),
    },
    "dots_rr": {
        "predictor": (
            "a language model's embeddings and networks trained before the run; words are counted "
            "instead, and 7 numbers fitted",
            "a model of difficulties",
        ),
    },
    "dyna_grpo": {
        "simulation": (
            "the first stage (ReSim), supervised training on simulated futures in the thoughts",
            "searches in the environment whose texts are trained on",
        ),
    },
    "rapo_reward_aware": {
        "step_rewards": ("the second stage's reward for single calls of tools", "a judge of calls"),
    },
    "v0_value": {
        "value_model": (
            "a pretrained model of values that reads other prompts' results; these are averaged over prompts with "
            "alike words",
            "a value model of prompts",
        ),
    },
    "ppo_max": {
        "reward_model": (
            "a critic that starts from a reward model; it starts from the policy instead, see --critic-steps",
            "a reward model with a value head",
        ),
    },
    "decoupled_ppo": {
        "asynchronous": (
            "sampling beside training, with a bound on staleness and new weights in the middle of a completion",
            "an asynchronous loop",
        ),
    },
}  # fmt: skip

# method -> need that only some runs provide (`jaxrl_llm.core.needs`) -> what it is to the method
NEEDED: dict[str, dict[str, str]] = {
    "aepo_agentic": {"turns": "episodes of several turns, which fork after observations"},
    "archer": {"turn_rewards": "rewards of turns", "turns": "episodes of several turns"},
    "arpo_agentic": {
        "calls": "calls of tools, for their bonus",
        "failed_calls": "calls that gave an error",
        "turns": "episodes of several turns, which fork after observations",
    },
    "dart_gui": {
        "episode": "steps of one episode as rows",
        "first_turn": "the order of the steps",
        "fresh_prompts": "a prompt of its own for each step; whole conversations are one row",
        "state_key": "how many steps there are",
        "turns": "episodes of several steps",
    },
    "deeptravel": {"turn_rewards": "verdicts on turns", "turns": "episodes of several turns"},
    "dgrpo_vital": {
        "calls": "calls of tools, for their bonus",
        "failed_calls": "calls that gave an error",
    },
    "dyna_grpo": {
        "episode": "rows of one episode",
        "first_turn": "the order of these rows",
        "turns": "episodes of several turns, whose replies are tried out in copies of the environment",
    },
    "eapo_iterresearch": {
        "episode": "rounds of one episode as rows",
        "first_turn": "the order of the rounds",
        "fresh_prompts": "a prompt of its own for each round; on whole conversations the method is GSPO",
    },
    "epo": {"turns": "episodes of several turns"},
    "ettrl": {"answer_key": "votes of answers; without it whole completions vote"},
    "fapo": {"sound": "a judge's verdict whether a step is wrong"},
    "flow_grpo": {
        "episode": "turns of one episode as rows",
        "first_turn": "the order of the turns",
        "fresh_prompts": "a prompt of its own, with the memory, for each turn; whole conversations are one row",
        "turns": "episodes of several turns",
    },
    "g_ra": {"turn_rewards": "rewards of turns", "turns": "episodes of several turns"},
    "gigpo": {"state_key": "turns that begin in the same state", "turns": "episodes of several turns"},
    "grpo_roc": {
        "calls": "calls of tools",
        "failed_calls": "calls that gave an error",
        "one_answer": "the form of the answer, half of the penalty, with the weight 0: 'one_answer*0'",
    },
    "grpo_tcr": {"first_turn": "how many turns came before", "turns": "turns with calls of tools"},
    "gui_r1": {
        "gui_action": "whether the action is the expected one",
        "gui_format": "whether the answer is well-formed",
    },
    "hgpo": {"state_key": "turns that begin in the same states", "turns": "episodes of several turns"},
    "hiper": {
        "plan": "subgoals of the policy's own, between tags",
        "turn_rewards": "rewards of turns",
        "turns": "episodes of several turns",
    },
    "igpo_information_gain": {
        "state_key": "how many turns there are",
        "turns": "episodes of several turns",
    },
    "infopo": {"state_key": "how many turns there are", "turns": "episodes of several turns"},
    "ipa": {
        "episode": "rows of one episode",
        "first_turn": "the order of these rows",
        "imitated": "restarts in the middle of a success",
        "imitated_score": "the score of that success",
        "turns": "episodes of several turns",
    },
    "istar": {"state_key": "how many turns there are", "turns": "episodes of several turns"},
    "llds": {"turns": "episodes of several turns"},
    "multi_turn_recipe": {"turn_rewards": "rewards at the ends of turns", "turns": "episodes of several turns"},
    "poad": {"turns": "episodes of several turns"},
    "polychromic": {"answer_key": "diversity of answers; without it whole completions are compared"},
    "r3l": {
        "episode": "rows of one episode",
        "first_turn": "the order of these rows",
        "turns": "episodes of several turns, which are tried again from one of them",
    },
    "salt": {"state_key": "turns with the same transition", "turns": "episodes of several turns"},
    "seeupo": {"turns": "episodes of several turns"},
    "srgpo": {"turn_rewards": "the progress of each turn", "turns": "episodes of several turns"},
    "srpo_self_referential": {"distance": "distances of failures to successes; without them failures get 0"},
    "subpo": {"spans": "gains of single parts; without them the score is the only gain"},
    "trloo": {"turn_rewards": "rewards of each turn", "turns": "episodes of several turns"},
    "ttrl": {"answer_key": "votes of answers; without it whole completions vote"},
    "visual_rft": {
        "box_confidence": "confidences that suit the matches",
        "box_format": "whether the answer is well-formed",
        "box_overlap": "overlap with the expected boxes",
    },
    "verpo": {"tests": "results of single tests of code; without it components of the reward are the tests"},
}


def missing(method: str) -> dict[str, tuple[str, str]]:
    """What a method lacks in a run with the default rollout, by name: what it is, and what would provide it."""
    needs = {name: (what, NEEDS[name].provider or "") for name, what in NEEDED.get(method, {}).items()}
    return UNFINISHED.get(method, {}) | needs


def names_in(without: str | Iterable[str]) -> tuple[str, ...]:
    """The names in a comma-separated text, or in a sequence.

    >>> names_in(" tree, answer_key "), names_in("")
    (('tree', 'answer_key'), ())
    """
    parts = without.split(",") if isinstance(without, str) else without
    return tuple(name for part in parts if (name := str(part).strip()))


def check_whole(
    method: str,
    needs: Iterable[str] = (),
    without: str | Iterable[str] = (),
    provided: Iterable[str] = (),
    option: str = "--algorithm.without {}",
) -> None:
    """InputError, in one line, unless the run provides or excludes each part and need of the method.

    needs: those of the algorithm. without: names of excluded parts and needs. provided: parts and needs that the run
    has, such as its rollout's `provides`. option: how `without` is given, for the message. Also raises InputError for
    a name in `without` that the method neither lacks nor needs a part of the run to provide.
    """
    given, parts = names_in(without), UNFINISHED.get(method, {})
    own = {need_of(need).name for need in needs if need_of(need).provider}  # which the method's rollout may provide
    known = {*missing(method), *own}
    for name in given:
        if name not in known:
            raise unknown(f"part that {method} lacks", name, known)
    there = {*given, *provided}
    lacks, unmet = [name for name in parts if name not in there], _unmet(needs, there)
    said = []
    if lacks:
        said.append("lacks " + "; ".join(f"{name}: {parts[name][0]} (wanted: {parts[name][1]})" for name in lacks))
    if unmet:
        said.append("needs " + "; ".join(_use(name, NEEDED.get(method, {}).get(name)) for name in unmet))
    if said:
        names = ",".join([*given, *lacks, *unmet])
        raise InputError(f"{method} {', and '.join(said)}. To train without: {option.format(names)}")


def check_needs(needs: Iterable[str], provided: Iterable[str]) -> None:
    """InputError, in one line, if an algorithm that is given as a value needs what the run does not provide."""
    if unmet := _unmet(needs, set(provided)):
        raise InputError("the algorithm needs " + "; ".join(_use(name) for name in unmet))


def _unmet(needs: Iterable[str], provided: set[str]) -> list[str]:
    """The sorted names of the needs that nothing provides: neither the learner, the loop nor `provided`."""
    return [name for need in sorted(needs) if need_of(need).provider and (name := need_of(need).name) not in provided]


def _use(name: str, what: str | None = None) -> str:
    """An unmet need, and what would provide it."""
    return f"{name} ({what or NEEDS[name].meaning}), which no part of this run provides: use {NEEDS[name].provider}"


def going_without(algorithm: Algorithm, names: Iterable[str]) -> Algorithm:
    """The algorithm without some of its needs, for which it then uses its own defaults."""
    dropped, transform, objective = set(names), algorithm.transform, algorithm.objective
    return replace(
        algorithm,
        transform=replace(transform, needs=transform.needs - dropped),
        objective=replace(objective, needs=objective.needs - dropped),
        phases=None if algorithm.phases is not None and algorithm.phases.provides & dropped else algorithm.phases,
    )


def reward_names(rewards: Iterable[str]) -> list[str]:
    """The names of reward functions in texts that may add a file, arguments and a weight.

    >>> reward_names(["number_match", "my.py:sound*0", "format_match(a:b*)*0.2"])
    ['number_match', 'sound', 'format_match']
    """
    return [text.partition("(")[0].partition("*")[0].rpartition(":")[2].strip() for text in rewards]


def provided_by_rewards(rewards: Iterable[str]) -> set[str]:
    """The needs that the named reward functions provide, as components of the reward or as entries beside it."""
    listed = list(rewards)
    parts = {name for name in reward_names(listed) if name in NEEDS and NEEDS[name].where.startswith("rewards[")}
    named = [text.rpartition("*")[0] if "*" in text and not text.endswith(")") else text for text in listed]
    return parts | {name for text in named for name in declared(text.strip()) if name in NEEDS}
