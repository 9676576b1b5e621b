"""Numbers of methods' cards beside their losses: edges, bounds, budgets, forms and defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of, outputs_of, prepared, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.guidance.zppo import at_most_parts
from jaxrl_llm.algorithms.prompts.gdro import bin_of
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.core.transform import RunFacts
from jaxrl_llm.plan import models
from jaxrl_llm.rewards.verifiers import one_answer
from jaxrl_llm.rewards.workers.loading import load
from jaxrl_llm.rollouts.agents.fork import reply_entropy, whole_paths
from jaxrl_llm.rollouts.guidance.repair import states
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.utils.errors import InputError


def test_gdro_moves_down_at_the_edge_less_the_hysteresis_itself() -> None:
    """Up needs accuracy >= edge + d, down accuracy <= edge - d: of ten bins, with d = 0.1, from the fifth and sixth."""
    accuracy, old = jnp.asarray([0.4, 0.41, 0.4, 0.7, 0.69]), jnp.asarray([5, 5, 6, 5, 5])
    assert bin_of(accuracy, old, 10, 0.1).tolist() == [4, 5, 4, 6, 5]
    assert bin_of(jnp.asarray([0.5, 0.49]), jnp.asarray([5, 5]), 10).tolist() == [5, 4], "without one the edge is above"


@pytest.mark.parametrize(
    ("text", "solution", "leaks"),
    [
        ("How many of 18 apples?", "8", False), ("8 of 18 apples", "8", True), ("1.8 litres", "8", False),
        ("8.5 litres", "8", False), ("It is 8.", "8", True), ("an ant", "an", True), ("banana", "an", False),
        ("x = 3/4, then", "3/4", True), ("-8 degrees", "8", True), ("8,000 men", "8", False),
    ],
)  # fmt: skip
def test_clpo_rejects_a_rewrite_that_states_the_solution_itself(text: str, solution: str, leaks: bool) -> None:
    assert states(text, solution) is leaks


def test_zppo_bounds_second_prompts_by_the_new_problems_alone() -> None:
    """With an empty buffer all 8 problems are new: 2 groups stay. Later 2 are replayed, and 1 stays."""
    bound = at_most_parts(0.25, 0.25, 0.5, 100)
    state = bound.init(RunFacts(prompts=20))
    problems = np.arange(8)
    solved = np.asarray([0.0, 0.25, 0.25, 0.25, 1, 1, 1, 1])
    info = {"part": np.repeat([0.0, 1.0], [8, 4]), "solved": np.concatenate([solved, solved[:4]])}
    group, prompt = np.arange(12), np.concatenate([problems, problems[:4]])
    batch = batch_of(np.ones((12, 1)), np.ones(12), np.zeros((12, 1)), group, prompt_id=prompt, info=info)
    state, first = bound.apply(state, batch)
    assert np.flatnonzero(~np.isnan(first.reward)).tolist() == [*range(8), 8, 9], "a quarter of 8, the hardest first"
    _, second = bound.apply(state, batch)
    assert np.flatnonzero(~np.isnan(second.reward)).tolist() == [*range(8), 8], "a quarter of 6 is 1"


def test_grpo_tcr_counts_the_tokens_of_an_episode_in_all_of_its_rows() -> None:
    """Two rows of 9216 tokens in the card's proportions: 18432 of 20480 with the buffer 4096 lose 0.5."""
    mask = np.ones((3, 9), bool)
    info = {"episode": np.array([0.0, 0, 1]), "first_turn": np.array([0.0, 1, 0])}
    batch = batch_of(mask, [1.0, 1.0, 1.0], -np.ones((3, 9)), info=info)
    ready = prepared(get("grpo_tcr", longest=20, overlong_buffer=4), batch)
    np.testing.assert_allclose(ready.reward, [0.5, 0.5, 1.0])


def test_ui_r1_is_its_worked_example_by_default() -> None:
    mask = np.arange(400) < np.array([100, 200, 150, 400])[:, None]
    ready = prepared(get("ui_r1"), batch_of(mask, [3.0, 3, 2, 0], -np.ones((4, 400))))
    np.testing.assert_allclose(ready.reward, [3.818182, 3.636364, 1.490909, -0.1], atol=1e-5)


def test_distances_have_the_success_of_their_method() -> None:
    completions, answers = ["it is 4", "it is 5"], ["4", "4"]
    given: dict[str, Any] = {"prompts": ["2+2"] * 2, "answer": answers}
    for spec, known in {"distances(number_match)": True, "distances(number_match, 1)": False}.items():
        found = load(spec).function(completions, **given)
        assert (found["distance"][1] is not None) is known
    with pytest.raises(InputError, match="no number above which"):
        load("distances(number_match, high)")


def test_nurl_begins_with_a_stage_of_grpo() -> None:
    for total, start in {None: 100, 60: 30}.items():
        method = get("nurl", total_steps=total)
        assert method.rollout is not None
        assert repr(method.rollout).endswith(f", 1, {start})")
    config = TrainConfig(algorithm="nurl", steps=8)
    assert ", 1, 4)" in repr(make_algorithm(config).rollout)


@pytest.mark.parametrize(
    ("completion", "form"),
    [
        ("<answer>4</answer>", 1.0), ("4", 0.0), ("<answer>4", 0.0), ("<answer>3</answer><answer>4</answer>", 0.0),
        ([{"role": "assistant", "content": "<answer>3</answer>"}, {"role": "tool", "content": "no <answer>"},
          {"role": "assistant", "content": "<answer>4</answer>"}], 0.5),
    ],
)  # fmt: skip
def test_the_form_of_grpo_roc_counts_blocks_by_turn(completion: Any, form: float) -> None:
    assert one_answer([completion]) == [form]
    assert "one_answer" in get("grpo_roc").needs


def test_dars_has_the_cap_of_its_rule() -> None:
    caps = {"equal": 32, "hard": 64}
    for rule, cap in caps.items():
        rollout = get("dars", rule=rule).rollout
        assert rollout is not None
        assert rollout.demands.max_episodes(8) == cap
    assert get("dars", rule="hard", most_samples=16).rollout.demands.max_episodes(8) == 16  # type: ignore[union-attr]


def test_brorl_replaces_its_reference_from_time_to_time() -> None:
    rule = get("brorl", reset_every=3).reference
    assert rule is not None
    assert rule.update is not None
    assert repr(rule) == repr(periodic_reset(3))
    moved = [float(rule.update(jnp.float32(0), jnp.float32(1), jnp.int32(t))) for t in (1, 2, 3, 4, 6)]
    assert moved == [0, 0, 1, 0, 1]


def test_dgpo_has_the_vocabulary_of_the_run_s_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        vocab_size = 1000

    monkeypatch.setattr(models, "config_of", lambda model: Model)
    name = "dgpo_distribution_guided"
    batch, _ = random_batch(1)
    batch = batch.with_info(reference_affinity=jnp.asarray(np.random.default_rng(0).random(batch.tokens.shape)))
    config = TrainConfig(algorithm=name, model="one")
    for run, size in [(config, 1000), (replace(config, hyperparameters={"vocabulary_size": 50.0}), 50)]:
        expected = advantages(get(name, vocabulary_size=size), batch)
        np.testing.assert_array_equal(advantages(make_algorithm(run), batch), expected)


def test_aepo_agentic_sums_the_entropies_of_a_reply() -> None:
    """The card's numbers: k = 16, beta = 0.5 and a difference of 1 give 7 or 10 whole paths."""
    twenty = np.full(20, np.log(1000) / 20)
    once, twice = (reply_entropy(share * twenty, 20, 1000, summed=True) for share in (1, 2))
    assert (once, twice) == (pytest.approx(1), pytest.approx(2))
    assert (whole_paths(16, once, twice, 0.5), whole_paths(16, twice, once, 0.5)) == (7, 10)
    assert "summed=True" in repr(get("aepo_agentic").rollout)


def test_degrpo_weighs_a_control_tag_of_several_tokens_as_one() -> None:
    """Tags of two tokens: the control term is their mean, and the answer what follows."""
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    logp, A = -0.5 * mask, np.array([[1.0], [-3.0]])
    batch = batch_of(mask, [1.0, 0.0], logp, reference_logp=logp, advantages=A * mask)
    method = get("degrpo", control_weight=0.5, control_tokens=2, kl_coefficient=0.0, entropy_coefficient=0.0)
    found = float(method.objective(outputs_of(logp), batch)[0])
    assert found == pytest.approx(-(0.5 * (1 - 3) / 2) - (1 - 3) / 2)
