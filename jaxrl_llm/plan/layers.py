"""The model of a plan, and the same model with fewer layers."""

from __future__ import annotations

from pathlib import Path

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.checks import with_slots
from jaxrl_llm.models.families import from_hf
from jaxrl_llm.models.io.load import DEMO_MODEL
from jaxrl_llm.models.kinds import read_json
from jaxrl_llm.utils.errors import InputError


def config_of(model: str, sink_slots: int = 0) -> ModelConfig:
    """The configuration of a model, whose weights need not be there: a folder, a config.json, a .gguf file, the demo
    model, or a name on the Hugging Face hub. sink_slots: those that a run adds. InputError for anything else."""
    return with_slots(_published(model), sink_slots)


def _published(model: str) -> ModelConfig:
    path = Path(model).expanduser()
    if model == DEMO_MODEL or model.endswith(".gguf"):
        from jaxrl_llm.models.io.gguf import read_gguf, smollm2_path

        file = smollm2_path() if model == DEMO_MODEL else path
        return from_hf(read_gguf(file).config, where=file.name)
    file = path if model.endswith(".json") else path / "config.json"
    if not file.exists() and model.count("/") == 1 and not model.startswith((".", "/", "~")):
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(model, "config.json"))
        except Exception as error:  # the hub's client raises several
            raise InputError(f"the hub gave no config.json of {model} ({type(error).__name__})") from None
    if not file.exists():
        raise InputError(f"{file} is not there: give a model's folder, its config.json, a .gguf file or a hub name")
    return from_hf(read_json(file), where=str(file))


def with_layers(model: ModelConfig, layers: int) -> ModelConfig:
    """The model with its first layers only."""
    return model.first(layers)


def depths(model: ModelConfig) -> tuple[int, int]:
    """Two small numbers of layers that hold each kind of layer as often as all layers do, as far as they go."""
    of_layer = model.kind_of_layer or (0,) * model.num_layers
    kinds = list(zip(model.rope_of_layer, model.window_of_layer, of_layer, strict=True))
    period = next(
        n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
    )  # fmt: skip
    return max(2, period), 2 * max(2, period)
