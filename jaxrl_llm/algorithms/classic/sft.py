import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import Code, Ours, Replies
from jaxrl_llm.core.parts import Array, Metrics, PolicyOutputs, Trajectories, objective_part, stateless
from jaxrl_llm.objectives import imitation, token_mean
from jaxrl_llm.rollouts.guidance.responses import written_completions
from jaxrl_llm.utils.errors import InputError


@method(paper="arXiv 2109.01652", test="test_supervised.py::test_sft_by_loop")
@run_settings(*given_responses(1))
def sft(
    column: Ours[str | None] = None, turns: Code[Replies] = "last", report_accuracy: Code[bool] = True
) -> Algorithm:
    """Supervised fine-tuning (SFT).

    Nothing is sampled: the policy learns to write a column of the data set after the row's prompt. The loss is the
    negative log-likelihood, nats a token, a mean over the tokens that the assistant writes in all rows of a step:

        loss = -sum_t log pi(y_t | x, y_<t) / number of tokens

    column: with texts or the assistant's messages; default completion, or answer in rows without one. A conversation
    in a column messages is split before its last message. turns: which of the assistant's turns in a conversation
    are learnt, the last or all. report_accuracy: find the share of tokens that are the most probable ones, which costs
    another product with the unembedding.
    """
    objective = imitation(average=token_mean(), metric="nll")
    objective = objective + token_accuracy() if report_accuracy else objective
    return Algorithm(stateless(as_right), objective, rollout=written_completions(column, turns))


def as_right(batch: Trajectories) -> Trajectories:
    """The batch with the advantage 1 for every token."""
    return batch.replace(advantages=jnp.where(batch.action_mask, 1.0, 0.0))


@objective_part({"greedy"})
def token_accuracy(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
    """No loss, and the metric "mean_token_accuracy": the share of tokens that are the most probable ones."""
    greedy = (outputs.extras or {}).get("greedy")
    if greedy is None:
        raise InputError("the share of tokens that are right needs outputs.extras['greedy']")
    right = jnp.where(batch.loss_weights != 0, greedy, 0.0)
    return jnp.zeros(()), {"mean_token_accuracy": token_mean()(right, batch)}
