"""jaxrl serve, as a process that a client asks and that ends on Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.cli.program import main

MODEL = Path(__file__).parents[1] / "vectors" / "llama_tied"


@pytest.mark.heavy
def test_it_serves_until_it_is_stopped() -> None:
    openai = pytest.importorskip("openai")
    command = [sys.executable, "-m", "jaxrl_llm.cli", "serve", str(MODEL), "--port", "0", "--name", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"tiny is served at (http://127\.0\.0\.1:\d+/v1); Ctrl-C ends it\n", line)
            assert found, line
            client = openai.OpenAI(base_url=found[1], api_key="any")
            answer = client.completions.create(model="tiny", prompt="Ab", max_tokens=5, temperature=0)
            assert 1 <= answer.usage.completion_tokens <= 5
            with pytest.raises(openai.BadRequestError, match="needs a chat template"):
                client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi."}])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (0, 130)
        finally:
            process.kill()


def test_an_address_that_others_reach_needs_a_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    assert main(["serve", str(MODEL), "--host", "0.0.0.0"]) == 2
    assert "set JAXRL_API_KEY to a key that clients must give" in capsys.readouterr().err
