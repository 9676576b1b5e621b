"""Molecules with wanted properties, which RDKit computes.

The idea of generating molecules by GRPO with rewards of computed descriptors. Neither paper nor card was at hand: the
properties and rewards are ours, and nothing is said of whether a molecule can be made or does anything. Here: a SMILES
with so many rings, so many donors of hydrogen bonds, and a weight within bounds. RDKit is an extra:
`pip install 'jaxrl_llm[molecules]'`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.recipes.drug_approval import tagged
from experiments.recipes.recipe import Row, config_of, main
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError

ASK = (
    "Write a molecule with {rings} ring(s), {donors} donor(s) of hydrogen bonds and a weight of {low} to {high} g/mol. "
    "Reply with its SMILES, <molecule>SMILES</molecule>."
)
MOST = 200  # characters of a SMILES


class Properties(NamedTuple):
    """Of a molecule."""

    rings: int
    donors: int
    weight: float  # g/mol, of the mean masses of isotopes


def properties(smiles: str) -> Properties | None:
    """The properties of a molecule; None for a text that is no SMILES. InputError without RDKit."""
    try:
        from rdkit import Chem, RDLogger
        from rdkit.Chem import Descriptors, rdMolDescriptors
    except ImportError:
        raise InputError("molecules need RDKit: pip install 'jaxrl_llm[molecules]'") from None
    RDLogger.DisableLog("rdApp.*")
    found = Chem.MolFromSmiles(smiles) if 0 < len(smiles) <= MOST else None
    if found is None or not found.GetNumAtoms():
        return None
    return Properties(
        rdMolDescriptors.CalcNumRings(found), rdMolDescriptors.CalcNumHBD(found), Descriptors.MolWt(found)
    )


def rows(seed: int, count: int) -> list[Row]:
    """Wishes, of which each can be had: rings of six atoms weigh some 80, and a donor some 16."""
    chosen, out = random.Random(seed), []
    for _ in range(count):
        rings, donors = chosen.randint(0, 3), chosen.randint(0, 3)
        low = 10 * chosen.randint(4 + 8 * rings + 2 * donors, 16 + 9 * rings + 3 * donors)
        wish = {"rings": rings, "donors": donors, "low": low, "high": low + 60}
        out.append({"prompt": ASK.format(**wish), **wish})
    return out


def as_wished(
    completions: Sequence[Any], rings: Sequence[int], donors: Sequence[int], low: Sequence[int], high: Sequence[int],
    **_: Any,
) -> list[float]:  # fmt: skip
    """A quarter for a molecule, and a quarter for each of its properties that is as wished."""
    out = []
    for text, ring, donor, least, most in zip(completions, rings, donors, low, high, strict=True):
        found = properties((tagged(text_of(text), "molecule") or "").strip())
        met = (found.rings == ring, found.donors == donor, least <= found.weight <= most) if found else ()
        out.append((found is not None) / 4 + sum(met) / 4)
    return out


def config(folder: Path, model: str, rows: list[Row], **settings: Any) -> TrainConfig:
    """The run."""
    return config_of(folder, model, rows, [f"{Path(__file__).resolve()}:as_wished"], **settings)


if __name__ == "__main__":
    main(__doc__, rows, config)
