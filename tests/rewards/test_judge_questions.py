"""Questions to judges and their verdicts, the position bias of pairs, and an endpoint that fails and is asked again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.rewards.judges.endpoint import Endpoint
from jaxrl_llm.rewards.judges.questions import Comparison, Grading, grading, met, on_scale, preferred, stated
from jaxrl_llm.rollouts.judges.comparisons import PairVerdicts, mean_verdict, row_win_rates, win_matrix
from jaxrl_llm.utils.errors import InputError


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("A is longer.\n[[A]]", 1.0), ("[[B]] first, then [[A]]", 1.0), ("**Verdict: B.**", 0.0),
        ("\\boxed{\\text{B}}", 0.0), ("They are equal: [[Tie]]", 0.5), ("[[C]]", 0.5), ("A or B?", None), ("", None),
        ("[[D]]", None), ("Winner is unclear", None), ("the better response:\nB", 0.0),
    ],
)  # fmt: skip
def test_verdicts_of_comparisons(said: str, found: float | None) -> None:
    assert preferred(said) == found


def test_verdicts_of_grades_and_checks() -> None:
    assert [on_scale(0, 10)(one) for one in ("7", "Score: 7.5", "[[7]]/10", "[[7/5]]", "seven", "-1")] == [
        0.7, 0.75, 0.7, None, None, None,
    ]  # fmt: skip
    assert [met(one) for one in ("[[Yes]]", "no", "[[false]]", "maybe")] == [1.0, 0.0, 0.0, None]
    assert stated("x\n\n") == "x"
    with pytest.raises(InputError, match="high"):
        on_scale(5, 5)


def test_texts_of_questions_keep_braces_and_refuse_other_fields() -> None:
    text = Comparison().text("2 {x}", "{first}", "b")
    assert "2 {x}" in text
    assert "Response A:\n{first}\n" in text
    assert "from 1 to 5" in grading(1, 5).text("p", "r")
    assert "Criterion: short" in Grading().text("p", "r", "short")
    with pytest.raises(InputError, match="lacks"):
        Comparison("{problem} {first}")
    with pytest.raises(InputError, match="another field"):
        Comparison("{problem} {first} {second} {third}")


def test_a_bonus_of_the_first_place_cancels_in_both_orders() -> None:
    """True preference p, and a judge that adds `bonus` to whatever it is shown first."""
    p, bonus = np.array([0.2, 0.5, 0.7]), 0.3
    found = PairVerdicts(p + bonus, 1 - p + bonus)
    np.testing.assert_allclose(found.wins, p)
    assert found.position_bias == pytest.approx(2 * bonus)
    always_first = PairVerdicts(np.ones(3), np.ones(3))
    np.testing.assert_array_equal(always_first.wins, 0.5)
    assert (always_first.position_bias, always_first.consistent) == (1.0, 0.0)
    unknown = PairVerdicts(np.array([1.0, np.nan]), np.array([0.0, 1.0]))
    np.testing.assert_array_equal(unknown.wins, [1.0, np.nan])
    assert (unknown.position_bias, unknown.consistent) == (0.0, 1.0)
    assert np.isnan(PairVerdicts(np.array([np.nan]), np.array([1.0])).position_bias)


def test_win_rates_against_a_loop() -> None:
    random = np.random.default_rng(3)
    pairs = [(i, j) for i in range(5) for j in range(i + 1, 5)]
    wins = random.uniform(size=len(pairs))
    wins[2] = np.nan
    matrix = win_matrix(5, pairs, wins)
    by_pair = dict(zip(pairs, wins, strict=True)) | {(j, i): 1 - w for (i, j), w in zip(pairs, wins, strict=True)}
    for i, rate in enumerate(row_win_rates(matrix)):
        known = [by_pair[i, j] for j in range(5) if j != i and not np.isnan(by_pair[i, j])]
        assert rate == pytest.approx(sum(known) / len(known))
    whole = row_win_rates(win_matrix(5, pairs, random.uniform(size=len(pairs))))
    assert whole.sum() == pytest.approx(5 / 2), "the group's mean is 1/2"
    assert np.isnan(row_win_rates(np.full((1, 1), 0.5)))[0]
    assert mean_verdict([1.0, None, 0.5]) == 0.75


class Server(HTTPServer):
    """Answers with the number of requests so far, after `failures` failures."""

    failures = 0
    seen: list[Any]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        status = 503 if len(self.server.seen) <= self.server.failures else 200
        if body["messages"][0]["content"] == "wrong":
            status = 400
        said = json.dumps({"choices": [{"message": {"content": f"answer {len(self.server.seen)}"}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as one:
        one.seen = []
        thread = threading.Thread(target=one.serve_forever, daemon=True)
        thread.start()
        yield one
        one.shutdown()


def test_an_endpoint_is_asked_again_and_answers_are_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    server.failures = 2
    one = Endpoint(f"http://127.0.0.1:{server.server_port}/v1/", "small", key="A_KEY", pause=0.001)
    assert one.answer("which?") == "answer 3"
    assert one.answer("which?") == "answer 3", "kept"
    assert one.answer("which?", 1) == "answer 4", "another answer to the same question"
    path, headers, body = server.seen[-1]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": "which?"}]
    assert "secret" not in repr(one)
    with pytest.raises(RuntimeError, match="status 400"):
        one.answer("wrong")
    assert len(server.seen) == 5, "a refusal is final"
    server.failures = 100
    with pytest.raises(RuntimeError, match="status 503"):
        one.answer("new")
    assert len(server.seen) == 9
    with pytest.raises(InputError, match="http"):
        Endpoint("localhost", "small")
