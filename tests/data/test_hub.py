"""Data sets of the hub, with a local stand-in for the hub's client: a folder of files, which datasets reads."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.data import load_prompts
from jaxrl_llm.data.load import open_prompts
from jaxrl_llm.data.sources import hub
from jaxrl_llm.data.sources.hub import hub_data, hub_name, is_hub_data
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import located
from jaxrl_llm.utils.errors import InputError

ROWS = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(6)]


def test_the_examples_hold() -> None:
    assert doctest.testmod(hub).failed == 0


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("openai/gsm8k:test", ("openai/gsm8k", None, "test")),
        ("openai/gsm8k:main/test", ("openai/gsm8k", "main", "test")),
        ("trl-lib/DeepMath-103K:train[:100]", ("trl-lib/DeepMath-103K", None, "train[:100]")),
        ("data/train.parquet", None),
        ("./a/b", None),
        ("/a/b:main/train", None),
        ("a/b/c", None),
        ("gsm8k", None),
        ("reasoning-gym:chain_sum", None),
        ("gs://bucket/a", None),
    ],
)
def test_names_of_data_sets(source: str, found: tuple[str, str | None, str] | None) -> None:
    assert hub_name(source) == found


def test_a_folder_of_the_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_data("own/data")
    (tmp_path / "own" / "data").mkdir(parents=True)
    assert not is_hub_data("own/data")
    config = TrainConfig(prompts="own/data", eval_prompts="openai/gsm8k:main/test")
    assert (located(config, tmp_path).prompts, located(config, tmp_path).eval_prompts) == (
        str(tmp_path / "own/data"), "openai/gsm8k:main/test"
    )  # fmt: skip
    assert located(TrainConfig(prompts="openai/gsm8k:main/train"), tmp_path).prompts == "openai/gsm8k:main/train"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the hub is asked for; it has own/sums with the configuration main and the splits train and test."""
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    hub_data.cache_clear()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load, found = datasets.load_dataset, list[tuple[Any, ...]]()

    def load_dataset(name: str, config: str | None, split: str, **how: Any) -> Any:
        found.append((name, config, split))
        if config is None:
            raise ValueError("Config name is missing. Please pick one among the available configs: ['main', 'easy']")
        files = {one: str(tmp_path / f"{one}.jsonl") for one in ("train", "test")}
        return load("json", data_files=files, split=split, cache_dir=str(tmp_path / "cache"))

    def dataset_info(self: HfApi, name: str, **how: Any) -> None:
        assert how["timeout"] <= 10
        if name == "own/offline":
            raise ConnectionError("no route to the host")
        if name != "own/sums":
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    return found


def test_rows_of_the_hub_are_prompts(asked: list[tuple[Any, ...]]) -> None:
    said: list[str] = []
    rows = load_prompts("own/sums:main/train", limit=4, say=said.append)
    assert [(row["prompt"], row["answer"]) for row in rows] == [(r["question"], r["answer"]) for r in ROWS[:4]]
    assert said == ["own/sums:main/train: prompts are from the column question, answers from answer"]
    assert len(load_prompts("own/sums:main/test")) == 2
    assert asked == [("own/sums", "main", "train"), ("own/sums", "main", "test")]


def test_many_rows_of_the_hub_are_read_as_they_are_drawn(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl_llm.data.load.LISTED", 3)
    drawn = open_prompts("own/sums:main/train", limit=5)
    assert not isinstance(drawn, list)
    assert [row["prompt"] for row in drawn] == [row["question"] for row in ROWS[:5]]
    assert asked == [("own/sums", "main", "train")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("own/sums", r"choose one of its configurations: own/sums:main/train, own/sums:easy/train"),
        ("own/sums:main/dev", r"own/sums:main/dev: .*(dev|split)"),
        ("own/other:main/train", r"the Hugging Face hub has no data set 'own/other'"),
        ("own/offline", r"no data at 'own/offline': .* cannot be asked .*\(ConnectionError: no route to the host\)"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(asked: list[tuple[Any, ...]], source: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(source)
    assert "\n" not in str(caught.value)


def test_without_the_hub_the_cache_is_read_at_once(
    asked: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    load, offline = datasets.load_dataset, list[bool]()

    def load_dataset(*names: Any, **how: Any) -> Any:
        offline.append(constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE)
        return load(*names, **how)

    before = constants.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (tmp_path / "cache" / "own___offline").mkdir(parents=True)
    assert len(load_prompts("own/offline:main/train")) == len(ROWS)
    assert offline == [True]
    assert constants.HF_HUB_OFFLINE is before
    assert len(load_prompts("own/sums:main/test")) == 2
    assert offline == [True, before]
