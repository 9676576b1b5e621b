from asyncio import gather
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.algorithms.method import Algorithm, beside, method, one_reward_of, run_settings
from jaxrl_llm.core.annotations import AtLeastTwo, Count, NonNegative, NonNegativeInt, Ours, Positive
from jaxrl_llm.core.parts import chain, part
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.curriculum.embedded import text_features
from jaxrl_llm.data.chat.calls import Message
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.games import SAYING, TalkGame, action_in, conversations, reply_text, sayings, with_sayings
from jaxrl_llm.games import Node, cfr, information_sets, regret_matching
from jaxrl_llm.objectives import pairwise
from jaxrl_llm.rewards.specs import ENVIRONMENT
from jaxrl_llm.rollouts.agents.messages import merged, messages_of
from jaxrl_llm.rollouts.agents.path import AgentSettings
from jaxrl_llm.rollouts.pairs import best_and_worst_place
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools, group, samples
from jaxrl_llm.utils.errors import InputError

Array = np.ndarray[Any, Any]
Embed = Callable[[str], Array]  # a text -> f[d]


@method(paper="arXiv 2502.04686", test="test_lspo.py::test_candidates_are_ordered_by_the_solved_game")
@beside("deep", "Deep CFR, networks in place of tables of regrets, and discussions of many rounds", "larger games")
@beside("embedding", "a model that embeds texts", "`embed` of `latent_talk`; by default hashed counts of words")
@run_settings(one_reward_of(ENVIRONMENT, why="the game"))
def lspo(
    clusters: Ours[AtLeastTwo] = 2,
    growth: Ours[NonNegativeInt] = 1,
    round_steps: Ours[Count] = 50,
    replies: Ours[Count] = 8,
    iterations: Ours[Count] = 200,
    prior: Ours[NonNegative] = 1.0,
    beta: Ours[Positive] = 0.1,
) -> Algorithm:
    """Latent Space Policy Optimization: games of words solved over clusters of what can be said (LSPO).

    The policy proposes group_size utterances in each state I in which a player of a game talks. Those of a player are
    clustered by k-means of their embeddings, y -> z(y), which leaves a game with k latent actions in place of texts;
    all other actions stay as they are. Counterfactual regret minimisation solves it, with the cumulative regrets R

        sigma(z | I) = max(R(I, z), 0) / sum_z max(R(I, z), 0),   uniform where no regret is positive

    over `iterations`, and the average of these sigma orders the utterances of a state: of the largest and the
    smallest one each is the chosen and the rejected response of DPO,

        loss = mean over pairs of -log sigmoid(beta (u_chosen - u_rejected)),   u the log-ratio to the reference

    After round_steps training steps, of one update each, a round is over: the reference becomes the policy, and k grows
    by `growth`, from `clusters` on; it is never more than the different utterances. Texts in one cluster, or in
    clusters that are equally good, make no pair.

    Words mean what those who hear them make of them, and without a listener to begin with all clusters are alike: all
    regrets stay 0. So R begins at `prior` times the policy's own play: how often it says what is in z at I, and, of
    `replies` replies of those who hear an utterance of z drawn at random, how often it acts in each way; with prior 0
    nothing is learnt of talk alone. The paper solves a game of seven players by Deep CFR with collected games; here
    the game is a table, of which every state is asked in every step, and the clusters are of a player, not of its
    hidden role, which a cluster's number would tell those who hear it. A game is a `games.TalkGame`, such as
    --environment jaxrl_llm.environments.games:spoken_advice --players 2.
    """
    return Algorithm(
        chain(), pairwise(beta=beta), rollout=latent_talk(clusters, growth, round_steps, replies, iterations, prior),
        reference=periodic_reset(round_steps),
    )  # fmt: skip


def clustered(vectors: Array, k: int, most: int = 100) -> Array:
    """int[n], the cluster of each vector f[n, d], from 0 on: k-means (Lloyd), with no empty cluster.

    There are k, or as many as different vectors if these are fewer. Centres begin at the first vector and, again and
    again, at the one that is farthest from all centres; each round moves them to the means of the vectors that are
    nearest to them, until nothing changes, at most so many times. A cluster that nothing is nearest to takes the vector
    that is farthest from its own centre.

    >>> clustered(np.array([[0.0], [5.0], [0.1], [5.2]]), 2).tolist()
    [0, 1, 0, 1]
    """
    points = np.asarray(vectors, np.float64)
    k = min(k, len(np.unique(points, axis=0)))
    centres = points[:1]
    while len(centres) < k:
        centres = np.vstack([centres, points[np.argmax(_distances(points, centres).min(1))]])
    labels = np.full(len(points), -1)
    for _ in range(most):
        distances = _distances(points, centres)
        found = distances.argmin(1)
        for empty in set(range(k)) - set(found.tolist()):
            own = distances[np.arange(len(points)), found]
            alone = np.bincount(found, minlength=k)[found] == 1
            found[np.argmax(np.where(alone, -1.0, own))] = empty
        if (found == labels).all():
            break
        labels, centres = found, np.stack([points[found == z].mean(0) for z in range(k)])
    return labels


def _distances(points: Array, centres: Array) -> Array:
    return np.asarray(((points[:, None] - centres[None]) ** 2).sum(-1))


def speakers_of(game: Node) -> dict[str, int]:
    """The player of each information set in which something is said. InputError where it has heard others before."""
    found = {name: player for name, (player, actions) in information_sets(game).items() if SAYING.fullmatch(actions[0])}
    if heard := [name for name in found if SAYING.search(name)]:
        raise InputError(f"{heard[0]!r} has heard something before it talks: give a game in which all talk first")
    return found


class Talk(NamedTuple):
    """What was proposed in the states in which players talk."""

    episodes: Mapping[str, Sequence[Episode]]
    texts: Mapping[str, Sequence[str]]
    latent: Mapping[str, Array]
    """int[N]: the cluster of each."""
    game: Node
    """With clusters in place of texts."""

    def heard(self, speakers: Mapping[str, int]) -> dict[str, list[str]]:
        """The texts of each latent action, by its name, in all states of its player."""
        found: dict[str, list[str]] = {}
        for name, player in speakers.items():
            for text, z in zip(self.texts[name], self.latent[name], strict=True):
                found.setdefault(sayings(player, int(z) + 1)[-1], []).append(text)
        return found


def frequencies(chosen: Sequence[int], count: int) -> Array:
    """f64[count]: the share of each number from 0 on; what is below 0 is none of them."""
    return np.asarray([sum(one == place for one in chosen) / max(len(chosen), 1) for place in range(count)])


@part
def latent_talk(
    clusters: Count = 2, growth: NonNegativeInt = 1, round_steps: Count = 50, replies: Count = 8,
    iterations: Count = 200, prior: NonNegative = 1.0, embed: Embed = text_features,
) -> Rollout:  # fmt: skip
    """Pairs of utterances of the run's game, ordered by the strategy over their clusters that solves it; see `lspo`.

    embed: a text -> f[d]. The rows are two of each state in which a player talks, a group of their own, with the
    probability of their cluster as reward; of more states than samples as many as these, drawn at random. It goes
    around self-play; InputError around another rollout, and for what is no `TalkGame`.
    """

    async def proposed(tools: Tools, task: Task, settings: AgentSettings, game: TalkGame) -> Talk:
        plain = game.build(lambda player: sayings(player, 1))
        speakers, asked = speakers_of(plain), conversations(plain, messages_of(task.row, settings.system))
        chat, G = settings.chat(tools.tokenizer, task.row, ()), task.samples
        found = await gather(
            *(drawn(tools, task, settings, asked[name], range(n * G, (n + 1) * G)) for n, name in enumerate(speakers))
        )
        episodes = dict(zip(speakers, found, strict=True))
        texts = {name: [reply_in(chat, one) for one in some] for name, some in episodes.items()}
        k = clusters + growth * (tools.first_step // round_steps)
        latent, counts = dict[str, Array](), dict[int, int]()
        for player in sorted(set(speakers.values())):
            own = [name for name in speakers if speakers[name] == player]
            labels = clustered(np.stack([embed(text) for name in own for text in texts[name]]), k)
            counts[player] = int(labels.max()) + 1
            latent |= dict(zip(own, labels.reshape(len(own), G), strict=True))
        return Talk(episodes, texts, latent, game.build(lambda player: sayings(player, counts.get(player, 1))))

    async def play(tools: Tools, task: Task, settings: AgentSettings) -> list[Episode]:
        game = settings.environment(task.row)
        if not isinstance(game, TalkGame):
            raise InputError("games without talk have no latent actions: give an environment that is a games.TalkGame")
        talk = await proposed(tools, task, settings, game)
        speakers, sets = speakers_of(talk.game), information_sets(talk.game)
        asked = conversations(talk.game, messages_of(task.row, settings.system))
        heard, random = talk.heard(speakers), tools.random("heard")
        others = [name for name in sets if name not in speakers]
        chat, first = settings.chat(tools.tokenizer, task.row, ()), task.samples * len(speakers)
        asking = list[Any]()
        for n, name in enumerate(others):
            for number in range(first + n * replies, first + (n + 1) * replies):
                said = {z: texts[int(random.integers(len(texts)))] for z, texts in heard.items()}
                spoken = [{**one, "content": with_sayings(str(one["content"]), said)} for one in asked[name]]
                asking.append(drawn(tools, task, settings, spoken, [number]))
        acted = [reply_in(chat, one) for (one,) in await gather(*asking)]
        start = {name: prior * frequencies(talk.latent[name].tolist(), len(sets[name][1])) for name in speakers}
        for n, name in enumerate(others):
            own = [action_in(text, sets[name][1]) for text in acted[n * replies : (n + 1) * replies]]
            start[name] = prior * frequencies(own, len(sets[name][1]))

        def solve() -> dict[str, list[float]]:
            found = cfr(talk.game, regret_matching(), iterations, start)
            return {name: found[name].tolist() for name in speakers}

        sigma = await tools.call(solve, name="solve")
        order = tools.random("states").permutation(len(speakers))[: task.samples]
        rows = list[Episode]()
        for n in sorted(order.tolist()):
            name = list(speakers)[n]
            scores = [float(sigma[name][z]) for z in talk.latent[name]]
            rows += [talk.episodes[name][one].scored(scores[one]).in_part(n) for one in best_and_worst_place(scores)]
        return rows

    def around(inner: Rollout) -> Rollout:
        settings = inner.agent
        if settings is None or settings.players < 2:
            raise InputError(
                f"latent actions are those of a game of several players, but the rollout {inner.name} has none: give "
                "--environment MODULE:NAME and --players 2"
            )

        demands = replace(
            inner.demands, turns=1, longest=None, min_samples=2, variable_size=True, max_episodes=lambda G: 2 * G
        )
        program = partial(play, settings=settings)
        return Rollout(program, f"{inner.name}, latent talk", frozenset({ENVIRONMENT}), demands=demands)

    return replace(group(), wrap=around)


async def drawn(
    tools: Tools, task: Task, settings: AgentSettings, asked: Sequence[Message], numbers: Sequence[int]
) -> list[Episode]:
    """Replies to a conversation, one with each sample number."""
    prompt = settings.chat(tools.tokenizer, task.row, ()).begin(merged(asked))
    limit = settings.limits.turn_tokens
    if limit is None:
        return await samples(tools, prompt, numbers)
    return list(await gather(*(tools.sample(prompt, number=number, limit=limit) for number in numbers)))


def reply_in(chat: ChatTurns, episode: Episode) -> str:
    """The text of a sampled reply."""
    return reply_text(chat.reading(episode.last))
