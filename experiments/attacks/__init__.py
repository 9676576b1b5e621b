"""Attacks on runs, files, commands and the Python API, each with a verdict; `experiments/attack.py` runs them."""

from __future__ import annotations

import re
from typing import NamedTuple

# clear: one line that names what is wrong, or, where something must survive, it did.
# unclear: refused, but by a traceback, several lines, or a message that does not name the cause.
# wrong: the result differs, something was lost, or the message is false.
# hang: no end within the limit. silent: accepted without a word.
VERDICTS = ("clear", "unclear", "wrong", "hang", "silent")

SO_FAR = re.compile(r"\d+ s so far to .*")  # a line of a slow start; it comes before the error and is no part of it


class Outcome(NamedTuple):
    """What one attack found."""

    attack: str  # one of `attack.ATTACKS`
    name: str  # of the case
    verdict: str  # one of VERDICTS
    seconds: float
    said: str  # the message, or what differs; one line
