"""Sampling on another split of the devices than the training's: the meshes, what is refused, and whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_units import mesh_on

from experiments.benchmarks import hosts
from experiments.benchmarks.meshes import compare, make_inputs, run
from jaxrl_llm.cli.program import main
from jaxrl_llm.distributed import check_mesh, sampling_mesh_of
from jaxrl_llm.distributed.hosts import by_unit, of_this_host, units_of
from jaxrl_llm.plan.models import config_of
from jaxrl_llm.utils.errors import InputError

CONFIGS = Path(__file__).parents[2] / "experiments" / "plan"


def test_the_devices_keep_their_order() -> None:
    mesh = mesh_on({"data": 2, "fsdp": 4, "tensor": 2}, 1)
    found = sampling_mesh_of("tensor=4", mesh)
    assert dict(found.shape) == {"data": 4, "tensor": 4}
    assert [device.id for device in found.devices.flat] == [device.id for device in mesh.devices.flat]
    assert dict(sampling_mesh_of("data=2,expert=4,tensor=-1", mesh).shape) == {"data": 2, "expert": 4, "tensor": 2}
    assert sampling_mesh_of("", mesh) is mesh


def test_each_host_has_its_part_or_several_are_one() -> None:
    mesh = mesh_on({"data": 1, "fsdp": 16, "tensor": 1}, 4)
    assert units_of(mesh) == units_of(sampling_mesh_of("tensor=4", mesh)) == 4
    assert dict(of_this_host(sampling_mesh_of("tensor=4", mesh)).shape) == {"data": 1, "tensor": 4}
    wide = sampling_mesh_of("tensor=8", mesh)
    assert dict(by_unit(wide).shape) == {"unit": 2, "data": 1, "tensor": 8}
    assert [device.id for device in by_unit(wide).devices.flat] == list(range(16))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("fsdp=4", "sampling_mesh is 'fsdp=4': give numbers of devices along data, expert and tensor, each once, such"),
        ("tensor", "sampling_mesh is 'tensor': give numbers"),
        ("tensor=2,tensor=2", "sampling_mesh is 'tensor=2,tensor=2': give numbers"),
        ("tensor=3", "sampling_mesh: a mesh of data=-1 x tensor=3 does not fit 8 devices: choose sizes"),
        ("data=2,tensor=2", "sampling_mesh: a mesh of data=2 x tensor=2 does not fit 8 devices: choose sizes"),
        ("tensor=0", "sampling_mesh: the mesh axis tensor is 0: give a number of devices"),
    ],
)
def test_what_is_no_mesh_is_refused_in_a_line(text: str, line: str) -> None:
    with pytest.raises(InputError) as error:
        sampling_mesh_of(text, mesh_on({"data": 8, "tensor": 1}, 1))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_what_does_not_divide_the_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = config_of(str(CONFIGS / "smollm2-135m.json"))
    with pytest.raises(
        InputError, match="the sampling mesh has tensor=2, which does not divide the model's 3 key-value"
    ):
        check_mesh(model, sampling_mesh_of("tensor=2", mesh_on({"data": 8, "tensor": 1}, 1)), "the sampling mesh")
    with pytest.raises(InputError, match="the sampling mesh has expert=2, but the model has no experts"):
        check_mesh(model, sampling_mesh_of("expert=2", mesh_on({"data": 8, "tensor": 1}, 1)), "the sampling mesh")
    asked = ["--model", str(CONFIGS / "smollm2-135m.json"), "--prompts-per-step", "4", "--eval-size", "0"]
    assert main(["plan", "--topology", "cpu:1", *asked, "--sampling-mesh", "tensor=2"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("a mesh of data=-1 x tensor=2 does not fit 1 devices: choose sizes whose product is their "
                         "number, or -1 for one of them")  # fmt: skip


def assert_same(found: dict[str, Any], one: dict[str, Any]) -> None:
    same, apart = compare(found, one)
    assert same
    assert apart < 1e-5


@pytest.mark.heavy
def test_tokens_and_parameters_are_those_of_one_device(tmp_path: Path) -> None:
    """Trained in shards of 8, and sampled with heads on 2; evaluations too."""
    make_inputs(tmp_path)
    options: dict[str, Any] = {"sampling_mesh": "data=4,tensor=2", "eval_size": 4, "algorithm": "dr_grpo"}
    one, found = (
        run(tmp_path, *on, 2, options | more) for on, more in ((("", 1), {"sampling_mesh": ""}), (("fsdp=8", 8), {}))
    )
    assert_same(found, one)
    assert found["bytes"] < 0.2 * one["bytes"]
    lines = [(tmp_path / name / "summary.json").read_text().count('"accuracy"') for name in ("one", "fsdp=8")]
    assert lines[0] == lines[1] > 0


@pytest.mark.heavy
def test_the_experts_may_be_split_while_sampling_alone(tmp_path: Path) -> None:
    make_inputs(tmp_path, "qwen3_moe")
    one, found = (
        run(tmp_path, *on, 2, {"sampling_mesh": text}) for on, text in ((("", 1), ""), (("fsdp=4", 4), "expert=4"))
    )
    assert_same(found, one)


@pytest.mark.heavy
@pytest.mark.parametrize("text", ["data=2,tensor=2", "tensor=4"])
def test_on_two_hosts_each_samples_on_its_own_part_or_both_as_one(text: str, tmp_path: Path) -> None:
    hosts.make_inputs(tmp_path)
    options = {"algorithm": "dr_grpo", "steps": 2, "eval_size": 2, "remat": False, "mesh": "fsdp=4"}
    one = hosts.run(tmp_path, "one", 1, options)
    assert_same(hosts.run(tmp_path, "two", 2, options | {"sampling_mesh": text}), one)
