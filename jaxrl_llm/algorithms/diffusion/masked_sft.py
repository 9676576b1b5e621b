import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.sft import as_right
from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import Code, Count, Ours, Paper, Replies
from jaxrl_llm.core.parts import Array, Metrics, Objective, PolicyOutputs, Trajectories, part, stateless
from jaxrl_llm.objectives import averaged, sequence_mean
from jaxrl_llm.rollouts.guidance.responses import written_completions


@method(paper="arXiv 2502.09992", test="test_diffusion.py::test_masked_sft_is_the_loop")
@run_settings(*given_responses(1))
def masked_sft(samples: Paper[Count] = 1, column: Ours[str | None] = None, turns: Code[Replies] = "last") -> Algorithm:
    """Supervised fine-tuning of masked-diffusion language models (LLaDA).

    Nothing is sampled: the policy learns to write a column of the data set after the row's prompt. Of each response a
    share t, uniform between 0 and 1, is masked, and the loss is the bound on its negative log-likelihood, nats a token,
    a mean over responses (samples: of t and masks, for each):

        loss = -1/N sum_i 1/|y_i| 1/t_i sum over the masked y of log pi(y | x, the rest of the response)

    The places after a response within its last block stay masked and have no loss, as the sampler leaves them
    (published code fills them with the end's token, which it learns). column, turns: see sft.
    """
    return Algorithm(stateless(as_right), bound_on_nll(samples), rollout=written_completions(column, turns))


@part
def bound_on_nll(samples: Count = 1) -> Objective:
    """The loss of `masked_sft`."""
    mean = sequence_mean()

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        terms = jnp.mean((outputs.extras or {})["elbo_terms"], axis=1) / jnp.maximum(batch.lengths, 1)
        return mean(jnp.broadcast_to(-terms[:, None], batch.tokens.shape), batch), {}

    return averaged(objective, mean, frozenset({f"elbo_terms:{samples}"}))
