"""Runs with environments and tools: what is refused before a model is loaded, exact tokens, resumption, evaluation."""

from __future__ import annotations

import dataclasses
import json
import shutil
import string
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs
from test_resume import assert_same_run, kill

sys.path.append(str(Path(__file__).parents[1]))

from chat_templates import tokenizer_with

from jaxrl_llm.core.transform import stateless
from jaxrl_llm.data.chat.calls import ReadCall, Reply
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.reporting.logging.files import read_json
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog
from jaxrl_llm.training import loop, setup
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import from_dict, located, to_dict
from jaxrl_llm.training.inputs import encode_for
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.training.rollout.agents import check_agent, tell_ends
from jaxrl_llm.utils.errors import InputError

WORLDS = Path(__file__).with_name("worlds.py")
STEPS = 3  # of a run whose conversations go on from step to step
# Short, since the model's context is 128 letters. Replies end with the token that ends texts.
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{{ '<eos>' if m.role == 'assistant' else '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def model_of(folder: Path, template: str | None = TEMPLATE) -> Path:
    """The tiny model, with a chat template."""
    shutil.copytree(runs.MODEL, folder / "model", dirs_exist_ok=True)
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **({"chat_template": template} if template else {})}))
    return folder / "model"


def config_of(folder: Path, environment: str | None = "Echo", **changes: Any) -> TrainConfig:
    """A run of conversations, of which two in five replies reach their limit, which ends an episode."""
    settings: dict[str, Any] = {
        "model": str(model_of(folder, changes.pop("template", TEMPLATE))), "turns": 3, "top_p": 1.0, "minibatches": 1,
        "stop": tuple(string.ascii_letters[:20] + string.digits), "max_new_tokens": 12,
        "environment": None if environment is None else f"{WORLDS}:{environment}", **changes,
    }  # fmt: skip
    config = to_dict(runs.small_config(folder))
    return TrainConfig(**{**vars(from_dict(config)), "rewards": ("environment",), **settings})


class AsCalls:
    """A policy of random weights calls no tool: each of its replies is read as a call of the first."""

    def __init__(self, chat: ChatTurns) -> None:
        self.chat = chat

    def __call__(self, ids: Any) -> Reply:
        text = self.chat.tokenizer.decode(list(ids), skip_special_tokens=True)
        call = ReadCall("add", {"text": text})
        said = {"type": "function", "function": {"name": "add", "arguments": {"text": text}}}
        return Reply({"role": "assistant", "content": "", "tool_calls": [said]}, (call,))


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = cached_property(AsCalls)
    reading.__set_name__(ChatTurns, "reading")
    monkeypatch.setattr(ChatTurns, "reading", reading)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no reset": ({"environment": "NoReset"}, "an environment needs a method reset, but .* has none"),
    "no reward": ({"environment": "NoReward"}, "NoReward has no get_reward, but rewards has environment"),
    "cannot be made": ({"environment": "Unmade"}, "Unmade cannot be made: OSError: no server"),
    "tools not described": ({"environment": "Undescribed"}, "the tool take is not described: give it type hints"),
    "not an environment": ({"environment": "NUMBER"}, "NUMBER is 3, but must be a class, a function"),
    "no such name": ({"environment": "Eco"}, "Eco.*Echo"),
    "no column": ({"environment": "BOTH"}, "each row must name one in its column environment"),
    "tools beside steps": ({"tools": (f"{WORLDS}:double",)}, "the tools double cannot be added to Echo"),
    "another rollout": ({"rollout": "forked(2)"}, r"environment is given, but the rollout is forked\(2\)"),
    "the method's rollout": ({"algorithm": "treepo"}, "environment is given, but treepo has a rollout of its own"),
    "a greedy baseline": ({"algorithm": "remax"}, "environment is given, but remax needs the reward of a greedy"),
    "tools give no reward": (
        {"environment": None, "tools": (f"{WORLDS}:double",)}, "rewards has environment, but the run has no environment"
    ),
    "one player": ({"players": 2}, "players is 2, but Echo is for 1"),
    "no such compaction": ({"context_tokens": 99, "compact": "sumary"}, "unknown compact 'sumary'.*summary"),
    "unread calls": (
        {
            "environment": "Purse",
            "template": TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}look(){% endif %}"),
        },
        "writes calls of tools in a format that is not known",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, said = REFUSED[case]

    def loaded(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(setup, "load_policy", loaded)
    with pytest.raises(InputError, match=said) as found:
        runs.train(config_of(tmp_path, **changes))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("system", [True, False])
def test_a_template_without_tools_is_said_once_at_the_start(
    system: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there are no system messages either, the question tells of the tools."""
    told = TEMPLATE.partition("{% for m")[2]
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    template = f"{'' if system else refuses}{{% for m{told}"
    config = config_of(tmp_path, "BOTH", template=template)
    rows = [{"prompt": "x", "answer": "1", "environment": name} for name in ("purse", "echo", "purse")]
    check_agent(config, rows, lambda: load_tokenizer(config.model))
    who = "system" if system else "first user"
    assert [record.getMessage() for record in caplog.records] == [
        f"the chat template describes no tools: the {who} message tells the policy of them"
    ]
    caplog.clear()
    check_agent(config_of(tmp_path, "Purse"), rows, lambda: load_tokenizer(config.model))
    assert not caplog.records


def test_a_model_that_does_not_stop_where_its_template_ends_a_reply_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A reply, or a call where there are tools; what ends them may differ, as of GLM-4.5 and Gemma 4."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}"
        "<|observation|>{{ m.content }}{% else %}<|assistant|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = tokenizer_with(template)
    user, seen = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("user", "observation"))
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    alone, chat = ChatTurns(tokenizer), ChatTurns(tokenizer, (tool,))
    tell_ends([alone], [user])
    tell_ends([chat], [user, seen])
    assert not caplog.records
    tell_ends([chat], [user])
    tell_ends([alone, chat], [seen])
    assert [record.getMessage().partition(", where")[0] for record in caplog.records] == [
        "the chat template ends calls of tools with <|observation|>", "the chat template ends replies with <|user|>"
    ]  # fmt: skip
    assert f"add its id {seen} to eos_token_id" in caplog.records[0].getMessage()


def test_settings_of_agents_need_an_environment() -> None:
    with pytest.raises(InputError, match="turns, tool_time_limit are given, but the run has neither"):
        TrainConfig(turns=3, tool_time_limit=2.0)
    with pytest.raises(InputError, match="tools holds '': name a function"):
        TrainConfig(tools=("",))
    with pytest.raises(InputError, match="compact is given, but context_tokens is not"):
        TrainConfig(environment="a:b", compact="summary")
    with pytest.raises(InputError, match="players is 2, but the run has no environment"):
        TrainConfig(tools=("a:b",), players=2)
    assert TrainConfig(environment="a:b").rewards == ("environment",)
    assert TrainConfig(environment="a:b").eval_reward == "environment"
    chosen = TrainConfig(environment="a:b", rewards=("reasoning_gym", "environment*0.5"))
    assert chosen.rewards == ("reasoning_gym", "environment*0.5")
    assert chosen.eval_reward == "environment"
    assert TrainConfig(environment="a:b", rewards=("reasoning_gym",)).rewards == ("reasoning_gym",)
    assert TrainConfig(tools=("a:b",)).rewards == ("reasoning_gym",)
    assert TrainConfig().eval_reward is None
    assert from_dict(to_dict(chosen)) == chosen
    here = located(TrainConfig(environment="a.py:b", tools=("c.py:d", "e:f")), "/at")
    assert (here.environment, here.tools) == ("/at/a.py:b", ("/at/c.py:d", "e:f"))
    budgets = {"environment": "a.py:b", "context_tokens": 9}
    assert located(TrainConfig(**budgets, compact="c.py:d"), "/at").compact == "/at/c.py:d"
    assert located(TrainConfig(**budgets, compact="summary(9)"), "/at").compact == "summary(9)"


def test_the_method_says_how_episodes_are_rewarded_read_and_begun() -> None:
    config = TrainConfig(environment=f"{WORLDS}:Echo")
    grpo = make_algorithm(config)
    known = {"turns", "state_key", "episode", "first_turn", "calls", "failed_calls", "environment"}
    assert rollout_of(config, grpo).provides == known
    for needs in ({"turn_rewards"}, {"plan", "turn_rewards"}, {"imitated", "imitated_score"}):
        asking = dataclasses.replace(grpo, transform=stateless(lambda batch: batch, frozenset(needs)))
        assert rollout_of(config, asking).provides == known | needs


@pytest.mark.heavy
@pytest.mark.parametrize("environment", ["Echo", "Purse"])
def test_it_trains_and_its_tokens_are_those_that_were_sampled(environment: str, tmp_path: Path, calling: None) -> None:
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config_of(tmp_path, environment, steps=2, episode_tokens=90))
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["rollout/failed_environments"] for line in lines] == [0.0, 0.0]
    assert all("rollout/failed_groups" not in line for line in lines)
    assert all(1 < line["rollout/turns"] <= 3 for line in lines)
    assert all(line["rollout/calls"] == (line["rollout/turns"] if environment == "Purse" else 0) for line in lines)
    assert lines[0]["mismatch"] < 1e-5
    policy, _, tokenizer = load_policy(tmp_path / "model")
    several = 0
    for step in taken:
        batch = step.scored.batch
        action, turn, tokens = (np.asarray(x) for x in (batch.action_mask, batch.turn, batch.tokens))
        logp = np.asarray(jax.jit(policy_outputs, static_argnums=0)(policy, step.params, batch).logp)
        np.testing.assert_allclose(np.asarray(batch.behaviour_logp)[action], logp[action], rtol=0, atol=1e-4)
        np.testing.assert_array_equal(action, turn >= 0)
        assert set(batch.rewards or {}) == {"environment"}
        np.testing.assert_array_equal(batch.reward, (batch.rewards or {})["environment"])
        for row in range(len(tokens)):
            text = tokenizer.decode(tokens[row, : np.argmax(action[row])])
            who, told = ("add u:", " coins") if environment == "Purse" else ("u:", "?")
            assert text.startswith(f"{who}number ")
            assert text.endswith(f"{told}\na:")
            several += turn[row].max() > 0
            for number in range(1, turn[row].max() + 1):
                before, here = np.flatnonzero(turn[row] == number - 1)[-1], np.flatnonzero(turn[row] == number)[0]
                said = tokenizer.decode(tokens[row, before + 1 : here])
                given = said.removeprefix("<eos>")
                assert given.startswith("t:" if environment == "Purse" else "u:")
                assert given.endswith(f"{told}\na:")
                assert (tokens[row, before] == 256) == (said == given), "the end of a reply is written once"
    assert several > 5, "too few conversations: this test shows nothing"
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["eval_before"]["prompts"] == 4
    evaluated = [
        line for line in runs.lines_of(tmp_path / "run" / "completions.jsonl") if line["phase"] == "eval_before"
    ]
    assert len(evaluated) == 4
    mean = np.mean([line["rewards"]["environment"] for line in evaluated])
    assert summary["eval_before"]["reward"] == pytest.approx(mean)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["summary", "players"])
def test_compacted_conversations_and_games_train(kind: str, tmp_path: Path) -> None:
    """The ratio is 1 before the first step at every action of every row, and rows of one episode have its reward."""
    changes = {
        "summary": {"context_tokens": 66, "compact": f"{WORLDS}:SHORT", "stream_rewards": True},
        "players": {"environment": "Duel", "players": 2},
    }[kind]
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config_of(tmp_path, **{"environment": "Echo", "steps": 2, **changes}))
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["rollout/failed_environments"] for line in lines] == [0.0, 0.0]
    assert lines[0]["mismatch"] < 1e-5
    policy, _, tokenizer = load_policy(tmp_path / "model")
    for step, line in zip(taken, lines, strict=True):
        batch = step.scored.batch
        action = np.asarray(batch.action_mask)
        logp = np.asarray(jax.jit(policy_outputs, static_argnums=0)(policy, step.params, batch).logp)
        np.testing.assert_allclose(np.asarray(batch.behaviour_logp)[action], logp[action], rtol=0, atol=1e-4)
        np.testing.assert_array_equal(action, np.asarray(batch.turn) >= 0)
        group, episode = np.asarray(batch.group), np.asarray(batch.info["episode"])
        keys, reward = list(zip(group, episode, strict=True)), np.asarray(batch.reward)
        assert all(len({reward[n] for n, key in enumerate(keys) if key == one}) == 1 for one in keys)
        if kind == "players":
            assert (line["rollout/parts"], line["rollout/turns"] > 0.5) == (2.0, True)
            continue
        assert line["rollout/compactions"] > 0
        assert len(set(keys)) < len(keys)
        assert np.asarray(batch.token_mask).sum(axis=1).max() <= 66
        text = [tokenizer.decode(row[mask]) for row, mask in zip(batch.tokens, batch.token_mask, strict=True)]
        assert any("sum?" in one for one in text)
    assert read_json(tmp_path / "run" / "summary.json")["eval_before"]["prompts"] == 4


@pytest.mark.heavy
def test_environments_that_fail_do_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, "Flaky", steps=2, stream_rewards=True, eval_size=0, num_prompts=4)
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    for line, step in zip(lines, taken, strict=True):
        batch = step.scored.batch
        lost = np.isnan(np.asarray(batch.reward))
        ended = (np.asarray(batch.turn).max(axis=1) == 1).sum()
        assert line["reward/unscored"] == lost.mean() == 0.5
        assert not np.asarray(batch.action_mask)[lost].any()
        assert line["rollout/failed_environments"] == lost.sum() + ended
        assert all(np.isfinite(value) for value in line.values() if isinstance(value, float))
    text = caplog.text
    assert "in reset, so that its episode is not scored: OSError: no server" in text
    assert "in step, where its episode ends: OSError: the server is gone" in text


KINDS: dict[str, dict[str, Any]] = {
    "agents": {},
    "summaries": {"context_tokens": 66, "compact": f"{WORLDS}:SHORT"},
    "players": {"environment": "Duel", "players": 2},
    "forks": {"algorithm": "arpo_agentic", "hyperparameters": {"initial": 2, "probability": 1.0}},
}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_neither_slots_nor_delays_change_episodes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays do not even change the last bits, as the same rows are decoded together.

    With one slot conversations that wait are parked beside the cache, and come back.
    """
    found = []
    for slots, seconds in ((1, 0.0), (4, 0.0), (4, 0.03), (64, 0.01)):
        monkeypatch.setenv("WORLD_SECONDS", str(seconds))
        taken: list[runs.Taken] = []
        with runs.watched(taken):
            output = str(tmp_path / f"run{slots}, {seconds}")
            runs.train(config_of(tmp_path, **KINDS[kind], steps=1, slots=slots, eval_size=0, output=output))
        found.append(taken[0].scored.batch)
    runs.assert_equal_trees(found[1], found[2])
    for batch in found[1:]:
        for name in ("tokens", "turn", "reward", "state_key", "truncated"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(found[0], name))


def is_in_the_middle(kind: str, log: GroupLog) -> bool:
    """Whether a group in flight has a conversation that goes on; of the kind that the test is about."""
    if kind == "forks":
        return any("/from " in name for name in log.recorded)
    if kind == "summaries":
        return any(call.number >= log.samples for call in log.drawn)
    return len(log.recorded) > 1


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_conversations_in_flight_resume(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes go on over several steps; a run that is cut off between any of them ends the same.

    So does one that is killed while its environments, which take their time, are working.
    """
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    pauses = {"segment_tokens": 4, "oversample": 2.0, "checkpoint_every": 1, "keep_checkpoints": 9}
    config = config_of(tmp_path, **KINDS[kind], **pauses, steps=STEPS, eval_size=4 if kind == "agents" else 0)
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    steps = [n for n, step in enumerate(taken, start=1) if any(is_in_the_middle(kind, log) for log in step.pool)]
    done = max((step for step in steps if step < STEPS), default=0)
    assert done, "no conversation is in flight: this test shows nothing"
    copy = tmp_path / "copy" / "run"
    shutil.copytree(tmp_path / "run", copy)
    for later in range(done + 1, STEPS + 1):
        shutil.rmtree(copy / "checkpoints" / str(later), ignore_errors=True)
    loop.resume(str(copy))
    assert_same_run(copy, tmp_path / "run")
    killed, working = tmp_path / "killed" / "run", tmp_path / "working"
    slow = {"WORLD_SECONDS": "0.3", "WORLD_WORKING": str(working)}

    def moment() -> bool:
        return len(runs.lines_of(killed / "metrics.jsonl")) == done and working.exists()

    process = runs.start("train", *runs.as_arguments(dataclasses.replace(config, output=str(killed))), **slow)
    kill(process, moment)
    assert working.exists(), "no environment was working: this test shows nothing"
    monkeypatch.setenv("WORLD_SECONDS", "0.01")
    loop.resume(str(killed))
    assert_same_run(killed, tmp_path / "run")


@pytest.mark.heavy
def test_an_environment_that_answers_otherwise_costs_a_resumed_run_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that nobody ends keeps the environments of its unfinished conversations."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    pauses = {"segment_tokens": 4, "oversample": 2.0, "checkpoint_every": 1, "keep_checkpoints": 9}
    config = config_of(tmp_path, "Unlike", **pauses, steps=STEPS, eval_size=0)
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert not any("rollout/failed_groups" in line for line in lines)
    done = max(n for n, step in enumerate(taken, 1) if n < STEPS and any(log.recorded for log in step.pool))
    for later in range(done + 1, STEPS + 1):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(later))
    shutil.copytree(tmp_path / "run", tmp_path / "strict" / "run")
    loop.resume(str(tmp_path / "run"))
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == STEPS
    assert lines[done]["rollout/failed_groups"] >= 1
    assert "'0/reset' returns another answer than before" in caplog.text
    strict = dataclasses.replace(config, output=str(tmp_path / "strict" / "run"), strict_reruns=True)
    with pytest.raises(InputError, match=r"is not deterministic: .* returns another answer than before"):
        runs.train(strict, resume=True)


def test_messages_are_prompts_of_environments_without_a_chat_template(tmp_path: Path) -> None:
    tokenizer, rows = load_tokenizer(str(runs.MODEL)), [{"prompt": [{"role": "user", "content": "Odd?"}]}]
    alone, played = runs.small_config(tmp_path), config_of(tmp_path, "Purse", template=None)
    assert not tokenizer.chat_template
    with pytest.raises(InputError, match="a prompt of messages needs a chat template, but this tokenizer has none"):
        encode_for(alone, tokenizer, 128, rows)
    ids = encode_for(played, tokenizer, 128, rows).ids[0]
    assert ids == ChatTurns(tokenizer).begin(rows[0]["prompt"])
    assert encode_for(played, tokenizer, 128, [{"prompt": ""}]).ids[0], "without a data set there is nothing to say"
