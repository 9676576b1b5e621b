from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.group import above_baseline
from jaxrl_llm.algorithms.method import Algorithm, RunSetting, method, run_settings
from jaxrl_llm.core.annotations import Code, Count, NonNegativeInt, Positive
from jaxrl_llm.core.parts import Metrics, objective_part, stateless_part
from jaxrl_llm.core.population import Population
from jaxrl_llm.core.trajectory import Array, PolicyOutputs, Trajectories, row_means, totals_of
from jaxrl_llm.rollouts.programs import members

Baseline = Literal["group", "population"]


@stateless_part()
def fitness(batch: Trajectories, baseline: Baseline = "group", epsilon: float = 1e-5) -> Trajectories:
    """z = (F - b) / sqrt(var(F) + epsilon): b is the mean of the row's group or of all rows, var that of all rows."""
    F = batch.scores
    known = ~jnp.isnan(F)
    keys = batch.group if baseline == "group" else jnp.zeros_like(batch.group)
    variance = jnp.mean(above_baseline(F, jnp.zeros_like(batch.group)) ** 2, where=known)
    z = above_baseline(F, keys) / jnp.sqrt(jnp.nan_to_num(variance) + epsilon)
    return batch.replace(advantages=jnp.where(batch.action_mask, z[:, None], 0.0))


@objective_part({"perturbation", "member", "member_seed"})
def evolution(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
    """-sqrt(N) mean_n z_n p_n over the N rows, z the advantage of a row and p its perturbation of the weights.

    p is linear in the weights (`models.by_row.perturbations`), so that the gradient is -sqrt(N) times the
    update of an evolution strategy, and no token goes through the model.
    """
    z = row_means(batch.need("advantages"), batch)
    perturbation = (outputs.extras or {})["perturbation"]
    return -jnp.sum(jnp.where(z != 0, z * perturbation, 0.0)) / jnp.sqrt(totals_of(batch)["rows"]), {}


@method(paper="arXiv 2511.16652", test="test_evolution.py::test_the_worked_example_of_eggroll")
@run_settings(
    RunSetting(
        "group_size", lambda given: 8, lambda config, given: config.group_size % 2 == 0,
        "an even number of members for each prompt, of which two share their noise",
    )
)  # fmt: skip
def eggroll(
    sigma: Code[Positive] = 1e-3,
    rank: Code[Count] = 1,
    reuse: Code[NonNegativeInt] = 1,
    baseline: Code[Baseline] = "group",
    epsilon: Code[Positive] = 1e-5,
) -> Algorithm:
    """Evolution Guided General Optimization via Low-rank Learning (EGGROLL).

    Member n has, in place of every projection W [a, b] of a layer, W + sign_n sigma E_n with

        E_n = A_n B_n^T / sqrt(r),    A_n [a, r], B_n [b, r] standard normal,    sign_n = +1 for even n, -1 for odd n

    A and B are drawn from the seed, epoch // reuse (0 where reuse is 0), the matrix and n // 2: two members share them.
    Each decodes its prompt greedily, with y = x W^T + sign_n (sigma / sqrt(r)) (x B_n) A_n^T in one engine for all, and
    its fitness is the reward F_n. The update is

        U = (1/N) sum_n z_n sign_n sigma E_n,    z_n = (F_n - mean) / sqrt(var + epsilon)

    with the mean of the n's group, or with `baseline` "population" that of all, and the variance of all. The optimiser
    of the run gets the gradient -sqrt(N) U: that of the loss -(1/sqrt(N)) sum_n z_n <sign_n sigma E_n, W>, which is
    linear in W, so that there are forward passes of sampling alone, and no backward pass. rank: r, the rank
    of each member's perturbation.

    Embeddings, norms, biases, and the experts of a mixture stay as they are. The run's optimiser is AdamW; the paper's
    code has SGD by default, in whose step sigma is a factor.
    """
    return Algorithm(fitness(baseline, epsilon), evolution(), rollout=members(Population(sigma, rank, reuse)))
