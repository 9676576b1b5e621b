from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageOver, Code, Count, NonNegative, Ours
from jaxrl_llm.core.parts import part
from jaxrl_llm.objectives import clipped_policy, regularised, token_mean
from jaxrl_llm.objectives.averages import Tokens, token_groups


@method(paper="arXiv 2505.13379", test="test_group_relative.py::test_degrpo_is_the_loop")
def degrpo(
    control_weight: Code[NonNegative] = 0.001,
    control_tokens: Ours[int] = 1,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.001,
    entropy_coefficient: Code[NonNegative] = 0.001,
    average: Ours[AverageOver] = "sequence",
) -> Algorithm:
    """Decoupled GRPO (Thinkless: LLM Learns When to Think).

    The first actions, a control tag that chooses how to answer, have a separate weight, so that its weight does not
    depend on the answer's length. With l = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), A_i = r_i - mean_g
    and alpha = control_weight,

        loss = mean_i [alpha l_i0 + 1/T_i sum_{t=1..T_i} l_it] + kl_coefficient mean k3 - entropy_coefficient mean H

    with l_i0 the mean over the control_tokens tokens of the tag: 1 where the tags were added to the tokenizer, in a run
    as many as the longer of <short> and <think> has in its tokenizer. T_i are the actions after them; the last two
    means are over all tokens. average "token": the answers' tokens are averaged over the batch instead of by sequence,
    as in the authors' code. The method requires rewards that prefer short right answers: with `by_mode(number_match)`
    1 after <short>, 0.5 after <think>, and -1 for wrong answers and without either, as in the paper. It requires a
    policy that was trained on answers of both modes, with both tags as tokens:

        jaxrl export MODEL base --add-tokens '<short>' '<think>'
        jaxrl train --algorithm sft --model base --prompts answers.jsonl --output runs/modes
        jaxrl export runs/modes modes
        jaxrl train --algorithm degrpo --model modes --rewards 'by_mode(number_match)' ...
    """
    control, answer = first_actions(control_tokens), actions_after(control_tokens)
    groups = {"control": (control_weight, control), "answer": (1.0, answer)}
    loss = clipped_policy(clip_low, clip_high, token_groups(groups, over=average))
    objective = regularised(loss, token_mean(), kl_coefficient=kl_coefficient, entropy_coefficient=entropy_coefficient)
    return Algorithm(group_relative("none"), objective)


@part
def first_actions(count: Count = 1) -> Tokens:
    """A function `batch -> bool[N, L]`: the first so many actions of each row."""
    return lambda batch: (batch.action_index >= 0) & (batch.action_index < count)


@part
def actions_after(count: Count = 1) -> Tokens:
    """A function `batch -> bool[N, L]`: all actions except the first so many of each row."""
    return lambda batch: batch.action_index >= count
