"""Updates for TPUs: their memory is linear in the length of rows, attention is the kernel's, and defaults compile."""

from __future__ import annotations

from pathlib import Path

import pytest
from other_process import result_of
from tpu_environment import tpu_environment

PROGRAM = """
import json, sys
from jaxrl_llm.distributed.chips import topology_of
from jaxrl_llm.plan.program.cycles import kernels_in
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.plan.plan import learning_programs
from jaxrl_llm.plan.shapes import config_of, shapes_of

topology, found = topology_of("v5e:2x2"), []
for length in (3072, 7168):
    config = TrainConfig(
        model=sys.argv[1], dtype="bfloat16", param_dtype="bfloat16", mesh="data=4", algorithm="dr_grpo", eval_size=0,
        optimizer=OptimizerConfig(moments="bfloat16"), prompts_per_step=4, group_size=2, max_prompt_tokens=1024,
        max_new_tokens=length,
    )
    model = config_of(config.model).first(2)
    update = learning_programs(shapes_of(config, topology, model))["update"].compiled
    names = [kernel.name for kernel in kernels_in(update.as_text())]
    found.append([update.memory_analysis().temp_size_in_bytes, names])
print("RESULT" + json.dumps(found))
"""


@pytest.mark.heavy
def test_memory_is_linear_in_the_length_of_rows() -> None:
    """4,096 and 8,192 tokens in a row, two rows on a device, of a model with SmolLM2's shapes and two layers."""
    model = Path(__file__).parents[2] / "experiments" / "plan" / "smollm2-135m.json"
    (short, names), (long, others) = result_of(PROGRAM, str(model), environment=tpu_environment())
    for kernels in (names, others):
        assert {"packed_attention", "packed_attention_dq", "packed_attention_dkv", "norm_rotate"} <= set(kernels)
    assert long <= 2.1 * short


DEFAULTS = """
import json, sys
from jaxrl_llm.distributed.chips import topology_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.plan.plan import learning_programs
from jaxrl_llm.plan.shapes import config_of, shapes_of

config = TrainConfig(model=sys.argv[1], mesh="fsdp=4", prompts_per_step=16, group_size=8, eval_size=0)
model = config_of(config.model).first(2)
update = learning_programs(shapes_of(config, topology_of("v5e:2x2"), model))["update"].compiled
print("RESULT" + json.dumps(update.memory_analysis().temp_size_in_bytes))
"""


@pytest.mark.heavy
def test_an_update_with_default_settings_compiles() -> None:
    """SmolLM2's shapes, in float32: with elementwise work that carries collectives the compiler aborts."""
    model = Path(__file__).parents[2] / "experiments" / "plan" / "smollm2-135m.json"
    assert result_of(DEFAULTS, str(model), environment=tpu_environment()) < 16 * 2**30
