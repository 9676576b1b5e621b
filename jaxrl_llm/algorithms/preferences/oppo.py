import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import at_last_action
from jaxrl_llm.algorithms.method import Algorithm, beside, exactly, given_responses, method, run_settings
from jaxrl_llm.core.annotations import AtLeastTwo, Code, NonNegative, Ours
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Array, Metrics, Objective, PolicyOutputs, Trajectories, Transform, part
from jaxrl_llm.data.chat.encode import with_text
from jaxrl_llm.objectives import coupled
from jaxrl_llm.objectives.preference.pairs import bucket_log_sum_exp, mean_logp
from jaxrl_llm.objectives.values import needed_output
from jaxrl_llm.rewards.specs import GIVEN
from jaxrl_llm.rollouts.guidance.responses import given_rows, response
from jaxrl_llm.rollouts.programs import Episode, Task, Tools, program_part
from jaxrl_llm.utils.errors import InputError

PREFIX = "[style {code}] "
GOAL = "goal/"  # before numbers of codes, in controls and metrics


@method(paper="arXiv 2305.16217", test="test_oppo.py::test_it_is_the_loop")
@beside("vector", "latents that are vectors; here distributions over codes", "a policy that reads a vector")
@run_settings(
    *given_responses(None),
    exactly("group_size", lambda given: 2 * given["codes"], "both responses behind every code as a group"),
)
def oppo(
    codes: Ours[AtLeastTwo] = 4,
    preference_weight: Code[NonNegative] = 10.0,
    margin: Code[NonNegative] = 1.0,
    rate: Code[NonNegative] = 0.01,
) -> Algorithm:
    """Offline Preference-guided Policy Optimization (OPPO).

    No reward model: an encoder says of each response what it is like, z; the policy learns to write the response when
    it is told z; and preferences pull one point z*, the goal, towards the z of preferred responses. The policy is then
    used with the goal. What a policy of texts can be told is a text: z is a distribution over K = `codes` codes, each a
    beginning of the prompt ("[style 0] "). With e the value of a head before the last token of y behind code k,

        z(y)_k = softmax over k of e(y, k)
        L_him = mean over responses of sum_k z(y)_k (- mean over tokens of log pi(y | code k, prompt))
        L_pref = mean over pairs of max(0, |z* - z(y_chosen)| - |z* - z(y_rejected)| + margin)
        loss = L_him + preference_weight L_pref,    z* without gradient
        z* <- z* - rate dL_pref/dz*, cut to a distribution again,    z(y) without gradient

    after each update of the others, with the z of before it. L_him trains the policy and the encoder: a code comes to
    stand for responses that are alike. The columns chosen and rejected of a row are two responses to its prompt. z*
    begins halfway between the first code and the middle of all, where nothing tells them apart. The head is on a
    decoder of its own, the run's critic, or on the policy's states (--critic shared).

    Metrics: "latent/accuracy", the share of pairs whose chosen response is nearer to the goal, and "goal/0",
    "goal/1" ..., z*. Prompts begin with the code of the largest one where the trained policy is used.

    The paper is of control: z is a vector, with a penalty relu(|z| - 1), which is 0 of a distribution. Its
    equations were known to us from notes on the released code.
    """
    objective = latent_losses(codes, preference_weight, margin)
    return Algorithm(goal_by_preferences(codes, margin, rate), objective, rollout=behind_codes(codes))


NEEDS = frozenset({"values", "code"})


def triplet(goal: Array, chosen: Array, rejected: Array, margin: float = 1.0) -> Array:
    """max(0, |z* - z+| - |z* - z-| + margin) f32[...]; goal f32[K], the others f32[..., K].

    >>> print(triplet(jnp.array([1.0, 0.0]), jnp.array([0.5, 0.0]), jnp.array([0.0, 0.5])).round(6))
    0.381966
    """
    return jax.nn.relu(distance(goal, chosen) - distance(goal, rejected) + margin)


def distance(x: Array, y: Array) -> Array:
    """|x - y| over the last axis, with gradient 0 where it is 0."""
    square = jnp.sum((x - y) ** 2, axis=-1)
    apart = square > 0
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, square, 1.0)), 0.0)


def latents(e: Array, batch: Trajectories, codes: int) -> tuple[Array, Array, Array, Array]:
    """Of head values e f32[N]: each row's share z_k of its code in its response f32[N], whether it counts bool[N], and
    the z f32[N, K] of the chosen and of the rejected response of its group."""
    code = jnp.nan_to_num((batch.info or {})["code"], nan=-1.0).astype(jnp.int32)
    known = ~jnp.isnan(batch.scores) & (code >= 0) & jnp.any(batch.action_mask, axis=1)
    good = batch.scores > 0.5
    key = 2 * batch.group + good
    share = jnp.where(known, jnp.exp(jnp.where(known, e - bucket_log_sum_exp(key, e, known), 0.0)), 0.0)
    mates = (batch.group[:, None] == batch.group).astype(e.dtype)
    spread = share[:, None] * jax.nn.one_hot(code, codes)
    chosen, rejected = mates @ (spread * good[:, None]), mates @ (spread * ~good[:, None])
    return share, known, chosen, rejected


def pair_shares(batch: Trajectories, known: Array) -> Array:
    """f32[N]: what each row's group counts in a mean over groups with both responses, divided among its rows."""
    good = batch.scores > 0.5
    of_good, of_bad = bucket_sums(batch.group, (known & good).astype(jnp.float32), (known & ~good).astype(jnp.float32))
    of_rows = jnp.where(known & (of_good > 0) & (of_bad > 0), 1.0 / jnp.maximum(of_good + of_bad, 1), 0.0)
    return of_rows / jnp.maximum(jnp.sum(of_rows), 1)


def goal_in(batch: Trajectories, codes: int) -> Array:
    """z* f32[K] of the batch's controls."""
    return jnp.stack([(batch.controls or {})[f"{GOAL}{k}"] for k in range(codes)])


@part
def goal_by_preferences(codes: AtLeastTwo = 4, margin: NonNegative = 1.0, rate: NonNegative = 0.01) -> Transform:
    """Write the goal z* as controls "goal/0" ..., and move it by the preferences of the batch; see `oppo`."""

    def apply(goal: Array, batch: Trajectories) -> tuple[Array, Trajectories]:
        _, known, chosen, rejected = latents(at_last_action(batch.need("values"), batch), batch, codes)
        shares = pair_shares(batch, known)
        slope = jax.grad(lambda at: jnp.sum(shares * triplet(at, chosen, rejected, margin)))(goal)
        moved = jnp.maximum(goal - rate * slope, 0.0)
        told = batch.with_controls(**{f"{GOAL}{k}": goal[k] for k in range(codes)})
        return moved / jnp.sum(moved), told

    return Transform(lambda: (jnp.eye(codes)[0] + 1 / codes) / 2, apply, NEEDS)


@part
def latent_losses(codes: AtLeastTwo = 4, preference_weight: NonNegative = 10.0, margin: NonNegative = 1.0) -> Objective:
    """L_him + preference_weight L_pref of `oppo`. Metrics: "latent", the loss, "latent/likelihood", L_him,
    "latent/accuracy" and "goal/0" ...; needs the controls of `goal_by_preferences`."""

    def score(outputs: PolicyOutputs, batch: Trajectories) -> Array:
        values = needed_output(outputs, "values", "an encoder's loss")
        return jnp.stack([mean_logp(outputs, batch), at_last_action(values, batch)], axis=1)

    def parts(s: Array, batch: Trajectories) -> tuple[Array, Array, Array]:
        """Shares f32[N] of L_him, of L_pref and of the accuracy."""
        share, known, chosen, rejected = latents(s[:, 1], batch, codes)
        responses = jnp.maximum(jnp.sum(share), 1)  # as many, since the shares of each add up to 1
        goal, pairs = goal_in(batch, codes), pair_shares(batch, known)
        nearer = distance(goal, chosen) < distance(goal, rejected)
        likelihood = -share * s[:, 0] / jax.lax.stop_gradient(responses)
        return likelihood, pairs * triplet(goal, chosen, rejected, margin), pairs * nearer

    def shares(s: Array, batch: Trajectories) -> Array:
        likelihood, preference, _ = parts(s, batch)
        return likelihood + preference_weight * preference

    def report(s: Array, batch: Trajectories) -> Metrics:
        likelihood, _, accuracy = parts(s, batch)
        even = jnp.full(s.shape[0], 1.0 / s.shape[0])
        goal = {f"{GOAL}{k}": even * x for k, x in enumerate(goal_in(batch, codes))}
        return {"latent/likelihood": likelihood, "latent/accuracy": accuracy, **goal}

    return coupled(score, shares, "latent", NEEDS, report)


@program_part("behind_codes({codes})", {"code"}, ("chosen", "rejected"), lambda codes: given_rows(2 * codes))
async def behind_codes(tools: Tools, task: Task, codes: AtLeastTwo = 4) -> list[Episode]:
    """The columns `chosen` and `rejected` of each row, each behind every code: 2 * codes episodes with info["code"].

    Rewards are 1 and 0, and NaN where the responses are the same. InputError for a prompt that no text can begin.
    """
    found = list[list[Episode]]()
    for column in ("chosen", "rejected"):
        found.append([])
        for code in range(codes):
            asked: Any = with_text(task.row.get("prompt"), PREFIX.format(code=code), True)
            if not asked:
                raise InputError(f"prompt {task.prompt_id} is no text, which a code could begin: give texts")
            own = dataclasses.replace(task, row={**task.row, "prompt": asked}, prompt=tools.prompt(asked, task.row))
            found[-1].append(response(tools, own, column).with_info(code=float(code)))
    same = found[0][0].tokens == found[1][0].tokens
    rewards = (float("nan"),) * 2 if same else (1.0, 0.0)
    return [one.scored(x, {GIVEN: x}) for x, of_one in zip(rewards, found, strict=True) for one in of_one]
