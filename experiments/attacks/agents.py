"""Configurations of agent runs that are killed: environments, tools, games, trees, compaction, replay and curricula.

Conversations go on over several steps where that can be, so that a kill finds them in the middle.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

WORLDS = Path(__file__).with_name("agent_worlds.py")
# Short, since the model's context is 128 letters.
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{{ '<eos>' if m.role == 'assistant' else '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
# Some 30 of the 257 tokens end a reply. All steps are saved, so that half of the kills are in conversations.
_COMMON: dict[str, Any] = {
    "top_p": 1.0, "minibatches": 1, "max_new_tokens": 12, "checkpoint_every": 1, "keep_checkpoints": 9,
    "stop": list(string.ascii_letters[:20] + string.digits), "optimizer": {"learning_rate": 3e-4},
}  # fmt: skip
_PAUSES: dict[str, Any] = {"segment_tokens": 4, "oversample": 2.0}
_REPLAYED: dict[str, Any] = {"replay_megabytes": 0, "num_prompts": 8}
_AGENTS: dict[str, dict[str, Any]] = {
    "steps": {"environment": "Echo", **_PAUSES},
    "tools of an environment": {"environment": "Purse", **_PAUSES},
    "functions": {"tools": ["add"], "reward": "even", **_PAUSES},
    "python": {"tools": ["python"], "reward": "even", "tool_time_limit": 60.0, **_PAUSES},
    "summaries": {"environment": "Echo", "context_tokens": 66, "compact": "SHORT", **_PAUSES},
    "last turns": {"environment": "Echo", "context_tokens": 66, "compact": "LAST", **_PAUSES},
    "players": {"environment": "Duel", "players": 2, **_PAUSES},
    "trees of an agent": {
        "environment": "Echo", "algorithm": "arpo_agentic", "hyperparameters": {"initial": 2, "probability": 1.0},
        **_PAUSES,
    },
    "forks": {"rollout": "everything", "reward": "even", **_PAUSES},
    "trees": {
        "algorithm": "treepo", "hyperparameters": {"segment": 2, "first_most": 2, "rounds": 1}, "reward": "starts_even"
    },
    "replay on disk": {"algorithm": "symphony_fading_replay", "reward": "starts_even", **_REPLAYED},
    "replay of an agent": {"environment": "Purse", "algorithm": "wmar_reservoir_replay", **_REPLAYED},
    "hints": {
        "algorithm": "nurl", "hyperparameters": {"success": 1.0, "source": "column", "hints_from": 0},
        "reward": "starts_even",
    },
    "pool": {"algorithm": "xrpo", "hyperparameters": {"exploration": 1.0}, "reward": "starts_even", "group_size": 5},
    "prompts": {
        "algorithm": "dots_rr", "hyperparameters": {"references": 3, "units": 16}, "reward": "starts_even"
    },
}  # fmt: skip
AGENTS = {
    name: {**_COMMON, **({"turns": 3} if {"environment", "tools"} & values.keys() else {}), **values}
    for name, values in _AGENTS.items()
}


def with_worlds(values: dict[str, Any]) -> dict[str, Any]:
    """The settings with the file of what they name."""
    names = {name: f"{WORLDS}:{values[name]}" for name in ("environment", "rollout", "compact") if name in values}
    tools = {"tools": [f"{WORLDS}:{name}" for name in values["tools"]]} if "tools" in values else {}
    return {**values, **names, **tools}


def write_template(model: Path) -> None:
    """Give the model a chat template."""
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
