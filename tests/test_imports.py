"""The core works with jax, flax, optax, chex and orbax alone; other packages are imported where they are used."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "jaxrl_llm"
CORE = ["models", "sampling", "advantages", "objectives", "algorithms", "selection", "learner", "in_jax", "distributed"]
PROGRAM = f"CORE = {[f'jaxrl_llm.{name}' for name in CORE] + ['jaxrl_kernels']}"
# rich, PyYAML and scipy come with flax, orbax and jax.
PROGRAM += """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    names = {
        "grain", "transformers", "tokenizers", "sentencepiece", "gguf", "reasoning_gym", "math_verify", "datasets",
        "pyarrow", "pandas", "tyro", "matplotlib", "tensorboardX", "wandb", "trackio", "mlflow",
        "jinja2", "huggingface_hub", "torch",
        "safetensors",
    }
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Missing())
import jax
jax.config.update("jax_platforms", "cpu")
import jaxrl_llm, jaxrl_kernels
import importlib, pkgutil
import jaxrl_llm.training.loop, jaxrl_llm.data, jaxrl_llm.rewards, jaxrl_llm.reporting
for core in CORE:
    package = importlib.import_module(core)
    for module in pkgutil.walk_packages(package.__path__, core + "."):
        importlib.import_module(module.name)
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.config.rope import Rope
config = ModelConfig(
    family="llama", vocab_size=50, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.35,
)
policy, key = Policy(config), jax.random.key(0)
batch = jaxrl_llm.sample(policy, init_params(key, config), [[1, 2, 3]], key, group_size=2, max_new_tokens=4)
assert batch.tokens.shape[0] == 2
try:
    jaxrl_llm.load_policy("smollm2-135m")
except jaxrl_llm.InputError as error:
    print("SAYS", error)
"""


def test_core_needs_only_the_jax_packages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    # A missing package is reported in one line, with the command that installs it.
    assert "SAYS" in done.stdout
    assert "pip install" in done.stdout.split("SAYS")[1]


def test_only_runs_and_the_command_line_know_the_configuration_of_a_run() -> None:
    names = ("TrainConfig", "jaxrl_llm.training")
    found = [path for path in ROOT.rglob("*.py") if any(name in path.read_text() for name in names)]
    rooms = {path.relative_to(ROOT).parts[0] for path in found}
    # The package itself names them for whoever imports them from there, on first use.
    assert rooms == {"__init__.py", "training", "plan", "cli", "texts"}
