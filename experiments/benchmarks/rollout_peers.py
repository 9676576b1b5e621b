"""Other libraries' columns of the rollout benchmark, on the CPU, in their own environments; started by rollout.py.

    transformers: `generate` with sdpa attention.     tunix: its own sampler, of Llama models.

Both take batches of whole prompts, each row its own copy of a shared one.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollout_worker import COMPILED, random_prompts, serve


def repeated(batch: int, prompt: int, group: int, vocabulary: int) -> list[list[int]]:
    """Prompts of all rows, those of a group next to each other."""
    return [ids for ids in random_prompts(batch // group, prompt, vocabulary) for _ in range(group)]


class Transformers:
    """transformers.generate: no program is compiled, so none is counted."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        kind = getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=kind, attn_implementation="sdpa").eval()
        self.version = f"transformers {version('transformers')}, torch {torch.__version__}"

    def static(self, *, batch: int, prompt: int, new: int, group: int, seed: int) -> dict[str, Any]:
        torch, first = self.torch, list[float]()
        ids = torch.tensor(repeated(batch, prompt, group, self.model.config.vocab_size))

        def look(tokens: Any, scores: Any, **_: Any) -> Any:
            """A stopping criterion that stops nothing, and is asked after every token."""
            if not first:
                first.append(time.perf_counter() - begin)
            return torch.zeros(tokens.shape[0], dtype=torch.bool)

        torch.manual_seed(seed)
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=new, min_new_tokens=new, eos_token_id=None, pad_token_id=0, stopping_criteria=[look],
            )  # fmt: skip
        seconds = time.perf_counter() - begin
        if tuple(out.shape) != (batch, prompt + new):
            raise RuntimeError(f"transformers gave {tuple(out.shape)}, not {(batch, prompt + new)}")
        return {
            "seconds": seconds, "tokens": batch * new, "first_token": first[0], "steps_after": new - 1, "compiles": 0,
        }  # fmt: skip


class Ids:
    """A tokenizer for Tunix whose texts are numbers, so that prompts have exact lengths."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # then the sampler puts none in front

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return -1  # it takes padding for what has this id, so it must be no token's

    def dedup_bos_ids(self, ids: Any) -> Any:
        return ids


class Tunix:
    """Tunix's sampler. Its rotary base is wrong in some releases, which costs no time and is left as it is."""

    def __init__(self, model: str, dtype: str) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np
        from tunix.generate import sampler
        from tunix.models.llama3 import model as llama
        from tunix.models.llama3 import params

        self.np, self.sampler, self.compiled = np, sampler, 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        raw = json.loads((Path(model) / "config.json").read_text())
        if raw["model_type"] != "llama":
            raise SystemExit(f"the Tunix column is of Llama models only, not of {raw['model_type']}: leave it out")
        heads = raw["num_attention_heads"]
        rope = raw.get("rope_parameters") or {}
        self.config = llama.ModelConfig(
            num_layers=raw["num_hidden_layers"],
            vocab_size=raw["vocab_size"],
            embed_dim=raw["hidden_size"],
            hidden_dim=raw["intermediate_size"],
            num_heads=heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            num_kv_heads=raw["num_key_value_heads"],
            rope_theta=int(rope.get("rope_theta") or raw.get("rope_theta") or 10_000),
            norm_eps=raw["rms_norm_eps"],
            weight_tying=raw.get("tie_word_embeddings", False),
        )
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        with self.mesh:
            self.model = params.create_model_from_safe_tensors(model, self.config, self.mesh, dtype=jnp.dtype(dtype))
        self.samplers: dict[int, Any] = {}
        self.version = f"tunix {version('google-tunix')}, JAX {jax.__version__}"

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        self.compiled += event == COMPILED

    def static(self, *, batch: int, prompt: int, new: int, group: int, seed: int) -> dict[str, Any]:
        before = self.compiled
        texts = [" ".join(map(str, ids)) for ids in repeated(batch, prompt, group, self.config.vocab_size)]
        size = prompt + new
        if size not in self.samplers:
            cache = self.sampler.CacheConfig(
                cache_size=size, num_layers=self.config.num_layers, num_kv_heads=self.config.num_kv_heads,
                head_dim=self.config.head_dim,
            )  # fmt: skip
            self.samplers[size] = self.sampler.Sampler(self.model, Ids(), cache)

        def call(steps: int) -> float:
            begin = time.perf_counter()
            with self.mesh:
                # Without top_p it would be greedy; -7 is no token, so none ends a completion.
                out = self.samplers[size](
                    texts, max_generation_steps=steps, max_prompt_length=prompt, temperature=1.0, top_p=1.0,
                    eos_tokens=[-7], seed=seed,
                )  # fmt: skip
            seconds = time.perf_counter() - begin
            shape = self.np.stack([self.np.asarray(x) for x in out.tokens]).shape
            if shape != (batch, steps):
                raise RuntimeError(f"Tunix gave {shape}, not {(batch, steps)}")
            return seconds

        # It gives its tokens all at once: the time of the first one is that of a call for one, not part of `seconds`.
        seconds, compiled = call(new), self.compiled - before
        return {
            "seconds": seconds, "tokens": batch * new, "first_token": call(1), "steps_after": new - 1,
            "compiles": compiled,
        }  # fmt: skip


COLUMNS = {"transformers": Transformers, "tunix": Tunix}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", choices=COLUMNS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    held: list[Any] = []

    def load() -> dict[str, Any]:
        begin = time.perf_counter()
        held.append(COLUMNS[options.peer](options.model, options.dtype))
        return {"version": held[0].version, "platform": "cpu", "seconds": time.perf_counter() - begin}

    serve({"load": load, "static": lambda **case: held[0].static(**case)})


if __name__ == "__main__":
    main()
