from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.filters import demonstrated_rows
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Number, Ours, Positive, Range, Recalled, check_number
from jaxrl_llm.core.parts import Metrics, PolicyOutputs, Trajectories, stateless_part, surrogate_part
from jaxrl_llm.objectives import policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.guidance.responses import demonstrated
from jaxrl_llm.utils.errors import InputError


@stateless_part({"demonstrated", "old_logp"})
def labels_of_demonstrations(batch: Trajectories) -> Trajectories:
    """Advantages and weights are 1 on texts of the data set, else 0."""
    rows = demonstrated_rows(batch)
    labels = rows[:, None] * batch.action_mask.astype(jnp.float32)
    # Texts were not sampled: what the policy says of them stands for it.
    behaviour = jnp.where(rows[:, None], batch.need("old_logp"), batch.behaviour_logp)
    return batch.replace(advantages=labels, weights=batch.loss_weights * labels, behaviour_logp=behaviour)


@method(paper="arXiv 2509.26313", test="test_supervised.py::test_otr_has_the_gradient_of_its_loop_over_the_vocabulary")
def otr(
    penalty: Recalled[Annotated[float, Range(most=0)]] = -0.1,
    temperature: Recalled[Positive] = 1.3,
    column: Ours[str] = "answer",
) -> Algorithm:
    """One-Token Rollout (OTR).

    Supervised texts as one-step episodes: at each position K tokens are drawn from the model at a temperature k above
    1; those equal to the label x have reward 1, the others beta = penalty <= 0, and REINFORCE on them replaces
    cross-entropy. The labels are the tokens of the texts in `column` of the data set
    (`rollouts.guidance.responses.demonstrated`): nothing is sampled, and a run has group_size 1.

        loss_t = -(1/K) sum_k R(a_k) log p(a_k),    a_k ~ q = softmax(z / temperature),  R(x) = 1, else beta

    Here the K draws (the paper has some hundred) are replaced by their expectation, which has no noise:

        -E loss_t = (1 - beta) sg(q(x)) log p(x) + beta sum_a sg(q(a)) log p(a)

    The gradient of the second sum is that of log p(x) - k log p_k(x), with p_k the policy at the temperature, so no
    logits are kept; the value of the loss differs from the expectation by a number without a gradient. q is of the
    weights before the update. At temperature 1 the gradient is (1 - beta) p(x) times that of cross-entropy, so that
    beta only scales it; above, beta lowers wrong tokens, and so sharpens the policy: on texts that the model would
    hardly write, more than the labels teach it, and 0 is better. The paper's constants are not verified.

    The numbers are from memory of the paper.
    """
    need = f"heated_logp:{static_number('temperature', temperature):g}"
    objective = policy_gradient(token_ratio(), one_token(penalty, temperature), token_mean(), needs={need})
    return Algorithm(labels_of_demonstrations(), objective, rollout=demonstrated(column))


def static_number(name: str, value: float) -> float:
    """The number itself; InputError for a traced one."""
    if not isinstance(value, int | float):
        raise InputError(f"{name} must be a plain number, because it is part of the name of a need")
    check_number(name, value, above=0)
    return value


@surrogate_part
def one_token(
    ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories, penalty: Number = -0.1, temperature: float = 1.0
) -> tuple[jax.Array, Metrics]:
    """A times the expectation of the score of tokens drawn at a temperature k by the old policy.

    It has the gradient of sum_a sg(q(a)) R(a) log p(a), with R 1 for the label and `penalty` for other tokens a, and q
    the label's probability at k: that is (1 - penalty) q grad log p + penalty sum_a q_a grad log p_a, where

        log p - k log p_k = k log Z_k - log Z_1,    whose gradient is q - p = sum_a q_a grad log p_a

    At temperature 1 it is (1 - penalty) p grad log p, and that of the second term is 0. Only the gradient of
    the loss is meaningful, not its value. Needs "heated_logp:T" (`policy_gradient` with `needs`). Metric:
    "label/probability", of the label at the temperature.
    """
    counts = batch.loss_weights != 0
    heated = (outputs.extras or {}).get("heated_logp", outputs.logp)
    q = jnp.exp(jnp.minimum(jnp.where(counts, batch.need("heated_logp"), 0.0), 0.0))
    logp, heated = (jnp.where(counts, x, 0.0) for x in (outputs.logp, heated))
    score = (1 - penalty) * jax.lax.stop_gradient(q) * logp + penalty * (logp - temperature * heated)
    return batch.need("advantages") * score, {"label/probability": q}
