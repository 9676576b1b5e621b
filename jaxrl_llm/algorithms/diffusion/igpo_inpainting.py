from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_settings, several_steps
from jaxrl_llm.core.annotations import Code, Count, Fraction, NonNegative, NonNegativeInt, Ours
from jaxrl_llm.core.parts import Trajectories, chain, part, stateless_part
from jaxrl_llm.objectives import clip, policy_gradient, regularised, sequence_ratio, token_mean
from jaxrl_llm.rollouts.guidance.hints import texts_of
from jaxrl_llm.rollouts.guidance.repair import Succeeds, none_succeed, repair, succeeds
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools
from jaxrl_llm.utils.errors import InputError

CHUNK = (5, 10)  # tokens of a piece of the trace, from and to
STRETCH = 1.5  # at most, of the distances between pieces


@method(
    paper="arXiv 2509.10396", test="test_diffusion.py::test_igpo_fixes_parts_of_a_trace_and_learns_the_uncertain_ones"
)
@beside("sft", "the supervised start on rewritten short traces", "masked_sft, run before")
@beside("masks", "other masks of the prompt in each gradient step on a batch", "an estimate with random masks")
@run_settings(several_steps("the ratio to the policy that sampled is 1 in the first gradient step on a batch", 4))
def igpo_inpainting(
    column: Ours[str] = "solution",
    low: Code[Fraction] = 0.2,
    high: Code[Fraction] = 0.6,
    most: Code[Count] = 4,
    keep: Code[Fraction] = 0.2,
    free: Code[NonNegativeInt] = 30,
    success: Code[float] = 0.0,
    accuracy: Ours[str | None] = None,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.01,
) -> Algorithm:
    """Inpainting Guided Policy Optimization (IGPO) of masked-diffusion language models.

    A group in which no sample succeeds (reward > success; accuracy: this component of it) is sampled again with parts
    of a known solution y* (a column of the data set) in their places: for each sample a share eta between `low` and
    `high` of the pieces of y*, of 5 to 10 tokens, spread over the response but its last `free` places (at most half of
    it); all else is drawn around them. The first min(right ones, most) members of the group give way to samples that
    succeed. A_i = r_i - mean_g. With s_i the geometric mean of the token ratios of a response, and the mean over the
    tokens that were drawn, and those of the `keep` share of the given ones whose entropies are largest, at least one:

        loss = -mean_t [min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i) - kl_coefficient k3]

    Log-probabilities are those of all tokens at once, without each other (d1). A run takes four gradient steps on a
    batch. Metrics of groups: rollout/guided.
    """
    program = inpainted(column, succeeds(success, accuracy), low, high, most, free)
    mean = token_mean()
    objective = policy_gradient(sequence_ratio(), clip(clip_low, clip_high), mean)
    transform = chain(group_relative("none"), uncertain_where_given(keep))
    return Algorithm(transform, regularised(objective, mean, kl_coefficient=kl_coefficient), rollout=program)


@part
def inpainted(
    column: str, succeeds: Succeeds, low: Fraction = 0.2, high: Fraction = 0.6, most: Count = 4,
    free: NonNegativeInt = 30,
) -> Rollout:  # fmt: skip
    """Samples; a group in which none succeeds is sampled again with parts of a solution in their places, and takes in
    those samples that succeed then, `most` at most.

    Provides info["guided"], 1 for those; their info["inpainted"] has for each token whether it was given. The other
    arguments are those of `igpo_inpainting`. InputError where low is above high.
    """
    if low > high:
        raise InputError(f"low is {low:g}, above high {high:g}: give the smaller share of given tokens first")

    async def fix(tools: Tools, task: Task, found: list[Episode]) -> list[Episode] | None:
        known = texts_of(task.row.get(column), column)
        if not known:
            return None
        trace, random = tools.encode(known[0]), tools.random("inpainted")
        shares = np.sort(random.uniform(low, high, task.samples))
        canvases = [given_places(trace, share, task.limit, free, random) for share in shares]
        drawn = await gather(*(
            tools.sample(task.prompt, number=task.samples + number, fixed=fixed)
            for number, fixed in enumerate(canvases)
        ))  # fmt: skip
        marked = [
            one.with_info(guided=1.0, inpainted=_given(fixed, one)) for one, fixed in zip(drawn, canvases, strict=True)
        ]
        right = [one for one in await tools.score(marked) if succeeds(one)][:most]
        return [*right, *found[len(right) :]] if right else None

    return replace(repair((none_succeed(succeeds), fix)), name="inpainted", columns=(column,))


def _given(fixed: Sequence[int], episode: Episode) -> list[float]:
    marks = [float(token >= 0) for token in fixed[: episode.size]]
    return marks + [0.0] * (episode.size - len(marks))


def given_places(
    trace: Sequence[int], share: float, length: int, free: int, random: np.random.Generator
) -> tuple[int, ...]:
    """Ids at the places of a response of `length` tokens, -1 where one is to be drawn: about `share` of a trace's.

    The trace is cut into pieces of CHUNK tokens, of which each is shown with the probability that makes `share` of the
    tokens shown; at least one is. Pieces are as far apart as in the trace, or up to STRETCH times that where there is
    room before the last `free` places. What has no room is not shown.
    """
    room = length - min(free, length // 2)
    stretch = float(np.clip(room / max(len(trace), 1), 1.0, STRETCH))
    pieces, start = list[tuple[int, int]](), 0
    while start < len(trace):
        end = min(start + int(random.integers(CHUNK[0], CHUNK[1] + 1)), len(trace))
        pieces.append((start, end))
        start = end
    shown = random.uniform(size=len(pieces)) < share
    if pieces and not shown.any():
        shown[random.integers(len(pieces))] = True
    out = np.full(length, -1)
    for (start, end), there in zip(pieces, shown, strict=True):
        first = round(start * stretch)
        count = min(end - start, room - first)
        if there and count > 0:
            out[first : first + count] = trace[start : start + count]
    return tuple(out.tolist())


@stateless_part({"guided"})
def uncertain_where_given(batch: Trajectories, keep: Fraction = 0.2) -> Trajectories:
    """Drop the given tokens, info["inpainted"], of a row but those of the `keep` share with the largest entropies.

    At least one stays in a row that has some. Entropies are the sampler's, `batch.entropy`.
    """
    if "inpainted" not in (batch.info or {}):  # none was, in the whole batch
        return batch
    given = (jnp.nan_to_num(batch.need("inpainted")) > 0) & batch.action_mask
    entropy = jnp.where(given, batch.need("entropy"), -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-entropy, axis=1, stable=True), axis=1)
    most = jnp.maximum(jnp.floor(keep * jnp.sum(given, axis=1) + 1e-6), 1)
    return batch.replace(weights=jnp.where(given & (rank >= most[:, None]), 0.0, batch.loss_weights))
