"""Harnesses whose calls come at once, or go back to an earlier message: trees of rows, each sampled token in one."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("openai")
pytest.importorskip("aiohttp")
sys.path += [str(Path(__file__).parents[1] / "rollouts"), str(Path(__file__).parents[1] / "training")]

import openai
from speaking import Speaking, run_agents, tokenizer_of
from test_harness import HI, post, trained

from jaxrl_llm import server
from jaxrl_llm.advantages import group_relative
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.data.chat.calls import ReadCall, Reply
from jaxrl_llm.learner.prefix_trie import TokenRows, prefix_tries
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.rollouts.agents import agent
from jaxrl_llm.rollouts.agents.compaction import Summary, keep_last
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.collate import program_metrics, to_batch
from jaxrl_llm.rollouts.runtime.group_run import GroupRun
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.server.episodes import endpoint
from jaxrl_llm.server.harness import Harness
from jaxrl_llm.training.rollout import play as play_module

TOKENIZER = tokenizer_of("plain")
Messages = list[dict[str, Any]]
Ask = Callable[..., Awaitable[str]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def says(text: str, sample: int) -> str:
    """A reply that tells its sample number, and how many replies came before it."""
    return f"{sample}.{text.count('assistant') - 1}<|im_end|>"


def playing(play: Callable[[Ask], Awaitable[float]]) -> Callable[[str, str, dict[str, Any]], Awaitable[float]]:
    """A harness of a function that gets what asks the policy with the real client."""

    async def whole(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

            async def ask(messages: Messages) -> str:
                found = await client.chat.completions.create(model="policy", messages=messages)
                return found.choices[0].message.content

            return await play(ask)

    return whole


class Played:
    """A group of episodes that a harness played, and what the engine was asked for at once."""

    def __init__(self, play: Any, pause: float = 0.3, **settings: Any) -> None:
        of_agent = ("turns", "episode_tokens", "context_tokens", "compact")
        given = {name: settings.pop(name) for name in of_agent if name in settings}
        self.at_once = list[int]()
        step = Speaking.step

        def counted(engine: Speaking, chunk: int) -> Any:
            self.at_once += [len(engine.waiting)] * bool(engine.waiting)
            return step(engine, chunk)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Speaking, "step", counted)
            patch.setattr(server.harness, "PAUSE", pause)
            settings = {"samples": 1, **settings}
            rollout = agent(lambda row: Harness(play), **{"turns": 16, **given})
            found, self.engines = run_agents(rollout, TOKENIZER, says, [{"prompt": "q"}], **settings)
        (self.group,) = found.groups
        self.rows: Sequence[Episode] = self.group.episodes

    @property
    def requests(self) -> int:
        return sum(len(engine.requests) for engine in self.engines)

    @property
    def batch(self) -> Trajectories:
        return jax.tree.map(np.asarray, to_batch([self.group], SamplingConfig(), 0))

    @property
    def texts(self) -> dict[str, list[str]]:
        """By the whole text of a row: the replies that are trained on in it."""
        return {
            TOKENIZER.decode(row.tokens): [
                TOKENIZER.decode(segment.tokens.token).removesuffix("<|im_end|>")
                for segment in row.segments
                if segment.sampled
            ]
            for row in self.rows
        }


def chat(*texts: str) -> str:
    """What the template writes of a user's and the policy's messages, one after the other."""
    roles = ("user", "assistant") * len(texts)
    written = [f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in zip(roles, texts, strict=False)]
    return "\n".join(written)


def check_each_once(played: Played, heard: Sequence[str]) -> None:
    """Each reply that was heard is actions of one row, with the weight 1, and nothing else is."""
    batch, found = played.batch, list[str]()
    weights, turn = np.asarray(batch.loss_weights), np.asarray(batch.turn)
    for row in range(len(weights)):
        np.testing.assert_array_equal(weights[row], turn[row] >= 0)
        for number in range(turn[row].max() + 1):
            found.append(TOKENIZER.decode(batch.tokens[row][turn[row] == number]).removesuffix("<|im_end|>"))
    assert Counter(found) == Counter(heard)
    assert played.requests == len(heard)
    sampled = [TOKENIZER.encode(f"{one}<|im_end|>", add_special_tokens=False) for one in heard]
    assert weights.sum() == sum(map(len, sampled))


def test_calls_at_once_are_a_tree_that_is_sampled_together() -> None:
    """Three replies to one question, two of which go on: three rows, which go on as they were told."""
    heard = list[str]()

    async def play(ask: Ask) -> float:
        question = [user("q")]
        first = await asyncio.gather(*(ask(question) for _ in range(3)))
        chosen = sorted(first)[1:]
        more = await asyncio.gather(*(ask([*question, said(one), user("on")]) for one in chosen))
        heard.extend([*first, *more])
        heard.append(await ask([*question, said(chosen[0]), user("on"), said(more[0]), user("end")]))
        return 1.0

    played = Played(playing(play))
    assert played.at_once == [3, 2, 1]
    check_each_once(played, heard)
    left, one, other = sorted(set(heard[:3]))
    follows = {text.partition(".")[0]: text for text in heard[3:5]}
    one_on, other_on = (follows[text.partition(".")[0]] for text in (one, other))
    assert played.texts == {
        chat("q", left): [left],
        chat("q", one, "on", one_on, "end", heard[5]): [one, one_on, heard[5]],
        chat("q", other, "on", other_on): [other, other_on],
    }
    info = played.rows[0].info
    assert (info["branches"], info["new_rows"]) == (2.0, 0.0)
    assert program_metrics([played.group])["rollout/branches"] == 2.0
    # The question is in the packed rows once.
    batch = played.batch
    rows = TokenRows(batch.tokens, batch.token_mask, batch.action_mask, batch.group)
    (trie,) = prefix_tries(rows, np.arange(3))
    assert trie.prefix >= len(TOKENIZER.encode(chat("q")))


def test_going_back_forks_with_the_tokens_that_were_sampled() -> None:
    """What both have is given in the fork, and trained on where it was sampled; so it is behind a second fork."""
    heard = list[str]()

    async def play(ask: Ask) -> float:
        begun = [user("q")]
        heard.append(await ask(begun))
        for texts in (("x",), ("y",), ("y", "z"), ("y", "w"), ("y", "w")):
            replies = map(said, [heard[0], *heard[2:3]])
            turns = zip(replies, map(user, texts), strict=False)
            heard.append(await ask([*begun, *(message for turn in turns for message in turn)]))
        return 1.0

    played = Played(playing(play))
    check_each_once(played, heard)
    q, x, y, z, w, again = heard
    assert played.texts == {
        chat("q", q, "x", x): [q, x],
        chat("q", q, "y", y, "z", z): [y, z],
        chat("q", q, "y", y, "w", w): [w],
        chat("q", q, "y", y, "w", again): [again],
    }
    assert (played.rows[0].info["branches"], played.rows[0].info["new_rows"]) == (3.0, 0.0)
    assert sorted(row.info["first_turn"] for row in played.rows) == [0.0, 2.0, 4.0, 5.0]
    assert {row.info["episode"] for row in played.rows} == {0.0}
    # The tree has each token at most once: the question, six replies, and what was asked between them.
    batch = played.batch
    rows = TokenRows(batch.tokens, batch.token_mask, batch.action_mask, batch.group)
    (trie,) = prefix_tries(rows, np.arange(4))
    begin = "\n<|im_start|>assistant\n"
    size = sum(len(TOKENIZER.encode(text)) for text in (chat("q") + begin, *(one + "<|im_end|>" for one in heard)))
    size += sum(len(TOKENIZER.encode("\n" + chat(text) + begin)) for text in "xyzw")
    ends = len(played.rows)  # the last token of a path is only an action, and no context
    assert trie.prefix + trie.lengths.sum() - trie.shared.sum() <= size - ends


def sub_agents(order: Sequence[int], waits: float = 0.0) -> Callable[[Ask], Awaitable[float]]:
    """Sub-agents with system messages of their own, which start in this order, and speak twice."""

    async def play(ask: Ask) -> float:
        async def one(number: int) -> None:
            await asyncio.sleep(order.index(number) * waits)
            messages = [{"role": "system", "content": f"s{number}"}, user("q")]
            for _ in range(2):
                messages += [said(await ask(messages)), user("on")]

        await asyncio.gather(*map(one, order))
        return 1.0

    return play


def test_what_is_sampled_does_not_depend_on_who_comes_first() -> None:
    found = [Played(playing(sub_agents(order, 0.004))) for order in ((0, 1, 2), (2, 0, 1))]
    one, other = ({tuple(texts): text for text, texts in played.texts.items()} for played in found)
    assert one == other
    assert [played.at_once for played in found] == [[3, 3]] * 2
    assert {row.info["new_rows"] for played in found for row in played.rows} == {2.0}  # each has a row
    assert [len(texts) for texts in one] == [2] * 3
    for played in found:
        np.testing.assert_array_equal(played.batch.tokens, found[0].batch.tokens)
        np.testing.assert_array_equal(played.batch.action_mask, found[0].batch.action_mask)


def test_a_call_that_comes_while_another_is_answered_is_answered_next(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, sampling, step = list[str](), threading.Event(), Speaking.step

    async def play(ask: Ask) -> float:
        async def later() -> str:
            await asyncio.to_thread(sampling.wait)
            return await ask([user("p")])

        heard.extend(await asyncio.gather(ask([user("q")]), later()))
        return 1.0

    def until_it_came(engine: Speaking, chunk: int) -> Any:
        sampling.set()
        while len(engine.requests) == 1 and not any(calls.waiting for calls in endpoint().episodes.values()):
            time.sleep(0.01)
        return step(engine, chunk)

    monkeypatch.setattr(Speaking, "step", until_it_came)
    played = Played(playing(play))
    assert played.at_once == [1, 1]
    check_each_once(played, heard)


def test_several_choices_are_calls_at_once() -> None:
    heard = list[list[str]]()

    def play(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            asked: Any = {"model": "policy", "messages": [user("q")], "n": 3}
            found = client.chat.completions.create(**asked)
            assert found.usage.completion_tokens == sum(len(TOKENIZER.encode(one)) for one in texts_of(found)) + 3
            pieces = ["", "", ""]
            for piece in client.chat.completions.create(**asked, stream=True):
                for choice in piece.choices:
                    pieces[choice.index] += choice.delta.content or ""
        heard.extend([texts_of(found), pieces])
        return 1.0

    def texts_of(found: Any) -> list[str]:
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        return [choice.message.content for choice in found.choices]

    played = Played(play)
    assert played.at_once == [3, 3]
    check_each_once(played, [*heard[0], *heard[1]])
    assert played.texts == {chat("q", one): [one] for one in [*heard[0], *heard[1]]}


@pytest.mark.parametrize("leaves", [1, 5])
def test_an_episode_counts_once_in_its_group_however_many_leaves_it_has(leaves: int) -> None:
    """The baseline of rewards 1, 0 and 0 is a third, and all leaves of an episode have its advantage."""
    lock, numbers = threading.Lock(), iter(range(3))

    async def play(ask: Ask) -> float:
        with lock:
            number = next(numbers)
        await asyncio.gather(*(ask([user("q")]) for _ in range(1 if number else leaves)))
        return float(number == 0)

    played = Played(playing(play), samples=3)
    batch, score = played.batch, np.asarray([row.rewards["environment"] for row in played.rows], np.float32)
    assert sorted(score) == [0.0] * 2 + [1.0] * leaves
    assert len({row.info["episode"] for row in played.rows}) == 3
    transform = group_relative("none")
    _, out = transform.apply(transform.init(), batch.replace(reward=score))
    for row, own in zip(np.where(batch.action_mask, np.asarray(out.advantages), np.nan), score, strict=True):
        np.testing.assert_allclose(row[~np.isnan(row)], own - 1 / 3, rtol=1e-5)


def test_the_budget_of_an_episode_counts_what_rows_share_once() -> None:
    """Three replies of 4 or 5 tokens after one beginning, though rows with the beginning have more together."""
    heard = list[str]()

    async def play(ask: Ask) -> float:
        heard.append(await ask([user("q")]))
        for text in "xyz":
            heard.append(await ask([user("q"), said(heard[0]), user(text)]))
        return 1.0

    room = Played(playing(play))
    (own,) = {sum(row.size for row in room.rows) - sum(room_shared(row) for row in room.rows)}
    assert len(heard) == 4
    again = Played(playing(play), episode_tokens=own + 1)
    assert len(heard) == 8
    assert again.texts == room.texts


def room_shared(row: Episode) -> int:
    """Tokens of a fork before what it is asked: the first reply, which another row has."""
    return 0 if row.segments[0].sampled else row.segments[0].tokens.size


@pytest.mark.parametrize("compact", [keep_last(1), Summary(12, ask="Sum up.", told="Summary: ")])
def test_branches_that_are_compacted_go_on_in_rows_of_their_own(compact: Any) -> None:
    heard = list[str]()

    async def play(ask: Ask) -> float:
        messages = [user("q")]
        heard.append(await ask(messages))
        messages += [said(heard[0]), user("on")]

        async def branch(text: str) -> None:
            own = [*messages, user(text)]
            for _ in range(5):
                own += [said(await ask(own)), user("and on")]
                heard.append(own[-2]["content"])

        await asyncio.gather(branch("x"), branch("y"))
        return 1.0

    limits = {"context_tokens": 200, "compact": compact}
    played = Played(playing(play), turns=16, limit=24, **limits)
    assert played.rows[0].info["compactions"] > 0
    assert played.rows[0].info["branches"] > 0
    assert played.rows[0].rewards["environment"] == 1.0
    found = Counter(one for texts in played.texts.values() for one in texts)
    assert not Counter(heard) - found
    assert found.total() == played.requests == 11 + isinstance(compact, Summary) * played.rows[0].info["compactions"]
    assert all(len(row.tokens) <= 200 for row in played.rows)
    batch = played.batch
    np.testing.assert_array_equal(batch.loss_weights, np.asarray(batch.turn) >= 0)


class Log:
    """What the program of a group recorded, until its end."""

    def __init__(self) -> None:
        self.logs = list[GroupLog]()

    def __enter__(self) -> Log:
        self.patch, group = pytest.MonkeyPatch(), GroupRun.group

        def kept(run: GroupRun) -> Any:
            self.logs.append(run.log())
            return group(run)

        self.patch.setattr(GroupRun, "group", kept)
        return self

    def __exit__(self, *unused: object) -> None:
        self.patch.undo()

    @property
    def first_replies(self) -> GroupLog:
        """As it was after the first reply in each row, which its environment heard of the first calls at once."""
        log = self.logs[-1]
        drawn = {call: answer for call, answer in log.drawn.items() if call.place == 0}
        return log._replace(recorded={name: log.recorded[name] for name in ("0/reset", "0/0")}, drawn=drawn)


@pytest.mark.parametrize("first", [0.0, 0.2])  # seconds between the first calls of two agents
def test_an_episode_that_was_killed_goes_on_with_the_calls_that_it_had(first: float) -> None:
    """The agents' calls are at once, or apart, and the other way round when they are told again: as they were."""
    with Log() as log:
        whole = Played(playing(sub_agents((0, 1), first)), pause=0.05)
    for record, left in ((log.first_replies, 2), (log.logs[-1], 0)):
        again = Played(playing(sub_agents((0, 1), 0.2 - first)), pause=0.05, flight=(record,))
        assert not again.group.failed
        assert again.texts == whole.texts
        assert again.requests == left


def test_ids_of_calls_are_the_same_when_an_episode_is_told_again() -> None:
    def play(url: str, key: str, row: dict[str, Any]) -> None:
        found = post(url, key, HI)["choices"][0]["message"]
        heard.append(found["tool_calls"][0]["id"])
        post(url, key, {**HI, "messages": [*HI["messages"], {"role": "user", "content": str(found)}]})

    heard = list[str]()
    for _ in range(2):
        world = Harness(play)
        asyncio.run(world.reset({}, 0))
        reply = Reply({"role": "assistant", "content": ""}, (ReadCall("look", {}),))
        assert not asyncio.run(world.step(reply)).done
        asyncio.run(world.close())
    assert heard[0] == heard[1]


def test_calls_at_once_are_seen_in_a_terminal() -> None:
    """As `jaxrl sample` plays: each conversation that is asked, and each reply."""

    def play(url: str, key: str, row: dict[str, Any]) -> float:
        return float(len(post(url, key, {**HI, "n": 2})["choices"]))

    lines, found = list[str](), play_module.Played({})
    world = play_module.Watched(Harness(play), found, lines.append)
    assert len(asyncio.run(world.reset({}, 0)).conversations) == 2
    assert asyncio.run(world.step([Reply(said(text), ()) for text in "ab"])).done
    assert asyncio.run(world.close()) == 2.0
    assert lines == ["[user] Hi.", "[user] Hi.", "[assistant] a", "[assistant] b"]


@pytest.mark.heavy
def test_a_tree_of_a_model_is_trained_on_as_it_was_heard(tmp_path: Path) -> None:
    """With a model's own samples, over loopback: every reply that a client heard is the actions of one row."""
    taken, lines, heard = trained(tmp_path, "branches", turns=8)
    tokenizer, found = load_tokenizer(str(tmp_path / "model")), Counter[str]()
    for step in taken:
        batch = step.scored.batch
        weights, turn = np.asarray(batch.loss_weights), np.asarray(batch.turn)
        np.testing.assert_array_equal(weights > 0, turn >= 0)
        for row, number in {(row, int(turn[row, place])) for row, place in zip(*np.nonzero(weights), strict=True)}:
            ids = np.asarray(batch.tokens)[row][turn[row] == number].tolist()
            found[tokenizer.decode(ids, skip_special_tokens=True).strip()] += 1
    texts = Counter(text.strip() for one in heard for text in one)
    assert not texts - found  # episodes of which a reply was cut are trained on, and tell nothing
    assert sum(texts.values()) > 0
    assert all(line["rollout/branches"] > 0 for line in lines)
    assert all(np.isfinite(line["loss"]) for line in lines)
