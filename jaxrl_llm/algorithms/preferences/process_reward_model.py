import jax.numpy as jnp

from jaxrl_llm.advantages.returns import last_actions
from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import AtLeastTwo, Code
from jaxrl_llm.core.parts import Array, Metrics, Objective, PolicyOutputs, Trajectories, part, stateless
from jaxrl_llm.data.step_labels import NO_LABEL, encode_steps
from jaxrl_llm.objectives import averaged, token_mean
from jaxrl_llm.objectives.preference.reward_models import class_loss
from jaxrl_llm.objectives.values import HEAD, needed_output
from jaxrl_llm.rewards.specs import GIVEN
from jaxrl_llm.rollouts.episode import given
from jaxrl_llm.rollouts.guidance.responses import given_rows
from jaxrl_llm.rollouts.programs import Episode, Task, Tools, program_part
from jaxrl_llm.utils.errors import InputError, shown


@method(paper="arXiv 2305.20050", test="test_process_rewards.py::test_process_reward_model_by_loop")
@run_settings(*given_responses(1))
def process_reward_model(
    separator: Code[str] = "\n", only_last: Code[bool] = False, classes: Code[AtLeastTwo] = 2
) -> Algorithm:
    """Process reward model (PRM).

    The model is the decoder with a new head of two scores, wrong and right, in place of the unembedding. The columns
    completions and labels of a row are the steps of a solution and whether each is right. With z_k the scores at the
    last token of the separator after step k,

        loss = mean over all steps of -log softmax(z_k)_label

    only_last: the last step's label alone counts, an outcome reward. classes: of a step, where labels are the whole
    numbers below it. Prompt and steps are texts, tokenised one by one as TRL's. The exported model scores steps as
    `--rewards steps:PATH`, after its own separator.
    """
    return Algorithm(
        stateless(marked_steps, {"turn_rewards"}), step_classes(classes),
        rollout=labelled_steps(separator, only_last, classes),
    )  # fmt: skip


def marked_steps(batch: Trajectories) -> Trajectories:
    """The batch with the advantage 1 where an action follows a step with a label, and without the weight of others."""
    known = (_labels(batch) != NO_LABEL).astype(jnp.float32)
    return batch.replace(advantages=known, weights=batch.loss_weights * known)


def _labels(batch: Trajectories) -> Array:
    """int32[N, L]: the label of the step before each action, which is the reward of its turn; NO_LABEL elsewhere.

    Without rewards of turns the last action alone has one, whether the score is above 1/2.
    """
    rewards, turn = batch.turn_rewards, batch.turn
    if rewards is None:
        return jnp.where(last_actions(batch), batch.scores[:, None] > 0.5, NO_LABEL).astype(jnp.int32)
    found = jnp.take_along_axis(rewards, jnp.clip(turn, 0, rewards.shape[1] - 1), axis=1)
    return jnp.where(batch.action_mask & ~jnp.isnan(found), jnp.nan_to_num(found), NO_LABEL).astype(jnp.int32)


@part
def step_classes(classes: AtLeastTwo = 2) -> Objective:
    """The mean over labelled steps of -log softmax of their scores, one for each of two classes or more. Metric:
    "mean_token_accuracy", of these labels."""
    mean = token_mean()

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        scores = needed_output(outputs, "scores", "the loss of steps", HEAD)
        labels = jnp.where(batch.loss_weights != 0, _labels(batch), NO_LABEL)
        right = (jnp.argmax(scores, axis=-1) == labels).astype(jnp.float32)
        return mean(class_loss(scores, labels), batch), {"mean_token_accuracy": mean(right, batch)}

    return averaged(objective, mean, frozenset({f"scores:{classes}", "turn_rewards"}))


@program_part("labelled_steps", {"turn_rewards"}, ("completions", "labels"), given_rows(1))
async def labelled_steps(
    tools: Tools, task: Task, separator: str = "\n", only_last: bool = False, classes: int = 2
) -> list[Episode]:
    """The columns prompt, completions and labels of each row as an episode, whose actions are the tokens that follow a
    step, and whose turns' rewards are the labels, NaN for none. Cut where it is longer than the task's limit."""
    prompt, steps, labels = (task.row.get(name) for name in ("prompt", "completions", "labels"))
    tokenizer = tools.tokenizer
    if not (isinstance(prompt, str) and isinstance(steps, list | tuple) and isinstance(labels, list | tuple)):
        raise InputError(
            f"prompt {task.prompt_id} has the prompt {shown(prompt)}, the steps {shown(steps)} and the labels "
            f"{shown(labels)}, but must have a text and two lists"
        )
    if not all(isinstance(one, str) and one for one in steps) or not all(x in range(classes) for x in labels):
        wanted = "true or false" if classes == 2 else f"0 to {classes - 1}"
        raise InputError(f"prompt {task.prompt_id}: steps must be texts, and labels {wanted}")
    found = encode_steps(tokenizer, prompt, steps, labels, separator=separator, only_last=only_last)
    most = len(task.prompt) + task.limit
    ids = [*found.tokens[:most], tokenizer.eos_token_id or 0]
    marks = found.labels[:most]
    ends = [at + 1 for at, mark in enumerate(marks) if mark != NO_LABEL]
    if not ends:
        raise InputError(f"prompt {task.prompt_id} is cut before its first label: raise max_new_tokens")
    cuts = sorted({*ends, *(at + 1 for at in ends), len(ids)} - {ends[0]})
    pieces = zip([ends[0], *cuts], cuts, strict=False)
    segments = [given(ids[a:b], tools.step)._replace(sampled=a in ends) for a, b in pieces if b <= ends[-1] + 1]
    episode = Episode(
        tuple(ids[: ends[0]]), task.prompt_id, segments=tuple(segments), ended=len(found.tokens) <= most,
        truncated=len(found.tokens) > most, turn_rewards=tuple(float(marks[at - 1]) for at in ends),
    )  # fmt: skip
    return [episode.scored(1.0, {GIVEN: 1.0})]
