"""A batch as shaded text: which shade, which numbers, and that nothing of the text becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models import ModelConfig, Policy, from_hf
from jaxrl_llm.reporting import show
from jaxrl_llm.reporting.completions import MOST_TOKENS, shade_kind, token_texts
from jaxrl_llm.reporting.html.shading import KINDS
from jaxrl_llm.utils.errors import InputError

ACTION = re.compile(r'<i (?:class="(?P<shade>[a-z]-?\d)" )?title="(?P<title>[^"]*)">(?P<text>[^<]*)</i>')
GIVEN = re.compile(r'<i class="given">([^<]*)</i>')


class Bytes:
    """A tokenizer whose tokens are bytes; what is no UTF-8 decodes to U+FFFD."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        return bytes(ids).decode(errors="replace")


def batch_of(rows: list[tuple[str, str]], **fields: Any) -> Trajectories:
    """Prompts and completions as bytes; the log-probability of the n-th action is -n, counted from 0 in each row."""
    ids = [list((a + b).encode()) for a, b in rows]
    starts = np.array([len(a.encode()) for a, _ in rows])[:, None]
    sizes = np.array([len(x) for x in ids])[:, None]
    L = int(sizes.max()) + 1
    tokens = np.array([x + [65] * (L - len(x)) for x in ids], np.int32)  # padding is a letter
    place = np.arange(L)[None]
    action = (place >= starts) & (place < sizes)
    N = len(rows)
    settings = {
        "tokens": jnp.asarray(tokens),
        "token_mask": jnp.asarray(place < sizes),
        "action_mask": jnp.asarray(action),
        "behaviour_logp": jnp.asarray(np.where(action, starts - place, 0).astype(np.float32)),
        "policy_step": jnp.full((N, L), 3, jnp.int32),
        "turn": jnp.asarray(np.where(action, 0, -1).astype(np.int32)),
        "group": jnp.arange(N, dtype=jnp.int32) // 2,
        "prompt_id": jnp.arange(N, dtype=jnp.int32) // 2,
        "truncated": jnp.arange(N) == 1,
        **fields,
    }
    return Trajectories(**settings)


def test_it_is_part_of_the_library() -> None:
    assert jaxrl_llm.show is show


def test_shades_and_numbers_of_log_probabilities() -> None:
    """Values 0 to -6: their 98th percentile but for zeros is 5.9, so level n of 6 stands for about -n."""
    page = show(batch_of([("Q:", "abcdefg")]), Bytes())._repr_html_()
    found = [m.groupdict() for m in ACTION.finditer(page)]
    assert [x["text"] for x in found] == list("abcdefg")
    assert [x["shade"] for x in found] == [None, "l-1", "l-2", "l-3", "l-4", "l-5", "l-6"]
    assert found[2]["title"] == f"c (id {ord('c')}), logp -2, policy_step 3"
    assert GIVEN.findall(page) == ["Q:"]
    assert "logp -6 to 0, mean -3" in page
    assert "logp -5.9 <i" in page
    assert 'class="jaxrl-completions show-logp"' in page
    for level in range(-6, 0):
        assert f".show-logp .l{level}{{background" in page


def test_shades_of_advantages_have_their_sign() -> None:
    batch = batch_of([("Q", "abcd")])
    advantages = jnp.asarray([[9.0, 2.0, -1.0, 0.0, jnp.nan, 9.0]])  # on the prompt and on padding they say nothing
    entropy = jnp.full((1, 6), 0.25)
    page = show(batch.replace(advantages=advantages, entropy=entropy), Bytes(), by="advantages")._repr_html_()
    found = [m.groupdict() for m in ACTION.finditer(page)]
    assert [x["shade"] for x in found] == ["a6", "a-4", None, None]
    assert found[0]["title"] == f"a (id {ord('a')}), logp 0, entropy 0.25, advantages 2, policy_step 3"
    assert "advantages" not in found[3]["title"]
    assert "advantages -1 to 2, mean 0.333" in page
    legend = re.findall(r'<i class="(a-?\d)">&nbsp;', page)
    assert legend == [f"a{level}" for level in range(-6, 7)]


def test_the_legend_of_what_has_one_sign_has_one_side() -> None:
    batch = batch_of([("Q", "abc")]).replace(entropy=jnp.full((1, 5), 0.5))
    by_entropy = show(batch, Bytes(), by="entropy")._repr_html_()
    assert re.findall(r'<i class="(e-?\d)">&nbsp;', by_entropy) == [f"e{level}" for level in range(7)]
    by_logp = show(batch, Bytes())._repr_html_()
    assert re.findall(r'<i class="(l-?\d)">&nbsp;', by_logp) == [f"l{level}" for level in range(-6, 1)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("logp", "logp"),
        ("reference_logp", "logp"),
        ("entropy", "entropy"),
        ("returns", "advantage"),
        ("mine", "advantage"),
    ],
)
def test_the_kind_of_shade(name: str, kind: str) -> None:
    assert shade_kind(name) == kind
    assert kind in KINDS


def test_fields_of_info_can_be_shown() -> None:
    batch = batch_of([("Q", "ab")]).with_info(mine=jnp.asarray([[0.0, -4.0, 4.0, 0.0]]), row=jnp.zeros(1))
    page = show(batch, Bytes(), by="mine")._repr_html_()
    assert [m["shade"] for m in ACTION.finditer(page)] == ["a-6", "a6"]


def test_text_is_no_markup() -> None:
    attack = '<script>alert("1")</script>'
    batch = batch_of([(attack, attack), (attack, '" onmouseover="x')])
    name = '<img src="x">'
    for shown in (show(batch, Bytes()), show(batch.with_info(**{name: batch.behaviour_logp}), Bytes(), by=name)):
        page = shown._repr_html_()
        assert "<script" not in page
        assert "<img" not in page
        assert set(re.findall(r"<(\w+)", page)) == {"div", "style", "p", "i", "pre"}
        assert "".join(m["text"] for m in ACTION.finditer(page)).startswith("&lt;script&gt;alert(&quot;1&quot;)")
        assert not re.search(r"(src|href)=\"|@import|url\(|onmouseover=\"", re.sub(r'title="[^"]*"', "", page))


def test_a_prompt_is_shown_once_for_neighbours_that_share_it() -> None:
    batch = batch_of([("one", "a"), ("one", "b"), ("two", "c"), ("one", "d")])
    assert GIVEN.findall(show(batch, Bytes())._repr_html_()) == ["one", "two", "one"]
    lines = str(show(batch, Bytes())).splitlines()
    assert [line for line in lines if line.startswith("  ")] == ["  one", "  two", "  one"]
    assert [line for line in lines if line.startswith("> ")] == ["> a", "> b", "> c", "> d"]


def test_tokens_of_the_environment_are_folded() -> None:
    batch = batch_of([("Q", "abcd")])
    mask = batch.action_mask.at[0, 2:4].set(False)
    page = show(batch.replace(action_mask=mask), Bytes())._repr_html_()
    assert GIVEN.findall(page) == ["Q"]
    assert [m["text"] for m in ACTION.finditer(page)] == ["a", "d"]
    assert page.index(">a</i>") < page.index("<summary>bc</summary>bc</details>") < page.index(">d</i>")


def test_the_text() -> None:
    batch = batch_of([("Q", "ab\n\x1b[2Jc"), ("Q", "")], reward=jnp.asarray([0.5, 1.0]))
    assert repr(show(batch, Bytes())).splitlines() == [
        "2 completions, logp -7 to 0, mean -3.5",
        "row 0, group 0, reward 0.5, 8 tokens, mean logp -3.5",
        "  Q",
        "> ab\u21b5",
        "> \u241b[2Jc",
        "row 1, group 0, reward 1, 0 tokens, truncated",
    ]


def test_no_actions_at_all() -> None:
    shown = show(batch_of([("Q", "")]), Bytes())
    assert "logp: no values" in str(shown)
    assert GIVEN.findall(shown._repr_html_()) == ["Q"]


def test_ids_without_a_tokenizer() -> None:
    shown = show(batch_of([("AB", "CD")]), None)
    assert [m["text"] for m in ACTION.finditer(shown._repr_html_())] == ["67 ", "68 "]
    assert "  65 66" in str(shown)


def test_many_rows_and_long_rows_are_cut() -> None:
    batch = batch_of([("Q", "a")] * 20)
    assert str(show(batch, Bytes())).count("\nrow ") == 16
    assert "4 more rows" in show(batch, Bytes())._repr_html_()
    assert "more rows" not in str(show(batch, Bytes(), rows=20))
    long = show(batch_of([("Q", "a" * (MOST_TOKENS - 4) + "bcdefghz")]), Bytes())._repr_html_()
    texts = [m["text"] for m in ACTION.finditer(long)]
    assert len(texts) == MOST_TOKENS
    assert texts[-1] == "z"
    assert long.count("[4 tokens left out]") == 1
    exact = show(batch_of([("Q", "a" * MOST_TOKENS)]), Bytes())._repr_html_()
    assert len(list(ACTION.finditer(exact))) == MOST_TOKENS
    assert "left out" not in exact


def test_a_page_is_small() -> None:
    """About a hundred characters a token, and no script."""
    page = show(batch_of([("Q", "abcdefgh" * 10)] * 4), Bytes())._repr_html_()
    assert len(page) < 2500 + 110 * 320


def test_it_can_be_read_on_white_and_on_black() -> None:
    """WCAG's contrast of text in the page's own colour on the deepest shades is at least 4.5."""

    def luminance(colour: np.ndarray) -> float:
        part = colour / 255
        return float(
            np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
        )

    page = show(batch_of([("Q", "abc")]), Bytes())._repr_html_()
    own = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"[;{]color:(?!inherit)", own)
    for kind, sides in KINDS.items():
        for colour in sides:
            shade = np.array([int(x) for x in colour.split(",")])
            for paper, ink in ((255.0, 0.0), (17.0, 255.0)):
                ground = luminance(0.6 * shade + 0.4 * paper)
                bright, dark = sorted((ground, luminance(np.full(3, ink))), reverse=True)
                assert (bright + 0.05) / (dark + 0.05) > 4.5, (kind, paper)


def test_a_character_of_several_tokens_comes_with_the_last() -> None:
    text = "a\u00e9\u20ac\U0001f600z"
    assert token_texts(Bytes(), list(text.encode())) == [
        "a", "", "\u00e9", "", "", "\u20ac", "", "", "", "\U0001f600", "z",
    ]  # fmt: skip
    broken = "a\u00e9".encode() + b"\xff" + b"b" + b"\xe2"
    assert "".join(token_texts(Bytes(), list(broken))) == "a\u00e9\ufffdb\ufffd"


class Words:
    """A tokenizer that writes a space between tokens, but none before the first, as SentencePiece does."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(chr(i) for i in ids)


def test_spaces_between_tokens_are_kept() -> None:
    assert token_texts(Words(), [ord(x) for x in "abcd"]) == ["a", " b", " c", " d"]


def test_bad_arguments_are_refused() -> None:
    batch = batch_of([("Q", "ab")])
    with pytest.raises(InputError, match="the batch has no advantages of each token: show it by one of behaviour_logp"):
        show(batch, Bytes(), by="advantages")
    with pytest.raises(InputError, match="did you mean 'logp'"):
        show(batch, Bytes(), by="logpp")
    with pytest.raises(InputError, match="the batch has no group of each token"):
        show(batch, Bytes(), by="group")
    with pytest.raises(InputError, match="rows is 0"):
        show(batch, Bytes(), rows=0)


def test_a_policy_has_a_tokenizer() -> None:
    policy, batch = Policy(from_vectors(), tokenizer=Bytes()), batch_of([("Q:", "abc")])
    assert str(show(batch, policy)) == str(show(batch, Bytes()))
    with pytest.raises(InputError, match="tokenizer"):
        show(batch, 3)
    assert str(show(batch, Policy(from_vectors()))) == str(show(batch, None)), "token ids, where it has none"


def from_vectors() -> ModelConfig:
    """The configuration of a tiny model."""
    folder = Path(__file__).parents[1] / "vectors" / "llama_tied"
    return from_hf(json.loads((folder / "config.json").read_text()))
