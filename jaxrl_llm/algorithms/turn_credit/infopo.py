from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import above_baseline
from jaxrl_llm.advantages.multipliers import revised, standard_scores, token_moments
from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.advantages.turns import needs_turns, on_tokens, turn_mask, turn_numbers
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import Code, NonNegative, Positive
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools
from jaxrl_llm.rollouts.runtime.answer_likelihood import around, blanked
from jaxrl_llm.utils.errors import InputError, shown


@method(paper="arXiv 2603.00656", test="test_turn_information.py::test_infopo_worked_example")
@run_needs(state_key="how many turns there are", turns="episodes of several turns")
@beside("decay", "the decay of beta with the epochs, off by default", "a schedule of beta")
def infopo(
    beta: Code[NonNegative] = 0.1,
    gate_temperature: Code[Positive] = 0.05,
    placeholder: Code[str] = "No information found.",
    epsilon: Code[Positive] = 1e-6,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
) -> Algorithm:
    """Information-Driven Policy Optimization (InfoPO).

    A turn k with tokens a_k also earns what its observation o_k changes in the next one, against the same conversation
    with the `placeholder` in place of o_k, repeated or cut to its length:

        IG_k = mean_{t in a_{k+1}} (log pi(a_t | ..., o_k, ...) - log pi(a_t | ..., placeholder, ...))
        A = A_out + beta sigmoid(-sigma_g / gate_temperature) min(1, max(std A_out, 1) / std A_in) A_in

    A_out = (R - mean_g R) / (sigma_g + epsilon) with the scores' deviation sigma_g, so that the gate closes where
    outcomes already tell episodes apart. A_in are the standard scores of IG_k / |a_k|, once for each token of a_k, over
    those of the group that are not 0, and std is over the tokens of the batch (all with n - 1). The last turn has
    IG = 0, and so has one whose observation begins a new row. Then PPO's clip (clip_low, clip_high), averaged over
    tokens. The released code can let beta decay with the epochs, which it does not by default, and is left out here.

    Each turn but the first costs a forward pass before the update. Rollout: `with_blanks`, around the run's agents.
    """
    needs = {"old_logp", "blanked_logp", "blanked", "state_key"}
    return Algorithm(
        chain(needs_turns(), revised(with_feedback(beta, gate_temperature, epsilon), needs)),
        clipped_policy(clip_low, clip_high),
        rollout=with_blanks(placeholder),
    )


@batch_part
def with_feedback(batch: Trajectories, beta: float, temperature: float, epsilon: float) -> Array:
    """A function of the batch: the advantages of `infopo`, f32[N, L]. IG is 0 where nothing was blanked."""
    mask, actions = turn_mask(batch), scored_actions(batch)
    own = jax.nn.one_hot(jnp.where(batch.action_mask, turn_numbers(batch), -1), mask.shape[1])
    lengths = jnp.maximum(jnp.sum(own, axis=1), 1)
    change = batch.need("old_logp") - batch.need("blanked_logp")
    raised = jnp.einsum("nl,nlk->nk", jnp.where(batch.action_mask, change, 0.0), own) / lengths
    gains = jnp.where(mask, jnp.pad(raised, ((0, 0), (0, 1)))[:, 1:], 0.0)
    spread = bucket_moments(batch.group, batch.scores)[2]
    outcome = above_baseline(batch.scores, batch.group) / (spread + epsilon)
    outcome = jnp.where(actions, outcome[:, None], 0.0)
    shares = on_tokens(gains / lengths, batch)
    own = standard_scores(shares, actions & (shares != 0), batch.group, 1, epsilon)
    one = jnp.zeros_like(batch.group)
    deviations = [token_moments(x, actions, one, 1)[2].max() for x in (outcome, own)]
    scale = jnp.where(deviations[1] > 0, jnp.maximum(deviations[0], 1.0) / jnp.maximum(deviations[1], 1e-12), 1.0)
    return outcome + beta * jax.nn.sigmoid(-spread / temperature)[:, None] * jnp.minimum(scale, 1.0) * own


@part
def with_blanks(placeholder: str = "No information found.") -> Rollout:
    """Episodes that know what stands in for the content of their observations, which gives another context.

    The placeholder's tokens are repeated at the end, or cut, to the length of the content; what the chat template
    writes around it stays. Without a chat template all tokens between two turns are replaced. Provides blanked.
    InputError for an empty placeholder.
    """

    if not isinstance(placeholder, str) or not placeholder:
        raise InputError(f"the placeholder is {shown(placeholder)}, but must be a text that is not empty")

    def change(tools: Tools, task: Task) -> Callable[[Episode], Episode]:
        ids = tools.encode(placeholder)
        chat = ChatTurns(tools.tokenizer) if getattr(tools.tokenizer, "chat_template", None) else None
        return lambda episode: blanked(episode, ids, chat)

    return around(change, "blanks", "blanked")
