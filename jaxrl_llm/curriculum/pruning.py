"""A curriculum of epochs that drops prompts which the policy solves."""

from __future__ import annotations

from typing import Any

State = dict[str, Any]
