"""Files of an episode: what is kept, and every way out of the folder that a path may try."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.environments.tools.base import with_tools
from jaxrl_llm.environments.tools.files import _Folder, files, scratch_files
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["hermes"][1]
OUT = r"no path in your folder|leads out of your folder"


@pytest.fixture
def box() -> Iterator[_Folder]:
    made = scratch_files(kilobytes=1, count=3, characters=10).make()
    assert isinstance(made, _Folder)
    yield made
    made.close()


def test_write_read_and_list(box: _Folder) -> None:
    assert box.list_files() == "there are no files"
    assert box.write_file("b/c.txt", "0123456789abcde") == "b/c.txt has 15 bytes now"
    assert box.write_file("./a.txt", "\ud800ä") == "./a.txt has 3 bytes now"
    assert box.list_files() == "a.txt (3 bytes)\nb/c.txt (15 bytes)"
    assert box.read_file("a.txt") == "?ä"
    assert box.read_file("b//c.txt") == "0123456789\n[cut: it goes on at start=10, and has 15 characters]"
    assert box.read_file("b/c.txt", start=10) == "abcde"
    assert box.read_file("b/c.txt", start=99) == ""
    box.write_file("b/c.txt", "new")
    assert box.read_file("b/c.txt") == "new"


@pytest.mark.parametrize(
    "path", ["", "/", ".", "/etc/passwd", "../out", "a/../../out", "..", "a\0b", "link/out", "link"]
)
def test_no_path_leads_out(box: _Folder, path: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "out").write_text("secret")
    (box._folder / "link").symlink_to(outside)
    with pytest.raises(RuntimeError, match=OUT):
        box.read_file(path)
    with pytest.raises(RuntimeError, match=OUT):
        box.write_file(path, "x")
    assert (outside / "out").read_text() == "secret"


def test_limits_and_errors_name_no_path_of_the_host(box: _Folder) -> None:
    box.write_file("a", "x" * 900)
    with pytest.raises(RuntimeError, match="1,000 bytes, but would have 1,001"):
        box.write_file("b", "x" * 101)
    box.write_file("a", "y" * 1000)
    box.write_file("a", "")
    box.write_file("d/b", "")
    box.write_file("c", "")
    with pytest.raises(RuntimeError, match="there may be 3 files"):
        box.write_file("e", "")
    errors = []
    for call in (
        lambda: box.write_file("d", "x"), lambda: box.write_file("c/f", "x"), lambda: box.read_file("d"),
        lambda: box.read_file("absent"), lambda: box.read_file("x" * 101), lambda: box.write_file("a/" * 9 + "a", "x"),
        lambda: box.read_file("\ud800"), lambda: box.read_file("c/f"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as error:
            call()
        errors.append(str(error.value))
    assert not any(str(box._folder) in text for text in errors)
    assert errors[2:4] == ["d is a folder", "absent does not exist: list_files() shows what does"]
    for name in ("kilobytes", "count", "characters"):
        with pytest.raises(InputError, match=f"{name} of scratch_files is 0, but must be at least 1"):
            scratch_files(**{name: 0})


@pytest.mark.heavy
def test_the_folder_is_removed(box: _Folder) -> None:
    folder = box._folder
    box.write_file("a/b", "x")
    box.close()
    box.close()
    assert not folder.exists()
    abandoned = files.make()
    assert isinstance(abandoned, _Folder)
    folder = abandoned._folder
    assert folder.exists()
    del abandoned
    gc.collect()
    assert not folder.exists()


def test_a_conversation() -> None:
    def says(text: str, sample: int) -> str:
        turns = text.count("<tool_response>")
        name, given = [
            ("write_file", {"path": "note.txt", "text": f"seven and {sample}"}),
            ("list_files", {}),
            ("read_file", {"path": "note.txt"}),
            ("", {}),
        ][turns]
        call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"
        return (call if name else "Done.") + END

    tokenizer = tokenizer_of("hermes")
    found, _ = run_agents(agent(with_tools([files])), tokenizer, says, [{"prompt": "Note it."}], limit=1000)
    for sample, one in enumerate(found.groups[0].episodes):
        assert one.info["failed_calls"] == 0.0
        text = tokenizer.decode(one.tokens)
        assert "<tool_response>\nnote.txt (11 bytes)\n</tool_response>" in text
        assert f"<tool_response>\nseven and {sample}\n</tool_response>" in text
