"""Data sets of the Hugging Face hub: OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG/SPLIT."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

from jaxrl_llm.utils.errors import InputError, error_line, optional_package, shown

_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?:(?P<config>[\w.-]+)/)?(?P<split>[\w.-]+(?:\[[\w:%+-]*\])?))?")
_FILES = (".jsonl", ".json", ".parquet", ".array_record", ".csv", ".txt", ".gz", ".py", ".yaml", ".arrow")
SECONDS = 10.0  # to ask whether the hub has a data set


class HubName(NamedTuple):
    """A data set on the hub; its split is "train" unless another is named."""

    name: str
    config: str | None
    split: str


def hub_name(source: str) -> HubName | None:
    """The data set that a source names; None if it has another form, or is the path of a file.

    >>> hub_name("openai/gsm8k:main/train"), hub_name("data/train.jsonl")
    (HubName(name='openai/gsm8k', config='main', split='train'), None)
    """
    found = _NAME.fullmatch(source)
    if not found or source.startswith((".", "/", "~")) or found["name"].endswith(_FILES):
        return None
    return HubName(found["name"], found["config"], found["split"] or "train")


def is_hub_data(source: str, folder: str | os.PathLike[str] = ".") -> bool:
    """Whether a source is a data set on the hub: it has the form of one, and no file or folder has its name.

    folder: that relative paths are resolved against.
    """
    found = hub_name(source)
    return found is not None and not os.path.exists(os.path.join(folder, found.name if ":" in source else source))


@cache
def hub_data(source: str) -> Any:
    """A data set on the hub as a `datasets.Dataset`, downloaded once into the cache of datasets.

    Raises InputError, naming the configurations and splits that there are, if the hub has no such data set, or cannot
    be reached and the data set is not in the cache; and if the package datasets is not installed.
    """
    found = hub_name(source)
    assert found is not None
    with optional_package("datasets", "data", f"reading {source} from the Hugging Face hub"):
        import datasets
    reason = _unreachable(found.name, source)
    cached = os.path.join(str(datasets.config.HF_DATASETS_CACHE), found.name.replace("/", "___").lower())
    if reason is not None and not os.path.isdir(cached):
        raise InputError(
            f"no data at {shown(source)}: there is no such file, and the Hugging Face hub cannot be asked for a data "
            f"set of that name ({reason})"
        )
    try:
        with _offline() if reason is not None else nullcontext():
            return datasets.load_dataset(found.name, found.config, split=found.split)
    except ValueError as error:  # a configuration or split that is missing or unknown
        raise InputError(f"{source}: {_with_choices(found, ' '.join(str(error).split()))}") from error
    except Exception as error:  # of many packages
        raise InputError(f"{source} cannot be read from the Hugging Face hub: {error_line(error)}") from error


def _unreachable(name: str, source: str) -> str | None:
    """Why the hub cannot be asked; None if it has the data set. InputError if it says that it does not."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(name, timeout=SECONDS)
    except GatedRepoError:
        raise InputError(f"{name} needs its terms accepted on huggingface.co, and then: hf auth login") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise InputError(
            f"no data at {shown(source)}: there is no such file, and the Hugging Face hub has no data set {name!r} (or "
            "it is private: hf auth login)"
        ) from None
    except Exception as error:  # no network, the offline mode ...
        return error_line(error)
    return None


@contextmanager
def _offline() -> Iterator[None]:
    """Context manager in which datasets reads its cache at once, instead of retrying for half a minute first."""
    from datasets import config
    from huggingface_hub import constants

    modules: list[Any] = [config, constants]
    before = [(module, module.HF_HUB_OFFLINE) for module in modules]
    try:
        for module, _ in before:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in before:
            module.HF_HUB_OFFLINE = value


def _with_choices(found: HubName, reason: str) -> str:
    """An error of datasets with the names to choose from, as a source is written."""
    listed = re.findall(r"'([\w.-]+)'", reason.partition("[")[2])
    if "onfig" in reason and listed:
        return f"choose one of its configurations: {', '.join(f'{found.name}:{x}/{found.split}' for x in listed[:8])}"
    if "split" in reason.lower() and listed:
        config = "" if found.config is None else f"{found.config}/"
        return f"choose one of its splits: {', '.join(f'{found.name}:{config}{x}' for x in listed[:8])}"
    return reason[:300]
