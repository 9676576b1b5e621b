"""A teacher behind a server: what a run learns from it is what it learns from the same model beside it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.models import load_policy
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.other_policies import teacher as server_teacher
from jaxrl_llm.training.other_policies.teacher import ServerTeacher
from jaxrl_llm.utils.errors import InputError

TEACHER = runs.MODEL.parent / "gemma2"
WIDTH = 32


def answer_of(policy: Any, params: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """As vLLM answers, with one token more than the prompt has, and beside the most probable ones the token itself."""
    choices = []
    for index, ids in enumerate(asked["prompt"]):
        padded, real = np.zeros((2, WIDTH), np.int32)
        padded[: len(ids)], real[: len(ids)] = ids, 1
        z = policy.without_unknown(policy.logits(params, jnp.asarray(padded[None]), jnp.asarray(real[None]))[0])
        logp = np.asarray(jax.nn.log_softmax(z))
        own, top = [None], [None]
        for token, now in zip(ids[1:], logp, strict=False):
            own.append(float(now[token]))
            best = {*np.argsort(-now, kind="stable")[: asked["logprobs"]].tolist(), token}
            top.append({f"token_id:{k}": float(now[k]) for k in best})
        tokens = [f"token_id:{token}" for token in [*ids, 7]]
        said = {"tokens": tokens, "token_logprobs": [*own, -1.0], "top_logprobs": [*top, {"token_id:7": -1.0}]}
        choices.append({"index": index, "logprobs": said})
    return {"choices": choices[::-1]}


@contextmanager
def server(failures: int = 0, by_text: bool = False) -> Iterator[tuple[str, list[int]]]:
    """Its address, and how many rows each request had; the first requests fail."""
    (policy, params, _), asked, left = load_policy(TEACHER, remat=False), list[int](), [failures]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions"
            assert body["model"] == "big"
            assert body["echo"]
            left[0] -= 1
            self.send_response(503 if left[0] >= 0 else 200)
            self.end_headers()
            if left[0] >= 0:
                self.wfile.write(b"busy\nnow")
                return
            asked.append(len(body["prompt"]))
            text = json.dumps(answer_of(policy, params, body))
            self.wfile.write((text.replace("token_id:", "") if by_text else text).encode())

        def log_message(self, *unused: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}/v1#big", asked
    finally:
        listening.shutdown()
        listening.server_close()


def config_of(folder: Path, name: str, teacher: str, **changes: Any) -> TrainConfig:
    usual = {"teacher": teacher, "minibatches": 1, "top_p": 1.0, "eval_size": 0, "steps": 2}
    return runs.small_config(folder, algorithm=name, **{**usual, **changes})


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "given", "metric"),
    [("gkd", {"beta": 0.0, "top_k": 4}, "distillation"), ("iw_opd", {}, "teacher/log_ratio")],
)
def test_a_run_learns_the_same_as_from_the_model_itself(
    tmp_path: Path, name: str, given: dict[str, Any], metric: str
) -> None:
    (tmp_path / "here").mkdir()
    runs.train(config_of(tmp_path / "here", name, str(TEACHER), hyperparameters=given))
    with server() as (address, asked):
        runs.train(config_of(tmp_path, name, address, hyperparameters=given))
    assert sum(asked) <= 2 * 16
    folders = (tmp_path / "run", tmp_path / "here" / "run")
    found, expected = ([line[metric] for line in runs.lines_of(one / "metrics.jsonl")] for one in folders)
    np.testing.assert_allclose(found, expected, rtol=2e-4)


def test_answers_are_kept_and_failures_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_teacher, "PAUSES", (0.0, 0.0))
    rows = [[3, 4, 5], [6, 7], [3, 4, 5]]
    with server(failures=2) as (address, asked):
        teacher = ServerTeacher(address)
        first = teacher.answers(rows, 2)
        again = teacher.answers(rows[::-1], 2)
    assert asked == [2]
    assert first[0] is first[2] is again[0]
    assert first[1].top.shape == (2, 2, 2)
    assert (np.diff(first[0].top[1:, 1]) <= 0).all()
    policy, params, _ = load_policy(TEACHER, remat=False)
    expected = jax.nn.log_softmax(policy.without_unknown(policy.logits(params, jnp.asarray([[3, 4, 5]]))))[0]
    np.testing.assert_allclose(first[0].logp[1:], [expected[0, 4], expected[1, 5]], atol=1e-5)


def test_errors_are_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_teacher, "PAUSES", ())
    with (
        server(failures=1) as (address, _),
        pytest.raises(InputError, match=r"does not answer \(status 503 busy now\)") as found,
    ):
        ServerTeacher(address).answers([[1, 2]], 1)
    assert "\n" not in str(found.value)
    with pytest.raises(InputError, match="does not answer"):
        ServerTeacher(address).answers([[1, 2]], 1)
    with server(by_text=True) as (address, _), pytest.raises(InputError, match="log-probabilities by token id"):
        ServerTeacher(address).answers([[1, 2]], 1)
    with pytest.raises(InputError, match="names no model"):
        runs.train(config_of(tmp_path, "iw_opd", "http://127.0.0.1:1/v1"))
    with pytest.raises(InputError, match="most probable tokens only"):
        runs.train(config_of(tmp_path, "gkd", address))
    with pytest.raises(InputError, match=r"the run at 0\.5"):
        runs.train(config_of(tmp_path, "iw_opd", address, temperature=0.5))
