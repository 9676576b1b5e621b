"""Which prompts a run trains on and is evaluated on, and how completions reach the rewards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.data.prompt_set import PromptSet, check_vocabulary, encode_rows
from jaxrl_llm.models import load_policy
from jaxrl_llm.rewards import Reward, close_rewards
from jaxrl_llm.rewards.scoring import score_batch
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.health.first_checks import make_rewards, read_value
from jaxrl_llm.training.inputs import encode_for, evaluation_inputs, evaluation_rows, prompt_sets
from jaxrl_llm.utils.errors import InputError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte, and no chat template."""
    return load_policy(runs.MODEL)[2]


def texts(prompts: Any) -> list[str]:
    return [row["prompt"] for row in prompts.rows]


def evaluation_prompts(config: TrainConfig, tokenizer: Any, **which: Any) -> PromptSet:
    return encode_for(config, tokenizer, 0, evaluation_rows(config, **which))


def of_file(folder: Path, count: int, **changes: Any) -> TrainConfig:
    path = runs.write_prompts(folder / f"{count}.jsonl", count)
    return TrainConfig(**{"prompts": str(path), "eval_size": 4, **changes})


def of_task(**changes: Any) -> TrainConfig:
    """Sums of two digits, of which there are 200: items repeat, within a draw and between two."""
    options = {"max_terms": "2", "max_digits": "1"}
    return TrainConfig(
        **{"prompts": "reasoning-gym:chain_sum", "num_prompts": 60, "eval_size": 20, "task_options": options, **changes}
    )


def test_held_out_prompts_of_a_file_are_set_aside(tokenizer: Any, tmp_path: Path) -> None:
    config = of_file(tmp_path, 12)
    train, held_out = prompt_sets(config, tokenizer, 0)
    assert held_out is not None
    assert len(train.rows) == 8
    assert len(held_out.rows) == 4
    assert sorted(texts(train) + texts(held_out)) == [f"number {i:02d}:" for i in range(12)]
    assert train.ids[0] == list(train.rows[0]["prompt"].encode())
    assert texts(prompt_sets(config, tokenizer, 0)[1]) == texts(held_out)
    other = prompt_sets(of_file(tmp_path, 12, seed=1), tokenizer, 0)[1]
    assert set(texts(other)) != set(texts(held_out)), "another seed sets others aside"


def test_num_prompts_is_without_those_set_aside(tokenizer: Any, tmp_path: Path) -> None:
    train, held_out = prompt_sets(of_file(tmp_path, 12, num_prompts=5), tokenizer, 0)
    assert held_out is not None
    assert (len(train.rows), len(held_out.rows)) == (5, 4)
    assert {int(text[7:9]) for text in texts(train) + texts(held_out)} == set(range(9))


def test_held_out_prompts_of_a_task_are_no_training_prompts(tokenizer: Any) -> None:
    train, held_out = prompt_sets(of_task(), tokenizer, 0)
    assert held_out is not None
    assert len(held_out.rows) == len(set(texts(held_out))) == 20
    assert len(set(texts(train))) == len(train.rows) <= 60
    assert not set(texts(train)) & set(texts(held_out))
    alone, nothing = prompt_sets(of_task(eval_size=0), tokenizer, 0)
    assert nothing is None
    assert set(texts(alone)) - set(texts(train)) <= set(texts(held_out)), "only held-out prompts were taken out"
    assert set(texts(alone)) & set(texts(held_out)), "the draws overlap, or this test shows nothing"


def test_held_out_prompts_of_a_file_of_their_own(tokenizer: Any, tmp_path: Path) -> None:
    theirs = runs.write_prompts(tmp_path / "eval.jsonl", count=6, first=8)
    train, held_out = prompt_sets(of_file(tmp_path, 12, eval_prompts=str(theirs)), tokenizer, 0)
    assert held_out is not None
    assert texts(held_out) == [f"number {i:02d}:" for i in (8, 9, 10, 11)]
    assert {int(text[7:9]) for text in texts(train)} == set(range(8))


def test_options_of_the_task_are_not_asked_of_a_file(tokenizer: Any, tmp_path: Path) -> None:
    theirs = runs.write_prompts(tmp_path / "eval.jsonl")
    _, held_out = prompt_sets(of_task(eval_prompts=str(theirs)), tokenizer, 0)
    assert held_out is not None
    assert len(held_out.rows) == 12
    with pytest.raises(InputError, match="task_options apply to reasoning-gym"):
        prompt_sets(of_file(tmp_path, 12, task_options={"max_terms": "2"}), tokenizer, 0)


@pytest.mark.parametrize(
    ("count", "message"),
    [(4, "4 different prompts, too few to hold 4 out"), (3, "3 different"), (1, "1 different prompt, too")],
)
def test_too_few_prompts_to_set_any_aside(tokenizer: Any, tmp_path: Path, count: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prompt_sets(of_file(tmp_path, count), tokenizer, 0)
    same = runs.write_prompts(tmp_path / "same.jsonl", 3)
    with pytest.raises(InputError, match=r"every prompt of .* is a held-out prompt too"):
        prompt_sets(of_file(tmp_path, 3, eval_prompts=str(same)), tokenizer, 0)


def test_a_run_is_evaluated_on_what_it_was_not_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    """Asking for another number of prompts must not draw another split, with training prompts among the held-out."""
    config = of_file(tmp_path, 12)
    _, held_out = prompt_sets(config, tokenizer, 0)
    assert held_out is not None
    assert texts(evaluation_prompts(config, tokenizer)) == texts(held_out)
    assert texts(evaluation_prompts(config, tokenizer, size=3)) == texts(held_out)[:3]
    with pytest.raises(InputError, match=r"held 4 prompts of .* out and was trained on the others: .*asked for: 5"):
        evaluation_prompts(config, tokenizer, size=5)
    with pytest.raises(InputError, match="no held-out prompts"):
        evaluation_prompts(of_file(tmp_path, 12, eval_size=0), tokenizer)


def test_a_task_gives_more_held_out_prompts_than_the_run_had(tokenizer: Any) -> None:
    train, held_out = prompt_sets(of_task(), tokenizer, 0)
    assert held_out is not None
    more = evaluation_prompts(of_task(), tokenizer, size=40)
    assert len(more.rows) == 40
    assert texts(more)[:20] == texts(held_out)
    assert not set(texts(more)) & set(texts(train))


def test_prompts_that_are_given_are_taken_as_they_are(tokenizer: Any, tmp_path: Path) -> None:
    config = of_file(tmp_path, 12)
    source = str(runs.write_prompts(tmp_path / "all.jsonl", count=12))
    assert len(evaluation_prompts(config, tokenizer, source=source, size=12).rows) == 12
    assert len(evaluation_prompts(config, tokenizer, source=source).rows) == 4, "as many as the run has"


LONG = [{"prompt": "x" * n} for n in (3, 5, 8)]


@pytest.mark.parametrize(
    ("how", "lengths", "skipped", "shortened"), [("skip", [3, 5], 1, 0), ("truncate", [3, 5, 5], 0, 1)]
)
def test_long_prompts(tokenizer: Any, how: str, lengths: list[int], skipped: int, shortened: int) -> None:
    got = encode_rows(tokenizer, LONG, max_tokens=5, long_prompts=how, system_prompt=None)
    assert [len(ids) for ids in got.ids] == lengths
    assert [row["prompt"] for row in got.rows] == [row["prompt"] for row in LONG[: len(lengths)]]
    assert (got.skipped, got.shortened) == (skipped, shortened)


def test_long_prompts_keep_their_end_or_stop_the_run(tokenizer: Any) -> None:
    rows = [{"prompt": "abcdefg"}]
    got = encode_rows(tokenizer, rows, max_tokens=3, long_prompts="truncate", system_prompt=None)
    assert tokenizer.decode(got.ids[0]) == "efg"
    with pytest.raises(InputError, match="a prompt has 7 tokens, more than max_prompt_tokens 3"):
        encode_rows(tokenizer, rows, max_tokens=3, long_prompts="error", system_prompt=None)
    with pytest.raises(InputError, match="the only prompt has more than 3 tokens"):
        encode_rows(tokenizer, rows, max_tokens=3, long_prompts="skip", system_prompt=None)


def test_an_id_that_the_model_lacks_is_found_before_anything_is_sampled(tokenizer: Any, tmp_path: Path) -> None:
    most = max(id for ids in prompt_sets(of_file(tmp_path, 12), tokenizer, 0)[0].ids for id in ids)
    assert prompt_sets(of_file(tmp_path, 12), tokenizer, 0, vocabulary=most + 1)[0].ids
    with pytest.raises(InputError, match=rf"prompt \d+ of .* token id {most}, but the model's vocabulary has {most}"):
        prompt_sets(of_file(tmp_path, 12), tokenizer, 0, vocabulary=most)
    listed = encode_rows(tokenizer, [{"prompt": "a"}], max_tokens=9, long_prompts="error", system_prompt=None)
    with pytest.raises(InputError, match="another model's"):
        check_vocabulary(listed.ids[0], max(listed.ids[0]))


def test_prompt_and_completion_fit_into_the_context(tokenizer: Any, tmp_path: Path) -> None:
    """10 tokens of prompt: they fit into a context of 20 with 10 new tokens, not with 11."""
    assert len(prompt_sets(of_file(tmp_path, 12, max_new_tokens=10), tokenizer, 20)[0].rows) == 8
    with pytest.raises(InputError, match="all 8 prompts have more than 9 tokens"):
        prompt_sets(of_file(tmp_path, 12, max_new_tokens=11), tokenizer, 20)
    with pytest.raises(InputError, match="max_new_tokens is 128, but the model's context length is 128 tokens"):
        prompt_sets(of_file(tmp_path, 12, max_new_tokens=128), tokenizer, 128)


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("0.5", 0.5), ("[1, 2]", [1, 2]), ("true", True), ("a", "a"), (4, 4)]
)
def test_options_are_read_as_yaml(text: Any, value: Any) -> None:
    assert read_value(text) == value


def rewards_of(folder: Path, *names: str, **changes: Any) -> TrainConfig:
    path = runs.write_rewards(folder)
    return TrainConfig(rewards=tuple(f"{path}:{name}" for name in names), **changes)


def test_rewards_get_the_run_s_limits(tmp_path: Path) -> None:
    config = rewards_of(tmp_path, "even", "constant*2", reward_time_limit=3.0, reward_default=-1.0)
    rewards = make_rewards(config)
    close_rewards(rewards)
    assert [(r.name, r.weight, r.time_limit, r.default) for r in rewards] == [
        ("even", 1.0, 3.0, -1.0), ("constant", 2.0, 3.0, -1.0),
    ]  # fmt: skip


def test_rewards_that_cannot_be_used_are_found_before_the_run(tmp_path: Path) -> None:
    prompts = str(runs.write_prompts(tmp_path / "prompts.jsonl"))

    def use(config: TrainConfig) -> None:
        with evaluation_inputs(config, prompts, 4):
            pass

    with pytest.raises(InputError, match="column that the reward 'needy' needs, 'solution'"):
        use(rewards_of(tmp_path, "needy"))
    with pytest.raises(InputError, match="two rewards are named 'even'"):
        use(rewards_of(tmp_path, "even", "even*0.5"))
    with pytest.raises(InputError, match="unknown reward to judge by 'evn': did you mean 'even'"):
        use(rewards_of(tmp_path, "even", eval_reward="evn"))
    (tmp_path / "singular.py").write_text(
        "def reward(completions, prompt): ...\ndef nothing(): ...\ndef place(completions, /): ...\n"
    )
    for name, said in {
        "reward": "'prompt': did you mean 'prompts'",
        "nothing": "reward 'nothing' must take completions by name",
        "place": "reward 'place' must take completions by name",
    }.items():
        with pytest.raises(InputError, match=said):
            use(TrainConfig(rewards=(f"{tmp_path / 'singular.py'}:{name}",)))


def test_completions_meet_the_row_of_their_group() -> None:
    tokens = jnp.asarray([[1, 5, 9], [1, 6, 0], [2, 7, 9]], jnp.int32)
    action = jnp.asarray([[False, True, True], [False, True, False], [False, True, True]])
    batch = Trajectories(
        tokens=tokens, token_mask=tokens > 0, action_mask=action, behaviour_logp=tokens * 0.0, policy_step=tokens,
        turn=tokens, group=jnp.asarray([0, 0, 1]), prompt_id=jnp.asarray([7, 7, 8]), truncated=jnp.zeros(3, bool),
    )  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"prompt": "one", "answer": "a"},
        {"prompt": [{"role": "user", "content": "two"}], "answer": "b"},
    ]
    seen: dict[str, Any] = {}

    def look(completions: list[Any], **columns: Any) -> list[float | None]:
        seen.update(columns, completions=completions)
        return [1.0, None, 0.5]

    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    scored = score_batch([Reward(look, weight=2.0)], tokenizer, rows, batch)
    assert seen == {
        "completions": ["5 9", "6", [{"role": "assistant", "content": "7 9"}]],
        "answer": ["a", "a", "b"],
        "prompts": ["one", "one", rows[1]["prompt"]],
        "completion_ids": [[5, 9], [6], [7, 9]],
    }
    assert scored.texts == ["5 9", "6", "7 9"]
    assert scored.batch.rewards is not None
    np.testing.assert_array_equal(scored.batch.rewards["look"], [1.0, np.nan, 0.5])
    np.testing.assert_array_equal(scored.batch.reward, [2.0, np.nan, 1.0])
    assert scored.failures == {"look": 0}


def test_rows_reach_the_rewards_through_json_lines(tokenizer: Any, tmp_path: Path) -> None:
    """A column under another name, through a template."""
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "1+1", "unit": "apples"}) + "\n")
    config = TrainConfig(
        prompts=str(path), eval_size=0, prompt_column="question", prompt_template="{prompt} in {unit}?"
    )
    train, held_out = prompt_sets(config, tokenizer, 0)
    assert held_out is None
    assert train.rows == [{"question": "1+1", "unit": "apples", "prompt": "1+1 in apples?"}]
    assert tokenizer.decode(train.ids[0]) == "1+1 in apples?"


def test_prompts_that_come_again_with_another_answer_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    path = runs.write_prompts(tmp_path / "twice.jsonl", 8)
    again = [{"prompt": "number 00:", "answer": "9"}, {"prompt": "number 01:", "answer": "1"}]
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in again))
    train, _ = prompt_sets(TrainConfig(prompts=str(path), eval_size=2), tokenizer, 0)
    assert len(train.rows) == 6
    assert train.conflicting == 1, "the same answer is no conflict"
