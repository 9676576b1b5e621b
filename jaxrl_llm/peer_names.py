"""Names of options in TRL, verl and Tunix, and what they are here.

Names are written with underscores and without leading dashes. `SAME` has those that mean what an option here means,
which are read as it; `OTHER` those that something else takes the place of. verl's and Tunix's are given as NAME=VALUE.
"""

from __future__ import annotations

from typing import NamedTuple


class Same(NamedTuple):
    """An option here, and what the values are called here where they have other names."""

    option: str
    values: dict[str, str] = {}  # noqa: RUF012 (never changed)


METHODS = {
    "drgrpo": "dr_grpo", "reinforce++": "reinforce_plus_plus", "reinforce++_baseline": "reinforce_plus_plus_baseline",
    "gae": "ppo", "grpo_passk": "passk_grpo", "spo": "spo_single_stream", "sapo": "sapo_soft_adaptive",
}  # fmt: skip
FILES = (".yaml", ".yml", ".toml")
SCHEDULES = {"constant_with_warmup": "constant"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
LEARNING_RATE, KL = "--optimizer.learning-rate", "--algorithm.kl-coefficient"

REWARDS_HERE = {
    "accuracy_reward": "math_verify",
    "reasoning_accuracy_reward": "math_verify",
    "think_format_reward": "format_match(<think>.*</think>.*)",
}

# TRL's GRPOConfig, ModelConfig and ScriptArguments, with the trainer's arguments of transformers.
TRL_SAME: dict[str, Same] = {
    "adam_beta1": Same("--optimizer.beta1"),
    "adam_beta2": Same("--optimizer.beta2"),
    "adam_epsilon": Same("--optimizer.epsilon"),
    "beta": Same(KL),
    "data": Same("--prompts"),
    "data_path": Same("--prompts"),
    "entropy_coef": Same("--algorithm.entropy-coefficient"),
    "eval_dataset": Same("--eval-prompts"),
    "gamma": Same("--algorithm.gamma"),
    "kl_coef": Same(KL),
    "lam": Same("--algorithm.lam"),
    "max_tokens": Same("--max-new-tokens"),
    "model_id": Same("--model"),
    "model_path": Same("--model"),
    "num_steps": Same("--steps"),
    "train_data": Same("--prompts"),
    "train_file": Same("--prompts"),
    "dataset_name": Same("--prompts"),
    "dataset": Same("--prompts"),
    "dataset_prompt_column": Same("--prompt-column"),
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
_NOT_NEEDED = "has no counterpart here: leave it out"
# Parts of a data set's name, which are one here: OWNER/NAME:CONFIG/SPLIT.
TRL_PLACE = {
    "dataset_config": "config", "dataset_config_name": "config", "dataset_split": "split",
    "dataset_train_split": "split",
}  # fmt: skip
_BATCH = (
    "is --prompts-per-step here, the prompts of a step, each with --group-size completions; --micro-batches cuts the "
    "batch where memory is short"
)
_MESH = "is --mesh here, such as --mesh fsdp=4,tensor=2; without it the mesh is chosen from the devices"
_ENGINE = "has no counterpart here, since the policy samples with its own engine: leave it out"
_LENGTH = "is --steps here: rows x passes / prompts_per_step (--epochs counts passes over one batch)"
_CLIP = "is --algorithm.clip-low and --algorithm.clip-high here: give both"
_LOG = "has no counterpart here, since every step is logged: leave it out"
_AVERAGE = (
    "is --algorithm.average here (sequence, token, prompt, constant ...); the methods are --algorithm grpo, dapo, "
    "dr_grpo, bnpo, cispo"
)
_REWARD_MODEL = "is a function here: --rewards my_file.py:reward, which may call a model"
_HUB = "is jaxrl export RUN FOLDER here, after training: upload that folder"
TRL_OTHER: dict[str, str] = {
    "accelerate_config": _MESH,
    "attn_implementation": _NOT_NEEDED,
    "batch_size": _BATCH,
    "clip_range": _CLIP,
    "cliprange": _CLIP,
    "device": "has no counterpart here, since all devices are used; JAX_PLATFORMS=cpu chooses others",
    "gpus": _MESH,
    "num_epochs": _LENGTH,
    "num_gpus": _MESH,
    "tensor_parallel_size": "is --mesh tensor=N here",
    "tokenizer_name_or_path": "has no counterpart here, since the model's tokenizer is used: leave it out",
    "train_batch_size": _BATCH,
    "config_file": "is --config here, a YAML or TOML file",
    "dataset_num_proc": _NOT_NEEDED,
    "dataset_test_split": "is --eval-prompts here: --eval-prompts OWNER/NAME:CONFIG/SPLIT",
    "ddp_find_unused_parameters": _NOT_NEEDED,
    "deepspeed": _MESH,
    "delta": "is --algorithm.dual-clip here",
    "disable_dropout": "has no counterpart here, since there is no dropout: leave it out",
    "do_eval": "is --eval-size here, 0 to turn evaluation off",
    "do_train": _NOT_NEEDED,
    "epsilon": _CLIP,
    "eval_strategy": "is --eval-every here, in steps; 0 evaluates before and after training",
    "fp16": "has no counterpart here, since float16 loses small gradients: use --dtype bfloat16",
    "fsdp": _MESH,
    "generation_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "hub_model_id": _HUB,
    "importance_sampling_level": "is the method here: --algorithm gspo for sequence, grpo for token",
    "load_in_4bit": "has no counterpart here: for less memory use --lora-rank 16 --param-dtype bfloat16",
    "load_in_8bit": "has no counterpart here: for less memory use --lora-rank 16 --param-dtype bfloat16",
    "log_completions": "is --log-completions-every here, in steps",
    "logging_dir": "has no counterpart here, since TensorBoard's files are in the folder of --output: leave it out",
    "logging_first_step": _LOG,
    "logging_steps": _LOG,
    "logging_strategy": _LOG,
    "lora_dropout": "has no counterpart here, since there is no dropout: leave it out",
    "lora_target_modules": "is --lora-targets here: query key value out gate up down; all by default",
    "loss_type": _AVERAGE,
    "mask_truncated_completions": (
        "is part of the method here: --algorithm dapo --algorithm.overlong-filter; or --overlong-tokens, a soft penalty"
    ),
    "num_processes": _MESH,
    "num_train_epochs": _LENGTH,
    "optim": "is AdamW here; --optimizer.moments factored gives Adafactor's memory",
    "overwrite_output_dir": "has no counterpart here, since a run is never overwritten: choose another --output",
    "per_device_eval_batch_size": "is --slots here, the completions that are decoded at the same time",
    "per_device_train_batch_size": _BATCH,
    "push_to_hub": _HUB,
    "ref_model": "has no counterpart here, since the reference is the initial model: leave it out",
    "report_to": "is --wandb PROJECT here; TensorBoard's files are written unless --no-tensorboard",
    "reward_model_name_or_path": _REWARD_MODEL,
    "reward_weights": "is written after each reward here: --rewards 'number_match*1' 'my.py:style*0.5'",
    "run_name": "is the folder of the run here: --output runs/NAME",
    "save_strategy": "is --checkpoint-every here, in steps; 0 saves only at the end",
    "scale_rewards": "is --algorithm.scale here: std, or none",
    "shuffle_dataset": "has no counterpart here, since prompts are always shuffled, by --seed: leave it out",
    "steps_per_generation": "is --minibatches here, gradient steps for each batch of samples",
    "sync_ref_model": "has no counterpart here, since the reference is the initial model: leave it out",
    "tf32": _NOT_NEEDED,
    "torch_dtype": "is --dtype (of the computation) and --param-dtype (of the weights) here",
    "trust_remote_code": "has no counterpart here, since no code of a model is run: leave it out",
    "use_liger_kernel": "has no counterpart here, since the loss never builds all logits: leave it out",
    "use_peft": "is --lora-rank here: --lora-rank 16",
    "use_vllm": _ENGINE,
    "vllm_gpu_memory_utilization": _ENGINE,
    "vllm_mode": _ENGINE,
    "vllm_server_host": _ENGINE,
    "vllm_tensor_parallel_size": _ENGINE,
    "warmup_ratio": "is --optimizer.warmup-steps here, in gradient steps",
}

_VERL_ACTOR, _VERL_ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
VERL_SAME: dict[str, Same] = {
    "algorithm.adv_estimator": Same("--algorithm", METHODS),
    "algorithm.gamma": Same("--algorithm.gamma"),
    "algorithm.lam": Same("--algorithm.lam"),
    "critic.optim.lr": Same("--optimizer.critic-learning-rate"),
    "data.max_prompt_length": Same("--max-prompt-tokens"),
    "data.max_response_length": Same("--max-new-tokens"),
    "data.prompt_key": Same("--prompt-column"),
    "data.seed": Same("--seed"),
    "data.train_batch_size": Same("--prompts-per-step"),
    "data.train_files": Same("--prompts"),
    "data.truncation": Same("--long-prompts", {"left": "truncate"}),
    "data.val_files": Same("--eval-prompts"),
    "trainer.critic_warmup": Same("--critic-steps"),
    "trainer.default_local_dir": Same("--output"),
    "trainer.max_actor_ckpt_to_keep": Same("--keep-checkpoints"),
    "trainer.project_name": Same("--wandb"),
    "trainer.save_freq": Same("--checkpoint-every", {"-1": "0"}),
    "trainer.test_freq": Same("--eval-every", {"-1": "0"}),
    "trainer.total_training_steps": Same("--steps"),
    "actor_rollout_ref.model.lora_alpha": Same("--lora-alpha"),
    "actor_rollout_ref.model.lora_rank": Same("--lora-rank"),
    "actor_rollout_ref.model.path": Same("--model"),
    _VERL_ACTOR + "clip_ratio_c": Same("--algorithm.dual-clip"),
    _VERL_ACTOR + "clip_ratio_high": Same("--algorithm.clip-high"),
    _VERL_ACTOR + "clip_ratio_low": Same("--algorithm.clip-low"),
    _VERL_ACTOR + "entropy_coeff": Same("--algorithm.entropy-coefficient"),
    _VERL_ACTOR + "grad_clip": Same("--optimizer.max-grad-norm"),
    _VERL_ACTOR + "kl_loss_coef": Same(KL),
    _VERL_ACTOR + "optim.lr": Same(LEARNING_RATE),
    _VERL_ACTOR + "optim.lr_warmup_steps": Same("--optimizer.warmup-steps"),
    _VERL_ACTOR + "optim.weight_decay": Same("--optimizer.weight-decay"),
    _VERL_ACTOR + "ppo_epochs": Same("--epochs"),
    _VERL_ROLLOUT + "n": Same("--group-size"),
    _VERL_ROLLOUT + "temperature": Same("--temperature"),
    _VERL_ROLLOUT + "top_k": Same("--top-k", {"-1": "0"}),
    _VERL_ROLLOUT + "top_p": Same("--top-p"),
}
# By the longest beginning of the name that is listed.
VERL_OTHER: dict[str, str] = {
    "data.filter_overlong_prompts": "is --long-prompts skip here, the default",
    "data.reward_fn_key": _NOT_NEEDED,
    "data.": _NOT_NEEDED,
    "algorithm.kl_ctrl": f"is {KL} here",
    "algorithm.norm_adv_by_std_in_grpo": "is --algorithm.scale here: std, or none",
    "algorithm.use_kl_in_reward": "is --algorithm.kl-in reward here, of --algorithm ppo",
    "algorithm.": "is a hyper-parameter of the method here: jaxrl algorithms NAME lists them",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "is --remat here, which is on",
    "actor_rollout_ref.model.use_remove_padding": "has no counterpart here, since rows are always packed: leave it out",
    "actor_rollout_ref.model.": _NOT_NEEDED,
    _VERL_ACTOR + "clip_ratio": _CLIP,
    _VERL_ACTOR + "fsdp_config": _MESH,
    _VERL_ACTOR + "kl_loss_type": "is part of the method here (k3, verl's low_var_kl)",
    _VERL_ACTOR + "loss_agg_mode": _AVERAGE,
    _VERL_ACTOR + "ppo_micro_batch_size": "is --micro-batches here, how many parts a minibatch is cut into",
    _VERL_ACTOR + "ppo_max_token_len_per_gpu": "is --micro-batches here, how many parts a minibatch is cut into",
    _VERL_ACTOR + "ppo_mini_batch_size": "is --minibatches here: the number of gradient steps for each batch",
    _VERL_ACTOR + "strategy": _MESH,
    _VERL_ACTOR + "ulysses_sequence_parallel_size": "is --mesh sequence=N here",
    _VERL_ACTOR + "use_kl_loss": f"is {KL} here, above 0",
    _VERL_ACTOR: _NOT_NEEDED,
    _VERL_ROLLOUT + "tensor_model_parallel_size": "is --mesh tensor=N here",
    _VERL_ROLLOUT: _ENGINE,
    "actor_rollout_ref.ref": "has no counterpart here; --reference-memory host keeps the reference off the accelerator",
    "critic.": "is --critic here, tower or shared, for methods that have one",
    "custom_reward_function": "is --rewards here: --rewards my_file.py:compute_score",
    "reward_model": _REWARD_MODEL,
    "reward.": _REWARD_MODEL,
    "trainer.experiment_name": "is the folder of the run here: --output runs/NAME",
    "trainer.logger": "is --wandb PROJECT here; TensorBoard's files are written unless --no-tensorboard",
    "trainer.n": _MESH,
    "trainer.resume_mode": "is --resume auto here, or --resume RUN",
    "trainer.total_epochs": _LENGTH,
    "trainer.val_before_train": "is always done here, unless --eval-size 0",
    "trainer.": _NOT_NEEDED,
}

_TUNIX_RATE = "rl_training_config.actor_optimizer_config."
TUNIX_SAME: dict[str, Same] = {
    "actor_model_config.lora_config.alpha": Same("--lora-alpha"),
    "actor_model_config.lora_config.rank": Same("--lora-rank"),
    "batch_size": Same("--prompts-per-step"),
    "dataset_name": Same("--prompts"),
    "grpo_config.beta": Same(KL),
    "grpo_config.num_generations": Same("--group-size"),
    "grpo_config.num_iterations": Same("--epochs"),
    "model_config.model_id": Same("--model"),
    "num_batches": Same("--steps"),
    "reference_model_config.model_id": Same("--model"),
    "reward_functions": Same("--rewards"),
    "rl_training_config.eval_every_n_steps": Same("--eval-every"),
    "rl_training_config.max_steps": Same("--steps"),
    "rollout_config.max_prompt_length": Same("--max-prompt-tokens"),
    "rollout_config.temperature": Same("--temperature"),
    "rollout_config.top_k": Same("--top-k"),
    "rollout_config.top_p": Same("--top-p"),
    "rollout_config.total_generation_steps": Same("--max-new-tokens"),
    _TUNIX_RATE + "learning_rate": Same(LEARNING_RATE),
    _TUNIX_RATE + "warmup_steps": Same("--optimizer.warmup-steps"),
    _TUNIX_RATE + "weight_decay": Same("--optimizer.weight-decay"),
}
TUNIX_OTHER: dict[str, str] = {
    "actor_model_config": _MESH,
    "config_file": "is --config here, a YAML or TOML file",
    "data_source": "is --prompts here: a file, a Hub data set such as openai/gsm8k:main/train, or reasoning-gym:TASK",
    "grpo_config.epsilon": _CLIP,
    "grpo_config": "is a hyper-parameter of the method here: jaxrl algorithms grpo lists them",
    "model_config.mesh": _MESH,
    "model_config.model_name": "is --model here: a Hugging Face folder or hub name",
    "model_config": _NOT_NEEDED,
    "num_train_epochs": _LENGTH,
    "reference_model_config": _NOT_NEEDED,
    "rl_training_config": _NOT_NEEDED,
    "rollout_config": _ENGINE,
    "rollout_engine": _ENGINE,
    "rollout_model_config": _MESH,
    "tokenizer_config": "has no counterpart here, since the model's tokenizer is used: leave it out",
    "train_fraction": _LENGTH,
}

# For tests: all tables.
SAME_TABLES = (TRL_SAME, VERL_SAME, TUNIX_SAME)
OTHER_TABLES = (TRL_OTHER, VERL_OTHER, TUNIX_OTHER)

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
    "dpo": "not here: preference pairs are trained with the objectives of jaxrl_llm.objectives in Python",
    "evaluate": "jaxrl eval RUN",
    "generate": "jaxrl sample MODEL 'PROMPT'",
    "list": "jaxrl algorithms",
    "main_ppo": "jaxrl train --algorithm ppo",
    "merge": "jaxrl export RUN FOLDER",
    "methods": "jaxrl algorithms",
    "resume": "jaxrl train --resume RUN",
    "run": "jaxrl train",
    "sft": "not here as a command: supervised steps are rollouts.ready_made.demonstrations in Python",
    "test": "jaxrl eval RUN",
    "version": "jaxrl --version",
    "vllm-serve": "not needed: the policy samples with its own engine; see jaxrl sample",
}
