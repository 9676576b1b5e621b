"""Training adapters: the model is frozen, has no gradients or moments, and is the reference; runs resume."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_runs as runs
from compiling import optimised
from heavy import few

from jaxrl_llm.algorithms import grpo
from jaxrl_llm.cli.program import main
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import gradient, update
from jaxrl_llm.models import ModelConfig, Policy, init_params, load_policy, lora
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.models.critic import Critic, init_critic
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.objectives.values import value_loss
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.setup import set_up
from jaxrl_llm.utils.errors import InputError

SMALL = ModelConfig(
    family="llama", vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=4, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.5,
)  # fmt: skip
POLICY = Policy(SMALL, remat=False)
GRPO = grpo()
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, weight_decay=0.1), 4)
KEY = jax.random.key(3)


def batch_of(rows: int = 4, length: int = 8) -> Trajectories:
    """Rows of which all but the first two tokens were chosen."""
    random = np.random.default_rng(0)
    action = jnp.broadcast_to(jnp.arange(length) >= 2, (rows, length))
    zeros, each = jnp.zeros((rows, length), jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    return Trajectories(
        tokens=jnp.asarray(random.integers(0, 11, (rows, length)), jnp.int32), token_mask=action | True,
        action_mask=action, behaviour_logp=jnp.where(action, -2.4, 0.0), policy_step=zeros,
        turn=jnp.where(action, 0, -1), group=each // 2, prompt_id=each // 2, truncated=each < 0,
        temperature=jnp.ones(rows), reward=each / rows, reference_logp=jnp.where(action, -2.5, 0.0),
        advantages=jnp.asarray(random.normal(size=(rows, 1)) * np.ones(length), jnp.float32),
    )  # fmt: skip


def parts(rank: int = 2) -> tuple[Any, Any]:
    """The frozen parameters, and adapters with a non-zero output."""
    base = init_params(jax.random.key(0), SMALL, scale=0.5)
    adapters = lora.init(KEY, SMALL, rank)
    return lora.scaled(base, rank, 4.0), jax.tree.map(lambda x: x + 0.1, adapters)


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.heavy
def test_an_update_moves_the_adapters_alone_and_donates_them_alone() -> None:
    frozen, adapters = parts()
    before, old = bits(frozen), bits(adapters)
    expected, _ = jax.jit(gradient, static_argnums=(0, 1))(POLICY, GRPO.objective, adapters, batch_of(), frozen=frozen)
    by_hand = OPTIMIZER.update(expected, OPTIMIZER.init(adapters), adapters)[0]
    by_hand = optax.apply_updates(adapters, by_hand)
    state, _ = update(POLICY, GRPO.objective, OPTIMIZER, init_state(adapters, OPTIMIZER), batch_of(), frozen=frozen)
    assert bits(frozen) == before
    assert all(a != b for a, b in zip(bits(state.params), old, strict=True))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(by_hand), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert all(x.is_deleted() for x in jax.tree.leaves(adapters))


@pytest.mark.heavy
@pytest.mark.parametrize("micro_batches", few([1, 2], [2]))
def test_the_gradient_is_the_adapters_share_of_that_of_all(micro_batches: int) -> None:
    frozen, adapters = parts()
    grad_fn, batch = jax.jit(gradient, static_argnums=(0, 1)), batch_of()
    slices = plan_steps(batch, micro_batches=micro_batches).slices
    found, metrics = grad_fn(POLICY, GRPO.objective, adapters, batch, slices, frozen)
    whole, same = grad_fn(POLICY, GRPO.objective, combine(frozen, adapters), batch, slices)
    assert jax.tree.structure(found) == jax.tree.structure(adapters)
    for name, g in found["layers"].items():
        assert float(jnp.abs(g).max()) > 1e-5
        np.testing.assert_allclose(g, whole["layers"][name], rtol=1e-4, atol=1e-7)
    assert float(metrics["loss"]) == pytest.approx(float(same["loss"]), rel=1e-5)


@pytest.mark.heavy
def test_frozen_and_learning_parts_may_be_any() -> None:
    """Whatever learns: the final norm and one kind of weight, with a loss that needs the batch at the parameters."""
    base = init_params(jax.random.key(0), SMALL, scale=0.5)
    learning = {"final_norm": base["final_norm"], "layers": {"up": base["layers"]["up"]}}
    frozen = {"embed": base["embed"], "layers": {k: w for k, w in base["layers"].items() if k != "up"}}
    found, _ = jax.jit(gradient, static_argnums=(0, 1))(POLICY, GRPO.objective, learning, batch_of(), frozen=frozen)
    whole, _ = jax.jit(gradient, static_argnums=(0, 1))(POLICY, GRPO.objective, base, batch_of())
    np.testing.assert_allclose(found["final_norm"], whole["final_norm"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found["layers"]["up"], whole["layers"]["up"], rtol=1e-4, atol=1e-7)


def memory_of_update(config: ModelConfig, rank: int, length: int) -> tuple[Any, Any]:
    """What the compiled updates of all parameters and of adapters take, by shapes alone; bytes."""
    policy, optimizer = Policy(config, remat=True), make_optimizer(OptimizerConfig(), 10)
    params = jax.eval_shape(partial(init_params, config=config), KEY)
    frozen = jax.eval_shape(lambda p: lora.scaled(p, rank, 32.0), params)
    adapters = jax.eval_shape(partial(lora.init, config=config, rank=rank), KEY)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(2, length))
    found = []
    for learning, rest in ((params, None), (adapters, frozen)):
        state = jax.eval_shape(partial(init_state, optimizer=optimizer), learning)
        compiled = update.lower(policy, GRPO.objective, optimizer, state, batch, frozen=rest).compile()
        found.append(compiled.memory_analysis())
    return found[0], found[1]


SMOLLM2 = ModelConfig(
    family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, norm_epsilon=1e-5, tie_embeddings=True, ropes=(Rope(100000.0),),
    rope_of_layer=(0,) * 30, window_of_layer=(0,) * 30, query_scale=0.125, max_positions=8192,
)  # fmt: skip


@optimised
@pytest.mark.parametrize(("config", "rank", "length"), [(SMALL, 2, 8), (SMOLLM2, 16, 16)], ids=["tiny", "smollm2"])
def test_no_gradient_and_no_moment_of_a_frozen_weight_is_allocated(config: ModelConfig, rank: int, length: int) -> None:
    """The update gives back adapters and their moments alone; and its temporaries have no room for base gradients."""
    full, thin = memory_of_update(config, rank, length)
    base = bytes_of(jax.eval_shape(partial(init_params, config=config), KEY))
    small = bytes_of(jax.eval_shape(partial(lora.init, config=config, rank=rank), KEY))
    slack = 2000 + 8 * config.num_layers  # counters, metrics, the batch, the factors
    assert abs(full.output_size_in_bytes - 3 * base) < slack
    assert abs(thin.output_size_in_bytes - 3 * small) < slack
    inputs = bytes_of(batch_of(2, length))
    assert abs(full.argument_size_in_bytes - 3 * base - inputs) < slack
    assert abs(thin.argument_size_in_bytes - base - 3 * small - inputs) < slack
    if config is SMOLLM2:
        assert full.temp_size_in_bytes > base, "there are gradients of all weights"
        assert thin.temp_size_in_bytes < base / 5


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    """A run with adapters and a reference policy, for the KL penalty of grpo."""
    settings = {"lora_rank": 2, "lora_alpha": 4.0, "optimizer": OptimizerConfig(learning_rate=0.02), "minibatches": 1}
    return runs.small_config(folder, **settings | {"top_p": 1.0} | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; its folder is shared."""
    config = config_of(tmp_path_factory.mktemp("lora"), hyperparameters={"kl_coefficient": 0.05})
    runs.train(config)
    return Path(config.output)


def test_a_run_learns_and_sampler_and_trainer_agree(finished: Path) -> None:
    lines = runs.lines_of(finished / "metrics.jsonl")
    assert len(lines) == 4
    assert all(line["mismatch"] < 1e-5 for line in lines), [line["mismatch"] for line in lines]
    # The reference is the model without adapters: there is no distance before the first step, and some after it.
    distances = [next(v for k, v in line.items() if k.startswith("kl") and "behaviour" not in k) for line in lines]
    assert distances[-1] > 1e-4, lines[-1]


def test_checkpoints_hold_adapters_and_their_moments_and_no_weight_of_the_model(finished: Path) -> None:
    policy, params, _ = load_policy(runs.MODEL)
    shapes = jax.eval_shape(lambda: lora.init(KEY, policy.config, 2))
    restored = Checkpoints(finished / "checkpoints").latest(shapes)
    assert restored is not None
    assert restored.params.keys() == {"layers"}
    assert any(np.any(x) for name, x in restored.params["layers"].items() if name.endswith("_out"))
    sums = runs.lines_of(finished / "checkpoints/4/meta/metadata")[0]["checksums"]
    assert sum("lora_" in name for name in sums) == 14 * 3, "each adapter and its two moments"
    assert not any(f"'{name}'" in key for key in sums for name in ("embed", "query", "gate", "final_norm"))
    arrays = (finished / "checkpoints" / "4").rglob("*")
    assert sum(file.stat().st_size for file in arrays if file.is_file()) < bytes_of(params)


def test_a_run_resumes_bit_by_bit(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    again = tmp_path / "again"
    shutil.copytree(finished, again)
    shutil.rmtree(again / "checkpoints" / "4")
    loop.resume(str(again))
    sums = [runs.lines_of(run / "checkpoints/4/meta/metadata")[0]["checksums"] for run in (finished, again)]
    for one in sums:
        del one["meta"]  # it holds seconds
    assert sums[0] == sums[1]
    assert runs.reproducible(finished / "metrics.jsonl") == runs.reproducible(again / "metrics.jsonl")
    assert (finished / "completions.jsonl").read_bytes() == (again / "completions.jsonl").read_bytes()


def test_a_loaded_run_is_what_was_evaluated_and_its_export_is_merged(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, policy, params, _ = load_run(str(finished))
    _, base, _ = load_policy(runs.MODEL)
    assert "lora_scale" in params["layers"]
    for name, w in base["layers"].items():
        assert np.asarray(params["layers"][name]).tobytes() == np.asarray(w).tobytes()
    np.testing.assert_array_equal(params["layers"]["lora_scale"], [2.0, 2.0])
    tokens = jnp.arange(12).reshape(1, 12)
    expected = np.asarray(policy.logits(params, tokens))
    assert np.abs(expected - policy.logits(base, tokens)).max() > 0.05
    assert main(["export", str(finished), str(tmp_path / "model")]) == 0
    exported, merged, _ = load_policy(tmp_path / "model")
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    np.testing.assert_allclose(exported.logits(merged, tokens), expected, atol=1e-4 * np.abs(expected).max())
    told = json.loads((finished / "summary.json").read_text())["eval_after"]["reward"]
    assert main(["eval", str(finished), "--output", str(tmp_path / "figures.json")]) == 0
    assert json.loads((tmp_path / "figures.json").read_text())["reward"] == pytest.approx(told, abs=1e-9)
    capsys.readouterr()


def test_the_reference_is_the_frozen_weights_and_not_a_copy(tmp_path: Path) -> None:
    found, state, _ = set_up(config_of(tmp_path, lora_targets=("query", "down")))
    assert found.reference is found.frozen
    assert {name for name in state.params["layers"]} == {
        f"{name}_lora_{end}" for name in ("query", "down") for end in ("in", "out")
    }
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    plain, whole, _ = set_up(
        dataclasses.replace(
            config_of(tmp_path), lora_rank=0, lora_alpha=TrainConfig.lora_alpha, output=str(tmp_path / "other")
        )
    )
    assert plain.frozen is None
    assert plain.reference is not None
    ours = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(whole.params)}
    assert not ours & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(plain.reference)}


@pytest.mark.heavy
def test_a_critic_learns_beside_the_adapters(tmp_path: Path) -> None:
    """With bfloat16 weights the trained parameters are float32; a warm-up updates only the critic."""
    config = config_of(tmp_path, algorithm="ppo", critic="shared", param_dtype="bfloat16")
    found, state, _ = set_up(config)
    assert state.params.keys() == {"layers", "critic"}
    assert found.frozen is not None
    assert "critic" not in found.frozen
    assert {x.dtype for name, x in found.frozen["layers"].items() if name != "lora_scale"} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}

    policy = dataclasses.replace(POLICY, critic=Critic("shared"))
    frozen, adapters = parts()
    learning = {**adapters, "critic": init_critic(KEY, policy, combine(frozen, adapters), policy.critic)["critic"]}
    before, optimizer = bits(learning["layers"]), make_optimizer(OptimizerConfig(critic_learning_rate=0.1), 4)
    batch = batch_of().replace(returns=jnp.ones((4, 8)), values=jnp.zeros((4, 8)))
    after, _ = update(
        policy, value_loss(), optimizer, init_state(learning, optimizer), batch, only="critic", frozen=frozen
    )
    assert bits(after.params["layers"]) == before
    assert np.all(after.params["critic"]["head"]["bias"] > 0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_rank": -1}, "lora_rank is -1, but must be at least 0"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "lora_alpha is 0.0, but must be at least 1e-30"),
        ({"lora_rank": 4, "lora_targets": ("quer",)}, "unknown entry of lora_targets 'quer': did you mean 'query'"),
        ({"lora_targets": ("query",)}, "lora_targets are given, but lora_rank is 0"),
        ({"lora_rank": 4, "reference_memory": "host"}, "the reference policy is the frozen model"),
        ({"reference_memory": "tape"}, "unknown reference_memory 'tape'"),
        ({"optimizer": OptimizerConfig(moments="int8")}, "unknown optimizer.moments 'int8'"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        TrainConfig(**changes)


def test_the_command_line_has_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, model="nowhere/at/all", lora_targets=("query", "key"), reference_memory="device")
    assert main(["train", *runs.as_arguments(config), "--optimizer.moments", "factored"]) == 2
    assert "nowhere/at/all" in capsys.readouterr().err, "all settings were taken, and the model is looked for"
    assert main(["train", "--lora-rank", "2", "--lora-targets", "kwery"]) == 2
    assert "--lora-targets: invalid choice 'kwery': did you mean 'key'?" in capsys.readouterr().err
