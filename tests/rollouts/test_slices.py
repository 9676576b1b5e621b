"""Single replies to slices of dialogues, and the simulated patient that they are with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.algorithms.rewards.baichuan_m2 import sliced
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.patient import UNKNOWN, Patient
from jaxrl_llm.rollouts.agents.compaction import keep_last
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["plain"][1]
ROW = {
    "prompt": "", "complaint": "I cough.", "diagnosis": "Flu",
    "facts": {"fever": "39 degrees.", "travel": "None.", "Smoke": "Never."},
}  # fmt: skip


def heard(patient: Patient, text: str) -> Any:
    return patient.step(Reply({"role": "assistant", "content": text}, ()))


def test_the_patient_by_hand() -> None:
    patient = Patient(ROW)
    assert [m["content"] for m in patient.reset(ROW, 0).messages] == ["I cough."]
    for said, answer, reward, done in [
        ("Do you have a FEVER?", "39 degrees.", 1 / 3, False),
        ("A fever?", "39 degrees.", 0.0, False),
        ("Where do you live?", UNKNOWN, 0.0, False),
        ("Do you smoke, or travel?", "None. Never.", 1.0, False),
        ("Any pain?", UNKNOWN, 0.0, False),
        ("It is the flu.", UNKNOWN, 1.0, True),
    ]:
        seen = heard(patient, said)
        assert [m["content"] for m in seen.messages] == [answer]
        assert (seen.reward, seen.done) == (pytest.approx(reward), done)
    early = Patient(ROW)
    early.reset(ROW, 0)
    guessed = heard(early, "Flu, or did you travel?")  # 1 - 3 points
    assert (guessed.reward, guessed.done) == (0.0, True)


@pytest.mark.parametrize("wrong", [{"facts": 3}, {"facts": {"a": ""}}, {"complaint": ""}, {"diagnosis": None}])
def test_rows_of_another_form_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=f"the column '{next(iter(wrong))}' has"):
        Patient({**ROW, **wrong})


def says(text: str, sample: int) -> str:
    """A doctor who asks about one thing after the other, and then names the flu; one sample asks about all."""
    asked = text.count("assistant\n") - 1
    return f"{('fever?', 'travel?', 'smoke?', 'flu')[asked] if sample != 1 else 'fever, travel, smoke'}{END}"


def slices(seed: int) -> tuple[list[Any], Any]:
    tokenizer, rows = tokenizer_of("plain"), [ROW] * (seed + 1)
    rollout = sliced().wrap(agent(Patient, turns=5))  # type: ignore[misc]
    found, _ = run_agents(rollout, tokenizer, says, rows, 3)
    one = found.groups[seed]
    return list(one.episodes), to_batch([one], SamplingConfig(), 0)


def test_a_group_replies_to_one_slice_whose_rubric_is_of_its_moment() -> None:
    """All have the same context; the dialogue before it is not trained on, whichever turn is drawn."""
    tokenizer, turns = tokenizer_of("plain"), set[int]()
    for seed in range(12):
        episodes, batch = slices(seed)
        (prompt,) = {episode.prompt for episode in episodes}
        context = tokenizer.decode(prompt)
        turn = context.count("assistant\n") - 1
        turns.add(turn)
        for before, answer in [("fever?", "39 degrees."), ("travel?", "None."), ("smoke?", "Never.")][:turn]:
            assert f"assistant\n{before}{END}\n<|im_start|>user\n{answer}{END}" in context
        replies = [tokenizer.decode(episode.own.token.tolist(), skip_special_tokens=True) for episode in episodes]
        own = ("fever?", "travel?", "smoke?", "flu")[turn]
        assert replies == [own, "fever, travel, smoke", own]
        each = 1 / (3 - turn) if turn < 3 else 1.0
        rewards = [episode.rewards["environment"] for episode in episodes]
        np.testing.assert_allclose(rewards, [each, float(turn < 3), each])
        action = np.asarray(batch.action_mask)
        assert action.sum(axis=1).tolist() == [episode.size for episode in episodes]
        assert set(np.asarray(batch.turn)[action].tolist()) == {0}
        assert [episode.sample for episode in episodes] == [0, 1, 2]
    assert turns == {0, 1, 2, 3}


class Broken(Patient):
    """It does not begin."""

    def reset(self, row: Any, seed: int) -> Any:
        raise OSError("no server")


def test_other_rollouts_stay_and_what_cannot_be_sliced_is_not_scored() -> None:
    plain = group()
    assert sliced().wrap(plain) is plain  # type: ignore[misc]
    found, _ = run_agents(sliced().wrap(agent(Broken, turns=5)), tokenizer_of("plain"), says, [ROW], 2)  # type: ignore[misc]
    assert [bool(np.isnan(episode.reward)) for episode in found.groups[0].episodes] == [True, True]
    with pytest.raises(InputError, match="not compacted"):
        sliced().wrap(agent(Patient, context_tokens=99, compact=keep_last(1)))  # type: ignore[misc]
