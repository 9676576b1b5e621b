import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Count, NonNegative, Ours, Paper, Positive, Scale, ZeroOrOne
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, Trajectories, part, row_means
from jaxrl_llm.objectives import averaged, sequence_mean


@method(paper="arXiv 2510.11683", test="test_diffusion.py::test_bgpo_is_the_loop")
def bgpo(
    samples: Paper[Count] = 16,
    largest: Ours[Positive] = 5.0,
    scale: Paper[Scale] = "std",
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Boundary-Guided Policy Optimization (BGPO) of masked-diffusion language models.

    The ratio of likelihoods of a response is exp of a difference of bounds, each a mean of n = `samples` terms
    l(j) = 1/t_j sum of log pi over the tokens that sample j masks. BGPO maximises a lower bound of ratio times
    advantage that is a sum over j, whose gradient needs the memory of one sample. With d_j = l(j) - l_old(j), both
    under the same masks, and A in the group as in grpo (scale, ddof, epsilon):

        g_j = (1 + d_j) A / n  where A >= 0,   exp(d_j) A / n  where A < 0
        loss = -1/N sum_i sum_j g_j

    Before the first gradient step on a batch d_j = 0, and value and gradient are those of the ratio. The paper clips
    nothing; d_j, in which 1/t_j can be large, is kept within +-largest where it is exponentiated. Metrics: "elbo", the
    mean of the l(j).
    """
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), bounded_ratio(samples, largest))


@part
def bounded_ratio(samples: Count = 16, largest: Positive = 5.0) -> Objective:
    """The loss of `bgpo`. samples: of the bound on each row's likelihood; largest: of a difference in the exponent."""
    mean = sequence_mean()

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        new = (outputs.extras or {})["elbo_terms"]
        change = new - jax.lax.stop_gradient(batch.need("elbo_terms"))
        advantage = row_means(batch.need("advantages"), batch)[:, None]
        raised = jnp.exp(jnp.clip(change, -largest, largest))
        gained = jnp.mean(jnp.where(advantage >= 0, 1 + change, raised) * advantage, axis=1)

        def of_rows(values: jax.Array) -> jax.Array:
            return mean(jnp.broadcast_to(values[:, None], batch.tokens.shape), batch)

        return -of_rows(gained), {"elbo": of_rows(jnp.mean(new, axis=1))}

    return averaged(objective, mean, frozenset({f"elbo_terms:{samples}"}))
