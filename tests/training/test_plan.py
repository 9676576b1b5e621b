"""`jaxrl plan`: shapes and bytes against arithmetic, the search, and programs that are those of a run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import tiny_runs as runs
from compiling import with_devices
from tpu_environment import tpu_environment

from jaxrl_llm.cli.program import main
from jaxrl_llm.distributed.chips import GIB, TPUS, Chip, Topology, simulated, topology_of
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan import table
from jaxrl_llm.plan.estimate import held_bytes
from jaxrl_llm.plan.full_batch import as_trained, full_batch
from jaxrl_llm.plan.models import config_of, depths
from jaxrl_llm.plan.plan import Plan, estimated_plan, learning_programs
from jaxrl_llm.plan.sampling import abstract_mesh
from jaxrl_llm.plan.search import SearchResult, applied, candidates, train_options
from jaxrl_llm.plan.shapes import held_by, shapes_of, state_shapes
from jaxrl_llm.plan.table import sharding_table
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.utils.errors import InputError

TESTS = Path(__file__).parents[1]
CONFIGS = TESTS.parent / "experiments" / "plan"


def tiny(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": str(runs.MODEL), "prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 10, "max_new_tokens": 6,
        "eval_size": 0, "rewards": ("number_match", "exact_match*0.5", "format_match(a*b)"),
    }  # fmt: skip
    return TrainConfig(**settings | changes)


def here() -> Topology:
    return topology_of("cpu:1")


def numbers(model: ModelConfig) -> int:
    """Parameters of a Llama with tied embeddings, by hand."""
    D, F, h = model.hidden_size, model.intermediate_size, model.head_dim
    layer = 2 * D * h * (model.num_heads + model.num_kv_heads) + 3 * D * F + 2 * D
    return model.vocab_size * D + model.num_layers * layer + D


@pytest.mark.parametrize(
    ("name", "given", "times"),
    [("spark_co_evolving", {}, 3), ("masa", {"predictions": 6}, 3), ("dars", {"most_samples": 8}, 2), ("grpo", {}, 1)],
)
def test_a_plan_has_room_for_the_rows_that_a_rollout_may_add(name: str, given: dict[str, Any], times: int) -> None:
    """As much as groups of so many samples would need; predictions are 6 beside 4, in whole groups 12."""
    config, larger = tiny(algorithm=name, hyperparameters=given), tiny(algorithm=name, group_size=4 * times)
    assert len(full_batch(config, make_algorithm(config), 64).tokens) == 16 * times
    assert as_trained(config, make_algorithm(config)).group_size == 4 * times
    found = estimated_plan(config, here())
    plain = tiny(algorithm="grpo", hyperparameters={"kl_coefficient": 0.0}, group_size=larger.group_size)
    expected = estimated_plan(plain, here())
    assert found.phases["update"] == expected.phases["update"]
    assert found.costs["update"].flops == expected.costs["update"].flops
    assert (
        found.phases["sampling"] == estimated_plan(dataclasses.replace(plain, group_size=4), here()).phases["sampling"]
    )


def test_a_full_batch_is_a_rollouts() -> None:
    config = tiny(top_p=0.9)
    batch = full_batch(config, make_algorithm(config), 64)
    assert batch.tokens.shape == (16, 16)
    assert batch.action_mask.sum() == 16 * 6
    assert batch.token_mask.sum() == 16 * 16
    assert (batch.tokens[:4, :10] == batch.tokens[0, :10]).all()
    assert not (batch.tokens[4, :10] == batch.tokens[0, :10]).all()
    assert set(batch.rewards) == {"number_match", "exact_match", "format_match"}
    assert batch.support_floor is not None
    assert batch.untruncated_logp is not None
    assert full_batch(tiny(), make_algorithm(tiny()), 64).support_floor is None
    assert set(full_batch(tiny(rewards=("folder/file.py:even*2",)), make_algorithm(tiny()), 64).rewards) == {"even"}


def test_bytes_are_those_of_arithmetic() -> None:
    config = tiny(algorithm="grpo")
    found, count = estimated_plan(config, here()), numbers(config_of(config.model))
    assert found.held["parameters"] == found.held["reference"] == 4 * count
    assert found.held["optimiser"] == 8 * count + 4 * 3  # counters of Adam, of the schedule, and of steps
    both = tiny(algorithm="remix", epochs=2, epochs_until=50)  # the reference, and the weights before the last update
    assert estimated_plan(both, here()).held["reference"] == held_by(shapes_of(both, here()))["reference"] == 8 * count
    half = dataclasses.replace(config, param_dtype="bfloat16", optimizer=OptimizerConfig(moments="bfloat16"))
    found = estimated_plan(half, here())
    assert found.held["parameters"] == 2 * count
    assert found.held["optimiser"] == (2 + 4 + 4) * count + 4 * 3


def test_an_algorithm_in_a_file_is_planned(tmp_path: Path) -> None:
    """With a reference policy where its hyper-parameters ask for one."""
    program = "def mine(kl: float = 0.0):\n    return get('grpo', kl_coefficient=kl)\n"
    (tmp_path / "own.py").write_text(f"from jaxrl_llm.algorithms import get\n\n{program}")
    config = tiny(algorithm=f"{tmp_path}/own.py:mine")
    assert not estimated_plan(config, here()).held.get("reference")
    anchored = dataclasses.replace(config, hyperparameters={"kl": 0.1})
    assert estimated_plan(anchored, here()).held == estimated_plan(tiny(), here()).held


def test_a_second_policy_that_samples_has_weights_and_caches_of_its_own() -> None:
    """pav needs no log-probabilities of its prover, but an engine; spo_segment needs only those of its reference."""
    one, two = (
        estimated_plan(tiny(algorithm=name, dtype="bfloat16"), here()) for name in ("spo_segment", "pav")
    )  # fmt: skip
    assert two.held["reference"] == one.held["reference"] > 0
    for what in ("sampler's weights", "caches"):
        assert two.phases["sampling"][what] == 2 * one.phases["sampling"][what] > 0


CASES = {"qwen3-8b": 8_190_735_360, "llama-3.1-70b": 70_553_706_496, "qwen3-30b-a3b": 30_532_122_624,
         "smollm2-135m": 134_515_008}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parameters_of_public_models(name: str) -> None:
    """As their authors state them; and in shards, without what does not divide."""
    config = TrainConfig(model=str(CONFIGS / f"{name}.json"), param_dtype="bfloat16")
    model = config_of(config.model)
    state = state_shapes(config, model, make_algorithm(config))
    assert held_bytes(state, abstract_mesh({"data": 1})).parameters == 2 * CASES[name]
    split = held_bytes(state, abstract_mesh({"data": 1, "fsdp": 4}))
    assert split.parameters == 2 * (CASES[name] - model.hidden_size) // 4 + 2 * model.hidden_size  # the last norm
    assert split.learning * 2 == split.parameters


def test_shardings_hold_every_array() -> None:
    config = tiny()
    shapes = shapes_of(config, here())
    rows = {row.name: row for row in sharding_table(shapes)}
    count = numbers(shapes.policy.config)
    assert sum(row.bytes for name, row in rows.items() if name.startswith("parameters/")) == 4 * count
    assert rows["parameters/embed"].shape == (shapes.policy.config.vocab_size, shapes.policy.config.hidden_size)
    assert not any(name.startswith("sampler/") for name in rows)  # on one CPU it reads the parameters
    text = table.shardings_text(list(rows.values()))
    assert "| parameters/embed | float32[" in text
    assert f"{sum(row.bytes for row in rows.values()):,} |" in text.splitlines()[-1]


def test_depths_hold_every_kind_of_layer() -> None:
    model = config_of(str(runs.MODEL))
    assert depths(model) == (2, 4)
    mixed = dataclasses.replace(
        model, num_layers=12, rope_of_layer=(0,) * 12, window_of_layer=(512, 512, 512, 512, 512, 0) * 2
    )
    assert depths(mixed) == (6, 12)
    assert mixed.first(6).window_of_layer == (512,) * 5 + (0,)


class TestSearch:
    FOUR = Topology(Chip("toy", 3.0, 100, 800, 100), [SimpleNamespace(process_index=0)] * 4, "tpu")

    def possible(self, memory: float, **changes: Any) -> list[Any]:
        config = TrainConfig(
            model=str(CONFIGS / "smollm2-135m.json"),
            prompts_per_step=8,
            group_size=8,
            max_new_tokens=256,
            eval_size=0,
            **changes,
        )
        topology = self.FOUR._replace(chip=self.FOUR.chip._replace(memory=memory))
        found = candidates(config, config_of(config.model), make_algorithm(config), topology)
        return [one for _, one in zip(range(4), found, strict=False)]

    def test_what_costs_nothing_comes_first(self) -> None:
        best = self.possible(8.0)[0]
        assert set(best.changes) <= {"mesh", "micro_batches"}
        assert best.config.dtype == "float32"

    def test_less_memory_costs_more_than_a_mesh(self) -> None:
        best = self.possible(1.1)[0]
        assert set(best.changes) - {"mesh", "micro_batches"}
        assert not best.config.lora_rank
        assert best.config.optimizer.moments == "float32"

    @pytest.mark.heavy
    def test_little_memory_costs_the_method(self) -> None:
        best = self.possible(0.75)[0]
        assert best.config.lora_rank or best.config.optimizer.moments == "factored"

    def test_micro_batches_divide(self) -> None:
        for one in self.possible(2.0, minibatches=2):
            shards = math.prod(int(part.split("=")[1]) for part in one.config.mesh.split(",") if "tensor" not in part)
            assert 64 % (2 * one.config.micro_batches * shards) == 0
            assert 8 % (2 * one.config.micro_batches) == 0

    def test_changes_as_options(self) -> None:
        changes = {"mesh": "fsdp=4", "remat": True, "keep_projections": False, "optimizer.moments": "bfloat16"}
        assert train_options(changes) == "--mesh fsdp=4 --remat --no-keep-projections --optimizer.moments bfloat16"
        config = applied(TrainConfig(remat=False), changes)
        assert (config.mesh, config.remat, config.optimizer.moments) == ("fsdp=4", True, "bfloat16")


class TestTables:
    def found(self, **changes: Any) -> tuple[Plan, SearchResult]:
        plan = estimated_plan(tiny(**changes), here()._replace(chip=TPUS["v5e"]))
        return plan, SearchResult(plan, "", None, {})

    def test_text_and_json_say_the_same(self) -> None:
        plan, found = self.found()
        said, text = table.as_json(found), table.as_text(found, "jaxrl train --model x")
        assert said["fits"]
        assert said["plan"]["peak"] == plan.peak == max(said["plan"]["peaks"].values())
        assert said["plan"]["usable"] < 16 * GIB
        json.dumps(said)
        assert "fits: " in text
        assert text.endswith("jaxrl train --model x")
        assert f"{plan.new_tokens / plan.iteration:,.0f} new tokens/s" in text
        assert plan.chip_hours == pytest.approx(plan.iteration * 100 / 3600)

    def test_what_does_not_fit_names_the_changes(self) -> None:
        plan, _ = self.found()
        large = plan._replace(held=plan.held | {"parameters": 20 * GIB})
        text = table.as_text(SearchResult(large, "", plan, {"mesh": "fsdp=4"}), "jaxrl train")
        assert "does not fit: 20." in text
        assert text.endswith("jaxrl train --mesh fsdp=4")
        text = table.as_text(SearchResult(None, "no such mesh", None, {}), "jaxrl train")
        assert "no such mesh" in text
        assert text.endswith("take more chips.")

    def test_the_picture_is_written(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        table.write_picture(table.plan_json(self.found()[0]), tmp_path / "plan.png")
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the devices"),
        (["--topology", "v9:4x4"], "v9"),
        (["--topology", "h100"], "h100:8"),
        (["--topology", "v5e"], "must be a slice such as v5e:4x4"),
        (["--topology", "v5e:2x"], "must be a slice such as v5e:4x4"),
        (["--topology", "cpu:1", "--picture", "plan.doc"], "must end in .svg, .png"),
        (["--topology", "h100:8", "--slices", "two"], "must be a number"),
        (["--topology", "cpu:1", "--slices", "2"], "only TPUs have slices"),
        (["--topology", "cpu:1", "--model", "nowhere/at/all"], "is not there"),
        (["--topology", "cpu:1", "--picture", "no/such/folder/plan.png"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", list(sys.path)):
        assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("tpu", "bfloat16"), ("gpu", "bfloat16")])
def test_the_dtype_that_a_plan_leaves_to_the_devices(
    platform: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[TrainConfig] = []

    def split(config: TrainConfig, devices: Topology) -> None:
        asked.append(config)
        raise InputError("no more is wanted")

    monkeypatch.setattr("jaxrl_llm.cli.plan._prepare", lambda topology: None)
    monkeypatch.setattr("jaxrl_llm.distributed.chips.topology_of", lambda *given: SimpleNamespace(platform=platform))
    monkeypatch.setattr("jaxrl_llm.plan.split.splits", split)
    given = ["--topology", "any", "--dtype", "auto", "--max-staleness", "1", "--model", str(runs.MODEL)]
    assert main(["plan", *given]) == 2
    assert "no more is wanted" in capsys.readouterr().err
    assert [config.dtype for config in asked] == [dtype]


def test_topologies() -> None:
    assert [simulated(name) for name in ("v5e:4x4", "h100:8", "cpu:2")] == [0, 8, 2]
    with pytest.raises(InputError, match="names no number"):
        simulated("b200:many")


# A run of one step on four devices, whose programs JAX itself writes to a folder; then those of its plan.
RUN = """
import sys
from pathlib import Path
import jax, numpy as np
import tiny_runs as runs
from jaxrl_llm.distributed.chips import topology_of
from jaxrl_llm.learner.setup import compile_learning
from jaxrl_llm.training import loop
from jaxrl_llm.plan.full_batch import full_batch
from jaxrl_llm.plan.shapes import shapes_of
from jaxrl_llm.plan.sampling_programs import compile_sampling

folder = Path(sys.argv[1])
config = runs.small_config(
    folder, steps=1, eval_size=0, max_prompt_tokens=10, mesh="fsdp=4", dtype="bfloat16",
    sampling_mesh=sys.argv[2], slots=int(sys.argv[3]),
)
jax.config.update("jax_include_debug_info_in_dumps", False)
jax.config.update("jax_dump_ir_to", str(folder / "programs"))
loop.train(config)
jax.config.update("jax_dump_ir_to", "")
ran = {path.read_text().strip() for path in (folder / "programs").glob("*.mlir")}
shapes = shapes_of(config, topology_of("cpu:4"))
learner, engine = shapes.learner, config.sampling
batch = full_batch(config, learner.algorithm, learner.policy.config.vocab_size)
programs = compile_learning(learner, shapes.state.params, batch)
programs += compile_sampling(
    shapes.policy, shapes.params, shapes.sampler, shapes.size, cache_dtype=engine.cache_dtype,
    filtered=engine.truncating,
).values()
print([program.name for program in programs], flush=True)
for program in programs:
    assert program.lowered.as_text().strip() in ran, program.name
print("the same")
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS), str(TESTS / "training"), environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.mark.heavy
@pytest.mark.parametrize(("sampled", "slots"), [("", 8), ("data=2,tensor=2", 16)])
def test_the_programs_of_a_plan_are_those_of_the_run(sampled: str, slots: int, tmp_path: Path) -> None:
    """Sampling, preparation and update, in bfloat16 and sharded; one completion at least is of full length."""
    done = run(RUN, str(tmp_path), sampled, str(slots), XLA_FLAGS=with_devices(4))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.endswith("the same\n")
    assert "decode" in done.stdout
    assert "update" in done.stdout


@pytest.mark.heavy
def test_a_plan_for_eight_gpus() -> None:
    """There is no compiler: bytes are those of arithmetic, and operations are counted on the lowered programs."""
    code = "import sys; from jaxrl_llm.cli.program import main; sys.exit(main(sys.argv[1:]))"
    options = ["plan", "--topology", "h100:8", "--json", "--model", str(runs.MODEL), "--mesh", "fsdp=8"]
    done = run(code, *options, "--prompts-per-step", "16", "--max-prompt-tokens", "64", "--max-new-tokens", "64")
    assert done.returncode == 0, done.stderr[-3000:]
    plan, config = json.loads(done.stdout)["plan"], TrainConfig(model=str(runs.MODEL))
    assert (plan["compiled"], plan["chips"], plan["fits"]) == (False, 8, True)
    state = state_shapes(config, config_of(config.model), make_algorithm(config))
    by_hand = held_bytes(state, abstract_mesh({"data": 1, "fsdp": 8}))
    assert plan["held"]["parameters"] == by_hand.parameters
    assert plan["held"]["optimiser"] == by_hand.optimiser
    # The update makes a pass forward, one again for the backward pass, and one of twice the operations.
    operations = {name: plan["programs"][name]["flops"] for name in ("outputs_of", "update")}
    assert operations["update"] == pytest.approx(4 * operations["outputs_of"], rel=0.1)


@pytest.mark.heavy
@pytest.mark.parametrize("slices", [1, 2])
def test_a_plan_for_slices_of_four_v5e_chips(slices: int, tmp_path: Path) -> None:
    code = "import sys; from jaxrl_llm.cli.program import main; sys.exit(main(sys.argv[1:]))"
    options = [
        "plan", "--topology", "v5e:2x2", "--slices", str(slices), "--json", "--model", str(runs.MODEL),
        "--mesh", f"data={slices},fsdp=4", "--dtype", "bfloat16", "--eval-size", "0", "--prompts-per-step", "4",
        "--max-prompt-tokens", "16", "--max-new-tokens", "16", "--picture", str(tmp_path / "plan.svg"),
    ]  # fmt: skip
    done = run(code, *options, **tpu_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    plan, model = found["plan"], config_of(str(runs.MODEL))
    assert found["fits"]
    assert plan["compiled"]
    assert plan["chips"] == 4 * slices
    assert set(plan["programs"]) == {"convert", "prefill", "begin", "decode", "outputs_of", "prepare", "update"}
    by_hand = held_bytes(
        state_shapes(TrainConfig(model=str(runs.MODEL)), model, make_algorithm(TrainConfig())),
        abstract_mesh({"data": 1, "fsdp": 4}),
    )
    assert plan["held"]["parameters"] == by_hand.parameters
    assert plan["held"]["optimiser"] == by_hand.optimiser
    update = plan["programs"]["update"]
    assert update["collectives"]["all-gather"] > 0
    assert any(kind.endswith("between slices") for kind in update["collectives"]) == (slices > 1)
    assert update["flops"] > 0
    assert update["cycles"] > 0
    assert update["given"] >= plan["held"]["parameters"] + plan["held"]["optimiser"]
    assert np.isclose(sum(max(s[k] for k in ("compute", "memory", "links", "compiler", "scheduled"))
                          for s in plan["seconds"].values()), plan["iteration_seconds"])  # fmt: skip
    assert (tmp_path / "plan.svg").exists()


def test_teachers_are_counted() -> None:
    """Their weights are there all the time, and each makes a forward pass beside the policy's own."""
    folder = runs.MODEL.parent
    one = {"algorithm": "gkd", "hyperparameters": {"top_k": 4}, "teacher": str(folder / "gemma2")}
    two = {**one, "teacher": f"a={folder / 'gemma2'},b={folder / 'qwen3'}"}
    sizes = [4 * sum(x.size for x in jax.tree.leaves(load_policy(folder / name)[1])) for name in ("gemma2", "qwen3")]
    for changes, held in ((one, sizes[0]), (two, sum(sizes))):
        config = tiny(**changes)
        plan, programs = estimated_plan(config, here()), learning_programs(shapes_of(config, here()), "cpu")
        assert plan.held["teachers"] == held_by(shapes_of(config, here()))["teachers"] == held
        passes = [[name for name in found if name.startswith("outputs_of")] for found in (plan.costs, programs)]
        assert passes[0] == passes[1] == ["outputs_of", "outputs_of 2", "outputs_of 3"][: len(passes[0])]
        assert len(passes[0]) == (2 if changes is one else 3)
    assert estimated_plan(tiny(), here()).held["teachers"] == 0
    with pytest.raises(InputError, match="is a server: plan grpo"):
        estimated_plan(
            tiny(**{**one, "teacher": "http://host/v1#m", "hyperparameters": {"top_k": 4, "beta": 0}}), here()
        )


def test_reward_models_are_counted() -> None:
    """Their weights are on the devices all the time, sharded as the policy's."""
    model = str(Path(__file__).parents[1] / "reward_models" / "gemma2_1")
    config = tiny(rewards=(f"model:{model}*0.5", "exact_match"))
    plan, count = estimated_plan(config, here()), 31_616  # as transformers counts them
    assert plan.held["rewards"] == held_by(shapes_of(config, here()))["rewards"] == 4 * count
    assert estimated_plan(tiny(), here()).held["rewards"] == 0
