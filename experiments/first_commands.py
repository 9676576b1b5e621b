"""What users of TRL, verl and Tunix type first, and how long the answer takes.

Each command either does what it does there (it is read as the command in `here`), prints something, or says in a line
what to write instead. `tests/test_first_commands.py` checks that; run this file for the seconds of each as a process:

    python experiments/first_commands.py
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple


class First(NamedTuple):
    """A command, and what it must be read as (`here`), print (`prints`) or say (`says`, a regular expression)."""

    typed: str
    here: str = ""
    prints: str = ""
    says: str = ""


FILES = {
    "data.jsonl": '{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?", "answer": "4"}\n',
    "my.py": "def reward(completions, answer):\n    return [float(a in c) for a, c in zip(answer, completions)]\n",
    "trl.yaml": "model_name_or_path: Qwen/Qwen3-0.6B\nlearning_rate: 1.0e-6\nnum_generations: 4\nbeta: 0.01\n",
    "ours.yaml": "optimizer.learning_rate: 2.0e-6\nalgorithm: dapo\nalgorithm.clip-high: 0.3\n",
}
TRAIN = "train --prompts data.jsonl --rewards my.py:reward"
COMMANDS = (
    # TRL: its documentation's command line, GRPOConfig, ScriptArguments and ModelConfig.
    First("grpo --model_name_or_path Qwen/Qwen2.5-0.5B", says="jaxrl train --algorithm grpo"),
    First(
        "train --model_name_or_path Qwen/Qwen3-0.6B --dataset_name openai/gsm8k --dataset_config main "
        "--dataset_train_split train --reward_funcs accuracy_reward",
        here="train --model Qwen/Qwen3-0.6B --prompts openai/gsm8k:main/train --rewards math_verify",
    ),
    First(f"{TRAIN} --algorithm GRPO", here=TRAIN),
    First(f"{TRAIN} --learning_rate 1e-5", here=f"{TRAIN} --optimizer.learning-rate 1e-5"),
    First(
        f"{TRAIN} --lr=1e-5 --num_generations 16 --max-completion-length 256",
        here=f"{TRAIN} --optimizer.learning-rate 1e-5 --group-size 16 --max-new-tokens 256",
    ),
    First(f"{TRAIN} --beta 0.001", here=f"{TRAIN} --algorithm.kl-coefficient 0.001"),
    First(f"{TRAIN} --algorithm dapo --beta 0.1", says="--algorithm.kl-coefficient here, which dapo does not have"),
    First(f"{TRAIN} --epsilon 0.2", says="--algorithm.clip-low and --algorithm.clip-high here"),
    First(f"{TRAIN} --epsilon_high 0.28", here=f"{TRAIN} --algorithm.clip-high 0.28"),
    First(f"{TRAIN} --loss_type dr_grpo", says="--algorithm.average here .* dr_grpo"),
    First(f"{TRAIN} --per_device_train_batch_size 8", says="--prompts-per-step here"),
    First(f"{TRAIN} --gradient_accumulation_steps 4", says="--prompts-per-step here.*--micro-batches"),
    First(f"{TRAIN} --num_train_epochs 3", here=f"{TRAIN} --epochs-of-data 3"),
    First(
        f"{TRAIN} --max_steps 500 --warmup_steps 10 --lr_scheduler_type constant_with_warmup",
        here=f"{TRAIN} --steps 500 --optimizer.warmup-steps 10 --optimizer.schedule constant",
    ),
    First(f"{TRAIN} --bf16 true --gradient_checkpointing true", here=f"{TRAIN} --dtype bfloat16 --remat"),
    First(f"{TRAIN} --use_vllm true", says="samples with its own engine: leave it out"),
    First(f"{TRAIN} --use_peft", says="--lora-rank here"),
    First(f"{TRAIN} --lora_r 8 --lora_alpha 16", here=f"{TRAIN} --lora-rank 8 --lora-alpha 16"),
    First(f"{TRAIN} --report_to wandb", says="--wandb PROJECT here"),
    First(
        f"{TRAIN} --output_dir runs/a --save_steps 100 --save_total_limit 3 --eval_steps 50",
        here=f"{TRAIN} --output runs/a --checkpoint-every 100 --keep-checkpoints 3 --eval-every 50",
    ),
    First("train --resume_from_checkpoint runs/none", says="runs/none holds no run"),
    First("train --config trl.yaml", here="train --model Qwen/Qwen3-0.6B --optimizer.learning-rate 1e-6 "
          "--group-size 4 --algorithm.kl-coefficient 0.01"),
    First("train --config ours.yaml", here="train --optimizer.learning-rate 2e-6 --algorithm dapo "
          "--algorithm.clip-high 0.3"),
    First(f"{TRAIN} --reward_weights 1.0 0.5", says=r"'my.py:style\*0.5'"),
    First(f"{TRAIN} --rewards accuracy_reward", says="TRL's accuracy_reward is math_verify here"),
    First(f"{TRAIN} --fp16", says="use --dtype bfloat16"),
    First(f"{TRAIN} --logging_steps 10", says="every step is logged: leave it out"),
    First("sft --dataset_name trl-lib/Capybara", says="jaxrl sft is jaxrl train --algorithm sft here"),
    First("vllm-serve --model Qwen/Qwen3-0.6B", says="jaxrl vllm-serve is not needed"),
    First("env", prints="jax .*devices|devices"),
    # verl: its quickstart and its configuration page.
    First("train actor_rollout_ref.rollout.n=8", says="verl's actor_rollout_ref.rollout.n=8 is --group-size 8 here"),
    First(
        "train algorithm.adv_estimator=grpo data.train_files=data.jsonl data.train_batch_size=64 "
        "data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen3-0.6B "
        "actor_rollout_ref.actor.optim.lr=1e-6 trainer.total_epochs=15",
        says="--algorithm grpo --prompts data.jsonl --prompts-per-step 64 --max-new-tokens 512 --model Qwen/Qwen3-0.6B "
        "--optimizer.learning-rate 1e-6; trainer.total_epochs is --epochs-of-data here",
    ),
    First("train actor_rollout_ref.actor.kl_loss_coef=0.001", says="is --algorithm.kl-coefficient 0.001 here"),
    First("train actor_rollout_ref.actor.ppo_mini_batch_size=256", says="is --minibatches here"),
    First("train trainer.n_gpus_per_node=8", says="is --mesh here"),
    First("train custom_reward_function.path=my.py", says="is --rewards here: --rewards my_file.py:compute_score"),
    First("main_ppo data.train_files=data.jsonl", says="jaxrl train --algorithm ppo"),
    First(f"{TRAIN} --algorithm gae", here=f"{TRAIN} --algorithm ppo"),
    # Tunix: its command line and base_config.yaml.
    First("train base_config.yaml", says="given as --config base_config.yaml"),
    First("train model_config.model_id=google/gemma-2-2b-it grpo_config.num_generations=4 grpo_config.beta=0.08",
          says="--model google/gemma-2-2b-it --group-size 4 --algorithm.kl-coefficient 0.08"),
    First("train rl_training_config.max_steps=100", says="Tunix's rl_training_config.max_steps=100 is --steps 100"),
    First("train rollout_config.total_generation_steps=768", says="is --max-new-tokens 768 here"),
    # Anybody.
    First("--version", prints="jaxrl_llm [0-9]"),
    First("help", prints="First steps"),
    First("help train", prints="jaxrl train --help all describes"),
    First("list", says="jaxrl list is jaxrl algorithms here"),
    First("train --prompts nothing.jsonl --rewards nothing", says="nothing.jsonl.*|unknown reward 'nothing'"),
    First(f"{TRAIN} --batch_size 32", says="--prompts-per-step here"),
)  # fmt: skip


def write_files(folder: Path) -> None:
    """The files that the commands name."""
    for name, text in FILES.items():
        (folder / name).write_text(text)


def main() -> None:
    """Run each command as a process of its own; those that would train end at a model that is not there."""
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for first in COMMANDS:
            arguments = shlex.split(first.typed)
            if first.here:
                arguments = [*arguments, "--model", "./none", "--prompts", "data.jsonl"]
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "jaxrl_llm.cli", *arguments], cwd=folder, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            seconds = time.perf_counter() - began
            slowest = max(slowest, seconds)
            said = (done.stderr or done.stdout).strip().splitlines()
            print(f"{seconds:5.2f} s  {done.returncode}  jaxrl {first.typed}\n             {said[-1] if said else ''}")
    print(f"{len(COMMANDS)} commands, the slowest in {slowest:.2f} s")


if __name__ == "__main__":
    main()
