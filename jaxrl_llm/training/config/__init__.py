"""`TrainConfig`: everything a run depends on, as data. Runs with equal configurations are bit-identical."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxrl_llm.core.arguments.ranges import WHOLE, Range
from jaxrl_llm.learner.optimizer_config import SMALLEST, OptimizerConfig
from jaxrl_llm.training.config.checks import LoraTarget, inside, settle
from jaxrl_llm.training.config.inputs import Count as Count
from jaxrl_llm.training.config.inputs import CountOrOff, InputSettings
from jaxrl_llm.training.config.inputs import Dtype as Dtype
from jaxrl_llm.utils.keywords import settings_class

if TYPE_CHECKING:
    from jaxrl_llm.sampling.sampler import SamplingConfig


@settings_class(elsewhere=inside)
@dataclass(frozen=True)
class TrainConfig(InputSettings):
    """A training run: the model and the prompts (`InputSettings`), sampling, rewards, method, and what is written."""

    prompts_per_step: Annotated[int, Range(1, 2**20)] = 16
    """Prompts per iteration."""
    group_size: Annotated[int, Range(1, 2**20)] = 8
    """Completions per prompt."""
    max_new_tokens: Annotated[int, Range(1, 2**24)] = 128
    """Maximum length of a completion, in tokens."""
    temperature: Annotated[float, Range(1e-9, 1e6)] = 1.0
    """Sampling temperature, above 0."""
    top_p: Annotated[float, Range(SMALLEST, 1)] = 1.0
    """Nucleus sampling: above 0, at most 1 (1 is off)."""
    top_k: CountOrOff = 0
    """Sample from the k most likely tokens; 0 is off."""
    min_p: Annotated[float, Range(0, 1)] = 0.0
    """Sample from tokens with at least this fraction of the highest probability; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    slots: Annotated[int, Range(0, 2**20)] = 0
    """Completions decoded at the same time; 0 is all completions of a step."""
    cache_dtype: Literal["dtype", "bfloat16", "int8", "float8"] = "dtype"
    """Dtype of keys and values while sampling; at lower precision than `dtype`, sampled log-probabilities are less
    exact. dtype is that of activations; int8 and float8 have a scale for each vector."""
    weight_dtype: Literal["dtype", "int8", "float8", "int8_blocks", "float8_blocks"] = "dtype"
    """Round the projections of layers while sampling, with a scale for each output: decoding then reads half as many
    bytes as in bfloat16. Embeddings, norms and adapters are not rounded. With int8_blocks and float8_blocks, of dense
    layers, each block of 128 x 128 has a scale, and what is multiplied with it is rounded too, in groups of 128."""
    same_rounding: bool = False
    """Compute with the rounding of weight_dtype in updates and evaluations too, with straight-through gradients (as
    Jet-RL, 2601.14243): ratios start at 1 again, with float32 activations. float32 weights are updated. Blocks also
    round the products of the backward pass, and ratios are near 1 only: a rounded activation may go either way."""
    speculative_tokens: Annotated[int, Range(0, 64)] = 0
    """Once few completions of a step are unfinished, draft this many tokens of each from what followed the same tokens
    before, and verify them in one pass: no token changes. Drafts come from the completion, from others of its prompt,
    and from earlier epochs. 0 is off; 4 is a good start."""
    oversample: Annotated[float, Range(1, 1024)] = 1.0
    """Prompts in flight, as a multiple of prompts_per_step. Above 1, a step ends when prompts_per_step groups are
    complete, and the other completions continue in the next step (partial rollouts)."""
    segment_tokens: CountOrOff = 0
    """Above 0, a step ends when each completion in flight has this many new tokens or is finished. It trains on the
    complete groups, at most prompts_per_step; the others continue in the next step. For full batches, set oversample
    to max_new_tokens / segment_tokens. At 0, some methods use segments of their own; t_ppo trains on all completions
    in flight, on each segment in the step that sampled it."""

    max_staleness: Annotated[int, Range(0, 1024)] = 0
    """Above 0, tokens are sampled beside the updates, and the learner is at most this many steps ahead of the weights
    with which a group was begun. New weights come in while completions are decoded, and no group is dropped. At 0
    sampling and updates alternate."""
    stale_correction: Literal["truncate", "mask", "interpolate", "none"] = "truncate"
    """With max_staleness, for methods that have no ratio to the old policy: tokens are weighted by the policy before
    the update over the one that drew them, with weights above 2 cut to 2 (truncate) or taken as 0 (mask), and the
    method's ratio is to the policy before the update; methods without advantages stay as they are. interpolate: a
    policy between the current one and the one that drew a token stands for that before the update, and saves its
    forward pass. none: all methods stay as they are."""
    stale_cache: Literal["recompute", "keep"] = "recompute"
    """With max_staleness, what becomes of the caches of completions that go on under new weights: recomputed, or kept
    as they are, which costs nothing, but of a token's context only the newest part is then of the current weights."""
    sampler_devices: Annotated[int, Range(0, 2**20)] = 0
    """With max_staleness, the number of devices, the last, that sample only; the others learn. At 0 all devices do
    both, by turns if there are several."""
    samplers: Annotated[int, Range(0, 1024)] = 0
    """With max_staleness, the number of programs that sample for this host, each on devices of its own, mostly on other
    machines: start them with jaxrl sampler and the address of the learner. All devices of the learner learn then."""
    sampler_address: str = "127.0.0.1:7390"
    """With samplers, the address HOST:PORT at which they dial the learner. Both have the same secret in the variable
    JAXRL_SAMPLER_KEY, and belong in one private network: what they tell each other is not encrypted."""
    replay_order: str | None = None
    """Folder of an asynchronous run, whose order of weights and groups is repeated: with the same settings the run is
    the same bit by bit."""

    rollout: str = "group"
    """Program that makes a group of completions: group, down_sampled(TIMES), hinted(COLUMN), forked(PLACE, ...),
    demonstrated(COLUMN) (supervised texts), demonstrated_before(STEP, COLUMN), or path/to/file.py:FUNCTION or
    package.module:FUNCTION, an async program or a function that returns a Rollout."""
    rollout_time_limit: Annotated[float, Range(1e-3, 1e6)] = 60.0
    """Seconds a rollout program may wait for anything other than tokens; after that its group counts as failed. When a
    run starts, its files and its environment have as long to load and to be made."""
    strict_reruns: bool = False
    """End the run where an environment answers otherwise when an unfinished conversation is resumed after a kill; else
    its group counts as failed."""

    environment: str | None = None
    """What the policy acts in, over several turns: path/to/file.py:NAME or package.module:NAME, a class or function
    that makes an environment of TRL's kind (its methods are tools), Gymnasium's, TextArena's or TextWorld's, or a dict
    of them by the rows' column `environment`."""
    harness: str | None = None
    """An agent that brings its own loop, instead of an environment: path/to/file.py:FUNCTION or
    package.module:FUNCTION, an async or plain function of (base_url, api_key, row) that plays an episode with any
    OpenAI client, and returns its reward, or nothing where other rewards judge it."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call, path/to/file.py:FUNCTION or package.module:FUNCTION, with type hints and a
    docstring that says what each argument is; alone, or beside the tools of an environment of TRL's kind."""
    turns: Annotated[int, Range(1, 2**10)] = 8
    """Most replies of an episode with an environment or tools."""
    turn_tokens: Annotated[int, Range(0, 2**24)] = 0
    """Most tokens of a reply there; 0 is max_new_tokens."""
    episode_tokens: CountOrOff = 0
    """Most tokens of an episode there, replies and observations, after its prompt; 0: as the context allows."""
    context_tokens: CountOrOff = 0
    """Most tokens that the policy sees at once, its prompt included; 0 is as the model's context allows. A model with
    rotary factors for short and for long contexts (longrope) takes those for as many."""
    compact: str | None = None
    """What a conversation goes on with when context_tokens is near, instead of ending: summary(TOKENS), which the
    policy writes and is trained on, keep_last(TURNS), which drops the turns before, or path/to/file.py:NAME or
    package.module:NAME, a function that takes the messages and returns those that are kept, or a Summary."""
    players: Annotated[int, Range(1, 2**10)] = 1
    """Players of the environment, a game of TextArena's kind: the policy is each of them, and each is compared with the
    same player of the group's other games."""
    environment_steps: Annotated[int, Range(0, 2**20)] = 4
    """Decode steps of other episodes while an environment answers. An answer that takes less counts after these steps,
    and decoding waits for one that takes more, so that a run does not depend on how long answers take."""
    tool_time_limit: Annotated[float, Range(1e-3, 1e6)] = 30.0
    """Seconds that a call of a tool may take; the policy is told then. Environments have rollout_time_limit."""

    rewards: tuple[str, ...] = ("reasoning_gym",)
    """Reward functions NAME[*WEIGHT]: exact_match, number_match, math_verify, reasoning_gym, format_match(REGEX),
    path/to/file.py:FUNCTION or package.module:FUNCTION, model:PATH, the score of a reward model, or environment, what
    the environment gives, which is the default where there is one."""
    reward_time_limit: Annotated[float, Range(1e-3, 1e6)] = 10.0
    """Seconds that a reward function may take for a completion, after which that one is not scored. A call with the
    completions of a step (with stream_rewards: of a group) has as much again for each doubling of their number."""
    stream_rewards: bool = False
    """Score each group as soon as it is complete, while others are still being sampled. Reward functions are then
    called once per group instead of once per step, so they must not compare completions of different prompts."""
    reward_default: Annotated[float, Range(-1e30, 1e30)] = 0.0
    """Score of a completion on which a reward function raises."""
    overlong_tokens: CountOrOff = 0
    """Soft overlong penalty: falls from 0 to -1 over this many tokens before max_new_tokens; 0 is off."""

    algorithm: str = "grpo"
    """Method from the catalogue (`jaxrl algorithms` lists them), or path/to/file.py:NAME or package.module:NAME, an
    Algorithm or a function of hyper-parameters that returns one."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """Hyper-parameters of the algorithm."""
    routing_replay: Literal["method", "rollout", "recompute", "none"] = "method"
    """Of a mixture of experts, the experts that updates see tokens with, instead of the current routers' choice: those
    of the rollout (R3), those that the weights before the update choose (recompute, R2), or none; by default as
    the method has it, which is none but for minirl. It takes layers x experts_per_token bytes a token (2 of more than
    128 experts)."""
    router_aux_coefficient: Annotated[float, Range(0, 1e3)] = 0.0
    """Of a mixture of experts, the coefficient of an auxiliary loss that keeps its experts busy (TRL's
    router_aux_loss_coef; of models 0.001 to 0.02); with micro-batches it costs another forward pass. 0 is off."""
    router_bias_speed: Annotated[float, Range(0, 1)] = 0.0
    """Of a mixture whose routers have correction biases (DeepSeek-V3, GLM-4.5), by how much each gradient step raises
    those of experts with less than the mean load and lowers the others; DeepSeek-V3's is 0.001, and 0 keeps them."""
    critic: Literal["tower", "shared"] = "tower"
    """Critic, for methods that have one: a copy of the model with a value head (tower), or a value head on the policy's
    hidden states (shared)."""
    critic_model: str | None = None
    """Reward model (a folder, or a name on the hub) of the model's own size and vocabulary from which a critic that is
    a tower starts, value head included. Default: the model, and values of 0."""
    teacher: str | None = None
    """Teacher of methods that have one: a folder, a name on the hub, or the URL of an OpenAI-compatible server, such as
    http://HOST:8000/v1#MODEL. A model of any architecture with the same tokens; it is kept in `dtype`. Several are
    NAME=PATH,NAME=PATH; the column `teacher` of a row names the one that teaches it."""
    critic_steps: CountOrOff = 0
    """Number of first steps in which only the critic is trained."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    epochs: Annotated[int, Range(1, 2**20)] = 1
    """Passes over each batch."""
    epochs_until: CountOrOff = 0
    """Number of first steps with `epochs` passes over their batches; later steps make one. 0: all steps."""
    minibatches: Annotated[int, Range(1, 2**20)] = 1
    """Gradient steps per pass; minibatches x micro_batches must divide prompts_per_step."""
    micro_batches: Annotated[int, Range(1, 2**20)] = 1
    """Slices of a minibatch whose gradients are accumulated; saves memory and changes nothing else."""
    sink_slots: Annotated[int, Range(0, 1024)] = 0
    """Learned keys and values that are of no token, so many in each key-value head (Sink-KV of ReLIC). They begin at 0,
    where each adds 1 to the denominator of attention's softmax. The model then stays in the run's own checkpoints:
    `jaxrl export` has no format for it."""
    adapter: str | None = None
    """Folder of LoRA adapters, as PEFT writes them, with which the policy begins. They are trained, with the rank and
    scale that they have, and the model's weights are frozen. A reference policy has them as they were at first."""
    lora_rank: Annotated[int, Range(0, 2**16)] = 0
    """Above 0, the model's weights are frozen and low-rank adapters (LoRA) of this rank are trained, in float32. A
    reference policy is then the frozen model and needs no copy."""
    lora_alpha: Annotated[float, Range(SMALLEST, 1e6)] = 32.0
    """Scale of the adapters: their output is multiplied by lora_alpha / lora_rank."""
    lora_targets: tuple[LoraTarget, ...] = ()
    """Matrices with adapters: query, key, value, out, gate, up, down (in layers with experts one for each expert), and,
    where they are not tied, embed and unembed; by default all projections of layers but for experts."""
    frozen_dtype: Literal["param_dtype", "int8", "float8", "nf4"] = "param_dtype"
    """With adapters, dtype in which the frozen projections of layers are kept, in updates and while sampling: nf4 is
    QLoRA's, in 4 bits with a scale for 64 inputs; int8 and float8 have a scale for each output."""
    reference_memory: Literal["device", "host", "disk"] = "device"
    """Where a reference policy is kept while it is not used: host saves device memory, and costs a transfer a step.
    disk: of given responses, whose log-probabilities under it are computed before the first step and kept in the cache
    folder for later runs of the same model, no reference is kept at all."""
    remat: bool = True
    """Recompute activations in the backward pass instead of storing them."""
    keep_projections: bool = False
    """With remat, store the outputs of products with weights and recompute only the rest: faster, more memory."""

    eval_prompts: str | None = None
    """Held-out prompts, given like `prompts`; by default from the same source (another seed, or a held-out split)."""
    eval_size: CountOrOff = 256
    """Number of held-out prompts; they are removed from the training prompts. 0 disables evaluation. The default is at
    most a quarter of a small file."""
    eval_every: CountOrOff = 0
    """Steps between evaluations; 0 evaluates only before and after training."""
    eval_patience: CountOrOff = 0
    """Evaluations after the best one after which the run ends; 0 is never. To have the best weights then, keep as many
    checkpoints, with checkpoint_every as eval_every."""
    eval_metric: str = ""
    """Figure of evaluations by which one is the best, the largest, or of loss the smallest; by default accuracy, of
    given responses loss."""
    eval_reward: str | None = None
    """Name of the reward that marks an answer as correct (at 1); by default environment if there, else the first."""

    checkpoint_every: CountOrOff = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep_checkpoints: Annotated[int, Range(2, WHOLE)] = 2
    """Number of checkpoints to keep, at least 2, in case the newest is damaged."""
    replay_megabytes: CountOrOff = 1024
    """Size of a method's stored rows in memory and in each checkpoint, above which their tokens are in files of the
    run's folder instead; 0 is always. On one host, and where the folder is no URL."""
    log_completions_every: CountOrOff = 10
    """Steps between those whose completions are logged for the report; 0 is never."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run's folder."""
    wandb: str | None = None
    """Weights & Biases project to report to. A resumed run goes on with its run there, as in the next two."""
    trackio: str | None = None
    """Trackio project to report to."""
    mlflow: str | None = None
    """MLflow experiment to report to, at MLFLOW_TRACKING_URI."""

    hang_seconds: Annotated[float, Range(0, 1e7)] = 1800.0
    """Seconds without progress after which a run is reported as hung, with the stacks of its threads; 0 is never."""
    hang_factor: Annotated[float, Range(1, 1e6)] = 10.0
    """A phase also has to take this multiple of its median time until then."""
    hang_exit: bool = False
    """End a hung process, with exit code 75, so that a scheduler can resume the run."""
    spike_factor: Annotated[float, Range(0, 1e6)] = 0.0
    """Above 0: if a metric of spike_metrics exceeds its median by this multiple of the median deviation from it, over
    the last spike_window steps, go back to the last checkpoint and on with the next prompts; 10 is careful."""
    spike_metrics: tuple[str, ...] = ("loss", "grad_norm")
    """Metrics in which spikes are looked for."""
    spike_window: Annotated[int, Range(4, 2**20)] = 32
    """Steps that a step is compared with."""
    spike_rollbacks: Annotated[int, Range(1, 2**20)] = 3
    """At most this many rollbacks in spike_window steps; further spikes are only reported."""

    @property
    def sampling(self) -> SamplingConfig:
        """How completions are sampled: the settings of the same names."""
        from jaxrl_llm.sampling.sampler import SamplingConfig

        own = {field.name: getattr(self, field.name) for field in fields(SamplingConfig)}
        usual = self.dtype if self.activations == "dtype" else self.activations
        cache = {"dtype": usual, "float8": "float8_e4m3fn"}.get(self.cache_dtype, self.cache_dtype)
        weights = None if self.weight_dtype == "dtype" else self.weight_dtype
        return SamplingConfig(**own | {"cache_dtype": cache, "weight_dtype": weights})

    def epochs_at(self, step: int) -> int:
        """Passes over the batch of a step, counted from 0."""
        return self.epochs if not self.epochs_until or step < self.epochs_until else 1

    @property
    def gradient_steps(self) -> int:
        """Those of the whole run."""
        raised = min(self.epochs_until, self.steps) if self.epochs_until else self.steps
        return (raised * self.epochs + self.steps - raised) * self.minibatches

    @property
    def world(self) -> str | None:
        """What the policy acts in, the environment or the harness; None where there is neither."""
        return self.environment or self.harness

    @property
    def adapts(self) -> str:
        """The setting by which adapters learn instead of the model's weights; "" where these do."""
        return "adapter" if self.adapter else "lora_rank" if self.lora_rank else ""

    def __post_init__(self) -> None:
        settle(self)
