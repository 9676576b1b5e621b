"""Train one configuration on several meshes and compare: sampled tokens, parameters, and bytes on each device.

    python experiments/benchmarks/meshes.py [--devices 8] [--model MODEL]
        [--meshes data=8 fsdp=8 fsdp=2,tensor=4 ...]

Each mesh is a process of its own on simulated CPU devices, and the first is one device. Tokens must be the same, and
parameters equal to 1e-5; status 1 if they are not. Bytes are those of the largest shard of the state of training
(parameters, moments) and of what the compiled update needs beside its arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

MESHES = ["data=8", "fsdp=8", "fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2", "data=2,sequence=4"]
MODELS = ROOT / "tests" / "vectors"  # their configurations and tokenizers
REWARD = """
def even(completions, completion_ids):
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
"""


def make_inputs(folder: Path, model: str = "llama_tied") -> None:
    """A tiny model, as one of MODELS, with random weights and four key-value heads; prompts, and a reward."""
    import jax

    from jaxrl_llm import load_policy, save_policy
    from jaxrl_llm.models import Policy, init_params

    policy, _, tokenizer = load_policy(str(MODELS / model))
    config = dataclasses.replace(policy.config, num_kv_heads=4)
    save_policy(folder / "model", Policy(config), init_params(jax.random.key(0), config, scale=0.08), tokenizer)
    (folder / "rewards.py").write_text(REWARD)
    prompts = [{"prompt": f"number {i:02d}:"} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))


def train(folder: Path, mesh: str, steps: int, options: dict[str, Any]) -> None:
    """One run into folder/NAME; its parameters and bytes go beside it. In a process with the devices of the mesh."""
    import jax

    from jaxrl_llm.training import loop, step
    from jaxrl_llm.training.config import TrainConfig

    kept: dict[str, Any] = {}
    learn = step.learn

    def learn_and_keep(parts: Any, config: Any, state: Any, *rest: Any) -> Any:
        state, learned = learn(parts, config, state, *rest)
        kept["state"] = state.train
        return state, learned

    step.__dict__["learn"] = learn_and_keep
    name = mesh or "one"
    settings = {
        "model": str(folder / "model"), "prompts": str(folder / "prompts.jsonl"), "output": str(folder / name),
        "mesh": mesh, "rewards": (f"{folder / 'rewards.py'}:even",), "steps": steps, "prompts_per_step": 4,
        "group_size": 4, "max_new_tokens": 8, "eval_size": 0, "log_completions_every": 1, "tensorboard": False,
    }  # fmt: skip
    loop.train(TrainConfig(**settings | options))
    state = kept["state"]
    held = sum(max(part.data.nbytes for part in x.addressable_shards) for x in jax.tree.leaves(state))
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    arrays = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    np.savez(folder / f"{name}.npz", **arrays)
    compiles = [json.loads(line)["compiles"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    (folder / f"{name}.json").write_text(json.dumps({"bytes": held, "compiles": compiles}))


def run(folder: Path, mesh: str, devices: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """`train` in a process; what it found."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    arguments = [sys.executable, __file__, "--run", str(folder), mesh, str(steps), json.dumps(options)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{mesh}: {done.stderr[-3000:]}")
    name = mesh or "one"
    rows = [json.loads(line) for line in (folder / name / "completions.jsonl").read_text().splitlines()]
    return {
        **json.loads((folder / f"{name}.json").read_text()),
        "params": dict(np.load(folder / f"{name}.npz")),
        "tokens": [row["tokens"] for row in rows],
    }


def compare(found: dict[str, Any], one: dict[str, Any]) -> tuple[bool, float]:
    """Whether the sampled tokens are the same, and the largest difference of a parameter."""
    apart = max(float(np.abs(found["params"][name] - x).max()) for name, x in one["params"].items())
    return found["tokens"] == one["tokens"], apart


def main() -> int:
    """Train on every mesh, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--model", default="llama_tied", help="a folder of tests/vectors")
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={}, help="of the run, as JSON")
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, given.model)
        one = run(folder, "", 1, given.steps, given.options)
        print("| mesh | same tokens | parameters differ by | state on a device, bytes | of one device's | compiles |")
        print("|---|---|---|---|---|---|")
        print(f"| one device | | | {one['bytes']:,} | | {one['compiles']} |", flush=True)
        for mesh in given.meshes:
            found = run(folder, mesh, given.devices, given.steps, given.options)
            same, apart = compare(found, one)
            wrong += not same or apart > 1e-5
            share = found["bytes"] / one["bytes"]
            print(f"| {mesh} | {'yes' if same else 'no'} | {apart:.1e} | {found['bytes']:,} | {share:.3f} "
                  f"| {found['compiles']} |", flush=True)  # fmt: skip
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        place, mesh_text, count, settings = sys.argv[2:]
        train(Path(place), mesh_text, int(count), json.loads(settings))
    else:
        sys.exit(main())
