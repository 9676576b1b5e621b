import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import Code, NonNegative, Number
from jaxrl_llm.core.parts import Array, PolicyOutputs, Trajectories, chain, part
from jaxrl_llm.objectives import pairwise
from jaxrl_llm.objectives.preference.losses import PairLoss, Pairs, of_each_pair
from jaxrl_llm.objectives.preference.reward_models import bradley_terry_loss
from jaxrl_llm.objectives.values import HEAD, needed_output
from jaxrl_llm.rewards.models.whole import encoded
from jaxrl_llm.rollouts.episode import given
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected
from jaxrl_llm.rollouts.programs import Episode, Task, Tools
from jaxrl_llm.utils.errors import InputError, shown


@method(paper="arXiv 2203.02155", test="test_scored_pairs.py::test_loss_and_gradients_are_trls")
@run_settings(*given_responses(2))
def reward_model(centring: Code[NonNegative] = 0.0) -> Algorithm:
    """Reward model of pairs (Bradley-Terry).

    The model is the decoder with a new head in place of the unembedding, or a reward model that learns on. With r the
    score of a whole conversation, prompt and response, at its last token,

        loss = mean over pairs of -log sigmoid(r_chosen - r_rejected - margin) + centring (r_chosen + r_rejected)^2

    The columns chosen and rejected of a row are two responses to its prompt, margin by how much the scores shall
    differ at least (Llama 2; 0 without such a column). centring keeps scores near 0 (2312.09244: 0.01).
    """
    objective = pairwise(bradley_terry(centring), 1.0, against=None, scores=last_scores, needs={"scores:1"})
    return Algorithm(chain(), objective, rollout=chosen_and_rejected(whole_conversation))


@part
def bradley_terry(centring: Number = 0.0) -> PairLoss:
    """`bradley_terry_loss` as a loss of pairs of scores."""

    def loss(pairs: Pairs, beta: Number) -> Array:
        return bradley_terry_loss(pairs.chosen_logp, pairs.rejected_logp, pairs.margin, centring)

    return of_each_pair(loss)


def last_scores(outputs: PolicyOutputs, batch: Trajectories) -> Array:
    """The scores f32[N] before the only action of each row."""
    scores = needed_output(outputs, "scores", "a reward model's loss", HEAD)
    return jnp.sum(jnp.where(batch.action_mask, scores[..., 0], 0.0), axis=1)


def whole_conversation(tools: Tools, task: Task, column: str) -> Episode:
    """A row's prompt and its response in a column as `rewards.models` reads them, and one action, after which nothing
    comes: the token before it, the last that is no padding, is scored. Cut and `truncated` where it is longer than a
    prompt and a response may be.
    """
    said = task.row.get(column)
    if not isinstance(said, str | list | tuple):
        raise InputError(f"prompt {task.prompt_id} has no text or messages in the column {column!r}: {shown(said)}")
    tokenizer = tools.tokenizer
    ids, end = encoded(tokenizer, task.row["prompt"], said), tokenizer.eos_token_id
    pad = end if getattr(tokenizer, "pad_token_id", None) is None else tokenizer.pad_token_id
    while len(ids) > 1 and ids[-1] == pad:
        ids = ids[:-1]
    most = len(task.prompt) + task.limit - 1
    place = given([ids[most] if len(ids) > most else end or 0], tools.step)._replace(sampled=True)
    whole = len(ids) <= most
    return Episode(tuple(ids[:most]), task.prompt_id, segments=(place,), ended=whole, truncated=not whole)
