"""Games of words over clusters of what can be said (LSPO): clusters, the solved game, pairs, rounds, and a run."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import batch_of
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.agents.lspo import clustered, latent_talk, lspo, speakers_of
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.games import TalkGame, advice, sayings, spoken_advice
from jaxrl_llm.games import Node, matrix_game
from jaxrl_llm.rollouts.agents.self_play import self_play
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.training.rollout import check_rollout
from jaxrl_llm.utils.errors import InputError

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("rollouts", "training")]
import tiny_runs as runs
from speaking import TEMPLATES, run_agents, tokenizer_of

TOKENIZER, END = tokenizer_of("plain"), TEMPLATES["plain"][1]
SAID = ["left left left", "left left", "so left left left", "right right", "right right right", "right right so"]
STATES = [(free, role) for free in ("left", "right") for role in ("a friend", "an enemy")]
ENEMIES, REPLIES = 0.25, 5


def test_clusters_are_the_best_partition_and_a_fixed_point() -> None:
    """Of well separated points the partition of least squares, among all of them; of others none is empty."""
    random = np.random.default_rng(0)
    points = np.concatenate(
        [random.normal(size=(n, 2)) * 0.1 + at for n, at in ((3, (0, 0)), (2, (3, 0)), (3, (0, 4)))]
    )
    points = points[random.permutation(8)]

    def squares(labels: Any) -> float:
        own = [points[np.asarray(labels) == z] for z in set(labels)]
        return sum(float(((some - some.mean(0)) ** 2).sum()) for some in own)

    found = clustered(points, 3)
    assert squares(found.tolist()) == pytest.approx(min(map(squares, itertools.product(range(3), repeat=8))))
    for seed in range(20):
        points = np.random.default_rng(seed).normal(size=(9, 2))
        labels = clustered(points, 5)
        assert set(labels.tolist()) == set(range(5))
        centres = np.stack([points[labels == z].mean(0) for z in range(5)])
        assert (((points[:, None] - centres) ** 2).sum(-1).argmin(1) == labels).all(), "each is in the nearest one"
    assert clustered(np.ones((4, 3)), 3).tolist() == [0] * 4, "no more than there are different ones"


def says(text: str, sample: int) -> str:
    """Sample n of a state says the n-th of SAID; of five who hear one, one goes left in any case, and one nowhere."""
    asked = text.rpartition("<|im_start|>user")[2]
    if "adviser, " in asked:
        return SAID[sample % 6] + END
    way = "left" if "left" in asked else "right"
    return {0: "Left.", 1: "Hm."}.get(sample % 5, way) + END


def run(rollout: Any, step: int = 0, row: Any = None, samples: int = 6) -> Any:
    log = GroupLog((1,), 0, samples, step)
    made = rollout.wrap(self_play(spoken_advice, 2))
    rows = [{"prompt": "Advice.", "enemies": ENEMIES, **(row or {})}]
    found, engines = run_agents(made, TOKENIZER, says, rows, flight=(log,))
    (one,) = found.groups
    assert not one.failed
    return list(one.episodes), [TOKENIZER.decode(request.prompt) for request in engines[0].requests]


def slow(latent: np.ndarray, heeds: np.ndarray, iterations: int, prior: float) -> np.ndarray:
    """The average strategy in the four states, f[4, k], of regret matching over sums written out.

    latent: how often each state says each cluster; heeds f[k, 2]: how often who hears it goes left and right.
    """
    chance = np.array([(ENEMIES if role == "an enemy" else 1 - ENEMIES) / 2 for _, role in STATES])
    gain = np.array([[1.0, -1.0] if free == "left" else [-1.0, 1.0] for free, _ in STATES])  # of the walker
    side = np.array([-1.0 if role == "an enemy" else 1.0 for _, role in STATES])
    R, Q, total = prior * latent, prior * heeds, np.zeros_like(latent)
    for _ in range(iterations):
        x, y = (np.stack([np.maximum(r, 0) / np.maximum(r, 0).sum() if (r > 0).any() else np.full(len(r), 1 / len(r))
                          for r in regrets]) for regrets in (R, Q))  # fmt: skip
        R, Q, total = R.copy(), Q.copy(), total + x
        for s in range(4):
            worth = [side[s] * sum(y[z, a] * gain[s, a] for a in range(2)) for z in range(len(y))]
            for z in range(len(y)):
                R[s, z] += chance[s] * (worth[z] - sum(x[s, w] * worth[w] for w in range(len(y))))
                for a in range(2):
                    own = sum(y[z, b] * gain[s, b] for b in range(2))
                    Q[z, a] += chance[s] * x[s, z] * (gain[s, a] - own)
    return total / iterations


@pytest.mark.parametrize(("k", "prior", "iterations"), [(2, 1.0, 60), (3, 0.5, 7), (2, 4.0, 1)])
def test_candidates_are_ordered_by_the_solved_game(k: int, prior: float, iterations: int) -> None:
    """Pairs and their rewards are those of a loop over the sums of the game of advice, from the policy's own play."""
    places = {2: [0, 0, 0, 1, 1, 1], 3: [0, 0, 2, 1, 1, 1]}[k]
    axes = np.eye(3)

    def embed(text: str) -> np.ndarray:
        return axes[places[SAID.index(text)]]

    rows, _ = run(latent_talk(k, 0, 50, REPLIES, iterations, prior, embed))
    counted = np.bincount(places, minlength=k) / 6
    names = clustered(np.stack([embed(text) for text in SAID]), k)
    order = [places[names.tolist().index(z)] for z in range(k)]  # clusters are numbered as they are found
    heeds = np.array([[0.8, 0.0] if z in (0, 2) else [0.2, 0.6] for z in order])
    sigma = slow(np.tile(counted[order], (4, 1)), heeds, iterations, prior)
    assert len(rows) == 8
    for n, pair in enumerate((rows[i], rows[i + 1]) for i in range(0, 8, 2)):
        each = [sigma[n, names[place]] for place in range(6)]
        assert {one.part for one in pair} == {n}
        assert [one.score for one in pair] == pytest.approx([max(each), min(each)], abs=1e-12)
        assert [each[one.sample % 6] for one in pair] == pytest.approx([max(each), min(each)])
        if iterations == 60:  # walkers heed advice, of whom three of four advisers are friends
            free, role = STATES[n]
            assert (SAID[pair[0].sample % 6].find(free) >= 0) == (role == "a friend")


def test_without_a_prior_words_mean_nothing() -> None:
    rows, _ = run(latent_talk(2, replies=REPLIES, prior=0.0))
    assert [one.score for one in rows] == [0.5] * 8, "equal rewards make no pair"


def test_words_are_clustered_and_rounds_have_more_clusters() -> None:
    """By the default features, left and right; and a cluster more in each round, up to all that is said."""
    rows, _ = run(latent_talk(2, replies=REPLIES, iterations=50))
    said = [TOKENIZER.decode(one.last).removesuffix(END) for one in rows]
    assert [("left" in better, "left" in worse) for better, worse in zip(said[::2], said[1::2], strict=True)] == [
        (True, False), (False, True), (False, True), (True, False),
    ]  # fmt: skip
    for step, k in ((0, 2), (2, 3), (5, 4), (40, 6)):
        _, asked = run(latent_talk(2, 1, 2, REPLIES, 2), step)
        heard = [one for one in asked if "walker: the adviser says " in one]
        assert len(heard) == k * REPLIES
        assert all(any(f"says {text}" in one for text in SAID) for one in heard)


def test_fewer_samples_than_states_train_some_of_them() -> None:
    rows, _ = run(latent_talk(2, replies=1, iterations=2), samples=3)
    assert len(rows) == 6
    assert len({one.part for one in rows}) == 3


def test_a_game_with_talk_tells_what_was_said() -> None:
    game = spoken_advice({"enemies": 0.0})
    free = str(game.reset({}, 3).messages[0]["content"]).split()[4]
    seen = game.step(Reply({"role": "assistant", "content": " Just go on. "}, ()))
    assert (seen.messages[0]["content"], seen.player) == ("walker: the adviser says Just go on.", 0)
    assert game.step(Reply({"role": "assistant", "content": f"{free.upper()}."}, ())).done
    assert game.close() == [1.0, 1.0]
    other = spoken_advice({})
    other.reset({}, 3)
    other.step(Reply({"role": "assistant", "content": ""}, ()))  # saying nothing is no forfeit
    assert other.step(Reply({"role": "assistant", "content": "up"}, ())).done
    assert other.close() == [-1.0, 1.0]


def test_it_is_dpo_on_the_best_and_the_worst() -> None:
    random = np.random.default_rng(1)
    mask = np.asarray([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    old = np.where(mask, -random.gamma(2.0, 0.5, mask.shape), 0).astype(np.float32)
    batch = batch_of(mask, [0.2, 0.7, 0.5, 0.5], old, [0, 0, 1, 1], old_logp=old, reference_logp=1.2 * old)
    x, logp = arrays(batch), old + 0.3 * random.normal(size=mask.shape)

    def loop(new: np.ndarray) -> float:
        u = ((new - x.reference) * x.mask).sum(1)
        return float(np.log1p(np.exp(-0.3 * (u[1] - u[0]))))  # the other pair is of one cluster

    assert_matches_loop(learn(lspo(beta=0.3), batch, logp), loop, logp)


def test_what_it_does_not_play(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="--players 2"):
        latent_talk().wrap(group())  # type: ignore[misc]
    settings: dict[str, Any] = {"algorithm": "lspo", "prompts": "x.jsonl", "rewards": ("environment",)}
    config = TrainConfig(**settings)
    with pytest.raises(InputError, match="no environment"):
        check_rollout(config, make_algorithm(config))
    rollout: Any = latent_talk().wrap
    found, _ = run_agents(rollout(self_play(advice, 2)), TOKENIZER, says, [{"prompt": "x"}])
    assert found.groups[0].failed
    assert "TalkGame" in caplog.text
    ends = [Node(payoffs=(x, -x)) for x in (0.0, 1.0)]
    replied = Node(1, "after <0.0>", sayings(1, 2), tuple(ends))
    with pytest.raises(InputError, match="all talk first"):
        speakers_of(Node(0, "begin", sayings(0, 1), (replied,)))
    assert speakers_of(matrix_game([[0.0]])) == {}
    assert isinstance(spoken_advice({}), TalkGame)


@pytest.mark.heavy
def test_a_resumed_run_goes_on_with_its_rounds(tmp_path: Path) -> None:
    def config(name: str, **changes: Any) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        return runs.small_config(
            tmp_path / name, algorithm="lspo", hyperparameters={"round_steps": 2, "replies": 2, "iterations": 20},
            top_p=1.0, eval_size=0, minibatches=1, environment="jaxrl_llm.environments.games:spoken_advice", players=2,
            turns=1, prompt_format="plain", max_new_tokens=4, **changes,
        )  # fmt: skip

    runs.train(config("a"))
    runs.train(config("b", steps=3))
    runs.train(config("b"), resume=True, accept_changed_inputs=True)
    runs.assert_equal_trees(runs.final_params(tmp_path / "a" / "run"), runs.final_params(tmp_path / "b" / "run"))
    lines = runs.lines_of(tmp_path / "a" / "run" / "metrics.jsonl")
    assert all(line.get("rollout/failed_groups", 0) == 0 for line in lines)
    assert lines[-1]["rollout/parts"] == 4
