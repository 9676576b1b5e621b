"""A token depends on the key, its prompt, its sample number and its position: not on where it is computed."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from heavy import few
from other_process import on_devices, result_of

from jaxrl_llm import sample
from jaxrl_llm.sampling import completion_ids

pytestmark = pytest.mark.heavy

# Of different kinds: windows with soft caps, and a router. No token ends a completion, except where a test says so.
TWO_FAMILIES = ("gemma2", "qwen3_moe")
PROMPTS = [[5, 9, 200], [7, 1, 60, 61, 62, 3, 9], [80, 81], [100] * 6]
NAMES = [11, 3, 40, 7]
NEW = 12


@pytest.fixture(scope="module", params=few(TWO_FAMILIES, ["gemma2"]))
def model(request: pytest.FixtureRequest, vectors: Any) -> Any:
    return vectors(request.param)


def draw(model: Any, prompts: Any = None, names: Any = None, key: int = 0, **settings: Any) -> list[list[int]]:
    settings = {"group_size": 2, "max_new_tokens": NEW, "stop_token_ids": [-1], "temperature": 2.0} | settings
    prompts, names = (PROMPTS, NAMES) if prompts is None else (prompts, names)
    found = sample(model.policy, model.params, prompts, jax.random.key(key), prompt_ids=names, **settings)
    return completion_ids(found)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """Two completions of each of the four prompts, all at once."""
    found = draw(model)
    assert len({tuple(ids) for ids in found}) == 8
    assert {len(ids) for ids in found} == {NEW}
    return found


def test_the_same_key_gives_the_same_tokens(model: Any, expected: Any) -> None:
    assert draw(model) == expected


def test_another_key_gives_other_tokens(model: Any, expected: Any) -> None:
    assert all(a != b for a, b in zip(draw(model, key=1), expected, strict=True))


def test_other_names_give_other_tokens(model: Any, expected: Any) -> None:
    found = draw(model, PROMPTS, [11, 4, 40, 8])
    assert [a == b for a, b in zip(found, expected, strict=True)] == [True, True, False, False] * 2


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 3, 0, 2]])
def test_order(order: list[int], model: Any, expected: Any) -> None:
    found = draw(model, [PROMPTS[i] for i in order], [NAMES[i] for i in order])
    assert found == [expected[2 * i + j] for i in order for j in range(2)]


@pytest.mark.parametrize("rows", few([1, 3, 8, 100], [3]))
def test_slots(rows: int, model: Any, expected: Any) -> None:
    """3 does not divide 8 rows, and cuts groups."""
    assert draw(model, slots=rows) == expected


def test_other_prompts_in_the_batch_and_longer_padding(model: Any, expected: Any) -> None:
    """A prompt of 13 tokens among the others changes the size of everything."""
    found = draw(model, [list(range(13)), *PROMPTS], [99, *NAMES])
    assert found[2:] == expected


def test_fewer_samples_and_fewer_tokens(model: Any, expected: Any) -> None:
    found = draw(model, group_size=1, max_new_tokens=NEW - 4)
    assert found == [ids[: NEW - 4] for ids in expected[::2]]


def test_a_prompt_that_comes_twice_is_sampled_anew(model: Any, expected: Any) -> None:
    found = draw(model, [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]], [11, 3, 11, 11])
    assert found[:4] == expected[:4]
    assert len({tuple(ids) for ids in found}) == 8
    # The samples are those of one larger group.
    assert draw(model, [PROMPTS[0], PROMPTS[1]], [11, 3], group_size=4)[:4] == found[:2] + found[4:6]


def test_an_early_end_changes_no_other_row(model: Any, expected: Any) -> None:
    end = expected[2][1]
    found = draw(model, stop_token_ids=[end])
    for ids, whole in zip(found, expected, strict=True):
        assert ids == (whole[: whole.index(end) + 1] if end in whole else whole)
    assert len(found[2]) <= 2
    assert max(map(len, found)) == NEW


ON_DEVICES = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
from jaxrl_llm import load_policy, sample
from jaxrl_llm.distributed import data_mesh, replicate
from jaxrl_llm.sampling import completion_ids

folder, prompts, names, new, devices = json.loads(sys.argv[1])
policy, params, _ = load_policy(folder)
mesh = data_mesh()
assert mesh.size == devices
settings = dict(group_size=2, max_new_tokens=new, stop_token_ids=[-1], temperature=2.0, prompt_ids=names, mesh=mesh)
params = replicate(params, mesh)
found = sample(policy, params, prompts, jax.random.key(0), **settings)
# Three prompts do not spread over four devices.
fewer = sample(policy, params, prompts[:3], jax.random.key(0), **settings | {"prompt_ids": names[:3]})
# Rows that are refilled, and find their prompts, which may be on another device, by an index.
refilled = sample(policy, params, prompts, jax.random.key(0), slots=3, **settings)
print("RESULT" + json.dumps([completion_ids(x) for x in (found, fewer, refilled)]))
"""


def same_on(devices: int, model: Any, expected: Any) -> None:
    """The same tokens as on one device."""
    settings = json.dumps([str(model.folder), PROMPTS, NAMES, NEW, devices])
    found, fewer, refilled = result_of(ON_DEVICES, settings, environment=on_devices(devices, quick=True))
    assert found == expected
    assert fewer == expected[:6]
    assert refilled == expected


def test_four_devices(model: Any, expected: Any) -> None:
    same_on(4, model, expected)


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("model", ["gemma2"], indirect=True)
def test_other_numbers_of_devices(devices: int, model: Any, expected: Any) -> None:
    same_on(devices, model, expected)


def test_log_probabilities_do_not_depend_on_the_batch(model: Any) -> None:
    """To rounding: programs of other shapes add up in another order."""
    key = jax.random.key(0)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "stop_token_ids": [-1], "temperature": 2.0, "group_size": 2}
    together = sample(model.policy, model.params, PROMPTS, key, prompt_ids=NAMES, **settings)
    alone = sample(model.policy, model.params, PROMPTS, key, prompt_ids=NAMES, slots=1, **settings)
    np.testing.assert_allclose(together.behaviour_logp, alone.behaviour_logp, atol=5e-5)
    np.testing.assert_allclose(together.entropy, alone.entropy, atol=5e-5)
