from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.episodes import EPISODES, one_row_each
from jaxrl_llm.advantages.turns import episode_backwards, episode_returns, needs_turns, on_tokens, rewards_of_turns
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import Fraction, NonNegative, NonNegativeInt, Ours, Paper, Positive, Range
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, stateless_part, step_part
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.curriculum.records import PromptFacts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome
from jaxrl_llm.objectives import log_probability, policy_gradient, sequence_sum, span_ratio
from jaxrl_llm.objectives.off_policy import mismatch
from jaxrl_llm.objectives.ratios import over_span
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rollouts.agents.metrics import RESTARTED
from jaxrl_llm.rollouts.agents.restarts import MODEL, Model
from jaxrl_llm.utils.errors import InputError, shown

TAKEN_OVER = frozenset({"imitated", "imitated_score"})


@batch_part
def failures_at(batch: Trajectories, reward: Annotated[float | None, Range(most=0)]) -> Array:
    """A function `batch -> f32[N]`: the score, or `reward` of rows whose score is not above 0; None: the score."""
    return batch.scores if reward is None else jnp.where(batch.scores <= 0, reward, batch.scores)


def imitated(batch: Trajectories) -> Array:
    """f32[N, L]: info["imitated"] of actions, 0 without it; below 0 for what is taken over and not imitated."""
    left = (batch.info or {}).get("imitated")
    return jnp.zeros(batch.tokens.shape) if left is None else jnp.where(batch.action_mask, jnp.nan_to_num(left), 0.0)


@stateless_part(TAKEN_OVER | EPISODES | {"old_logp"})
def chunk_returns(
    batch: Trajectories,
    gamma: Fraction,
    mismatch_limit: Positive,
    imitation_weight: NonNegative,
    chunk_weight: NonNegative,
) -> Trajectories:
    """Advantages of actions: those of IPA, see `ipa`. The score comes with the last turn of the episode."""
    last = one_row_each(batch)
    r = rewards_of_turns(batch.replace(reward=jnp.where(last | jnp.isnan(batch.scores), batch.scores, 0.0)))
    G = on_tokens(episode_backwards(batch, r, gamma, jnp.ones(r.shape, bool)), batch)
    near = over_span(mismatch(batch), batch, "turn", mean=True) <= jnp.log(mismatch_limit)
    own = chunk_weight * jnp.where(near, G, 0.0)
    left = imitated(batch)
    taken = imitation_weight * gamma ** jnp.maximum(left - 1, 0) * batch.entry("imitated_score", 0)[:, None]
    known = batch.action_mask & ~jnp.isnan(batch.scores)[:, None] & (left >= 0)
    return batch.replace(
        advantages=jnp.where(known, jnp.where(left > 0, taken, own), 0.0),
        # What was taken over from another step was not sampled.
        behaviour_logp=jnp.where(left == 0, batch.behaviour_logp, batch.need("old_logp")),
    )


@step_part
def truncated_in_failures(ratio: Array, batch: Trajectories) -> Array:
    """min(rho, 1) in episodes whose return is not above 0; 1 in others, and on tokens that were taken over."""
    won = (jnp.nan_to_num(episode_returns(batch)) > 0)[:, None]
    return jnp.where(won | (imitated(batch) > 0), 1.0, jnp.minimum(ratio, 1.0))


@method(paper="arXiv 2512.24873", test="test_turn_chunks.py::test_ipa_worked_example_and_loop")
@run_needs(
    episode="rows of one episode",
    first_turn="the order of these rows",
    imitated="restarts in the middle of a success",
    imitated_score="the score of that success",
    turns="episodes of several turns",
)
@beside("resampling", "episodes that the environment broke, sampled again from the same state", "retries of turns")
def ipa(
    gamma: Ours[float] = 0.95,
    failure: Ours[float | None] = -1.0,
    mismatch_limit: Ours[float] = 2.0,
    imitation_weight: Ours[float] = 1.0,
    chunk_weight: Ours[float] = 1.0,
    stored: Ours[NonNegativeInt] = 1000,
    teacher: Ours[str | None] = None,
    rollback: Paper[Literal["parallel", "sequential"]] = "parallel",
    enough: Ours[Fraction] = 0.5,
) -> Algorithm:
    """Interaction-perceptive agentic policy optimization (IPA of ROME).

    Return, importance weight and mask are those of chunks, what the policy says between two observations. Of K chunks

        G_k = gamma^(K - k) R,    m_k = 1 if exp(mean over the chunk of log pi_old - log pi_behaviour) <= H, else 0
        loss = - mean over episodes of sum_k sg(w_k) G_k m_k sum_t log pi_t,
        w_k = 1 if R > 0, else min(rho_k, 1),    rho_k = exp(mean over the chunk of log pi - log pi_old)

    H = mismatch_limit. Rewards of turns, if there are, count from their turn back: G_k = r_k + gamma G_{k+1}. failure:
    R of rows whose score is not above 0, which would teach nothing at 0; None: their score.

    Half of each group's samples restart in the middle of a success (`rollouts.agents.restarts.restarting`): of the
    group; or of an earlier step, of which the run keeps the best for each of `stored` prompts (0: none); or of a
    teacher, the replies of a successful episode with the score 1 in the column `teacher`, a list of texts. Those of
    other steps are told to a fresh environment. What restarts take over is imitated: its tokens have imitation_weight
    times the success's G_k, without weights and masks, and the chunks that they sample chunk_weight times their own.

    rollback: "parallel", the form that the paper ends with: restarts leave the success at several places at once.
    "sequential": all restarts of a prompt leave the stored success or the teacher's before one chunk p, at first the
    last. Where a share `enough` of them succeeds, p is one chunk earlier in the prompt's next group, until there is
    nothing left to take over. Where not, chunk p is crucial: without it success drops. Then p is one chunk later, and
    imitation ends with the crucial chunk: what is taken over after it, and all of it before one is known, is not
    learnt. A group without a stored success or a teacher's restarts as in the parallel form.

    The store is part of the curriculum, which draws prompts in shuffled epochs, and of each checkpoint. A run that
    leaves groups to later steps goes without: stored 0, no teacher.
    """
    if rollback == "sequential" and not stored and teacher is None:
        raise InputError("rollback is sequential, which needs successes of earlier steps: give stored, or a teacher")
    store = in_epochs(restart_points(stored, teacher, rollback == "sequential", enough)) if stored or teacher else None
    returns = chunk_returns(gamma, mismatch_limit, imitation_weight, chunk_weight)
    return Algorithm(
        chain(needs_turns(), rescore(failures_at(failure)), returns),
        policy_gradient(span_ratio("turn", against="old"), log_probability(truncated_in_failures()), sequence_sum()),
        curriculum=store,
    )


def moved_place(model: Model, rate: float | None, enough: float) -> Model:
    """The model after restarts from its place, of which the share `rate` succeeded; None: there were none.

    >>> model = Model([[1], [2], [3]], 1.0, place=2, learnt=0)
    >>> moved_place(model, 1.0, 0.5)[2:], moved_place(model, 0.0, 0.5)[2:]
    ((1, 0), (2, 3))
    >>> moved_place(model._replace(place=1), 0.0, 0.5)[2:]
    (2, 2)
    """
    if rate is None or not model.place:
        return model
    if rate >= enough:
        return model._replace(place=model.place - 1)
    return model._replace(place=min(model.place + 1, len(model.replies) - 1), learnt=model.place + 1)


@batch_part
def restart_points(
    facts: PromptFacts,
    stored: NonNegativeInt = 1000,
    teacher: str | None = None,
    sequential: bool = False,
    enough: Fraction = 0.5,
) -> Machine:
    """The successes of earlier steps and of teachers, from which episodes begin; see `ipa`.

    A prompt's is replaced by one with a higher score. Beyond `stored` prompts, the one that has not changed for longest
    is forgotten; with teachers, none is. Rows get the column "restart", a `Model` as a dict, or None. Metrics:
    curriculum/restart_points, their number, and with sequential curriculum/taken_over, the mean share of their replies
    that restarts take over.
    """

    if teacher is not None and isinstance(facts.rows, list) and not any(row.get(teacher) for row in facts.rows):
        raise InputError(f"the teacher's replies are in the column {teacher!r}, which no prompt has: name another")

    def new(replies: Sequence[Sequence[int] | str], score: float) -> Model:
        return Model(replies, score, len(replies) - 1 if sequential else None, 0 if sequential else None)

    def model_of(state: State, prompt: int) -> Model | None:
        if (known := state["models"].get(str(prompt))) is not None:
            return Model(**known)
        replies = None if teacher is None else facts.rows[prompt].get(teacher)
        if replies is None or replies == []:
            return None
        if not isinstance(replies, list | tuple) or not all(isinstance(one, str) and one for one in replies):
            raise InputError(
                f"prompt {prompt} has {shown(replies)} in the column {teacher!r}, but must have the texts of a "
                "teacher's replies there, as a list"
            )
        return new(list(replies), 1.0)

    def columns(state: State, ids: Any) -> list[Mapping[str, Any]]:
        found = [model_of(state, int(prompt)) for prompt in ids]
        return [{MODEL: None if one is None else one._asdict()} for one in found]

    def observe(state: State, outcome: Outcome) -> State:
        models = dict(state["models"])
        for prompt, episodes in episodes_of(outcome.step.scored.batch):
            before = model = model_of({"models": models}, prompt)
            if model is not None and sequential:
                again = [score > 0 for _, score, restarted in episodes if restarted]
                model = moved_place(model, float(np.mean(again)) if again else None, enough)
            best = max(episodes, key=lambda one: one[1], default=None)
            if stored and best is not None and best[1] > max(0.0, 0.0 if model is None else model.score):
                model = new(best[0], best[1])
            if model is not None and model != before:
                models.pop(str(prompt), None)
                models[str(prompt)] = model._asdict()
        most = max(stored, 1) if teacher is None else None  # a teacher's are as many as prompts
        return {"models": dict(list(models.items())[-most:] if most else models)}

    def metrics(state: State) -> dict[str, float]:
        models = [Model(**one) for one in state["models"].values()]
        out = {"restart_points": float(len(models))}
        if sequential:
            shares = [(one.place or 0) / len(one.replies) for one in models]
            out["taken_over"] = float(np.mean(shares)) if shares else 0.0
        return out

    return Machine({"models": {}}, observe=observe, metrics=metrics, columns=columns)


def episodes_of(batch: Trajectories) -> Iterator[tuple[int, list[tuple[list[list[int]], float, bool]]]]:
    """Of each group its prompt, and of its scored episodes the replies, the score with rewards of turns, and whether it
    began in the middle of a success."""
    info, group = batch.info or {}, np.asarray(batch.group)
    tokens, turn, reward = (np.asarray(x) for x in (batch.tokens, batch.turn, batch.need("reward")))
    own = np.zeros(len(group)) if batch.turn_rewards is None else np.nansum(np.asarray(batch.turn_rewards), axis=1)
    episode, first, restarted = (
        np.asarray(info.get(name, default))
        for name, default in (("episode", np.arange(len(group))), ("first_turn", 0 * group), (RESTARTED, 0 * group))
    )
    for number in np.unique(group):
        found = list[tuple[list[list[int]], float, bool]]()
        rows = np.flatnonzero(group == number)
        for one in np.unique(episode[rows]):
            mine = rows[episode[rows] == one]
            mine = mine[np.argsort(first[mine], kind="stable")]
            replies = [tokens[row][turn[row] == k].tolist() for row in mine for k in range(turn[row].max() + 1)]
            score = float(reward[mine[-1]] + own[mine].sum())
            if replies and score == score:
                found.append((replies, score, bool(restarted[mine[0]] > 0)))
        yield int(np.asarray(batch.prompt_id)[rows[0]]), found
