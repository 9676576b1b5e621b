"""Methods that turn policy improvement into likelihood: of supervised texts, or of the best of their own samples."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.demonstrations import demonstrated_rows
from jaxrl_llm.advantages.returns import at_last_action, sequence_values
from jaxrl_llm.algorithms.run_settings import more_samples_than, run_settings
from jaxrl_llm.algorithms.tempered import static_number
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain, counted, stateless
from jaxrl_llm.objectives import log_probability, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.averaging.averages import sequence_sum
from jaxrl_llm.objectives.regression import one_token
from jaxrl_llm.objectives.values import last_action_mean, value_loss
from jaxrl_llm.rollouts.guidance.demonstrated import demonstrated
from jaxrl_llm.selection.noise import row_noise
from jaxrl_llm.selection.rows import ranks_within

__all__ = ["otr", "pa_rl"]


@part
def labels_of_demonstrations() -> Callable[[Trajectories], Trajectories]:
    """A function of the batch: advantages and weights are 1 on texts of the data set, else 0."""

    def label(batch: Trajectories) -> Trajectories:
        rows = demonstrated_rows(batch)
        labels = rows[:, None] * batch.action_mask.astype(jnp.float32)
        # Texts were not sampled: what the policy says of them stands for it.
        behaviour = jnp.where(rows[:, None], batch.need("old_logp"), batch.behaviour_logp)
        return batch.replace(advantages=labels, weights=batch.loss_weights * labels, behaviour_logp=behaviour)

    return label


def otr(penalty: float = -0.1, temperature: float = 1.3, column: str = "answer") -> Algorithm:
    """One-Token Rollout (OTR, arXiv 2509.26313, 2025).

    Supervised texts as one-step episodes: at each position K tokens are drawn from the model at a temperature k above
    1; those equal to the label x have reward 1, the others beta = penalty <= 0, and REINFORCE on them replaces
    cross-entropy. The labels are the tokens of the texts in `column` of the data set
    (`rollouts.guidance.demonstrated`): nothing is sampled, and a run has group_size 1.

        loss_t = -(1/K) sum_k R(a_k) log p(a_k),    a_k ~ q = softmax(z / temperature),  R(x) = 1, else beta

    Here the K draws (the paper has some hundred) are replaced by their expectation, which has no noise:

        -E loss_t = (1 - beta) sg(q(x)) log p(x) + beta sum_a sg(q(a)) log p(a)

    The gradient of the second sum is that of log p(x) - k log p_k(x), with p_k the policy at the temperature, so no
    logits are kept; the value of the loss differs from the expectation by a number without a gradient. q is of the
    weights before the update. At temperature 1 the gradient is (1 - beta) p(x) times that of cross-entropy, so that
    beta only scales it; above, beta lowers wrong tokens, and so sharpens the policy: on texts that the model would
    hardly write, more than the labels teach it, and 0 is better. The paper's constants are not verified.

    The numbers are from memory of the paper.

    Defaults. Recalled: penalty, temperature. Ours: column.
    """
    check_number("penalty", penalty, most=0)
    need = f"heated_logp:{static_number('temperature', temperature):g}"
    objective = policy_gradient(token_ratio(), one_token(penalty, temperature), token_mean(), needs={need})
    return Algorithm(
        stateless(labels_of_demonstrations(), {"demonstrated", "old_logp"}), objective, rollout=demonstrated(column)
    )


@part
def chosen_by_critic(keep: float, temperature: float) -> Callable[[jax.Array, Trajectories], Trajectories]:
    """A function `(step, batch) -> batch` that writes the weights of `pa_rl` into the advantages."""

    def choose(step: jax.Array, batch: Trajectories) -> Trajectories:
        Q = at_last_action(batch.need("values"), batch)
        valid = jnp.any(batch.action_mask, axis=1) & ~jnp.isnan(batch.scores)
        best = valid & (ranks_within(batch.group, Q, row_noise(batch, step), valid) < keep)
        _, index = jnp.unique(batch.group, return_inverse=True, size=Q.shape[0])

        def total(x: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(x, index, num_segments=Q.shape[0])[index]

        largest = jax.ops.segment_max(jnp.where(best, Q, -jnp.inf), index, num_segments=Q.shape[0])[index]
        share = jnp.where(best, jnp.exp((jnp.where(best, Q - largest, 0.0)) / temperature), 0.0)
        share = share / jnp.maximum(total(share), 1e-30)
        weight = share * total(jnp.any(batch.action_mask, axis=1).astype(jnp.float32))
        return batch.replace(advantages=jnp.where(batch.action_mask, weight[:, None], 0.0))

    return choose


@run_settings(more_samples_than("keep", "more samples of a prompt than the best ones that it keeps"))
def pa_rl(keep: int = 10, temperature: float = 1.0, value_coefficient: float = 1.0) -> Algorithm:
    """Policy-Agnostic RL (PA-RL, arXiv 2412.06685, 2024), its form for language.

    Policy improvement is supervised learning on better actions: draw m answers to a prompt (the run's group_size), keep
    the best `keep` by a critic Q, and imitate one that is drawn from them by Q:

        w = softmax over the best of Q / temperature;    loss = -mean over prompts of sum_i w_i log pi(y_i)

    plus value_coefficient times the critic's loss. The draw is replaced by its expectation, the weights w. Q of an
    answer is the critic's value at its last action before the update, fitted to the rewards of all answers, (V - r)^2/2
    there; a whole answer is one action, so nothing is left to bootstrap. log pi is the sum over the answer's tokens.

    The paper is about continuous actions, which it also improves by T steps of gradient ascent on Q: tokens have no
    such gradient, and its language form has only the choice. It has m 32 and, for its critics, targets by calibrated
    Q-learning on offline data. Train the critic alone first (the run's critic_steps).

    Defaults. Paper: keep, temperature. Ours: value_coefficient.
    """
    check_number("keep", keep, least=1)
    transform = chain(sequence_values(), counted(chosen_by_critic(keep, temperature)))
    objective = policy_gradient(token_ratio(), log_probability(), sequence_sum())
    return Algorithm(transform, objective + value_coefficient * value_loss(None, last_action_mean()))
