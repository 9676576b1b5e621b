"""What shapes a run of the laboratory, and the small decoder that it trains."""

from dataclasses import dataclass

import optax

from jaxrl_llm.core.arguments.checks import check_fields
from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.tasks import Task
from jaxrl_llm.learner.optimizer import of_critic
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.policy import Params, Policy, init_params
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.keywords import settings_class


@settings_class()
@dataclass(frozen=True)
class LabSettings:
    """What shapes a run; other numbers need another compilation."""

    iterations: int = 100
    """Batches, each sampled by the newest policy."""
    prompts: int = 16
    """Prompts of a batch."""
    group_size: int = 8
    """Completions of each prompt."""
    epochs: int = 1
    """Passes over a batch."""
    minibatches: int = 1
    """Gradient steps of a pass; whole groups each."""
    learning_rate: float = 1e-3
    """Of Adam, where the hyper-parameters of a run do not say otherwise."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    critic_rate: float = 1.0
    """Learning rate of a critic's own weights, as a multiple of the policy's."""
    hidden: int = 32
    """Width of the decoder; its inner width is twice that."""
    layers: int = 2
    """Layers of the decoder."""
    heads: int = 2
    """Attention heads."""
    exact: bool = True
    """Under `vmap` runs take turns, and are bit by bit what they are alone. False computes them side by side: sums
    then round otherwise, sampled tokens change after some iterations, and only statistics agree."""


DEFAULTS = LabSettings()


def check_settings(settings: LabSettings) -> None:
    """InputError for a number that is not whole, out of its range, or does not fit another."""
    if not isinstance(settings, LabSettings):
        raise InputError(f"settings must be in_jax.train.LabSettings, but is {in_words(settings)}")
    for name in ("iterations", "prompts", "group_size", "epochs", "minibatches", "hidden", "layers", "heads"):
        check_number(name, getattr(settings, name), least=1, most=2**20, whole=True)
    check_number("learning_rate", settings.learning_rate, least=0)
    check_number("max_grad_norm", settings.max_grad_norm, above=0)
    check_number("critic_rate", settings.critic_rate, least=0)
    check_fields(settings)
    if settings.prompts % settings.minibatches:
        raise InputError(f"minibatches is {settings.minibatches}, but must divide the {settings.prompts} prompts")
    if settings.hidden % (2 * settings.heads):
        wanted = f"a multiple of twice the {settings.heads} heads"
        raise InputError(f"hidden is {settings.hidden}, but must be {wanted}, each of an even width")


def make_policy(task: Task, settings: LabSettings) -> Policy:
    """A small decoder for a task."""
    head_dim = settings.hidden // settings.heads
    config = ModelConfig(
        family="llama",
        vocab_size=task.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        num_layers=settings.layers,
        num_heads=settings.heads,
        num_kv_heads=settings.heads,
        head_dim=head_dim,
        norm_epsilon=1e-6,
        tie_embeddings=False,
        rope_of_layer=(0,) * settings.layers,
        window_of_layer=(0,) * settings.layers,
        query_scale=head_dim**-0.5,
    )
    return Policy(config, remat=False)


def fresh_params(key: Array, task: Task, settings: LabSettings) -> Params:
    """Random parameters, one dict a layer."""
    config = make_policy(task, settings).config
    return unstack(init_params(key, config, scale=settings.hidden**-0.5), config)


def make_optimizer(settings: LabSettings, rate: Array | float) -> optax.GradientTransformation:
    """Adam with a bound on the norm of the gradient. The critic's own weights learn `critic_rate` times as fast."""
    steps = [optax.clip_by_global_norm(settings.max_grad_norm), optax.adam(rate)]
    if settings.critic_rate != 1:
        steps.append(optax.masked(optax.scale(settings.critic_rate), of_critic))
    return optax.chain(*steps)
