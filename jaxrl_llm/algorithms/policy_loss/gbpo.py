import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import above_baseline, group_relative
from jaxrl_llm.algorithms.method import Algorithm, method, run_settings, several_steps
from jaxrl_llm.core.annotations import Code, FractionNumber, NonNegative, NonNegativeNumber, Number, Positive, ZeroOrOne
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.log_ratios import absolute
from jaxrl_llm.core.parts import Metrics, PolicyOutputs, Trajectories, chain, stateless_part, surrogate_part
from jaxrl_llm.objectives import policy_gradient, token_mean, token_ratio


@method(paper="arXiv 2604.18578", test="test_trust_region.py::test_gbpo_by_loop")
@run_settings(several_steps("several gradient steps on a batch, towards ratios away from 1", 5))
def gbpo(
    low: Code[float] = 0.3,
    high: Code[float] = 0.3,
    temperature: Code[Positive] = 1e-4,
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Group-relative Bounded Policy Optimization (Bounded Ratio RL).

    Regresses the ratio onto the optimum within bounds, 1 + high above the group's median and 1 - low below it:

        loss = token mean of |(rho - target) A|,  target = 1 - low + (low + high) sigmoid(z)
        A = (r - mean_g) / (std_g + epsilon),  z = (r - median_g) / (std_g + epsilon) / temperature

    Defaults are those of the code's README (its YAML has low = high = 0.2 and temperature 1). With binary rewards only
    the ratios of the minority outcome move away from 1, unless a group is split evenly; the others are at the median,
    with target 1, whose gradient is 0 at the first update of a batch: rho = pi/pi_old. A group of one has A = 0 (the
    code: about r). Intended for several epochs per batch.
    """
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), aim_at_bounds(low, high, temperature, ddof, epsilon))
    return Algorithm(transform, policy_gradient(token_ratio("old"), toward_ratio("ratio_target"), token_mean()))


def signed_ratio_distance(ratio: jax.Array, target: jax.Array, advantages: jax.Array) -> jax.Array:
    """|(rho - target) A|: a weighted L1 regression of the ratio, with gradient 0 at the target; elementwise.

    At the target means within `log_ratios.ROUNDING` of it.
    """
    return absolute(ratio - target) * jnp.abs(advantages)


def bounded_ratio(z: jax.Array, low: Number, high: Number) -> jax.Array:
    """1 - low + (low + high) sigmoid(z): the target ratio, in [1 - low, 1 + high] (2604.18578); elementwise."""
    return 1 - low + (low + high) * jax.nn.sigmoid(z)


@stateless_part()
def aim_at_bounds(
    batch: Trajectories,
    low: FractionNumber,
    high: NonNegativeNumber,
    temperature: Number,
    ddof: int = 1,
    epsilon: Number = 1e-6,
) -> Trajectories:
    """Write info["ratio_target"] f32[N], `bounded_ratio` of z = (r - median_g) / (std_g + epsilon) / temperature."""
    deviation = bucket_moments(batch.group, batch.scores, ddof)[2]
    z = above_baseline(batch.scores, batch.group, "median") / (deviation + epsilon) / temperature
    return batch.with_info(ratio_target=bounded_ratio(z, low, high))


@surrogate_part
def toward_ratio(
    ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories, name: str = "ratio_target"
) -> tuple[jax.Array, Metrics]:
    """The negative `signed_ratio_distance` to the targets info[name] f32[N]."""
    target = jnp.broadcast_to(batch.need(name)[:, None], ratio.shape)
    return -signed_ratio_distance(ratio, target, batch.need("advantages")), {"ratio/target": target}
