from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, beside, exactly, given_responses, method, run_settings
from jaxrl_llm.core.annotations import AtLeastTwo, Count, Ours, Positive, Recalled
from jaxrl_llm.core.log_ratios import ROUNDING, log_ratio_sums, source
from jaxrl_llm.core.parts import Metrics, PolicyOutputs, Trajectories, objective_part, part, stateless_part
from jaxrl_llm.core.population import League
from jaxrl_llm.core.reference import ReferenceRule, Snapshots
from jaxrl_llm.objectives import best_and_worst, loss_named, pairwise
from jaxrl_llm.objectives.preference.losses import PairLoss
from jaxrl_llm.rewards.specs import GIVEN
from jaxrl_llm.rollouts.guidance.responses import response
from jaxrl_llm.rollouts.programs import Demands, Episode, Task, Tools, program_part


@method(paper="arXiv 2410.05255", test="test_seppo.py::test_it_is_the_loop")
@beside("images", "diffusion models of images and videos", "diffusion models of images; responses are texts")
@run_settings(*given_responses(2), exactly("eval_size", 0, "no samples of held-out prompts"))
def seppo(
    beta: Ours[Positive] = 0.1,
    size: Ours[AtLeastTwo] = 4,
    every: Ours[Count] = 20,
    column: Ours[str | None] = None,
    loss: Recalled[str | PairLoss] = "sigmoid",
) -> Algorithm:
    """Semi-Policy Preference Optimization (SePPO).

    The data set has a good response y to each prompt; what it is compared with, y', an earlier policy samples. `size`
    policies are kept, the first and a snapshot after every `every` updates, the oldest of which make place for new
    ones. In each step one of them, drawn at random, is the reference pi_k: it samples y', and log-ratios are to it,

        u(y) = log pi(y) - log pi_k(y), a sum over tokens
        loss = mean over prompts of -log sigmoid(beta (u(y) - s u(y')))
        s = 1 if u(y) >= 0, else -1

    The good response is an anchor: where pi_k finds it more probable than the policy does, what pi_k samples counts as
    better than what the policy would, and is learned from too (s = -1); else it is the rejected response of `dpo`
    (s = 1). s is of the policy before the update. A y' that equals y has no pair.

    column: of the good responses; None: completion, or answer in rows without one. loss: of pairs, as in `dpo`. Metric:
    "sampled/better", the share of prompts with s = -1.

    Of the paper we read the abstract: earlier checkpoints as reference and source of samples, their random choice, and
    the anchor. The loss, written for texts here, is from memory, and so is the test as the sign of u(y).
    """
    chosen = loss_named(loss) if isinstance(loss, str) else loss
    objective = pairwise(chosen, beta, against=None, scores=signed_log_ratios, needs=NEEDS) + told_better()
    return Algorithm(
        anchor_test(), objective, rollout=given_and_sampled(column), reference=random_snapshot(size, every)
    )


NEEDS = frozenset({"old_logp", "reference_logp"})


@part
def random_snapshot(size: AtLeastTwo = 4, every: Count = 20) -> ReferenceRule:
    """The reference is one of the policies that a `League` keeps, drawn anew after each update, each as often.

    Places of the league that no snapshot has taken are not drawn. The draws depend on the number of updates alone.
    """
    league = League(size, every)

    def update(reference: Snapshots, params: Any, updates: jax.Array) -> Snapshots:
        taken = jnp.minimum(updates // every, size - 1)
        place = jax.random.randint(jax.random.fold_in(jax.random.key(0), updates), (), 0, taken + 1)
        return Snapshots(league.update(reference.policies, params, updates), place)

    return ReferenceRule(lambda initial, others: Snapshots((initial,) * size, jnp.int32(0)), update)


@program_part(
    "given_and_sampled", columns=["{column}"],
    demands=Demands(variable_size=True, max_episodes=lambda G: 2, reference=True),
)  # fmt: skip
async def given_and_sampled(tools: Tools, task: Task, column: str | None = None) -> list[Episode]:
    """The response in a column of each row, and one to the same prompt that the reference samples: rewards 1 and 0.

    column: as `written_completions` has it. Both have the reward NaN where they are the same.
    """
    usual = "answer" if task.row.get("completion") is None else "completion"
    own = response(tools, task, usual if column is None else column)
    other = await tools.sample(task.prompt, number=1, reference=True)
    rewards = (float("nan"),) * 2 if own.tokens == other.tokens else (1.0, 0.0)
    return [one.scored(x, {GIVEN: x}) for one, x in zip((own, other), rewards, strict=True)]


@stateless_part(NEEDS)
def anchor_test(batch: Trajectories) -> Trajectories:
    """Write info["sign"] f32[N], s of the rejected row of each pair and 1 of others, and info["better"], of which each
    row has its share: the mean over pairs of s = -1."""
    rows = best_and_worst()(batch)
    u = log_ratio_sums(batch.need("old_logp"), batch.need("reference_logp"), batch)
    better = rows.valid & (u[rows.chosen] < -ROUNDING)
    sign = jnp.ones(u.shape).at[rows.rejected].min(jnp.where(better, -1.0, 1.0))
    return batch.with_info(sign=sign, better=better / jnp.maximum(jnp.sum(rows.valid), 1))


def signed_log_ratios(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
    """s u f32[N], of each row's log-ratio to the reference."""
    return batch.need("sign") * log_ratio_sums(outputs.logp, source(batch, "reference"), batch)


@objective_part()
def told_better(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
    """No loss; metric "sampled/better"."""
    return jnp.float32(0), {"sampled/better": jnp.sum(batch.need("better"))}
