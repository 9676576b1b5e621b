"""Names of options, rewards and commands in TRL, and of methods in others, and what they are here.

Names are written with underscores and without leading dashes. `TRL_SAME` has those that mean what an option here
means, which are read as it; `TRL_OTHER` those that something else takes the place of. `cli.peer_overrides` has verl's
and Tunix's.
"""

from typing import NamedTuple


class Same(NamedTuple):
    """An option here, and what the values are called here where they have other names."""

    option: str
    values: dict[str, str] = {}  # noqa: RUF012 (never changed)


METHODS = {
    "drgrpo": "dr_grpo", "reinforce++": "reinforce_plus_plus", "reinforce++_baseline": "reinforce_plus_plus_baseline",
    "gae": "ppo", "grpo_passk": "passk_grpo", "spo": "spo_single_stream", "sapo": "sapo_soft_adaptive",
    "online_dpo": "dpo_online",
}  # fmt: skip
FILES = (".yaml", ".yml", ".toml")
SCHEDULES = {"constant_with_warmup": "constant"}
LEARNING_RATE, KL = "--optimizer.learning-rate", "--algorithm.kl-coefficient"

REWARDS_HERE = {
    "accuracy_reward": "math_verify",
    "reasoning_accuracy_reward": "math_verify",
}

# TRL's GRPOConfig, ModelConfig and ScriptArguments, with the trainer's arguments of transformers.
TRL_SAME: dict[str, Same] = {
    "adam_beta1": Same("--optimizer.beta1"),
    "adam_beta2": Same("--optimizer.beta2"),
    "adam_epsilon": Same("--optimizer.epsilon"),
    "beta": Same(KL),
    "chat_template_kwargs": Same("--template-options"),
    "data": Same("--prompts"),
    "data_path": Same("--prompts"),
    "entropy_coef": Same("--algorithm.entropy-coefficient"),
    "eval_dataset": Same("--eval-prompts"),
    "gamma": Same("--algorithm.gamma"),
    "kl": Same(KL),
    "kl_coef": Same(KL),
    "kl_coefficient": Same(KL),
    "lam": Same("--algorithm.lam"),
    "max_tokens": Same("--max-new-tokens"),
    "model_id": Same("--model"),
    "model_path": Same("--model"),
    "num_steps": Same("--steps"),
    "router_aux_loss_coef": Same("--router-aux-coefficient"),
    "train_data": Same("--prompts"),
    "train_dataset": Same("--prompts"),
    "train_file": Same("--prompts"),
    "dataset_name": Same("--prompts"),
    "dataset": Same("--prompts"),
    "dataset_prompt_column": Same("--prompt-column"),
    "environment_factory": Same("--environment"),
    "epsilon_high": Same("--algorithm.clip-high"),
    "eval_steps": Same("--eval-every"),
    "learning_rate": Same(LEARNING_RATE),
    "lora_r": Same("--lora-rank"),
    "lr": Same(LEARNING_RATE),
    "lr_scheduler_type": Same("--optimizer.schedule", SCHEDULES),
    "max_completion_length": Same("--max-new-tokens"),
    "max_grad_norm": Same("--optimizer.max-grad-norm"),
    "max_prompt_length": Same("--max-prompt-tokens"),
    "max_steps": Same("--steps"),
    "model_name": Same("--model"),
    "model_name_or_path": Same("--model"),
    "num_generations": Same("--group-size"),
    "num_iterations": Same("--epochs"),
    "num_train_epochs": Same("--epochs-of-data"),
    "output_dir": Same("--output"),
    "resume_from_checkpoint": Same("--resume"),
    "reward_fn": Same("--rewards"),
    "reward_func": Same("--rewards"),
    "reward_funcs": Same("--rewards", REWARDS_HERE),
    "save_steps": Same("--checkpoint-every"),
    "save_total_limit": Same("--keep-checkpoints"),
    "wandb_project": Same("--wandb"),
    "warmup_steps": Same("--optimizer.warmup-steps"),
    "weight_decay": Same("--optimizer.weight-decay"),
}
# Options that need no value: written so, or with true or false.
TRL_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "bf16": (["--dtype", "bfloat16"], ["--dtype", "float32"]),
    "gradient_checkpointing": (["--remat"], ["--no-remat"]),
}
NOT_NEEDED = "has no counterpart here: leave it out"
# Parts of a data set's name, which are one here: OWNER/NAME:CONFIG/SPLIT.
TRL_PLACE = {
    "dataset_config": "config", "dataset_config_name": "config", "dataset_split": "split",
    "dataset_train_split": "split",
}  # fmt: skip
BATCH = (
    "is --prompts-per-step here, the prompts of a step, each with --group-size completions; --micro-batches cuts the "
    "batch where memory is short"
)
MESH = "is --mesh here, such as --mesh fsdp=4,tensor=2; without it the mesh is chosen from the devices"
ENGINE = "has no counterpart here, since the policy samples with its own engine: leave it out"
LENGTH = "is --epochs-of-data here, or --steps (--epochs counts passes over one batch)"
CLIP = "is --algorithm.clip-low and --algorithm.clip-high here: give both"
LOG = "has no counterpart here, since every step is logged: leave it out"
AVERAGE = (
    "is --algorithm.average here (sequence, token, prompt, constant ...); the methods are --algorithm grpo, dapo, "
    "dr_grpo, bnpo, cispo"
)
REWARD_MODEL = "is a reward here: --rewards model:PATH"
HUB = "is jaxrl export RUN FOLDER here, after training: upload that folder"
TRL_OTHER: dict[str, str] = {
    "accelerate_config": MESH,
    "attn_implementation": NOT_NEEDED,
    "batch_size": BATCH,
    "clip_range": CLIP,
    "cliprange": CLIP,
    "device": "has no counterpart here, since all devices are used; JAX_PLATFORMS=cpu chooses others",
    "gpus": MESH,
    "num_epochs": LENGTH,
    "num_gpus": MESH,
    "tensor_parallel_size": "is --mesh tensor=N here",
    "tokenizer_name_or_path": "has no counterpart here, since the model's tokenizer is used: leave it out",
    "train_batch_size": BATCH,
    "config_file": "is --config here, a YAML or TOML file",
    "dataset_num_proc": NOT_NEEDED,
    "dataset_test_split": "is --eval-prompts here: --eval-prompts OWNER/NAME:CONFIG/SPLIT",
    "ddp_find_unused_parameters": NOT_NEEDED,
    "deepspeed": MESH,
    "delta": "is --algorithm.dual-clip here",
    "disable_dropout": "has no counterpart here, since there is no dropout: leave it out",
    "do_eval": "is --eval-size here, 0 to turn evaluation off",
    "do_train": NOT_NEEDED,
    "epsilon": CLIP,
    "eval_strategy": "is --eval-every here, in steps; 0 evaluates before and after training",
    "fp16": "has no counterpart here, since float16 loses small gradients: use --dtype bfloat16",
    "fsdp": MESH,
    "generation_batch_size": BATCH,
    "gradient_accumulation_steps": BATCH,
    "hub_model_id": HUB,
    "importance_sampling_level": "is the method here: --algorithm gspo for sequence, grpo for token",
    "load_in_4bit": "is --frozen-dtype nf4 here, with --lora-rank 16 or --adapter",
    "load_in_8bit": "is --frozen-dtype int8 here, with --lora-rank 16 or --adapter",
    "log_completions": "is --log-completions-every here, in steps",
    "logging_dir": "has no counterpart here, since TensorBoard's files are in the folder of --output: leave it out",
    "logging_first_step": LOG,
    "logging_steps": LOG,
    "logging_strategy": LOG,
    "lora_dropout": "has no counterpart here, since there is no dropout: leave it out",
    "lora_target_modules": "is --lora-targets here: query key value out gate up down; all by default",
    "loss_type": AVERAGE,
    "mask_truncated_completions": (
        "is part of the method here: --algorithm dapo --algorithm.overlong-filter; or --overlong-tokens, a soft penalty"
    ),
    "max_length": "is --max-new-tokens, of a completion, and --max-prompt-tokens here",
    "num_processes": MESH,
    "optim": "is AdamW here; --optimizer.moments factored gives Adafactor's memory",
    "overwrite_output_dir": "has no counterpart here, since a run is never overwritten: choose another --output",
    "peft_config": "is --lora-rank here: --lora-rank 16",
    "per_device_eval_batch_size": "is --slots here, the completions that are decoded at the same time",
    "per_device_train_batch_size": BATCH,
    "precompute_ref_log_probs": "is --reference-memory disk here",
    "processing_class": "has no counterpart here, since the model's tokenizer is used: leave it out",
    "push_to_hub": HUB,
    "ref_model": "has no counterpart here, since the reference is the initial model: leave it out",
    "report_to": "is --wandb PROJECT here, or --trackio and --mlflow, and TensorBoard's files are written anyhow",
    "reward_model_name_or_path": REWARD_MODEL,
    "reward_weights": "is written after each reward here: --rewards 'number_match*1' 'my.py:style*0.5'",
    "run_name": "is the folder of the run here: --output runs/NAME",
    "save_strategy": "is --checkpoint-every here, in steps; 0 saves only at the end",
    "scale_rewards": "is --algorithm.scale here: std, or none",
    "shuffle_dataset": "has no counterpart here, since prompts are always shuffled, by --seed: leave it out",
    "steps_per_generation": "is --minibatches here, gradient steps for each batch of samples",
    "sync_ref_model": "has no counterpart here, since the reference is the initial model: leave it out",
    "tf32": NOT_NEEDED,
    "torch_dtype": "is --dtype (of the computation) and --param-dtype (of the weights) here",
    "trust_remote_code": "has no counterpart here, since no code of a model is run: leave it out",
    "use_liger_kernel": "has no counterpart here, since the loss never builds all logits: leave it out",
    "use_peft": "is --lora-rank here: --lora-rank 16",
    "use_vllm": ENGINE,
    "vllm_gpu_memory_utilization": ENGINE,
    "vllm_mode": ENGINE,
    "vllm_server_host": ENGINE,
    "vllm_tensor_parallel_size": ENGINE,
    "warmup_ratio": "is --optimizer.warmup-steps here, in gradient steps",
}

# Rewards that TRL has, and what they are here.
REWARDS: dict[str, str] = {
    **REWARDS_HERE,
    "accuracy": "math_verify",
    "get_soft_overlong_punishment": "the option --overlong-tokens",
}
# Commands of `trl`, and of others, and what they are here.
COMMANDS: dict[str, str] = {
    "chat": "jaxrl sample MODEL 'PROMPT'",
    "config": "jaxrl train --help",
    "convert": "jaxrl export RUN FOLDER",
    "dpo": "jaxrl train --algorithm dpo",
    "evaluate": "jaxrl eval RUN",
    "generate": "jaxrl sample MODEL 'PROMPT'",
    "kto": "jaxrl train --algorithm kto",
    "list": "jaxrl algorithms",
    "main_ppo": "jaxrl train --algorithm ppo",
    "merge": "jaxrl export RUN FOLDER",
    "methods": "jaxrl algorithms",
    "resume": "jaxrl train --resume RUN",
    "run": "jaxrl train",
    "sft": "jaxrl train --algorithm sft",
    "test": "jaxrl eval RUN",
    "version": "jaxrl --version",
    "vllm-serve": "not needed: the policy samples with its own engine; see jaxrl sample",
}


def reward_hint(name: str) -> str:
    """What one of TRL's rewards is here; "" for any other name."""
    return f"TRL's {name} is {REWARDS[name]} here" if name in REWARDS else ""
