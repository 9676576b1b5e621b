import dataclasses
import zlib

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.returns import last_actions
from jaxrl_llm.algorithms.method import Algorithm, exactly, given_responses, method, run_settings
from jaxrl_llm.algorithms.preferences.dpo import dpo
from jaxrl_llm.core.annotations import AtLeastTwo, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import Array, Metrics, Objective, PolicyOutputs, Trajectories, part
from jaxrl_llm.objectives.preference.losses import PairLoss
from jaxrl_llm.objectives.preference.reward_models import class_loss
from jaxrl_llm.objectives.values import needed_output
from jaxrl_llm.rewards.specs import GIVEN
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected, given_rows, response
from jaxrl_llm.rollouts.programs import Episode, Task, Tools, program_part
from jaxrl_llm.utils.errors import InputError

KEYWORD = 5  # fewest letters of a word that counts as content
BETWEEN = 0.5  # reward of a degraded response: of a group, the best and the worst are the given pair


@method(paper="arXiv 2409.17791", test="test_degraded.py::test_spo_self_supervised_by_loop")
@run_settings(
    *given_responses(None),
    exactly("group_size", lambda given: 2 * given["degrees"], "both responses in every degree as a group"),
    exactly("critic", "shared", "a head on the policy"),
)
def spo_self_supervised(
    degrees: Ours[AtLeastTwo] = 4,
    weight: Ours[NonNegative] = 0.1,
    beta: Ours[Positive] = 0.1,
    loss: Ours[str | PairLoss] = "sigmoid",
) -> Algorithm:
    """Self-supervised Preference Optimization (SPO).

    Beside a loss of pairs (`dpo` with its beta), the policy's own states must tell how much key content a response has
    lost. Of both responses of a pair there are versions c = 0 .. C - 1, C = degrees, in which a share c / (C - 1) of
    the keywords is missing, words of five letters or more, chosen by a checksum of the text. With h the last hidden
    state before the response ends and W a linear head, which is discarded in the end,

        loss = L_pairs + weight mean over versions of -log softmax(W h(y^c))_c

    The sources that we read give neither the degrees, nor the head, nor the weight: this is the smallest reading of
    them, with keywords by length.
    """
    base = dpo(loss, beta)
    return Algorithm(base.transform, base.objective + weight * degree_loss(degrees), rollout=in_degrees(degrees))


@part
def degree_loss(degrees: AtLeastTwo) -> Objective:
    """-log softmax of the head's value for a row's degree info["degree"] at its last action, a mean over the rows that
    have one (NaN: none). Metrics: "degree/loss" and "degree/accuracy"."""

    def degrees_of(batch: Trajectories) -> Array:
        """int32[N], negative for none."""
        return jnp.where(jnp.any(batch.action_mask, axis=1), batch.entry("degree", -1.0), -1.0).astype(jnp.int32)

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        count = jnp.maximum(jnp.sum(degrees_of(batch) >= 0), 1)
        return batch.with_info(degree_share=jnp.full(batch.lengths.shape, 1.0 / count))

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        values = needed_output(outputs, "values", "the loss of degrees")
        degree = degrees_of(batch)
        logits = jnp.sum(jnp.where(last_actions(batch)[..., None], values, 0.0), axis=1)
        share = batch.need("degree_share")
        right = (jnp.argmax(logits, axis=1) == degree).astype(jnp.float32)
        value = jnp.sum(share * class_loss(logits, degree))
        return value, {"degree/loss": value, "degree/accuracy": jnp.sum(share * right)}

    return Objective(objective, frozenset({f"values:{degrees}", "degree"}), refresh)


@program_part("in_degrees({degrees})", {"degree"}, ("chosen", "rejected"), lambda degrees: given_rows(2 * degrees))
async def in_degrees(tools: Tools, task: Task, degrees: AtLeastTwo) -> list[Episode]:
    """The columns `chosen` and `rejected` of each row, and both without a part of their keywords: 2 * degrees episodes.

    They have info["degree"], 0 to degrees - 1. InputError for a response without a text at its end.
    """
    pair = chosen_and_rejected()
    whole = [one.with_info(degree=0.0) for one in await pair.program(tools, task)]
    reward = float("nan") if whole[0].info["equal"] else BETWEEN
    less = []
    for column in ("chosen", "rejected"):
        for degree in range(1, degrees):
            said = without_keywords(task.row[column], degree / (degrees - 1))
            own = dataclasses.replace(task, row={**task.row, column: said})
            episode = response(tools, own, column).with_info(degree=float(degree), equal=whole[0].info["equal"])
            less.append(episode.scored(reward, {GIVEN: reward}))
    return [*whole, *less]


def without_keywords(said: object, share: float) -> object:
    """A text, or messages that end with one, without a share (0 to 1) of its keywords, up to rounding.

    >>> without_keywords("The quick brown fox jumps over the lazy dog", 1.0)
    'The fox over the lazy dog'
    """
    if isinstance(said, list | tuple) and said and isinstance(said[-1].get("content"), str):
        return [*said[:-1], {**said[-1], "content": without_keywords(said[-1]["content"], share)}]
    if not isinstance(said, str):
        raise InputError("a response has no text, of which keywords could be left out: give texts or messages of text")
    words = said.split(" ")
    places = [at for at, word in enumerate(words) if sum(map(str.isalpha, word)) >= KEYWORD]
    order = np.random.default_rng(zlib.crc32(said.encode())).permutation(len(places))
    gone = {places[at] for at in order[: round(share * len(places))]}
    return " ".join(word for at, word in enumerate(words) if at not in gone)
