"""Methods with parts that are not implemented yet: what is missing, and what would provide it.

Without these parts a method is a simpler one than its name says. `jaxrl train` therefore refuses it unless the run
excludes each part by name: --algorithm.without PART, several separated by commas. The table must be a literal, because
`jaxrl_llm.signatures` reads it from the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.errors import InputError, unknown

# method -> part -> (what is missing, what would provide it)
UNFINISHED: dict[str, dict[str, tuple[str, str]]] = {
    "aepo_agentic": {
        "tree": ("tree rollouts that branch at tool calls by entropy", "a rollout that forks at tool calls"),
    },
    "aepo_arbitrary_entropy": {
        "tempered": (
            "the second set of samples, drawn at controls['temperature']; without it the method is GRPO",
            "a rollout that writes info['tempered']",
        ),
    },
    "ampo_multi_guidance": {
        "guided": (
            "teachers' answers, chosen by the probability of the reference answer, in groups that are all wrong",
            "a rollout with a source of teachers' answers, which writes info['guided']",
        ),
    },
    "brpo": {
        "judge": ("verdicts of a pairwise judge in both orders; scores are compared instead", "a judge of pairs"),
    },
    "capo_curvature": {
        "adam": ("the step model of Adam; a plain gradient step is used", "the optimiser's moments in the loss"),
    },
    "decoupled_ppo": {
        "asynchronous": (
            "sampling beside training, with a bound on staleness and new weights in the middle of a completion",
            "an asynchronous loop",
        ),
    },
    "degrpo": {
        "control": (
            "rewards that depend on the mode (1, 0.5, -1), and a policy that knows both control tokens",
            "a reward that reads the first token, and a model that was fine-tuned on both modes",
        ),
    },
    "dgrpo_vital": {
        "tools": ("turns with tools, and the bonus for using them", "a rollout of turns with tools"),
    },
    "epo": {
        "turns": ("episodes of several turns", "a rollout of turns, which writes batch.turn"),
    },
    "ettrl": {
        "tree": ("trees that fork at the tokens of highest entropy", "a rollout that forks at tokens"),
        "answers": ("votes of answers; whole completions vote", "a reward that writes the answers' keys"),
    },
    "fapo": {
        "sound": ("a judge that finds the first wrong step", "a reward named sound"),
    },
    "hapo_heterogeneous": {
        "temperature": (
            "a sampling temperature per token that depends on its entropy; the other three rules are implemented",
            "a sampler with a temperature that depends on the token's entropy",
        ),
    },
    "hbpo": {
        "budgets": (
            "samples of one prompt with different budgets in their prompts; every row has the same",
            "a rollout that writes info['budget']",
        ),
    },
    "icpo_in_context": {
        "guided": (
            "samples drawn with worked examples in the prompt",
            "a rollout that draws them, puts the plain prompt back and writes info['guided']",
        ),
    },
    "llds": {
        "turns": ("episodes of several turns", "a rollout of turns, which writes batch.turn"),
    },
    "otr": {
        "labels": ("supervised labels; the run's own right answers replace them", "a source of supervised texts"),
    },
    "polychromic": {
        "answers": ("diversity of answers; whole completions are compared", "a reward that writes the answers' keys"),
        "vines": ("rollouts from visited states", "a rollout that forks at visited states"),
    },
    "remix": {
        "replay": (
            "rollouts of the last policies mixed with fresh ones, and a change of the anchor during the run",
            "replay, and a reference that may be replaced",
        ),
    },
    "seeupo": {
        "turns": (
            "episodes of several turns, updated turn by turn, the last first",
            "a rollout of turns and updates in phases, which write info['turn_factor']",
        ),
    },
    "spo_single_stream": {
        "curriculum": (
            "prompts drawn by the tracker's uncertainty, and info['drift'], without which forgetting is constant",
            "a curriculum that reads the tracker",
        ),
    },
    "verpo": {
        "tests": (
            "results of single tests of code, and several attempts; reward components replace them",
            "a reward that writes info['tests']",
        ),
    },
    "xrpo": {
        "budget": (
            "samples assigned to prompts in rounds by their statistics, and examples prepended to unsolved prompts",
            "a rollout in rounds",
        ),
    },
}  # fmt: skip

# Parts of papers that are not part of the method itself; runs may omit them.
BESIDES: dict[str, dict[str, tuple[str, str]]] = {
    "baichuan_m2": {
        "dialogue": ("a patient simulator's dialogues, cut into single turns, scored by rubrics", "a rollout of turns"),
    },
    "loop": {
        "turns": ("an environment of several turns that executes code", "a rollout of turns with tools"),
    },
    "minirl": {
        "routing": ("routing replay, which mixtures of experts need", "a sampler that records the routing"),
    },
    "ppo_max": {
        "pretraining": ("the pretraining loss, and a critic that starts from a reward model", "a source of texts"),
    },
    "r2vpo": {
        "replay": ("replayed batches; the on-policy form is complete", "replay"),
    },
    "trpa": {
        "levels": ("the rule that sorts completions into four levels", "a reward function whose values are the levels"),
    },
}  # fmt: skip


def missing(method: str) -> dict[str, tuple[str, str]]:
    """The missing parts of a method by name: what is missing, and what would provide it."""
    return UNFINISHED.get(method, {})


def names_in(without: str | Iterable[str]) -> tuple[str, ...]:
    """The names in a comma-separated text, or in a sequence.

    >>> names_in(" tree, answers "), names_in("")
    (('tree', 'answers'), ())
    """
    parts = without.split(",") if isinstance(without, str) else without
    return tuple(name for part in parts if (name := str(part).strip()))


def check_whole(method: str, without: str | Iterable[str] = (), provided: Iterable[str] = ()) -> None:
    """InputError, in one line, unless `without` names each part that the method lacks.

    provided: parts that the run provides itself, such as a reward of that name. Also raises InputError for a name in
    `without` that is not a missing part.
    """
    parts, given = missing(method), names_in(without)
    for name in given:
        if name not in parts:
            raise unknown(f"part that {method} lacks", name, parts)
    left = [name for name in parts if name not in given and name not in set(provided)]
    if left:
        what = "; ".join(f"{name}: {parts[name][0]} (wanted: {parts[name][1]})" for name in left)
        raise InputError(f"{method} lacks {what}. To train without: --algorithm.without {','.join([*given, *left])}")


def reward_names(rewards: Iterable[str]) -> list[str]:
    """The names of reward functions in texts that may add a file, arguments and a weight.

    >>> reward_names(["number_match", "my.py:sound*0", "format_match(a:b*)*0.2"])
    ['number_match', 'sound', 'format_match']
    """
    return [text.partition("(")[0].partition("*")[0].rpartition(":")[2].strip() for text in rewards]


def take_without(method: str, hyperparameters: Mapping[str, Any], provided: Iterable[str] = ()) -> dict[str, Any]:
    """Remove the entry "without" from the hyper-parameters, after `check_whole` of its value."""
    given = dict(hyperparameters)
    check_whole(method, given.pop("without", None) or (), provided)
    return given
