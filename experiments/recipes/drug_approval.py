"""Whether a molecule became a medicine, with a confidence that counts.

The idea of DrugReasoner (2508.18579): GRPO on the question whether a molecule, given by its SMILES, was approved, with
rewards of the answer, its form and its confidence. Neither paper nor card was at hand: the rewards are ours, and the
twenty molecules are textbook ones, so that it shows the recipe and no chemistry. Descriptors (RDKit) and neighbours of
the molecule in the prompt, as in the paper, are columns of your own data.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.recipes.recipe import Row, config_of, main
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.training.config import TrainConfig

APPROVED = (
    "CC(=O)OC1=CC=CC=C1C(=O)O", "CC(C)CC1=CC=C(C=C1)C(C)C(=O)O", "CC(=O)NC1=CC=C(O)C=C1", "CN(C)C(=N)NC(=N)N",
    "CN1C=NC2=C1C(=O)N(C(=O)N2C)C", "CCN(CC)CC(=O)NC1=C(C)C=CC=C1C", "COC1=CC2=CC(=CC=C2C=C1)C(C)C(=O)O",
    "CC(C)NCC(O)COC1=CC=CC2=CC=CC=C21", "NNC(=O)C1=CC=NC=C1", "CC(C)(C)NCC(O)C1=CC(CO)=C(O)C=C1",
)  # fmt: skip
OTHERS = (
    "C1=CC=CC=C1", "CC1=CC=CC=C1", "NC1=CC=CC=C1", "C1=CC=C2C=CC=CC2=C1", "CCCCCC", "CC(C)=O", "ClC(Cl)Cl",
    "C=CC1=CC=CC=C1", "C=CC#N", "O=[N+]([O-])C1=CC=CC=C1",
)  # fmt: skip
ASK = (
    "Was this molecule approved as a medicine? SMILES: {}\nReply with <answer>yes</answer> or <answer>no</answer>, and "
    "how sure you are, <confidence>0 to 1</confidence>."
)


def rows(seed: int, count: int) -> list[Row]:
    """Molecules of both kinds, in a random order."""
    chosen = random.Random(seed)
    every = [(one, "yes") for one in APPROVED] + [(one, "no") for one in OTHERS]
    return [{"prompt": ASK.format(molecule), "answer": answer} for molecule, answer in chosen.choices(every, k=count)]


def tagged(text: str, name: str) -> str | None:
    """The text of the last tag of a name, or None."""
    found = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def approval(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """0 without an answer; 0.2 for its form; 1 more where it is right; and less the square of the confidence's error,
    where one is given, else a quarter."""
    out = []
    for text, right in zip(completions, answer, strict=True):
        said = text_of(text)
        found = (tagged(said, "answer") or "").lower()
        if found not in ("yes", "no"):
            out.append(0.0)
            continue
        try:
            confidence = min(max(float(tagged(said, "confidence") or ""), 0.0), 1.0)
        except ValueError:
            confidence = 0.5
        hit = float(found == right)
        out.append(0.2 + hit - (confidence - hit) ** 2)
    return out


def config(folder: Path, model: str, rows: list[Row], **settings: Any) -> TrainConfig:
    """The run."""
    return config_of(folder, model, rows, [f"{Path(__file__).resolve()}:approval"], **settings)


if __name__ == "__main__":
    main(__doc__, rows, config)
