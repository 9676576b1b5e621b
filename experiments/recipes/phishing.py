"""Mails that are phishing or not, with the reason that gives them away.

The idea of reasoning detectors trained by GRPO: a reward of the label, and one of naming what in the mail shows it.
Neither paper nor card was at hand: data and rewards are ours. Here: mails from templates, of which those that phish
have one or two tells (a strange sender, haste, a link elsewhere), which the row lists.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.recipes.drug_approval import tagged
from experiments.recipes.recipe import Row, config_of, main
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.training.config import TrainConfig

FIRMS = ("Northbank", "Parcel Post", "Mailhost", "City Energy")
TELLS = {
    "sender": ("{firm} <support@{firm_id}-secure-login.example>", "{firm} <service@{firm_id}.example>"),
    "haste": ("Act within 2 hours or your account is closed.", "There is nothing that you need to do."),
    "link": ("http://198.51.100.7/{firm_id}/login", "https://{firm_id}.example/account"),
}
MAIL = "From: {sender}\nSubject: Your account\n\nDear customer,\n{haste}\nDetails: {link}\n{firm}"
ASK = (
    "Is this mail phishing?\n\n{}\n\nReply with <answer>phishing</answer> or <answer>fine</answer>, and what shows it, "
    "<tell>sender</tell>, <tell>haste</tell> or <tell>link</tell>."
)


def rows(seed: int, count: int) -> list[Row]:
    """Mails, half of which phish."""
    chosen, out = random.Random(seed), []
    for number in range(count):
        firm = chosen.choice(FIRMS)
        tells = chosen.sample(sorted(TELLS), chosen.randint(1, 2)) if number % 2 else []
        names = {"firm": firm, "firm_id": firm.lower().replace(" ", "")}
        parts = {name: forms[name not in tells].format(**names) for name, forms in TELLS.items()}
        out.append({
            "prompt": ASK.format(MAIL.format(**parts, firm=firm)), "answer": "phishing" if tells else "fine",
            "tells": " ".join(sorted(tells)),
        })  # fmt: skip
    return out


def detected(completions: Sequence[Any], answer: Sequence[str], tells: Sequence[str], **_: Any) -> list[float]:
    """1 for the right label, and of a mail that phishes 0.5 more for a tell that it has."""
    out = []
    for text, right, known in zip(completions, answer, tells, strict=True):
        said = text_of(text)
        hit = (tagged(said, "answer") or "").lower() == right
        named = (tagged(said, "tell") or "").lower() in known.split()
        out.append(float(hit) + 0.5 * (hit and named))
    return out


def config(folder: Path, model: str, rows: list[Row], **settings: Any) -> TrainConfig:
    """The run."""
    return config_of(folder, model, rows, [f"{Path(__file__).resolve()}:detected"], **settings)


if __name__ == "__main__":
    main(__doc__, rows, config)
