import dataclasses
from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp

from jaxrl_llm.advantages.filters import demonstrated_rows
from jaxrl_llm.advantages.group import group_advantage
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Divisor, NonNegative, Ours, Paper
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Array, Metrics, Objective, PolicyOutputs, Trajectories, part, row_means, stateless_part
from jaxrl_llm.core.reference import ReferenceRule
from jaxrl_llm.objectives import Average, clip, coupled, distillation, policy_gradient, sequence_ratio
from jaxrl_llm.objectives.preference.pairs import bucket_log_sum_exp, mean_logp
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text, second_prompt, stated_answer
from jaxrl_llm.rollouts.episode import given, sampled_ids
from jaxrl_llm.rollouts.guidance.hints import texts_of
from jaxrl_llm.rollouts.guidance.repair import succeeds
from jaxrl_llm.rollouts.guidance.responses import NEED, demonstration
from jaxrl_llm.rollouts.programs import Demands, Episode, Task, Tools, program_part
from jaxrl_llm.utils.errors import InputError

EVALUATE, CREATE, DEFER = "EVAL", "CREATE", "DEFER"
STATE = """{problem}

Your own answer:
{own}

{peers}

{agreed} of these {number} answers agree.

Decide what to do: EVAL with a number adopts that answer of a peer, CREATE gives your own answer, DEFER asks an expert, which costs most. Reply with one of these alone: {choices}."""  # noqa: E501


@method(paper="arXiv 2603.07972", test="test_listed_actions.py::test_hila_is_its_loop")
def hila(
    defer_cost: Paper[NonNegative] = 0.3,
    create_cost: Code[NonNegative] = 0.03,
    scale: Paper[Divisor] = "none",
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.02,
    entropy_coefficient: Paper[NonNegative] = 0.001,
    sft_coefficient: Ours[NonNegative] = 0.01,
    peers: Ours[str] = "peers",
    expert: Ours[str] = "expert",
    own: Ours[str | None] = None,
    success: Ours[float] = 0.5,
    drop_same: Code[bool] = True,
) -> Algorithm:
    """Learning when to answer, to adopt a peer's answer, or to ask an expert (HILA, dual-loop policy optimisation).

    A state s is a task, the policy's own answer and peers' answers. Its group is not sampled: it lists all K actions,
    EVAL i (adopt the answer of peer i), CREATE (the own answer) and DEFER (ask the expert), each a short reply to a
    prompt that shows the state. With c = 1 for an answer that the run's rewards find right (above `success`), else 0,

        R(EVAL i) = c(peer i),    R(CREATE) = c(own) - create_cost,    R(DEFER) = c(expert) - defer_cost
        A_k = R_k - mean_k R,     with scale std divided by the population's standard deviation (the code)
        z_k = mean over the reply's tokens of log pi(a_k | s),    rho_k = exp(z_k - z_k of the reference)

        inner = -mean_k min(rho_k A_k, clip(rho_k, 1 - clip_low, 1 + clip_high) A_k)
                + kl_coefficient mean_k mean_t KL(pi || reference) - entropy_coefficient H(softmax_k z)
        loss  = mean over states of [inner + sft_coefficient / K * (-sum_i log pi(expert's token i | task))]

    The last term is the outer loop: 1[a = DEFER] of the paper's joint loss, of which the mean over the K actions is
    1 / K. The expert's answer is learnt after the task's own prompt, whether it is right or not. KL is over the whole
    vocabulary, as no action is sampled; of a run with a teacher it is from that. The means and the entropy are over the
    listed actions with equal weights; weighted by pi they would be the exact expectation, of which the paper says
    nothing. sft_coefficient is not known from the paper.

    peers, expert: columns of the data set, the first a list of texts, the other a text; all rows should have as many
    peers. own: a column with the policy's answer; None: it is sampled. Of the paper's cues in a state only consensus is
    there, how many of the answers agree. drop_same: states whose answers are all the same teach nothing and are left
    out (the code's ratio of 0 to 1). Held-out prompts are answered, not decided on. Metrics: "choice/entropy",
    "choice/reward", the expected reward of an action that is drawn by softmax_k z, and "expert/loss", the last term.
    """
    if create_cost >= defer_cost > 0:
        raise InputError(f"create_cost {create_cost:g} must be below defer_cost {defer_cost:g}: an expert costs more")
    of_actions, of_experts = by_share("choice_share"), by_share("expert_share")
    objective = policy_gradient(sequence_ratio("reference"), clip(clip_low, clip_high), of_actions)
    objective += kl_coefficient * distillation(1.0, average=of_actions, metric="kl")
    objective -= entropy_coefficient * choice_entropy()
    objective += sft_coefficient * expert_loss(of_experts)
    rollout = listed_actions(peers, expert, own, create_cost, defer_cost, success, drop_same)
    # The initial policy, said so that it is the teacher of the divergence, too.
    return Algorithm(of_listed_actions(scale), objective, rollout=rollout, reference=ReferenceRule())


def actions_of(peers: int) -> list[str]:
    """The replies that a state with so many peers allows.

    >>> actions_of(2)
    ['EVAL 1', 'EVAL 2', 'CREATE', 'DEFER']
    """
    return [*(f"{EVALUATE} {i}" for i in range(1, peers + 1)), CREATE, DEFER]


def action_rewards(
    own: bool, peers: Sequence[bool], expert: bool, create_cost: float = 0.03, defer_cost: float = 0.3
) -> list[float]:
    """R of the `actions_of` a state, by which answers are right.

    >>> action_rewards(True, [False], True)
    [0.0, 0.97, 0.7]
    """
    return [*(float(one) for one in peers), float(own) - create_cost, float(expert) - defer_cost]


def state_text(problem: str, own: str, peers: Sequence[str]) -> str:
    """The text that shows a state, and asks for one of the `actions_of` it."""
    numbered = "\n\n".join(f"Answer {i} (of a peer):\n{text}" for i, text in enumerate(peers, start=1))
    answers = [stated(text) for text in (own, *peers)]
    choices = actions_of(len(peers))
    return STATE.format(
        problem=problem, own=own, peers=numbered, agreed=Counter(answers).most_common(1)[0][1], number=len(answers),
        choices=", ".join(choices[:-1]) + f" or {choices[-1]}",
    )  # fmt: skip


def stated(text: str) -> str:
    """What a text answers: its `stated_answer`, else the text itself."""
    return stated_answer(text) or text.strip()


@program_part("listed_actions", {NEED}, ("{peers}", "{expert}", "{own}"), Demands(variable_size=True))
async def listed_actions(
    tools: Tools, task: Task, peers: str = "peers", expert: str = "expert", own: str | None = None,
    create_cost: NonNegative = 0.03, defer_cost: NonNegative = 0.3, success: float = 0.5, drop_same: bool = True,
) -> list[Episode]:  # fmt: skip
    """All actions of a state as a group, scored by `action_rewards`, and the expert's answer to the task in another.

    Nothing but the own answer is sampled, and that only where `own` names no column. A reply is its text and the token
    that ends a turn. Provides info["demonstrated"], 1 for the expert's answer. A state whose answers are all the same
    (drop_same), and one that does not fit into the model's context, is one episode without a score. Raises InputError
    for a row without peers or without an expert's answer.
    """
    is_right = succeeds(success)
    others, taught = texts_of(task.row.get(peers), peers), texts_of(task.row.get(expert), expert)
    if not others or not taught:
        name = expert if others else peers
        raise InputError(f"prompt {task.prompt_id} has nothing in the column {name!r}: give an answer there")
    blank = Episode(task.prompt, task.prompt_id)

    def said(text: str) -> Episode:
        return blank + given(tools.encode(text))._replace(sampled=True)

    mine = texts_of(task.row.get(own), own) if own is not None else []
    answer = said(mine[0]) if mine else await tools.sample(task.prompt, number=0)
    scored = await tools.score([answer, *map(said, others), said(taught[0])])
    texts = [tools.decode(sampled_ids(answer)), *others, taught[0]]
    right = [is_right(one) for one in scored]
    prompt = second_prompt(tools, task, state_text(problem_text(tools, task), texts[0], others))
    stop = getattr(tools.tokenizer, "eos_token_id", None)
    replies = [[*tools.encode(text), *([] if stop is None else [stop])] for text in actions_of(len(others))]
    same = drop_same and len({stated(text) for text in texts}) == 1
    if same or not all(tools.fits([*prompt, *ids]) for ids in replies):
        return [answer.with_info(demonstrated=0.0).scored(float("nan"), scored[0].rewards)]
    rewards = action_rewards(right[0], right[1:-1], right[-1], create_cost, defer_cost)
    adopted = [*scored[1:-1], scored[0], scored[-1]]
    actions = [
        Episode(prompt, task.prompt_id, number, (given(ids, tools.step)._replace(sampled=True),), ended=True)
        .with_info(demonstrated=0.0)
        .in_part(0)
        .scored(reward, answered.rewards)
        for number, (ids, reward, answered) in enumerate(zip(replies, rewards, adopted, strict=True))
    ]
    lesson = demonstration(tools, dataclasses.replace(task, row={**task.row, expert: taught[0]}), expert)
    lesson = dataclasses.replace(lesson, sample=len(actions)).in_part(1)
    return [*actions, lesson.scored(rewards[-1], adopted[-1].rewards)]


@stateless_part({NEED, "old_logp"})
def of_listed_actions(batch: Trajectories, scale: Divisor = "none") -> Trajectories:
    """Advantages of the actions of each state, 1 on the expert's answers, and what share of the loss each row has.

    info["choice_share"] f32[N]: 1 / (K S) for the K actions of each of S states. info["expert_share"]: the same for the
    expert's answers (info["demonstrated"]), with K of the states of their prompt. No row was sampled, so that what the
    policy says of them before the update stands for `behaviour_logp`.
    """
    acts, taught = jnp.any(batch.action_mask, axis=1), demonstrated_rows(batch)
    R = jnp.where(taught, jnp.nan, batch.scores)
    actions, lessons = (acts & ~jnp.isnan(R)).astype(jnp.float32), (acts & taught).astype(jnp.float32)
    (K,) = bucket_sums(batch.group, actions)
    of_states = actions / jnp.maximum(K, 1)
    S = jnp.maximum(jnp.sum(of_states), 1)
    listed, states = bucket_sums(batch.prompt_id, actions, of_states)
    of_prompt = jnp.maximum(listed, 1) / jnp.maximum(states, 1)
    A = group_advantage(R, batch.group, scale=scale, ddof=0, epsilon=1e-6)
    A = jnp.where(batch.action_mask, jnp.where(taught, 1.0, A)[:, None], 0.0)
    return batch.replace(advantages=A, behaviour_logp=batch.need("old_logp")).with_info(
        choice_share=of_states / S, expert_share=lessons / (of_prompt * S)
    )


@part
def by_share(name: str) -> Average:
    """sum_n share_n (mean over row n's tokens), with the shares info[name] f32[N] of the whole batch."""
    return Average(lambda values, batch: jnp.sum(batch.need(name) * row_means(values, batch)))


@part
def expert_loss(average: Average) -> Objective:
    """-sum_t log pi of each row, by its share in an average of rows. Metric "expert/loss"."""

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        tokens = jnp.sum(batch.loss_weights, axis=1, keepdims=True)  # the average's mean over tokens to a sum
        value = -average(tokens * jnp.where(batch.loss_weights != 0, outputs.logp, 0.0), batch)
        return value, {"expert/loss": value}

    return Objective(objective, average.needs)


@part
def choice_entropy() -> Objective:
    """The mean over states of H(softmax_k z), z_k the mean log-probability of the tokens of action k, nats.

    Metrics: "choice/entropy", and "choice/reward", sum_k softmax_k(z) R_k.
    """

    def logp_of_choices(z: Array, batch: Trajectories) -> Array:
        among = batch.need("choice_share") > 0
        return jnp.where(among, z - bucket_log_sum_exp(batch.group, z, among), -jnp.inf)

    def states(batch: Trajectories) -> Array:
        """f32[N]: 1 / S on the rows of the S states, 0 elsewhere."""
        share = batch.need("choice_share")
        (K,) = bucket_sums(batch.group, (share > 0).astype(jnp.float32))
        return share * K

    def shares(z: Array, batch: Trajectories) -> Array:
        l = logp_of_choices(z, batch)
        among = l > -jnp.inf
        l = jnp.where(among, l, 0.0)
        return jnp.where(among, -jnp.exp(l) * l, 0.0) * states(batch)

    def report(z: Array, batch: Trajectories) -> Metrics:
        expected = jnp.exp(logp_of_choices(z, batch)) * jnp.nan_to_num(batch.scores)
        return {"choice/reward": expected * states(batch)}

    return coupled(mean_logp, shares, "choice/entropy", report=report, by_groups=True)
