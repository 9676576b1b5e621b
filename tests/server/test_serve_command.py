"""jaxrl serve, as a process that a client asks and that ends on Ctrl-C."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

sys.path.append(str(Path(__file__).parents[1] / "training"))

import tiny_runs as runs

from jaxrl_llm.cli.program import main
from jaxrl_llm.cli.serve import named_adapters
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.sampler import settings_of
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.training.folder.load_run import load_adapters, load_run
from jaxrl_llm.utils.errors import InputError

MODEL = runs.MODEL
ADAPTERS: dict[str, Any] = {"lora_rank": 2, "minibatches": 1, "top_p": 1.0, "steps": 2, "eval_size": 0}


@contextmanager
def served(*options: str, says: str = "tiny is") -> Iterator[Any]:
    """Context manager: a client of `jaxrl serve` with the model and these options, which ends on Ctrl-C."""
    openai = pytest.importorskip("openai")
    command = [sys.executable, "-m", "jaxrl_llm.cli", "serve", str(MODEL), "--port", "0", "--name", "tiny", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(rf"{says} served at (http://127\.0\.0\.1:\d+/v1); Ctrl-C ends it\n", line)
            assert found, line
            yield openai.OpenAI(base_url=found[1], api_key="any")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (0, 130)
        finally:
            process.kill()


@pytest.mark.heavy
def test_it_serves_until_it_is_stopped() -> None:
    openai = pytest.importorskip("openai")
    with served() as client:
        answer = client.completions.create(model="tiny", prompt="Ab", max_tokens=5, temperature=0)
        assert 1 <= answer.usage.completion_tokens <= 5
        with pytest.raises(openai.BadRequestError, match="needs a chat template"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi."}])


def adapters_run(folder: Path, **changes: Any) -> str:
    """The folder of a run whose adapters changed what is drawn."""
    folder.mkdir()
    config = runs.small_config(folder, **{"optimizer": OptimizerConfig(learning_rate=0.2), **ADAPTERS, **changes})
    runs.train(config)
    return config.output


def greedy(path: str) -> list[int]:
    """What the engine draws with the parameters of a run or a model."""
    _, policy, params, tokenizer = load_run(path)
    request = Request(tuple(tokenizer.encode("Ab")), 9)
    settings = settings_of(policy, jax.random.key(0), temperature=0.0)
    (done,) = stream(policy, take_weights(policy, params), [request], settings)
    return done.tokens.token.tolist()


@pytest.mark.heavy
def test_runs_and_folders_of_adapters_are_models_by_name(tmp_path: Path) -> None:
    """One with a critic, one without, and one as PEFT writes it."""
    first, second = adapters_run(tmp_path / "first"), adapters_run(tmp_path / "second", algorithm="ppo", seed=1)
    assert main(["export", first, str(tmp_path / "peft"), "--adapters"]) == 0
    named = {"first": first, "second": second, "peft": str(tmp_path / "peft")}
    options = ["--adapter", *(f"{name}={folder}" for name, folder in named.items())]
    with served(*options, says="tiny, first, second, peft are") as client:
        assert [model.id for model in client.models.list()] == ["tiny", *named]
        found = {
            name: client.completions.create(
                model=name, prompt="Ab", max_tokens=9, temperature=0, extra_body={"return_token_ids": True}
            ).choices[0].token_ids
            for name in ("tiny", *named)
        }  # fmt: skip
    assert found == {
        "tiny": greedy(str(MODEL)),
        "first": greedy(first),
        "second": greedy(second),
        "peft": found["first"],
    }
    assert len({tuple(found[name]) for name in ("tiny", "first", "second")}) == 3


@pytest.mark.heavy
def test_runs_that_cannot_share_a_model_are_refused(tmp_path: Path) -> None:
    first = adapters_run(tmp_path / "first")
    whole = adapters_run(tmp_path / "whole", lora_rank=0)
    half = adapters_run(tmp_path / "half", dtype="bfloat16")
    other = shutil.copytree(MODEL.parent / "qwen3", tmp_path / "other")
    for model, adapters, said in (
        (first, {"one": first}, "is a run, and --adapter NAME=... is for a model"),
        (str(MODEL), {"one": whole}, "trained all weights: serve it by itself"),
        (str(MODEL), {"one": first, "two": half}, "dtype is 'float32' in .*, and 'bfloat16' in .*: models that share"),
        (str(other), {"one": first}, "changed since the checkpoint was written: .*weights"),
    ):
        with pytest.raises(InputError, match=said) as raised:
            load_adapters(model, adapters)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a=x", "a=y"], "--adapter has the name a twice"),
        (["a=x", "y"], "--adapter y has no name or no folder"),
        (["=x"], "--adapter =x has no name or no folder"),
        (["tiny=x"], "--adapter tiny=... has the model's own name"),
    ],
)
def test_names_of_adapters_are_checked_first(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(MODEL), "--name", "tiny", "--adapter", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_a_name_is_of_the_model_itself() -> None:
    assert named_adapters(["runs/adapters"]) == {}
    assert named_adapters([]) == {}
    assert named_adapters(["a=b=c"]) == {"a": "b=c"}


def test_an_address_that_others_reach_needs_a_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    assert main(["serve", str(MODEL), "--host", "0.0.0.0"]) == 2
    assert "set JAXRL_API_KEY to a key that clients must give" in capsys.readouterr().err
