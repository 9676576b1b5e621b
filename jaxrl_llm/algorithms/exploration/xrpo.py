from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group_relative, revised
from jaxrl_llm.advantages.multipliers import capped_bonus, row_mean
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Count, NonNegative, NonNegativeInt, Ours, Paper
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part
from jaxrl_llm.core.source import Step
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.curriculum.embedded import WIDTH, text_features
from jaxrl_llm.curriculum.records import PromptFacts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.rollouts.adaptive import by_confidence, in_rounds
from jaxrl_llm.rollouts.guidance.hints import problem_of
from jaxrl_llm.rollouts.guidance.repair import succeeds


@batch_part
def with_novelty_bonus(batch: Trajectories, novelty_coefficient: float, kappa: float) -> Array:
    """A function `batch -> f32[N, L]`: the advantages with the bonus of `xrpo` where they are above 0."""
    A = batch.need("advantages")
    s = jnp.where(jnp.isnan(batch.scores), jnp.nan, row_mean(batch.need("old_logp"), batch.action_mask))
    return jnp.where(A > 0, capped_bonus(A, novelty_coefficient * novelty(s, batch.group)[:, None], kappa), A)


@method(paper="arXiv 2510.06672", test="test_exploration.py::test_xrpo_against_a_loop")
def xrpo(
    novelty_coefficient: Paper[NonNegative] = 2.5,
    kappa: Paper[NonNegative] = 0.5,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    first: Ours[int | None] = None,
    rounds: Ours[Count] = 2,
    exploration: Ours[float] = 0.1,
    level: Ours[float] = 0.05,
    examples: Paper[int] = 2,
    pool: Ours[int] = 1000,
    success: Ours[float] = 0.0,
) -> Algorithm:
    """eXplore-eXploit GRPO (XRPO).

    Each prompt gets `first` samples (None: half of a group, at least 2), and the rest of the step's samples are divided
    in `rounds`, one after the other to the prompt where one more is worth most. With n samples of a prompt so far, s
    the unbiased standard deviation of their rewards, and T samples of all prompts before the round

        h(n) = t_(1 - level/2, n - 1) s / sqrt(n);  Pi = h(n) - h(n + 1) + exploration sqrt(log(1 + T) / n)

    A prompt without a success (reward > success) so far gets its samples of a round with `examples` solved problems in
    front, those most like it of a pool of the `pool` problems solved last in the steps before; they are trained on
    under the plain prompt. examples 0: none. A bonus favours responses that are right but unlikely: with s_i the mean
    of log pi_old over a response's tokens under the plain prompt

        eta_i = exp(s_i - mean_g s)
        A+_i = A_i + min(max(novelty_coefficient (1 - eta_i), 0), kappa A_i)  where A_i > 0, else A_i

    on GRPO's A, then its loss with clip_low and clip_high and ratios to pi_old. A re-implementation adds the bonus to
    wrong responses too. The paper compares problems by embeddings of another model, here by the words of the problems
    (`embedded.text_features`), and its pool may also hold solutions of the same step. Rollout:
    `rollouts.adaptive.in_rounds`, and curriculum: `solved_examples`.
    """
    bonus = with_novelty_bonus(novelty_coefficient, kappa)
    solved = succeeds(success) if examples else None
    return Algorithm(
        transform=chain(group_relative(epsilon=1e-8), revised(bonus, {"old_logp"})),
        objective=policy_gradient(token_ratio("old"), clip(clip_low, clip_high), sequence_mean()),
        curriculum=in_epochs(solved_examples(examples, pool, success)) if examples else None,
        rollout=in_rounds(by_confidence(exploration, level), first, rounds, solved=solved),
    )


def novelty(mean_logp: Array, group: Array) -> Array:
    """1 - exp(s - mean s of the group), f32[N]: positive for rows less likely than their group (XRPO, 2510.06672).

    s = mean_logp f32[N], the mean log-probability of the row's tokens, NaN for rows to ignore (novelty 0).
    """
    _, mean, _ = bucket_moments(group, mean_logp)
    return jnp.where(jnp.isnan(mean_logp), 0.0, -jnp.expm1(jnp.clip(mean_logp - mean, -20.0, 20.0)))


EXAMPLE = "Problem: {problem}\nSolution: {solution}"


@part
def solved_examples(
    examples: NonNegativeInt = 2,
    pool: Count = 1000,
    success: float = 0.0,
    column: str = "solved_examples",
    text: str = EXAMPLE,
) -> RuleOf:
    """Give each row solved problems of the steps before, like the prompt's own, in a column.

    The pool holds a completion with a reward above `success` of each problem that has had one, of several the first in
    the newest batch; it holds the `pool` problems that were solved last. A prompt gets the `examples` problems, others
    than itself, with the largest cosine of `text_features`, written as `text`, the most similar one last, next to the
    problem. Prompts of token ids have no text, and neither give nor get examples. Nothing is computed where `examples`
    is 0. The metric curriculum/pool is the number of problems in the pool.
    """

    def make(facts: PromptFacts) -> Machine:
        rows = facts.rows
        empty: State = {
            "pool_ids": np.zeros(0, np.int32), "pool_features": np.zeros((0, WIDTH), np.float32),
            "pool_sizes": np.zeros(0, np.int64), "pool_text": np.zeros(0, np.uint8),
        }  # fmt: skip

        def observe(state: State, outcome: Outcome) -> State:
            found = dict(zip(state["pool_ids"].tolist(), texts_in(state), strict=True))
            for prompt, solution in solutions(outcome.step, success).items():
                if examples and (problem := problem_of(rows[prompt])):
                    found.pop(prompt, None)  # so that it is the newest
                    found[prompt] = text.format(problem=problem, solution=solution)
            kept = list(found.items())[-pool:]
            known = dict(zip(state["pool_ids"].tolist(), state["pool_features"], strict=True))
            features = [known[i] if i in known else text_features(problem_of(rows[i])) for i, _ in kept]
            coded = [one.encode() for _, one in kept]
            return {
                "pool_ids": np.asarray([i for i, _ in kept], np.int32),
                "pool_features": np.stack(features) if features else np.zeros((0, WIDTH), np.float32),
                "pool_sizes": np.asarray([len(one) for one in coded], np.int64),
                "pool_text": np.frombuffer(b"".join(coded), np.uint8).copy(),
            }

        def columns(state: State, ids: np.ndarray) -> list[dict[str, Any]]:
            texts = texts_in(state)

            def of(prompt: int) -> list[str]:
                problem, others = problem_of(rows[prompt]), np.flatnonzero(state["pool_ids"] != prompt)
                if not problem or not examples:
                    return []
                chosen = nearest(text_features(problem), state["pool_features"][others], examples)
                return [texts[int(others[i])] for i in reversed(chosen)]

            return [{column: of(int(prompt))} for prompt in ids]

        def metrics(state: State) -> dict[str, float]:
            return {"pool": float(len(state["pool_ids"]))}

        return Machine(empty, observe=observe, metrics=metrics, columns=columns)

    return make


def texts_in(state: Mapping[str, Any]) -> list[str]:
    """The texts of a pool, the oldest first."""
    ends, text = np.cumsum(state["pool_sizes"]), state["pool_text"].tobytes()
    return [text[end - size : end].decode() for end, size in zip(ends, state["pool_sizes"], strict=True)]


def solutions(step: Step, success: float) -> dict[int, str]:
    """By prompt, the first completion of a step whose reward is above `success`."""
    batch, out = step.scored.batch, dict[int, str]()
    reward = np.asarray(batch.need("reward"), np.float64)
    for row, prompt in enumerate(np.asarray(batch.prompt_id).tolist()):
        if reward[row] > success:
            out.setdefault(prompt, step.scored.texts[row])
    return out


def nearest(query: np.ndarray, features: np.ndarray, count: int) -> list[int]:
    """Indices of the `count` rows of features f32[n, D] with the largest product with query f32[D], the largest first.

    Of equal ones the later row comes first.
    """
    order = np.lexsort((-np.arange(len(features)), -(features @ query)))
    return [int(i) for i in order[:count]]
