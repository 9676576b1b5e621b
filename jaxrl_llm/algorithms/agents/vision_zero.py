import re
from asyncio import gather
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method, one_reward_of, run_settings
from jaxrl_llm.core.annotations import Code, Count, Fraction, NonNegative, NonNegativeInt, Ours, Paper, Range, Recalled
from jaxrl_llm.core.parts import Array, State, Trajectories, Transform, chain, part
from jaxrl_llm.objectives import log_probability, policy_gradient, regularised, sequence_sum, token_ratio
from jaxrl_llm.rewards.judges.questions import stated
from jaxrl_llm.rewards.specs import ENVIRONMENT
from jaxrl_llm.rollouts.auxiliary_prompts import second_prompt
from jaxrl_llm.rollouts.programs import Demands, Episode, Task, Tools, program_part
from jaxrl_llm.utils.errors import InputError, shown

VOTES, CLUES, SPY_CLUES = 0, 1, 2  # parts of a game's rows, info["part"]
RIGHT, UNKNOWN, WRONG = 1.0, -0.5, -1.0  # rewards of votes
CLUE = """You are player {player} of {players}. All players see a scene. One of them, the spy, sees it with a change.
Nobody knows who it is.

Your scene: {scene}

Clues so far:
{clues}

Say one short clue about your scene, in a sentence. Do not give it away."""
VOTE = """{players} players see a scene, but one of them, the spy, sees it with a change.

Your scene: {scene}

Clues:
{clues}

Who is the spy? You are player {player}. Think, and end with [[the number of the spy]], or with [[n/a]]."""


@method(paper="arXiv 2509.25541", test="test_vision_zero.py::test_stages_baselines_and_the_switch")
@beside("vision", "scenes as images", "vision policies; scenes are texts")
@run_settings(one_reward_of(ENVIRONMENT, why="the rewards of the game"))
def vision_zero(
    players: Paper[Annotated[int, Range(least=3)]] = 4,
    rounds: Paper[Count] = 2,
    votes_weight: Paper[NonNegative] = 0.1,
    suspicion_weight: Paper[NonNegative] = 0.1,
    baseline_decay: Paper[Fraction] = 0.95,
    decay: Paper[Fraction] = 0.95,
    accuracy_up: Paper[Fraction] = 0.9,
    error_up: Recalled[Fraction] = 0.4,
    unknown_up: Recalled[Fraction] = 0.5,
    unknown_down: Recalled[Fraction] = 0.1,
    least_updates: Recalled[NonNegativeInt] = 5,
    start: Ours[Literal["clues", "decisions"]] = "clues",
    kl_coefficient: Code[NonNegative] = 0.04,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Iterative self-play policy optimisation over a game of clues and votes (Vision-Zero).

    A group is a game: the columns `scene` and `spy_scene` of a row describe what `players` - 1 civilians see and what
    the spy sees, whose seat is drawn. In each of `rounds` rounds all say a clue, one after another, who hear those
    before; then the group's samples are votes of the civilians. With v_s votes on the spy, v_j on civilian j, vbar
    their mean, n_c civilians, beta = votes_weight and lambda = suspicion_weight, the clues of the spy and of civilian j
    have

        r_s = -beta (v_s - vbar),   r_j = (beta / n_c)(v_s - vbar) - lambda (v_j - vbar)
        b <- baseline_decay b + (1 - baseline_decay) mean of r, of each of both roles;  A = r - b

    and votes 1 for the spy, -1/2 for n/a, else -1, with A = (r - mean_g) / (std_g + epsilon). One stage learns at a
    time, the other's rows have no weight:

        loss = mean over rows of -A log pi(y) + kl_coefficient sum_t k3(pi, reference)

    The switch: acc and na are moving averages (decay) of the shares of right votes and of n/a, without the bias of
    their start at 0. Decisions give way to clues where acc >= accuracy_up and na <= unknown_down; clues to decisions
    where 1 - acc >= error_up or na >= unknown_up; each after least_updates updates. In a step that switches the stage
    of before learns. The released code takes turns every step instead. Not here: images, the paper's patience.
    """
    loss = policy_gradient(token_ratio(), log_probability(), sequence_sum())
    objective = regularised(loss, sequence_sum(), kl_coefficient=kl_coefficient)
    stages = clue_and_decision(
        baseline_decay, decay, accuracy_up, error_up, unknown_up, unknown_down, least_updates, start
    )  # fmt: skip
    before = chain(group_relative(ddof=0, epsilon=epsilon), stages)
    return Algorithm(before, objective, rollout=clue_games(players, rounds, votes_weight, suspicion_weight))


@program_part(
    "clue games", {ENVIRONMENT}, ("scene", "spy_scene"),
    lambda rounds, players, **_: Demands(variable_size=True, max_episodes=lambda G: G + rounds * players),
)  # fmt: skip
async def clue_games(
    tools: Tools,
    task: Task,
    players: Annotated[int, Range(least=3)] = 4,
    rounds: Count = 2,
    votes_weight: NonNegative = 0.1,
    suspicion_weight: NonNegative = 0.1,
) -> list[Episode]:
    """Games of clues and votes, see `vision_zero`: the group's samples are votes, its second part the civilians' clues,
    its third the spy's, info["part"]. InputError for rows without scenes as texts."""
    scenes = [task.row.get(column) for column in ("scene", "spy_scene")]
    if wrong := [scene for scene in scenes if not isinstance(scene, str) or not scene.strip()]:
        raise InputError(f"prompt {task.prompt_id} needs texts in the columns scene and spy_scene: {shown(wrong[0])}")
    said: list[str] = []
    clues: list[Episode] = []
    spy = int(tools.random("spy").integers(players))
    civilians = [player for player in range(players) if player != spy]

    def asked(text: str, player: int) -> tuple[int, ...]:
        known = {"scene": scenes[player == spy], "clues": "\n".join(said) or "none"}
        return second_prompt(tools, task, text.format(player=player + 1, players=players, **known))

    for number in range(rounds * players):
        player = number % players
        clue = await tools.sample(asked(CLUE, player), number=task.samples + number)
        said.append(f"Player {player + 1}: {' '.join(tools.decode(clue.last).split())}")
        clues.append(clue)
    voters = [civilians[number % len(civilians)] for number in range(task.samples)]
    votes = await gather(*(tools.sample(asked(VOTE, who), number=n) for n, who in enumerate(voters)))
    named = [vote_in(tools.decode(vote.last)) for vote in votes]
    counts = [sum(one == player for one in named) for player in range(players)]
    rewards = clue_rewards(counts, spy, votes_weight, suspicion_weight)
    scored = [with_reward(vote, vote_reward(one, spy)) for vote, one in zip(votes, named, strict=True)]
    for kind, own in ((CLUES, civilians), (SPY_CLUES, [spy])):
        of_kind = [(n % players, clue) for n, clue in enumerate(clues) if n % players in own]
        scored += [with_reward(clue, float(rewards[player])).in_part(kind) for player, clue in of_kind]
    return scored


def with_reward(episode: Episode, reward: float) -> Episode:
    """The episode with a reward of the game, the component `environment`."""
    return episode.scored(reward, {ENVIRONMENT: reward})


def vote_in(text: str) -> int | None:
    """The place of the player whom a vote names last, from 0; None for n/a, -1 for what is no vote.

    >>> vote_in("The ball. [[2]]"), vote_in("[[Player 3]]"), vote_in("[[n/a]]"), vote_in("I do not know")
    (1, 2, None, -1)
    """
    last = stated(text) or ""
    found = re.fullmatch(r"(?:player )?(\d{1,3})", last)
    return None if last in ("n/a", "na") else int(found[1]) - 1 if found else -1


def vote_reward(vote: int | None, spy: int) -> float:
    """1 for the spy, -1/2 for n/a, -1 for anything else."""
    return UNKNOWN if vote is None else RIGHT if vote == spy else WRONG


def clue_rewards(votes: Sequence[int], spy: int, beta: float = 0.1, suspicion: float = 0.1) -> np.ndarray[Any, Any]:
    """f64[players], which add up to 0: of clues, by the votes on each player.

    >>> clue_rewards([1, 0, 5, 1], 2).round(6).tolist()
    [0.111111, 0.211111, -0.433333, 0.111111]
    """
    found = np.asarray(votes, np.float64)
    civilians = np.arange(len(found)) != spy
    mean = found[civilians].mean()
    lead = found[spy] - mean
    return np.where(civilians, beta / civilians.sum() * lead - suspicion * (found - mean), -beta * lead)


class Stage(NamedTuple):
    """What is known of the games so far."""

    clues: Array  # bool[]: clues learn
    since: Array  # int32[], updates of the stage
    baselines: Array  # f32[2], of civilians' and of spies' clues
    shares: Array  # f32[2], moving sums of the shares of right votes and of n/a
    total: Array  # f32[], of their weights


@part
def clue_and_decision(
    baseline_decay: Fraction = 0.95,
    decay: Fraction = 0.95,
    accuracy_up: Fraction = 0.9,
    error_up: Fraction = 0.4,
    unknown_up: Fraction = 0.5,
    unknown_down: Fraction = 0.1,
    least_updates: NonNegativeInt = 5,
    start: Literal["clues", "decisions"] = "clues",
) -> Transform:
    """Advantages of clues over the moving baseline of their role, and weights of the stage that learns: `vision_zero`.

    Votes keep the advantages that they have. Rows are known by info["part"]; without it all are votes, and learn.
    Controls: "stage/clues", 1 or 0, and "stage/accuracy" and "stage/unknown" of the votes so far.
    """

    def init() -> Stage:
        zero = jnp.float32(0)
        return Stage(jnp.bool_(start == "clues"), jnp.int32(0), jnp.zeros(2), jnp.zeros(2), zero)

    def after(clues: Array, accuracy: Array, unknown: Array, since: Array) -> Array:
        """bool[]: whether clues learn in the next update."""
        to_decisions = (1 - accuracy >= error_up) | (unknown >= unknown_up)
        to_clues = (accuracy >= accuracy_up) & (unknown <= unknown_down)
        return jnp.where(jnp.where(clues, to_decisions, to_clues) & (since >= least_updates), ~clues, clues)

    def mean_over(values: Array, rows: Array, otherwise: Array) -> Array:
        mean = jnp.sum(jnp.where(rows, values, 0.0)) / jnp.maximum(jnp.sum(rows), 1)
        return jnp.where(jnp.any(rows), mean, otherwise)

    def apply(state: Stage, batch: Trajectories) -> tuple[State, Trajectories]:
        score = batch.scores
        kind = jnp.zeros(score.shape) if (parts := (batch.info or {}).get("part")) is None else parts
        known = ~jnp.isnan(score)
        votes = known & (kind == VOTES)
        of_role = [known & (kind == role) for role in (CLUES, SPY_CLUES)]
        means = jnp.stack([mean_over(score, rows, b) for rows, b in zip(of_role, state.baselines, strict=True)])
        baselines = baseline_decay * state.baselines + (1 - baseline_decay) * means
        gain = jnp.nan_to_num(score) - jnp.where(kind == SPY_CLUES, baselines[1], baselines[0])
        advantages = jnp.where((kind == VOTES)[:, None], batch.need("advantages"), gain[:, None])
        learns = jnp.where(kind == VOTES, ~state.clues, state.clues) | (parts is None)
        now = jnp.stack([mean_over(score == reward, votes, jnp.float32(0)) for reward in (RIGHT, UNKNOWN)])
        keep = jnp.where(jnp.any(votes), decay, 1.0)
        shares, total = keep * state.shares + (1 - keep) * now, keep * state.total + (1 - keep)
        accuracy, unknown = shares / jnp.maximum(total, 1e-9)
        since = state.since + 1
        clues = jnp.where(total > 0, after(state.clues, accuracy, unknown, since), state.clues)
        stage = Stage(clues, jnp.where(clues == state.clues, since, 0), baselines, shares, total)
        learning = state.clues.astype(jnp.float32)
        controls = {"stage/clues": learning, "stage/accuracy": accuracy, "stage/unknown": unknown}
        advantages = jnp.where(batch.action_mask & known[:, None], advantages, 0.0)
        rows = batch.replace(advantages=advantages, weights=batch.loss_weights * learns[:, None])
        return stage, rows.with_controls(**controls)

    return Transform(init, apply)
