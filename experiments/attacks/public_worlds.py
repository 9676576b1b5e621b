"""Reports of data, environments, runs, and files of models."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import shutil
import string
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from experiments.attacks.public_reports import MENDED, NONE, RIGHT, Report, refuses
from experiments.attacks.tiny import MODEL
from jaxrl_llm import TrainConfig, load_policy, save_policy
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.data.load import load_prompts
from jaxrl_llm.data.stream import PromptStream
from jaxrl_llm.environments.adapters import adapted
from jaxrl_llm.models.families import from_hf
from jaxrl_llm.training import inputs, loop


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="public-reports-"))


def _rows(*contents: str | bytes, suffix: str = "jsonl") -> list[dict[str, Any]]:
    """The rows of a file, or of several that are its shards."""
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    for number, content in enumerate(contents):
        (folder / f"{number}.{suffix}").write_bytes(content.encode() if isinstance(content, str) else content)
    return load_prompts(folder)


def _lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _parquet_folder() -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(tempfile.mkdtemp(dir=_folder()))
    row = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "3", "style": "rule"}}
    pq.write_table(pa.Table.from_pylist([row]), folder / "train.parquet")
    (found,) = load_prompts(folder)
    return bool(found["prompt"] == row["prompt"] and found["answer"] == "3")


class Steps:
    """As Gymnasium has them. Its first turn has no reward; it may not be asked again after the end."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "no", None if self.turn == 1 else 0.25, self.turn == 3, False, {}


async def _played(world: Any, turns: int) -> list[Any]:
    one = adapted(world)
    await one.reset({"prompt": "q"}, 0)  # type: ignore[misc]
    reply = Reply({"role": "assistant", "content": "x"}, ())
    return [await one.step(reply) for _ in range(turns)]  # type: ignore[misc]


WORLD = '''
class World:
    """It cannot be reset for one row; else the policy never comes to an end. It counts those that are open."""

    def __init__(self, row):
        self.row = row

    def reset(self, seed=None):
        open("LOG", "a").write("reset\\n")
        if self.row["answer"] == "1":
            raise OSError("the server is gone")
        return "Go on.", {}

    def step(self, action):
        assert len(open("LOG").read().split()) < 1000
        return "Go on.", 0.5, False, False, {}

    def close(self):
        open("LOG", "a").write("close\\n")


def own(completions, answer):
    return [float(one == "0") for one in answer]


def needs(completions, solution):
    return [1.0] * len(completions)
'''


def _config(folder: Path, **changes: Any) -> TrainConfig:
    (folder / "world.py").write_text(WORLD.replace("LOG", str(folder / "log")))
    (folder / "p.jsonl").write_text(_lines(*({"prompt": f"n{n}:", "answer": str(n % 2)} for n in range(2))))
    settings: dict[str, Any] = {
        "model": str(MODEL), "output": str(folder / "run"), "prompts": str(folder / "p.jsonl"), "steps": 1,
        "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 12, "eval_size": 0, "tensorboard": False,
        "remat": False, "environment": f"{folder / 'world.py'}:World", "rewards": ("environment",),
    }  # fmt: skip
    return TrainConfig(**{**settings, **changes}, stop=tuple(string.ascii_letters))


@cache
def _run() -> tuple[dict[str, Any], str, list[str]]:
    """A step with an environment that fails for one of two prompts: its metrics, what it said, and its log."""
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    said = io.StringIO()
    handler, logger = logging.StreamHandler(said), logging.getLogger("jaxrl_llm.rollouts")
    logger.addHandler(handler)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        loop.train(_config(folder, turns=3))
    logger.removeHandler(handler)
    line = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    return line, said.getvalue(), (folder / "log").read_text().split()


def _refused_run(*words: str, reward: str) -> Callable[[], bool]:
    """Whether a run with this reward is refused before its model is loaded."""

    def check() -> bool:
        folder = Path(tempfile.mkdtemp(dir=_folder()))
        config = _config(folder, environment=None, rewards=(f"{folder / 'world.py'}:{reward}",))
        return refuses(lambda: inputs.read_inputs(config).__enter__(), *words)

    return check


def _model(change: Callable[[Path], None]) -> Path:
    """The folder of a tiny model that is changed."""
    folder = Path(tempfile.mkdtemp(dir=_folder())) / "m"
    shutil.copytree(MODEL, folder)
    change(folder)
    return folder


def _json(name: str, **entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        old = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**old, **entries}))

    return change


def _weights(rename: Callable[[str], str | None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        old = load_file(folder / "model.safetensors")
        new = {other: value for name, value in old.items() if (other := rename(name))}
        save_file(new, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def _exported() -> bool:
    policy, params, tokenizer = load_policy(MODEL)
    folder = Path(tempfile.mkdtemp(dir=_folder())) / "saved"
    save_policy(folder, policy, params, tokenizer)
    with safe_open(next(folder.glob("*.safetensors")), framework="np") as file:
        return bool((file.metadata() or {}).get("format") == "pt")


def _theta(raw: dict[str, Any]) -> float:
    whole = {**json.loads((MODEL / "config.json").read_text())}
    for name in ("rope_theta", "rope_parameters", "rope_scaling"):
        whole.pop(name, None)
    return float(from_hf({**whole, **raw}).ropes[0].theta)


def _in_order() -> bool:
    stream = PromptStream([{"prompt": one} for one in "abc"], batch_size=3, shuffle=False)
    return [row["prompt"] for row in next(stream)[0]] == list("abc")


def _ends(*configured: int) -> bool:
    """Whether a completion ends with these tokens and with the tokenizer's own end."""
    policy, _, tokenizer = load_policy(_model(_json("generation_config.json", eos_token_id=list(configured))))
    return {*configured, tokenizer.eos_token_id} <= set(policy.config.eos_token_ids)


def _without_embeddings() -> bool:
    folder = _model(_weights(lambda name: None if "embed_tokens" in name else name))
    return refuses(lambda: load_policy(folder), "embed_tokens")


TRL, VERL, SKYRL, DATASETS = "huggingface/trl", "verl-project/verl", "NovaSky-AI/SkyRL", "huggingface/datasets"
TWO = _lines({"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"})

REPORTS = [
    Report(
        f"{DATASETS}#8243", "a byte order mark changes the columns", RIGHT, "",
        lambda: _rows(b"\xef\xbb\xbf" + TWO.encode()) == _rows(TWO),
    ),
    Report(
        "datalad/datalad#3523", "U+2028 in a text ends a JSON line", RIGHT, "",
        lambda: _rows(_lines({"prompt": "a\u2028b\u0085c"}))[0]["prompt"] == "a\u2028b\u0085c",
    ),
    Report(
        f"{DATASETS}#7222", "a column that is null in one shard and text in the next", RIGHT, "",
        lambda: (
            [row["d"] for row in _rows(_lines({"prompt": "a", "d": None}), _lines({"prompt": "b", "d": "x"}))]
            == [None, "x"]
        ),
    ),
    Report(
        f"{DATASETS}#7092", "a column of empty lists in the first shard", RIGHT, "",
        lambda: _rows(_lines({"prompt": "a", "t": []}), _lines({"prompt": "b", "t": [{"x": 1}]}))[1]["t"] == [{"x": 1}],
    ),
    Report(
        f"{VERL}#1052", "a folder of Parquet files is not read", RIGHT, "",
        _parquet_folder,
    ),
    Report(
        f"{DATASETS}#8027", "tools and calls of different types have no common column",
        RIGHT, "JSON lines stay as they are",
        lambda: (
            [
                row["answer"]
                for row in _rows(_lines({"prompt": "a", "answer": 1}, {"prompt": "b", "answer": {"x": "y"}}))
            ]
            == [1, {"x": "y"}]
        ),
    ),
    Report(
        "huggingface/open-r1#126", "a data set with problem and messages fails", RIGHT, "the problem is the prompt",
        lambda: (
            _rows(_lines({"problem": "P", "solution": "S", "messages": [{"role": "user", "content": "P"}]}))[0][
                "prompt"
            ]
            == "P"
        ),
    ),
    Report(
        f"{TRL}#2998", "the order of the rows cannot be kept", RIGHT, "PromptStream(shuffle=False)",
        _in_order,
    ),
    Report(
        f"{TRL}#6322", "a DatasetDict as data set", NONE, "data sets are files, or a split of the hub",
    ),
    Report(
        "FareedKhan-dev/train-deepseek-r1#2", "a reward's missing column is a TypeError in the first step",
        RIGHT, "before a model is loaded",
        _refused_run("solution", reward="needs"),
    ),
    Report(
        f"{TRL}#3455", "a reward of one's own fails from the command line",
        RIGHT, "a file and a name; a wrong name is told",
        _refused_run("world.py", "own", reward="owm"),
    ),
    Report(
        f"{SKYRL}#299", "None as the reward of a turn in between", MENDED, "it failed the episode; it is none",
        lambda: [one.reward for one in asyncio.run(_played(Steps(), 3))] == [0.0, 0.25, 0.25],
    ),
    Report(
        f"{SKYRL}#201", "rewards of turns before the last are ignored", RIGHT, "they are summed",
        lambda: _run()[0]["reward/max"] > 0.5 and _run()[0]["reward/mean"] == _run()[0]["rollout/turns"],
    ),
    Report(
        "NVIDIA-NeMo/Gym#2931", "an agent that never ends is asked 2,703 times", RIGHT, "turns are limited",
        lambda: _run()[0]["rollout/turns"] <= 3,
    ),
    Report(
        "PrimeIntellect-ai/prime-rl#2308", "an error in reset is told as an empty trajectory", RIGHT, "by its name",
        lambda: "OSError: the server is gone" in _run()[1],
    ),
    Report(
        "PrimeIntellect-ai/prime-rl#1416", "failed episodes are trained on", RIGHT, "left out and counted",
        lambda: (_run()[0]["reward/unscored"], _run()[0]["rollout/failed_environments"]) == (0.5, 2.0),
    ),
    Report(
        "PrimeIntellect-ai/verifiers#543", "nothing is torn down after an episode", RIGHT, "close, failed ones too",
        lambda: _run()[2].count("close") >= 2,
    ),
    Report(
        "hsahovic/poke-env#211", "steps are made after the end", RIGHT, "an episode that is over is not asked",
        lambda: [one.done for one in asyncio.run(_played(Steps(), 3))] == [False, False, True],
    ),
    Report(
        "huggingface/lerobot#4242", "an environment resets itself in its last step",
        NONE, "each episode has an environment of its own",
    ),
    Report(
        f"{TRL}#7039", "only the tokenizer's end of text ends a completion", RIGHT, "those of generation_config, too",
        lambda: _ends(65, 66),
    ),
    Report(
        "Blaizzy/mlx-vlm#2112", "the configured ends replace the tokenizer's", RIGHT, "all of them end it",
        lambda: _ends(65),
    ),
    Report(
        "huggingface/transformers#34759", "missing embeddings are random, with a warning", RIGHT, "refused, by name",
        _without_embeddings,
    ),
    Report(
        "ml-explore/mlx#743", "saved weights lack the format's name, and transformers refuses them", RIGHT, "",
        _exported,
    ),
    Report(
        "deepspeedai/DeepSpeed#8345", "rope_theta in rope_parameters is silently the default",
        RIGHT, "read in both places",
        lambda: (
            _theta({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
            == _theta({"rope_theta": 5e5})
            == 5e5
        ),
    ),
    Report(
        "MakazhanAlpamys/Soup#793", "a rope scaling that is set after loading does nothing",
        NONE, "the configuration is fixed when it is read",
    ),
    Report(
        "huggingface/transformers#43429", "the tied flag of the inner configuration is ignored",
        NONE, "this family is not read",
    ),
]  # fmt: skip
