"""Runs of agents over tiny models that call tools in the formats of several families."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs
from tokenizers import AddedToken

sys.path.append(str(Path(__file__).parents[1]))

from family_templates import KNOWN, Family, called, sampled, tokenizer_of_family

from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.tools import with_tools
from jaxrl_llm.models import load_policy, save_policy
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.policy import Policy, init_params

pytestmark = pytest.mark.heavy
NAMED = ("Qwen3.5", "GLM-4.5", "gpt-oss", "Gemma 4", "Ministral 3", "OLMo 3")
TOOLS = '''
def find(text: str, count: int) -> str:
    """Find.

    Args:
        text: What.
        count: How many.
    """
    return f"found {count + 40}"
'''


def model_of(folder: Path, family: Family) -> tuple[Path, ChatTurns, list[list[int]]]:
    """A model that mostly calls a tool or says it is done, as its next token depends on the last; and both replies.

    A reply is one token of its own and an end, so that it is sampled as a model of the family would.
    """
    (folder / "tools.py").write_text(TOOLS)
    space: dict[str, Any] = {}
    exec(TOOLS, space)
    tokenizer = copy.deepcopy(tokenizer_of_family(family.name))
    chat = ChatTurns(tokenizer, with_tools([space["find"]])({}).tools)
    ids = [
        sampled(chat, called(family, chat, {"count": 1, "text": "a"}), calls=True),
        sampled(chat, "Done.", calls=False),
    ]
    texts = [tokenizer.decode(one[:-1]) for one in ids]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    chat = ChatTurns(tokenizer, chat.tools)
    replies = [[tokenizer.convert_tokens_to_ids(text), one[-1]] for text, one in zip(texts, ids, strict=True)]
    assert [len(tokenizer.encode(text)) for text in texts] == [1, 1]
    tiny = load_policy(runs.MODEL.parent / "llama")[0].config
    stops = tuple(sorted(chat.stops))
    config = dataclasses.replace(tiny, vocab_size=len(tokenizer), max_positions=4096, eos_token_ids=stops)
    params = init_params(jax.random.key(0), config, scale=1.0)
    layers = params["layers"]
    params["layers"] = {**layers, "out": layers["out"] * 1e-3, "down": layers["down"] * 1e-5}
    embed = np.asarray(params["embed"])
    unit = embed / np.linalg.norm(embed, axis=1, keepdims=True)
    results = chat.bridge([{"role": "tool", "name": "find", "content": "found 41"}], replies[0][-1])
    assert results is not None
    before = {chat.begin([{"role": "user", "content": "x"}])[-1], results[-1]}
    unembed = np.zeros_like(embed)
    for (first, last), weight in zip(replies, (4.0, 3.9), strict=True):
        unembed[first] += weight * sum(unit[one] for one in before)
        unembed[last] += 4.0 * unit[first]
    params["unembed"] = jax.numpy.asarray(unembed)
    save_policy(folder / "model", Policy(config), params, tokenizer)
    return folder / "model", chat, replies


@pytest.mark.parametrize("family", [one for one in KNOWN if one.name in NAMED], ids=lambda one: str(one.name))
def test_the_trainer_sees_the_ids_that_were_sampled(family: Family, tmp_path: Path) -> None:
    folder, chat, replies = model_of(tmp_path, family)
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(
            runs.small_config(
                tmp_path, model=str(folder), tools=(f"{tmp_path / 'tools.py'}:find",), turns=3, steps=1, top_p=1.0,
                minibatches=1, max_new_tokens=4, eval_size=0,
            )
        )  # fmt: skip
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(line.get("rollout/new_rows", 0) == 0 and "rollout/failed_groups" not in line for line in lines)
    assert lines[0]["mismatch"] < 1e-4
    policy = load_policy(folder)[0]
    results = chat.bridge([{"role": "tool", "name": "find", "content": "found 41"}], replies[0][-1])
    answered = [0, 0]
    for step in taken:
        batch = step.scored.batch
        action, turn, tokens = (np.asarray(x) for x in (batch.action_mask, batch.turn, batch.tokens))
        logp = np.asarray(jax.jit(policy_outputs, static_argnums=0)(policy, step.params, batch).logp)
        np.testing.assert_allclose(np.asarray(batch.behaviour_logp)[action], logp[action], rtol=0, atol=1e-4)
        for row, mask, of_turn in zip(tokens, action, turn, strict=True):
            for number in range(int(of_turn.max()) + 1):
                places = np.flatnonzero(of_turn == number)
                following = np.flatnonzero(of_turn == number + 1)
                assert mask[places].all()
                if row[places].tolist() == replies[0] and following.size:  # seldom it samples something else
                    between = slice(places[-1] + 1, following[0])
                    assert row[between].tolist() == results, "what the template writes for a result"
                    assert not mask[between].any()
                    answered[number] += 1
    assert answered[0] > 5
    assert answered[1] > 2, "episodes of three turns"
