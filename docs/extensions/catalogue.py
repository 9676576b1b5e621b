"""Pages that are made from the library: the catalogue of methods by stage, and the API."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from extensions.docstrings import escaped, restructured
from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.composition import composition
from jaxrl_llm.algorithms.describe import START, by_stage, method_card, parameters, valid_values
from jaxrl_llm.algorithms.method import Facts, presets_of
from jaxrl_llm.algorithms.parts import missing
from jaxrl_llm.core.needs import need_of
from jaxrl_llm.texts import method as of_texts
from jaxrl_llm.texts import method as texts
from jaxrl_llm.training.config.inputs import InputSettings

API = {
    "jaxrl_llm": "The front door",
    "jaxrl_llm.core.trajectory": "Batches",
    "jaxrl_llm.core.transform": "Composing transforms and objectives",
    "jaxrl_llm.core.needs": "What methods need",
    "jaxrl_llm.advantages": "Credit: advantages",
    "jaxrl_llm.advantages.functional": "Credit as functions of arrays",
    "jaxrl_llm.objectives": "Losses: ratios, surrogates, averages, penalties",
    "jaxrl_llm.objectives.functional": "Losses as functions of arrays",
    "jaxrl_llm.selection": "Selection of rows and tokens",
    "jaxrl_llm.selection.functional": "Selection as functions of arrays",
    "jaxrl_llm.algorithms": "The catalogue",
    "jaxrl_llm.rewards": "Rewards",
    "jaxrl_llm.data": "Prompts",
    "jaxrl_llm.core.rollout": "Rollouts",
    "jaxrl_llm.rollouts.programs": "Rollout programs",
    "jaxrl_llm.rollouts.context": "Tools of rollout programs",
    "jaxrl_llm.rollouts.episode": "Episodes",
    "jaxrl_llm.core.rules": "Rules of the driver",
    "jaxrl_llm.core.source": "Sources, curricula and replay",
    "jaxrl_llm.rollouts.runtime.sources": "Parts of sources",
    "jaxrl_llm.rollouts.runtime.offline": "Sources without sampling",
    "jaxrl_llm.rollouts.agents.program": "Agents",
    "jaxrl_llm.environments.protocol": "Environments",
    "jaxrl_llm.environments.adapters": "Environments of other libraries",
    "jaxrl_llm.environments.tools.base": "Tools of agents",
    "jaxrl_llm.environments.sandbox": "The sandbox",
    "jaxrl_llm.sampling": "Sampling",
    "jaxrl_llm.texts": "Texts in place of weights",
    "jaxrl_llm.models": "Models",
    "jaxrl_llm.learner.step": "Learning from a batch",
    "jaxrl_llm.learner.inputs": "Needs of a batch",
    "jaxrl_llm.learner.train_state": "What an update changes",
    "jaxrl_llm.learner.update": "Updates",
    "jaxrl_llm.learner.microbatches": "Gradient steps and packing",
    "jaxrl_llm.learner.optimizer": "The optimiser",
    "jaxrl_llm.training.config": "Configuration of a run",
    "jaxrl_llm.learner.optimizer_config": "Configuration of the optimiser",
    "jaxrl_llm.training.loop": "The training loop",
    "jaxrl_llm.rewards.transforms": "Shaping of rewards",
    "jaxrl_llm.rewards.verifiers": "Verifiers",
    "jaxrl_llm.in_jax.tasks": "Tasks in JAX",
    "jaxrl_llm.in_jax.train": "Training in JAX",
    "jaxrl_llm.distributed": "Meshes and hosts",
    "jaxrl_kernels": "Kernels",
}


def slug(stage: str) -> str:
    """The file name of a stage: "Credit: by token" -> "credit-by-token"."""
    return re.sub(r"[^a-z]+", "-", stage.lower()).strip("-")


def heading(text: str, mark: str) -> list[str]:
    return [text, mark * len(text), ""]


def with_code(text: str, names: Iterable[str]) -> str:
    """Paragraphs with names that have an underscore in backticks; equations and the beginnings of lists stay."""
    known = "|".join(name for name in names if "_" in name)
    if not known:
        return text
    word = re.compile(rf"(?<![\w`.^])(?:{known})(?![\w`:])")
    parts = text.split("\n\n")
    return "\n\n".join(part if part.startswith("    ") else word.sub(r"`\g<0>`", part) for part in parts)


def method_section(name: str) -> list[str]:
    """A method: its docstring, hyper-parameters, needs, composition and test."""
    build = algorithms.constructor(name)
    text, card = inspect.getdoc(build) or "", method_card(name)
    head, _, rest = text.partition("\n\n")
    text = f"{head} {card.facts.paper}, {card.facts.year}.\n\n{rest}"
    text = with_code(text, inspect.signature(build).parameters)
    title = f"{name} (where to start)" if name in START else name
    out = [f".. _method-{name}:", "", *heading(title, "-"), *restructured(text)]
    for label, parts in (("Incomplete in some runs", missing(name)), ("Not implemented", card.facts.beside)):
        for part, (what, by) in parts.items():
            out += [f"{label}: ``{part}``, {escaped(what)} (wanted: {escaped(by)}).", ""]
    out += _table(name)
    needs = [f"``{need}``, {escaped(need_of(need).text)}" for need in card.needs]
    out += [f"Needs beyond a scored batch: {'; '.join(needs) or 'nothing'}.", ""]
    code = composition(build).rstrip().splitlines()
    out += ["The composition, to copy and change:", "", ".. code-block:: python", "   :class: composition", ""]
    out += [("   " + line).rstrip() for line in code] + [""]
    return [*out, f"Tested by ``tests/algorithms/{card.facts.test}``.", ""]


def _table(name: str) -> list[str]:
    sets, rows = presets_of(algorithms.constructor(name)), parameters(name)
    if not rows:
        return []
    out = [".. list-table::", "   :header-rows: 1", "", "   * - hyper-parameter", "     - default", "     - values"]
    out += ["     - origin of the default"]
    for one in rows:
        others = [f"{preset}: {sets[preset][one.name]!r}" for preset in sets if one.name in sets[preset]]
        origin = "; ".join(filter(None, [one.origin, *others]))
        out += [f"   * - ``{one.name}``", f"     - ``{one.default!r}``", f"     - {escaped(valid_values(name, one))}"]
        out += [f"     - {escaped(origin)}".rstrip()]
    return [*out, ""]


def stage_page(stage: str, methods: list[str]) -> str:
    """The page of a stage as reStructuredText."""
    out = heading(stage, "=")
    for name in methods:
        out += method_section(name)
    return "\n".join(out)


def extent(facts: Facts) -> str:
    """How much of its paper a method has: whole, and what stands beside it that is not here."""
    return escaped("; ".join(["whole", *(f"not here: {what}" for what, _ in facts.beside.values())]))


def index_page() -> str:
    """The first page of the catalogue: where to start, then a table of all methods by stage."""
    out = heading("All methods", "=")
    out += [
        f"The catalogue has {len(algorithms.names())} methods. Seven are good places to start:",
        "",
    ]
    out += [f"* :ref:`{name} <method-{name}>`: {escaped(why)}." for name, why in START.items()]
    out += ["", ".. toctree::", "   :maxdepth: 1", "", *(f"   {slug(stage)}" for stage in by_stage()), ""]
    for stage, methods in by_stage().items():
        out += [*heading(stage, "-"), ".. list-table::", "   :widths: 25 8 37 30", ""]
        for name in methods:
            card = method_card(name)
            out += [
                f"   * - :ref:`{name} <method-{name}>`",
                f"     - {card.facts.year}",
                f"     - {escaped(card.title)}",
                f"     - {extent(card.facts)}",
            ]
        out += [""]
    out += [*heading("Texts in place of weights", "-"), "Run by ``jaxrl texts NAME``.", ""]
    out += [".. list-table::", "   :widths: 25 8 37 30", ""]
    for name in texts.names():
        facts, title = of_texts.facts(name), (inspect.getdoc(texts.constructor(name)) or "").partition("\n\n")[0]
        out += [f"   * - {name}", f"     - {facts.year}", f"     - {escaped(title)}", f"     - {extent(facts)}"]
    out += [""]
    return "\n".join(out)


def api_page(module: str, title: str) -> str:
    """The API page of a module: what its `__all__` lists, else the functions and classes that it defines."""
    found = importlib.import_module(module)
    listed = getattr(found, "__all__", None)
    out = [*heading(f"{title}: {module}", "="), f".. automodule:: {module}", "   :members:", ""]
    if listed is not None:
        classes = [n for n in listed if not inspect.ismodule(getattr(found, n))]
        out = [*out[:-2], "   :no-members:", ""]
        for name in classes:
            thing = getattr(found, name)
            kind = "autoclass" if inspect.isclass(thing) else "autofunction" if callable(thing) else "autodata"
            out += [f".. {kind}:: {module}.{name}", *(["   :members:"] if kind == "autoclass" else [])]
            if kind == "autoclass" and issubclass(thing, InputSettings):
                out += ["   :inherited-members:"]
            # The package's own names are those of its modules, which have pages too.
            out += ["   :no-index:", ""] if module == "jaxrl_llm" else [""]
    return "\n".join(out)


def pages() -> dict[str, str]:
    """All generated pages, by their paths in docs/generated."""
    out = {"methods/index.rst": index_page()}
    out |= {f"methods/{slug(stage)}.rst": stage_page(stage, methods) for stage, methods in by_stage().items()}
    entries = [f"   {module}" for module in API]
    out["api/index.rst"] = "\n".join([*heading("API", "="), ".. toctree::", "   :maxdepth: 1", "", *entries, ""])
    return out | {f"api/{module}.rst": api_page(module, title) for module, title in API.items()}


def _write(app: Any) -> None:
    folder, found = Path(app.srcdir, "generated"), pages()
    for old in folder.rglob("*.rst"):  # of a stage or module that has another name now
        if old.relative_to(folder).as_posix() not in found:
            old.unlink()
    for path, text in found.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_text() != text:  # an unchanged page is not built again
            target.write_text(text)


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
