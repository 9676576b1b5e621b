"""What of a model's files is not read, such as towers for images: said in a line, and kept in an export on request."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import FAMILIES, language_model
from jaxrl_llm.models.io.file_tensor import FileTensor, Tensors
from jaxrl_llm.models.io.huggingface import OF_LAYER, skipped_tensors
from jaxrl_llm.utils.errors import several

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Settings of layers that draft tokens, which the language model by itself has none of.
DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Of models with towers: how images and sound are prepared for them.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


class Unread(NamedTuple):
    """What an export needs to hold all that the files held: tensors, settings and files as they are there."""

    tensors: Tensors  # by their names in the files
    settings: dict[str, Any]  # of config.json
    prefix: str  # of the tensors of the language model, in place of "model."
    head: str  # the name of the output projection
    files: tuple[Path, ...]

    def name_of(self, name: str) -> str:
        """The name, in these files, of a tensor of the language model."""
        if self.settings is language_model(self.settings):
            return name
        return self.head if name == HEAD else f"{self.prefix}{name.removeprefix('model.')}"

    def settings_of(self, own: dict[str, Any]) -> dict[str, Any]:
        """config.json with the language model's settings `own`."""
        if self.settings is language_model(self.settings):
            return own | {name: self.settings[name] for name in DRAFTS if name in self.settings}
        inner = _floats(self.settings["text_config"]) | own
        outer = {name: own[name] for name in own.keys() & self.settings.keys() - {"architectures", "model_type"}}
        return _floats(self.settings) | outer | {"text_config": inner}


def _floats(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "quantization_config"}


def unread_of(folder: Path, tensors: Tensors, settings: dict[str, Any], config: ModelConfig) -> Unread:
    """What is not read of a folder. tensors: of its files, by the names of a language model by itself.

    A copy of tied embeddings is left out: it would no longer be one after training.
    """
    skipped = skipped_tensors(tensors, config) - {HEAD}
    stored = {name: read for name, read in tensors.items() if isinstance(read, FileTensor)}
    embed = stored[EMBED].name if EMBED in stored else EMBED
    return Unread(
        {read.name: read for name, read in stored.items() if name in skipped}, settings,
        embed.removesuffix("embed_tokens.weight"), stored[HEAD].name if HEAD in stored else HEAD,
        tuple(folder / name for name in PROCESSOR_FILES if (folder / name).is_file()),
    )  # fmt: skip


def skipped_line(names: Iterable[str], config: ModelConfig) -> str:
    """How many tensors are not read, and of what: "3 tensors are not read (mtp: 1, model.visual: 2)"."""

    def group(name: str) -> str:
        tower = next((start for start in FAMILIES[config.family].skipped if name.startswith(start)), "")
        layer = OF_LAYER.match(name)
        return tower.removesuffix(".") or (f"model.layers.{layer[1]}" if layer else name)

    counts = Counter(map(group, names))
    some = ", ".join(f"{group}: {count:,}" for group, count in sorted(counts.items())[:4])
    more = f" and {len(counts) - 4} more" if len(counts) > 4 else ""
    count = counts.total()
    return f"{several(count, 'tensor')} {'is' if count == 1 else 'are'} not read ({some}{more})"
