"""Runs against a league: draws are from the policies that it keeps, and a resumed run goes on with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.algorithms import get
from jaxrl_llm.core.population import League
from jaxrl_llm.core.rollout import Demands, Rollout
from jaxrl_llm.distributed.chips import topology_of
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.plan.shapes import held_by, shapes_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.training.rollout import rollout_of, strategy_of
from jaxrl_llm.utils.errors import InputError


async def of_each(tools: Any, task: Any) -> Any:
    """Two samples of the policy, and one of each member."""
    own = [await tools.sample(task.prompt, number=number) for number in range(2)]
    others = [await tools.sample(task.prompt, number=2 + place, snapshot=place) for place in range(2)]
    return [one.with_info(place=float(place)) for one, place in zip([*own, *others], (-1, -1, 0, 1), strict=True)]


@pytest.mark.heavy
def test_draws_are_from_the_first_policy_and_from_the_snapshot(tmp_path: Path) -> None:
    taken: list[runs.Taken] = []
    rollout = Rollout(of_each, demands=Demands(variable_size=True, league=League(2, every=2)))
    config = runs.small_config(tmp_path, top_p=1.0, minibatches=1, eval_size=0)
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=3e-2))
    with runs.watched(taken):
        runs.train(config, algorithm=replace(get("grpo", kl_coefficient=0.0), rollout=rollout))
    policy, batch = load_policy(runs.MODEL)[0], taken[3].scored.batch
    place, action = np.asarray(batch.info["place"]), np.asarray(batch.action_mask)
    for member, params in ((-1, taken[3].params), (0, taken[0].params), (1, taken[2].params)):
        own = {name: x for name, x in params.items() if name != "league"}
        logp = np.asarray(jax.jit(policy_outputs, static_argnums=0)(policy, own, batch).logp)
        of_member = action & (place == member)[:, None]
        np.testing.assert_allclose(np.asarray(batch.behaviour_logp)[of_member], logp[of_member], atol=1e-4)
        others = action & (place != member)[:, None]
        assert np.abs(np.asarray(batch.behaviour_logp) - logp)[others].max() > 0.01, "the policies differ"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("method", "given", "game"),
    [
        ("shor_psro", {"size": 3, "every": 1}, "kuhn"),
        ("conscientia_iterative_kto", {"size": 3, "round_updates": 1}, "advice"),
    ],
)
def test_a_resumed_run_goes_on_with_its_league(tmp_path: Path, method: str, given: dict[str, Any], game: str) -> None:
    def config(name: str, **changes: Any) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        return runs.small_config(
            tmp_path / name, algorithm=method, hyperparameters=given, top_p=1.0, eval_size=0,
            environment=f"jaxrl_llm.environments.games:{game}", rewards=("environment",), players=2, turns=2,
            prompt_format="plain", max_new_tokens=4, **changes,
        )  # fmt: skip

    runs.train(config("a"))
    runs.train(config("b", steps=2))
    runs.train(config("b"), resume=True, accept_changed_inputs=True)
    runs.assert_equal_trees(runs.final_params(tmp_path / "a" / "run"), runs.final_params(tmp_path / "b" / "run"))
    lines = [runs.reproducible(tmp_path / name / "run" / "metrics.jsonl") for name in ("a", "b")]
    assert lines[0] == lines[1]
    partial = replace(config("a"), oversample=2.0)
    with pytest.raises(InputError, match="against the league of one step, but oversample"):
        strategy_of(partial, make_algorithm(partial))


def test_a_plan_counts_the_policies_and_engines_of_a_league() -> None:
    settings: dict[str, Any] = {
        "model": str(runs.MODEL), "algorithm": "shor_psro", "environment": "jaxrl_llm.environments.games:kuhn",
        "rewards": ("environment",), "players": 2, "prompts_per_step": 4, "group_size": 4,
    }  # fmt: skip
    config = TrainConfig(**settings, hyperparameters={"size": 3})
    alone = replace(config, algorithm="dr_grpo", hyperparameters={})
    held, without = (held_by(shapes_of(one, topology_of("cpu:1"))) for one in (config, alone))
    assert sum(held.values()) == sum(without.values()) + 3 * without["parameters"]
    assert rollout_of(config, make_algorithm(config)).demands.engines == 4
