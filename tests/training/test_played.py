"""jaxrl sample with an environment: episodes as training samples them, as transcripts and as lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_agent_runs import WORLDS, model_of

from jaxrl_llm.cli.program import main
from jaxrl_llm.training.rollout.play import Played, message_as_text, rows_to_play
from jaxrl_llm.utils.errors import InputError


def test_arguments_are_prompts_or_rows() -> None:
    with pytest.raises(InputError, match="is not valid JSON"):
        rows_to_play(['{"prompt": '])
    assert rows_to_play(()) == [{"prompt": ""}]
    assert rows_to_play(["What?", '{"answer": 3}', "{no JSON"]) == [
        {"prompt": "What?"}, {"prompt": "", "answer": 3}, {"prompt": "{no JSON"},
    ]  # fmt: skip
    with pytest.raises(InputError, match="the row's prompt is 3, but must be a text or messages"):
        rows_to_play(['{"prompt": 3}'])


def test_transcripts_show_reasoning_and_calls_and_no_control_characters() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    said = {"role": "assistant", "content": "so\x1b[2J", "reasoning_content": "hm", "tool_calls": [call]}
    assert message_as_text(said) == '[assistant] (hm) so␛[2J -> add({"a": 1})'
    assert Played({}, rewards=[0.5, 0.25], final=1.0, state="done").outcome == "done after 2 turns, reward 1.75"
    assert Played({}, rewards=[0.0], rewarded=False).outcome == "cut off after 1 turn"


def test_episodes_are_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(model_of(tmp_path))
    asked = ["sample", model, "Hi.", "--environment", f"{WORLDS}:Echo", "--turns", "2", "--max-new-tokens", "6"]
    assert main([*asked, "--jsonl", "--samples", "2", "--stop", *"abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["sample"] for line in lines] == [0, 1]
    for line in lines:
        says = [message for message in line["messages"] if message["role"] == "assistant"]
        assert len(says) == len(line["turn_rewards"]) <= 2
        assert line["row"] == {"prompt": "Hi."}
        assert line["turn_rewards"] == [float(message["content"][:1] < "n") for message in says]
        assert line["reward"] == sum(line["turn_rewards"])
    assert lines[0]["messages"][0] == lines[1]["messages"][0]  # one seed for the samples of a prompt

    assert main([*asked, "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("[user] ")
    assert "\n[assistant] " in first
    assert "cut off after " in first
    assert main([*asked, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == first

    assert main(["sample", model, "--environment", f"{WORLDS}:None_such"]) == 2
    assert "None_such" in capsys.readouterr().err
