"""Credit side by side: numbers of known methods, stand-ins, and the drawing."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import on_actions
from jaxrl_llm.algorithms import get
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.objectives import clip, kl, log_probability, policy_gradient, sequence_mean, sequence_sum, token_ratio
from jaxrl_llm.reporting.credit import _moved, compare
from jaxrl_llm.reporting.html.credit_page import residual
from jaxrl_llm.utils.errors import InputError

MASK = np.array([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1]], bool)
REWARD = np.array([1.0, 0.0, 0.0, 1.0])
TEXTS = [["Q", "<b>", "a", "b"], ["Q", "c", "d", None], ["Q", "e", None, None], ["Q", "f", "\n", "g"]]


@pytest.fixture(scope="module")
def batch() -> Trajectories:
    mask = jnp.asarray(MASK)
    group = jnp.zeros(4, jnp.int32)
    return Trajectories(
        tokens=jnp.arange(16, dtype=jnp.int32).reshape(4, 4),
        token_mask=mask.at[:, 0].set(True),
        action_mask=mask,
        behaviour_logp=jnp.where(mask, -0.5, 0.0),
        policy_step=jnp.zeros((4, 4), jnp.int32),
        turn=jnp.where(mask, 0, -1),
        group=group,
        prompt_id=group,
        truncated=jnp.zeros(4, bool),
        reward=jnp.asarray(REWARD, jnp.float32),
    )


def reinforce() -> Algorithm:
    objective = policy_gradient(token_ratio(), log_probability(), sequence_sum())
    return Algorithm(on_actions(lambda b: b.scores - 0.25), objective)


def test_reinforce_has_its_gradient(batch: Trajectories) -> None:
    found = compare({"REINFORCE": reinforce()}, batch)
    expected = (REWARD - 0.25)[:, None] * MASK
    np.testing.assert_allclose(found.advantages["REINFORCE"], expected)
    np.testing.assert_allclose(found.gradients["REINFORCE"], -expected / 4, atol=1e-7)
    np.testing.assert_allclose(found.pushes["REINFORCE"], expected / 4, atol=1e-7)
    assert found.filled["REINFORCE"] == {}


def test_what_the_batch_lacks_is_filled_in_and_named(batch: Trajectories) -> None:
    found = compare(["grpo", reinforce()], batch, kl_coefficient=0.1)
    assert found.names == ("grpo", "algorithm 2")
    assert found.filled["grpo"] == {"reference_logp": "the behaviour policy"}
    # At the reference the penalty has no gradient.
    plain = compare("grpo", batch, kl_coefficient=0.0)
    assert plain.filled["grpo"] == {}
    np.testing.assert_allclose(found.gradients["grpo"], plain.gradients["grpo"], atol=1e-7)
    assert "reference_logp (the behaviour policy stands in)" in found.table()


def test_every_need_has_a_stand_in(batch: Trajectories) -> None:
    needs = ["values", "old_logp", "feedback", "greedy_reward", "squared_probability", "cubed_probability"]
    needs += ["hidden_square", "effective_rank", "reference_affinity", "tempered_logp:1.2", "mean_logp"]

    def loss(outputs: PolicyOutputs, b: Trajectories) -> tuple[jax.Array, dict[str, jax.Array]]:
        extras = outputs.extras or {}
        read = [b.need(name) for name in needs if name != "feedback"] + [extras["values"], extras["mean_logp"]]
        return jnp.sum(outputs.logp) + 0 * sum(jnp.sum(x) for x in read), {}

    found = compare({"all": Algorithm(reinforce().transform, Objective(loss, frozenset(needs)))}, batch)
    assert set(found.filled["all"]) == set(needs) - {"feedback"}
    np.testing.assert_allclose(found.gradients["all"], MASK)


def test_at_other_outputs(batch: Trajectories) -> None:
    at = PolicyOutputs(batch.behaviour_logp - 0.3, jnp.zeros((4, 4)))
    penalty = Algorithm(reinforce().transform, kl(to="behaviour", estimator="k2"))
    found = compare({"penalty": penalty}, batch, at)
    np.testing.assert_allclose(found.gradients["penalty"], -0.3 * MASK / MASK.sum(), atol=1e-6)


def test_the_drawing_has_the_signs_of_the_push(batch: Trajectories) -> None:
    found = compare({"A & B": reinforce(), "down": reinforce_reversed()}, batch)
    page = found.to_html(TEXTS)
    assert page == page.encode().decode()
    assert "A &amp; B" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert not re.search(r"(src|href)=|@import|url\(", page)
    shades = re.findall(r'<i class="(a-?\d)" title="advantage', page)
    actions = int(MASK.sum())
    assert len(shades) == 3 * actions  # of both, and of their difference
    first = [level for n in range(4) for level in row_levels(page, "A &amp; B", n)]
    up = np.repeat(REWARD > 0, MASK.sum(1))
    assert [level > 0 for level in first] == up.tolist()
    second = [level for n in range(4) for level in row_levels(page, "down", n)]
    assert [level < 0 for level in second] == up.tolist()
    assert 'title="advantage 0.75, d loss / d logp -0.1875"' in page
    # The four sequences share a prompt, which is drawn once and folded away.
    assert re.findall(r'<details><summary>([^<]*)</summary><pre><i class="given">([^<]*)</i>', page) == [
        ("Prompt of group 0 (1 token)", "Q")
    ]
    assert page.count('class="given"') == 1
    by_advantage = found.to_html(TEXTS, shade="advantage")
    assert "A &amp; B, down" in by_advantage  # one line for both: their advantages are the same
    assert len(row_levels(by_advantage, "A &amp; B, down", 0)) == 3
    assert "difference" not in by_advantage.partition("</style>")[2]


def reinforce_reversed() -> Algorithm:
    forward = reinforce()
    return Algorithm(forward.transform, -1.0 * forward.objective)


def reinforce_by_length() -> Algorithm:
    """Another weight for sequences of another length."""
    return Algorithm(reinforce().transform, policy_gradient(token_ratio(), log_probability(), sequence_mean()))


def row_levels(page: str, name: str, n: int) -> list[int]:
    """Levels of the shaded tokens in the n-th line of an algorithm."""
    lines: list[Any] = re.findall(f"<tr><th>{re.escape(name)}</th><td>(.*?)</td></tr>", page, re.S)
    return [int(level) for level in re.findall(r'class="a(-?\d)"', lines[n])]


def test_ids_stand_in_for_texts(batch: Trajectories) -> None:
    page = compare("grpo", batch)._repr_html_()
    assert ">13 </i>" in page
    assert ">7 </i>" not in page  # padding
    assert "reference_logp (the behaviour policy stands in)" in page


def test_the_table(batch: Trajectories) -> None:
    found = compare({"one": reinforce(), "two": reinforce_reversed(), "grpo": get("grpo")}, batch)
    lines = str(found).splitlines()
    assert lines[0].split() == ["row", "group", "reward", "actions", "one", "two", "grpo"]
    assert lines[1].split()[:6] == ["0", "0", "1", "3", "+0.5625", "-0.5625"]
    assert next(line for line in lines if line.strip().startswith("cosine")).split()[1:3] == ["1.000", "-1.000"]


class Words:
    """A tokenizer of one word for each id."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(f" w{i}" for i in ids)


def test_a_tokenizer_draws_text(batch: Trajectories) -> None:
    page = compare("grpo", batch, tokenizer=Words())._repr_html_()
    assert "> w13</i>" in page
    assert "w7<" not in page  # padding
    # The prompts of the test's rows are different tokens, so each is drawn.
    assert re.findall(r'<pre><i class="given">([^<]*)</i>', page) == [" w0", " w4", " w8", " w12"]
    with pytest.raises(InputError, match="tokenizer"):
        compare("grpo", batch, tokenizer=3)


def test_methods_that_coincide_are_said_and_share_a_line(batch: Trajectories) -> None:
    """At ratio 1 a clipped surrogate has the gradient of the plain one, and half of it is as good as the same."""
    plain = reinforce()
    clipped = Algorithm(plain.transform, policy_gradient(token_ratio(), clip(0.1), sequence_sum()))
    half = Algorithm(plain.transform, 0.5 * clipped.objective)
    small = Algorithm(plain.transform, 1e-6 * reinforce_by_length().objective)
    nothing = Algorithm(on_actions(lambda b: 0.0 * b.scores), plain.objective)
    named = {"plain": plain, "clipped": clipped, "half": half, "down": reinforce_reversed(), "small": small}
    found = compare({**named, "nothing": nothing}, batch)
    assert found.alike() == [("plain", "clipped", "half"), ("down",), ("small",), ("nothing",)]
    notes = "\n".join(found.notes())
    assert "ratios are 1, where clipping has no effect; after_steps=3 compares later" in notes
    assert "clipped coincides with plain here: its pushes are the same." in notes
    assert "half coincides with plain here: its pushes are 0.5 times as large" in notes
    assert "down coincides" not in notes
    assert all(note in str(found) for note in found.notes())
    page = found.to_html(TEXTS)
    idle = compare({"nothing": nothing, "more of it": nothing}, batch).to_html(TEXTS, rows=2)
    assert idle.count("<tr><th>no push by any</th>") == 2
    assert "<tr><th>nothing" not in idle
    assert page.count("<tr><th>plain, clipped, half</th>") == 4
    assert page.count('<tr class="difference"><th>down \u2212 plain</th>') == 4


def test_methods_part_after_some_steps(batch: Trajectories) -> None:
    """A step of 0.2 nats moves every token past a clip at 0.1, where its push ends, but not past one at 0.9."""
    transform = reinforce().transform
    named = {
        name: Algorithm(transform, policy_gradient(token_ratio(), clip(width, width), sequence_sum()))
        for name, width in {"wide": 0.9, "narrow": 0.1}.items()
    }
    found = compare(named, batch, after_steps=1, nats_per_step=0.2)
    assert found.alike() == [("wide",), ("narrow",)]
    good = MASK & (REWARD > 0)[:, None]
    assert np.all(found.pushes["narrow"][good] == 0)
    assert np.all(found.pushes["wide"][good] > 0)
    assert "1 step of 0.2 nats from the policy that sampled, each method's own" in found.notes()[0]
    # Within both, they are still alike.
    assert compare(named, batch, after_steps=1, nats_per_step=0.02).alike() == [("wide", "narrow")]


def test_a_log_probability_does_not_rise_above_zero() -> None:
    logp = jnp.asarray([[-0.5, -0.01, 0.0]])
    moved = _moved(logp, jnp.asarray([[-1.0, -1.0, 0.0]]), 0.2)
    np.testing.assert_allclose(moved, [[-0.3, 0.0, 0.0]], atol=1e-6)
    np.testing.assert_array_equal(_moved(logp, jnp.zeros((1, 3)), 0.2), logp)


def test_a_difference_is_what_a_factor_does_not_explain() -> None:
    first = np.array([[1.0, 2.0, 0.0]])
    scale, rest = residual(first, np.array([[2.0, 4.0, 3.0]]))
    assert scale == 2.0
    np.testing.assert_allclose(rest, [[0.0, 0.0, 3.0]])
    assert residual(first, -first)[0] == 0.0  # the opposite is no rescaling
    assert residual(0 * first, first)[0] == 0.0


def test_many_sequences_and_long_ones_are_cut(batch: Trajectories) -> None:
    found = compare("grpo", batch)
    page = found.to_html(rows=3)
    assert page.count("sequence ") == 3
    assert "1 more sequences" in page
    with pytest.raises(InputError, match="rows"):
        found.to_html(rows=0)


def test_prompts_may_be_given_apart(batch: Trajectories) -> None:
    found = compare("grpo", batch)
    page = found.to_html([[None, "a"]] * 4, prompts=["one", "one", "two", ""])
    assert re.findall(r'<pre><i class="given">([^<]*)</i>', page) == ["one", "two"]
    assert "Prompt of group 0</summary>" in page
    for wrong in (["one"], "four"):
        with pytest.raises(InputError, match="pass 4 texts"):
            found.to_html(prompts=wrong)


def test_bad_arguments_are_refused(batch: Trajectories) -> None:
    with pytest.raises(InputError, match="did you mean 'kl_coefficient'"):
        compare("grpo", batch, kl_coeficient=0.1)
    with pytest.raises(InputError, match="did you mean 'grpo'"):
        compare("gropo", batch)
    with pytest.raises(InputError, match="twice"):
        compare(["grpo", "grpo"], batch)
    with pytest.raises(InputError, match="nothing to compare"):
        compare([], batch)
    found = compare("grpo", batch)
    with pytest.raises(InputError, match="4 lists of at most 4"):
        found.to_html(TEXTS[:2])
    with pytest.raises(InputError, match="shade"):
        found.to_html(shade="colour")


def test_its_repr_is_the_summary_of_its_table(batch: Trajectories) -> None:
    found = compare({"plain": reinforce(), "grpo": get("grpo", kl_coefficient=0)}, batch)
    title, head, *lines = repr(found).splitlines()
    assert title == "Comparison of plain, grpo: 4 sequences, 9 actions"
    assert head.split() == ["plain", "grpo"]
    below = [line.split() for line in str(found).splitlines()[5:]]
    assert [line.split() for line in lines] == below
    assert lines[0].split()[0] == "loss"
