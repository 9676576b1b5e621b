"""`OptimizerConfig`: the settings of the optimiser, and their ranges. It imports no JAX; `optimizer` builds with it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_llm.core.arguments.ranges import WHOLE, Range
from jaxrl_llm.utils.errors import InputError, gather
from jaxrl_llm.utils.keywords import settings_class
from jaxrl_llm.utils.settings import check_types, range_checks

SMALLEST = 1e-30  # many devices take numbers below 1.2e-38 for zero
LARGEST = 1e30


@settings_class()
@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Range(0, LARGEST)] = 1e-6
    """Peak learning rate, >= 0."""
    critic_learning_rate: float | None = None
    """Peak learning rate of a critic; by default the same."""
    warmup_steps: Annotated[int, Range(0, WHOLE)] = 0
    """Gradient steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, until the last gradient step."""
    final_fraction: Annotated[float, Range(0, 1)] = 0.0
    """Share of the peak learning rate at the end of a linear or cosine schedule, 0 to 1."""
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Range(0, below=1)] = 0.95
    """Decay of the second moment; the bias-corrected average forgets gradients after about 1 / (1 - beta2) steps."""
    epsilon: Annotated[float, Range(SMALLEST, LARGEST)] = 1e-8
    """Added to the root of the second moment; above 0."""
    weight_decay: Annotated[float, Range(0, LARGEST)] = 0.0
    """Decoupled weight decay; matrices only, not norms, biases or embeddings."""
    moments: Literal["float32", "bfloat16", "factored"] = "float32"
    """float32: AdamW, 8 bytes a parameter. bfloat16: the first moment is kept in bfloat16 and the second in float32, 6
    bytes. factored: Adafactor's row and column means in the place of the second, and no first: nearly none (beta1 is
    unused, beta2 is reached from 0)."""
    master_copy: bool = True
    """For parameters in bfloat16, another copy in float32 (4 bytes each), which the updates add up in: without it,
    those below 1/512 of a parameter are lost."""
    max_grad_norm: Annotated[float, Range(0, LARGEST)] = 1.0
    """Gradients are scaled down to this global norm; 0 turns it off."""


def check_optimizer(config: OptimizerConfig) -> None:
    """InputError for a setting of another type, or out of range."""
    check_types(config, "optimizer.")
    gather(*range_checks(config, "optimizer."))
    rate = config.critic_learning_rate
    if rate is not None and not (config.learning_rate > 0 and 0 <= rate <= LARGEST):
        raise InputError(
            f"optimizer.critic_learning_rate is {rate}, but must be at least 0 and finite, with an "
            f"optimizer.learning_rate above 0 (it is {config.learning_rate})"
        )
