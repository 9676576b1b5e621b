"""Groups that list the actions of a state (HILA): their rewards, and the loss against a loop in double precision."""

from __future__ import annotations

import asyncio
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, finite_differences, prepared
from method_step import learn

from jaxrl_llm.algorithms.guidance.hila import action_rewards, actions_of, hila, listed_actions, state_text
from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rollouts.episode import Episode, given, sampled_ids
from jaxrl_llm.utils.errors import InputError

# Two states with three and four actions, and the expert's answer to each (prompts 7 and 8).
GROUP = np.array([0, 0, 0, 1, 2, 2, 2, 2, 3])
PROMPT = np.array([7, 7, 7, 7, 8, 8, 8, 8, 8])
EXPERT = np.array([0, 0, 0, 1, 0, 0, 0, 0, 1.0])
R = np.array([0, 0.97, 0.7, 0.7, 1, 0, -0.03, 0.7, 0.7])
LENGTHS = np.array([2, 1, 1, 5, 2, 3, 1, 1, 4])


def made(seed: int = 0) -> tuple[Any, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    mask = np.arange(5) < LENGTHS[:, None]
    reference = -random.gamma(2.0, 0.5, mask.shape) * mask
    logp = (reference + 0.4 * random.normal(size=mask.shape)) * mask
    batch = batch_of(
        mask, R, np.zeros(mask.shape), GROUP, prompt_id=PROMPT, reference_logp=reference, old_logp=logp - 0.1,
        info={"demonstrated": EXPERT},
    )  # fmt: skip
    return batch, logp, random.uniform(0, 1, mask.shape) * mask


def loop(logp: np.ndarray, batch: Any, kl: np.ndarray, scale: str) -> float:
    mask, reference = np.asarray(batch.action_mask), np.asarray(batch.reference_logp, np.float64)
    total = 0.0
    for expert, rows in ((3, [0, 1, 2]), (8, [4, 5, 6, 7])):
        A = R[rows] - R[rows].mean()
        A = A / (R[rows].std() + 1e-6) if scale == "std" else A
        z = [logp[n][mask[n]].mean() for n in rows]
        for a, n, one in zip(A, rows, z, strict=True):
            rho = np.exp(one - reference[n][mask[n]].mean())
            total -= min(rho * a, np.clip(rho, 0.8, 1.2) * a) / len(rows)
            total += 0.5 * kl[n][mask[n]].mean() / len(rows)
        p = np.exp(z) / np.exp(z).sum()
        total += 0.3 * (p * np.log(p)).sum()
        total -= 0.2 * logp[expert][mask[expert]].sum() / len(rows)
    return total / 2


@pytest.mark.parametrize("scale", ["none", "std"])
def test_hila_is_its_loop(scale: Any) -> None:
    batch, logp, kl = made()
    algorithm = hila(scale=scale, kl_coefficient=0.5, entropy_coefficient=0.3, sft_coefficient=0.2)
    found = learn(algorithm, batch, logp, teacher_divergence=jnp.asarray(kl, jnp.float32))
    assert found.loss == pytest.approx(loop(logp, batch, kl, scale), rel=1e-5)
    expected = finite_differences(lambda x: loop(x, batch, kl, scale), logp)
    np.testing.assert_allclose(found.gradient, expected * np.asarray(batch.action_mask), atol=2e-6)
    p = [np.exp([logp[n][: LENGTHS[n]].mean() for n in rows]) for rows in ([0, 1, 2], [4, 5, 6, 7])]
    p = [x / x.sum() for x in p]
    assert found.metrics["choice/entropy"] == pytest.approx(np.mean([-(x * np.log(x)).sum() for x in p]), rel=1e-5)
    mean_reward = (p[0] @ R[:3] + p[1] @ R[4:8]) / 2
    assert found.metrics["choice/reward"] == pytest.approx(mean_reward, rel=1e-5)


def test_the_worked_example() -> None:
    """A wrong peer, a right answer of one's own, and a right expert."""
    assert actions_of(1) == ["EVAL 1", "CREATE", "DEFER"]
    rewards = action_rewards(True, [False], True)
    assert rewards == pytest.approx([0, 0.97, 0.7])
    for scale, expected in (("none", [-0.556667, 0.413333, 0.143333]), ("std", [-1.361822, 1.011173, 0.350649])):
        batch = batch_of(np.ones((3, 2)), rewards, np.zeros((3, 2)), info={"demonstrated": np.zeros(3)})
        found = prepared(hila(scale=scale), batch)  # type: ignore[arg-type]
        np.testing.assert_allclose(found.advantages, np.repeat(expected, 2).reshape(3, 2), atol=3e-6)


def test_a_state_without_a_score_does_not_count() -> None:
    """Neither in the mean over states, nor its reply: the other state's loss is as if it were alone."""
    batch, logp, kl = made()
    one = np.arange(4)
    unused = batch.replace(reward=batch.reward.at[4:].set(jnp.nan), action_mask=batch.action_mask.at[8].set(False))
    alone = batch_of(
        np.asarray(batch.action_mask)[one], R[one], np.zeros((4, 5)), GROUP[one], prompt_id=PROMPT[one],
        reference_logp=np.asarray(batch.reference_logp)[one], old_logp=logp[one] - 0.1,
        info={"demonstrated": EXPERT[one]},
    )  # fmt: skip
    found = learn(hila(), unused, logp, teacher_divergence=jnp.asarray(kl, jnp.float32))
    expected = learn(hila(), alone, logp[one], teacher_divergence=jnp.asarray(kl[one], jnp.float32))
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    np.testing.assert_allclose(found.gradient[one], expected.gradient, atol=1e-6)
    assert (found.gradient[4:] == 0).all()


class Letters:
    """A tokenizer of one token for each character."""

    eos_token_id, chat_template = 1, ""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if i != 1)


class Tools:
    """Tools of which the policy answers 5, and the rewards find 4 right."""

    step, encode_prompt, tokenizer = 3, True, Letters()

    def __init__(self, room: int = 10_000) -> None:
        self.room = room

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Any) -> str:
        return self.tokenizer.decode(ids)

    def prompt(self, text: str, row: Any = None) -> tuple[int, ...]:
        return tuple(self.encode(text))

    def fits(self, ids: Any) -> bool:
        return len(ids) < self.room

    async def sample(self, prompt: Any, *, number: int) -> Episode:
        return Episode(tuple(prompt), 7, number) + given([ord("5")])._replace(sampled=True)

    async def score(self, episodes: Any) -> list[Episode]:
        right = [float(self.decode(sampled_ids(one)) == "4") for one in episodes]
        return [one.scored(r, {"right": r}) for one, r in zip(episodes, right, strict=True)]


def listed(row: dict[str, Any], tools: Any = None, **options: Any) -> list[Episode]:
    task = Task({"prompt": "2+2?", **row}, tuple(map(ord, "2+2?")), 7, 1, 64)
    program: Any = listed_actions(**options).program
    found: list[Episode] = asyncio.run(program(tools or Tools(), task))
    return found


def test_all_actions_of_a_state_are_its_group() -> None:
    *actions, lesson = listed({"peers": ["4", "6"], "expert": "4"})
    assert [Tools().decode(one.own.token) for one in actions] == ["EVAL 1", "EVAL 2", "CREATE", "DEFER"]
    assert all(one.own.token[-1] == 1 and one.actions.all() and one.ended for one in actions)
    assert [one.reward for one in actions] == pytest.approx([1, 0, -0.03, 0.7])
    assert [one.rewards["right"] for one in actions] == [1, 0, 0, 1], "of the answers that they adopt"
    shown = state_text("2+2?", "5", ["4", "6"])
    assert {Tools().decode(one.prompt) for one in actions} == {shown}
    assert "1 of these 3 answers agree" in shown
    assert shown.endswith("EVAL 1, EVAL 2, CREATE or DEFER.")
    assert Tools().decode(lesson.prompt) == "2+2?", "the expert's answer is learnt as one to the task"
    assert Tools().decode(lesson.own.token) == "4"
    assert [one.part for one in (*actions, lesson)] == [0, 0, 0, 0, 1]
    assert [one.info["demonstrated"] for one in (*actions, lesson)] == [0, 0, 0, 0, 1]
    given_own = listed({"peers": ["4"], "expert": "4", "said": "4"}, own="said", drop_same=False)
    assert [one.reward for one in given_own[:-1]] == pytest.approx([1, 0.97, 0.7])
    assert state_text("p", "so 4", ["it is 4", "5"]).count("2 of these 3 answers agree") == 1


def test_a_state_that_teaches_nothing_is_left_out() -> None:
    same = {"peers": ["so it is 5"], "expert": "5"}
    (one,) = listed(same)
    assert np.isnan(one.score)
    assert one.info["demonstrated"] == 0
    assert len(listed(same, drop_same=False)) == 4
    (long,) = listed({"peers": ["4"], "expert": "4"}, Tools(room=40))
    assert np.isnan(long.score)
    for row, name in (({"peers": [], "expert": "4"}, "peers"), ({"peers": ["4"], "expert": ""}, "expert")):
        with pytest.raises(InputError, match=f"prompt 7 has nothing in the column '{name}': give an answer there"):
            listed(row)
    with pytest.raises(InputError, match=r"create_cost 0\.4 must be below defer_cost 0\.3"):
        hila(create_cost=0.4)
