"""The index of all methods for the command line, which does not import JAX: `algorithms/catalogue.json`.

python -m jaxrl_llm.algorithms.index      # writes it anew, after a method was added or changed
"""

import inspect
import json
from typing import Any

from jaxrl_llm.algorithms import CATALOGUE, families
from jaxrl_llm.algorithms.method import presets_of, run_settings_of
from jaxrl_llm.algorithms.parts import missing
from jaxrl_llm.core.arguments.hyperparameters import hyperparameters_of
from jaxrl_llm.core.arguments.signatures import CATALOGUE as FILE
from jaxrl_llm.core.arguments.signatures import as_record, sentences_about


def record(name: str) -> dict[str, Any]:
    """What the command line reads of a method."""
    build = CATALOGUE[name]
    about = inspect.getdoc(build) or ""
    parameters = [one._replace(help=sentences_about(one.name, about)) for one in hyperparameters_of(build)]
    presets = {preset: dict(values) for preset, values in presets_of(build).items()}
    return {
        "family": families()[name],
        "hyperparameters": [as_record(one) for one in parameters],
        **({"presets": presets} if presets else {}),
        **({"lacks": True} if missing(name) else {}),
        **({"settings": True} if run_settings_of(build) else {}),
    }


def index() -> str:
    """The text of the file."""
    entries = [f"{json.dumps(name)}: {_text(record(name))}" for name in sorted(families())]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _text(entry: dict[str, Any]) -> str:
    """An entry with a line for each hyper-parameter."""
    listed = entry.pop("hyperparameters")
    rest = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items())
    lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in listed)
    return "{" + rest + ', "hyperparameters": [\n' + lines + "\n]}"


if __name__ == "__main__":
    FILE.write_text(index(), encoding="utf-8")
