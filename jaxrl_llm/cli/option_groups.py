"""How the settings of a run are shown as options: in groups, each with its description."""

import ast
import inspect
from functools import cache
from itertools import pairwise
from pathlib import Path

from jaxrl_llm.core.arguments.hyperparameters import Hyperparameter

# Name of a group -> (what it is about, its settings in order). Those of the optimiser and of the method come last.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "run": (
        "What is trained, where the results go, and for how long.",
        ("model", "output", "steps", "epochs_of_data", "seed", "algorithm"),
    ),
    "data": (
        "The prompts, and how the rows of the data become prompts.",
        ("prompts", "num_prompts", "same_task", "prompt_column", "answer_column", "prompt_template", "system_prompt",
         "prompt_format", "template_options", "earlier_thoughts", "date", "task_options", "max_prompt_tokens",
         "long_prompts"),
    ),
    "agent": (
        "What the policy acts in over several turns: environments and tools, and the budgets of their episodes.",
        ("environment", "harness", "tools", "turns", "turn_tokens", "episode_tokens", "context_tokens", "compact",
         "players", "environment_steps", "tool_time_limit"),
    ),
    "reward": (
        "How completions are scored.",
        ("rewards", "reward_time_limit", "stream_rewards", "reward_default", "overlong_tokens"),
    ),
    "sampling": (
        "How completions are sampled.",
        ("prompts_per_step", "group_size", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop",
         "rollout", "rollout_time_limit", "strict_reruns", "slots", "speculative_tokens", "oversample",
         "segment_tokens"),
    ),
    "asynchronous": (
        "Sampling beside the updates, with bounded staleness.",
        ("max_staleness", "stale_correction", "stale_cache", "sampler_devices", "samplers", "sampler_address",
         "replay_order"),
    ),
    "learning": (
        "How a batch is learned from.",
        ("epochs", "epochs_until", "minibatches", "routing_replay", "router_aux_coefficient", "router_bias_speed",
         "critic", "critic_model", "critic_steps", "teacher", "sink_slots", "adapter", "lora_rank", "lora_alpha",
         "lora_targets"),
    ),
    "evaluation": (
        "Held-out prompts, on which accuracy is measured before and after training.",
        ("eval_prompts", "eval_size", "eval_every", "eval_patience", "eval_metric", "eval_reward"),
    ),
    "logging": (
        "What is written down, and how often.",
        ("checkpoint_every", "keep_checkpoints", "replay_megabytes", "log_completions_every", "tensorboard", "wandb",
         "trackio", "mlflow"),
    ),
    "device": (
        "Precision, memory and the mesh of devices.",
        ("dtype", "activations", "param_dtype", "frozen_dtype", "cache_dtype", "weight_dtype", "same_rounding", "mesh",
         "sampling_mesh", "micro_batches", "remat", "keep_projections", "reference_memory"),
    ),
    "safety": (
        "What happens when a run hangs, or its loss spikes.",
        ("hang_seconds", "hang_factor", "hang_exit", "spike_factor", "spike_metrics", "spike_window",
         "spike_rollbacks"),
    ),
}  # fmt: skip

# Hyper-parameters that mean the same in every method; the others are described by the method's docstring.
SHARED: dict[str, str] = {
    "average": 'Average of the loss: "sequence" (the mean of each completion, then of these), "token" (over all tokens '
    'of the batch), "prompt" (over the tokens of each group), "sum", "constant" (by max_length) or "slice".',
    "clip_high": "The ratio of new to old probability is clipped above 1 + clip_high.",
    "clip_low": "The ratio of new to old probability is clipped below 1 - clip_low.",
    "ddof": "Degrees of freedom of the standard deviation: 1 divides by n - 1, 0 by n.",
    "dual_clip": "Bound of the loss where the advantage is negative, as a multiple of it; above 1, None is off.",
    "entropy_coefficient": "Coefficient of an entropy bonus; 0 is off.",
    "epsilon": "Small number added to a divisor, such as a standard deviation, against division by zero.",
    "gamma": "Discount of a token's reward for every token before it; 1 is none.",
    "kl_coefficient": "Coefficient of the KL penalty to the initial policy (TRL's and Tunix's beta, verl's "
    "kl_loss_coef); at 0 no reference policy is kept.",
    "lam": "Lambda of generalised advantage estimation: 0 trusts the critic, 1 the returns.",
    "max_length": "Length by which sums over tokens are divided; by default max_new_tokens.",
    "preset": "A named set of defaults, where the paper and its released code differ.",
    "total_steps": "Steps of the method's schedule; by default those of the run.",
    "value_clip": "How far the critic's values may move in an update; None is off.",
    "value_coefficient": "Coefficient of the critic's loss.",
    "weights": "Weights of the reward's components, in the order of --rewards.",
    "without": "Parts of the method that this run goes without, separated by commas.",
}


@cache
def setting_docs(kind: type) -> dict[str, str]:
    """The description under each field of a configuration's class, also of those that it inherits, on one line."""
    inherited: dict[str, str] = {}
    for base in kind.__bases__:
        if base is not object:
            inherited |= setting_docs(base)
    source = Path(inspect.getsourcefile(kind) or "").read_text(encoding="utf-8")
    (body,) = (x.body for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == kind.__name__)
    return inherited | {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def parameter_doc(parameter: Hyperparameter) -> str:
    """What a hyper-parameter of a method is: a sentence or two; "" where its docstring does not mention it."""
    return SHARED.get(parameter.name, parameter.help)
