"""gpt-oss: attention sinks, and experts with biases and clamped gates."""

from functools import partial

from jaxrl_llm.models.families.family import Tensor, biases, family, layer_types, types_of
from jaxrl_llm.models.kinds import number

GPT_OSS = family(
    "GptOssForCausalLM",
    read=lambda raw, where: biases(raw) | {
        "attention_sinks": True, "mlp_bias": True, "router_bias": True,
        "num_experts": raw["num_local_experts"], "normalise_router": True, "glu_limit": float(raw["swiglu_limit"]),
        "glu_slope": float(raw["swiglu_alpha"]),
    },
    write=lambda config: {
        "layer_types": layer_types(config), "attention_bias": config.attention_bias, "swiglu_limit": config.glu_limit,
        "swiglu_alpha": config.glu_slope, "num_local_experts": config.num_experts,
    },
    types=partial(types_of, otherwise=lambda layer: layer % 2 == 0), max_position_embeddings=131_072, head_dim=64,
    num_key_value_heads=8, rms_norm_eps=1e-5, sliding_window=128, num_experts_per_tok=4, num_local_experts=128,
    attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702, rope_theta=150_000.0,
    rope_parameters={
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    settings={"swiglu_limit": number(above=0), "swiglu_alpha": number(above=0)},
    tensors=(
        Tensor("mlp.router.weight", ("router",)),
        Tensor("mlp.experts.gate_up_proj", ("gate", "up"), alternate=True, outputs_first=False),
        Tensor("mlp.experts.gate_up_proj_bias", ("gate_bias", "up_bias"), alternate=True),
        Tensor("mlp.experts.down_proj", ("down",), outputs_first=False),
        Tensor("mlp.experts.down_proj_bias", ("down_bias",)),
    ),
)  # fmt: skip
