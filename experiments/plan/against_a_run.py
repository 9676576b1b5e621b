"""Hold a plan's memory against a real run's: the peak resident memory of `jaxrl train` in a process of its own.

    python experiments/plan/against_a_run.py [--hidden 1536] [--layers 2] [--options "--moments ..."]

On one CPU, where all memory is the host's. A wide model with random weights, so that arrays and not the process take
most of it. Status 1 where the plan is more than 15 % off.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

TOKENIZER = ROOT / "tests" / "vectors" / "llama_tied"
LIMIT = 0.15
RUN = (
    "--steps 2 --prompts-per-step 4 --group-size 4 --max-prompt-tokens 16 --max-new-tokens 32 --eval-size 0 "
    "--checkpoint-every 0 --no-tensorboard --log-completions-every 0"
)
REWARD = """
def even(completions, completion_ids):
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
"""


def make_inputs(folder: Path, hidden: int, layers: int) -> None:
    """A model with random weights, prompts and a reward."""
    import jax

    from jaxrl_llm import load_policy, save_policy
    from jaxrl_llm.models import Policy, init_params

    policy, _, tokenizer = load_policy(str(TOKENIZER))
    config = dataclasses.replace(
        policy.config, hidden_size=hidden, intermediate_size=4 * hidden, num_layers=layers, num_heads=hidden // 64,
        num_kv_heads=hidden // 64, head_dim=64, query_scale=64**-0.5, rope_of_layer=(0,) * layers,
        window_of_layer=(0,) * layers, eos_token_ids=(),
    )  # fmt: skip
    save_policy(folder / "model", Policy(config), init_params(jax.random.key(0), config), tokenizer)
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"number {i:02d}:"} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(arguments: list[str]) -> int:
    """Peak resident bytes of a process of the command line."""
    process = subprocess.Popen([sys.executable, "-m", "jaxrl_llm.cli", *arguments], env=environment(), cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"the run ended with status {process.returncode}")
    return usage.ru_maxrss * 1024


def environment() -> dict[str, str]:
    """Of the processes."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def main() -> int:
    """Print what was planned and what was measured; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--options", default="", help="more options of the run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-c", "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); "
             "import against_a_run as here; here.make_inputs(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))",
             str(Path(__file__).parent), name, str(given.hidden), str(given.layers)], env=environment(), check=True,
        )  # fmt: skip
        run = [
            "--model", str(folder / "model"), "--prompts", str(folder / "prompts.jsonl"), "--rewards",
            f"{folder / 'rewards.py'}:even", "--output", str(folder / "run"), *RUN.split(), *given.options.split(),
        ]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "jaxrl_llm.cli", "plan", "--topology", "cpu:1", "--json", *run],
            env=environment(), cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr[-2000:])
        plan = json.loads(done.stdout)["plan"]
        real, planned = measured(["train", *run]), sum(plan["host"].values())
    apart = planned / real - 1
    print(json.dumps({"planned": planned, "measured": real, "apart": round(apart, 4), "host": plan["host"],
                      "held": plan["held"], "phases": plan["phases"]}))  # fmt: skip
    print(f"planned {planned / 2**30:.2f} GiB, measured {real / 2**30:.2f} GiB: {apart:+.1%}", file=sys.stderr)
    return int(abs(apart) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
