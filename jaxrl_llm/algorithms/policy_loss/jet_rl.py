from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, RunSetting, beside, exactly, method, run_settings
from jaxrl_llm.core.annotations import AverageName, NonNegative, Ours, Paper, Scale


@method(paper="arXiv 2601.14243", test="test_jet_rl.py::test_it_is_the_model_of_rounded_products")
@beside("units", "the speed of units that multiply float8: values are multiplied as float32", "a kernel with them")
@beside("experts", "rounded products of experts and of latent attention", "a dense model, others are refused")
@beside("bfloat16", "bfloat16 states between products", "float32 states: sampler and update are two programs here")
@run_settings(
    RunSetting(
        "weight_dtype", lambda given: "float8_blocks",
        lambda config, given: config.weight_dtype in ("float8_blocks", "int8_blocks"), "weights rounded in blocks",
    ),
    exactly("same_rounding", True, "the same rounding in sampler and update"),
    RunSetting(
        "activations", lambda given: "float32",
        lambda config, given: "float32" in (config.activations, config.dtype if config.activations == "dtype" else ""),
        "float32 states between products: others differ between sampler and update, and are then rounded apart",
    ),
    exactly("cache_dtype", "dtype", "keys and values that are not rounded in the sampler alone"),
)  # fmt: skip
def jet_rl(
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
    scale: Paper[Scale] = "std",
    average: Ours[AverageName] = "sequence",
) -> Algorithm:
    """On-policy training in eight bits: one flow of rounded products in sampler and update (Jet-RL).

    Rounded weights in the sampler alone are another policy than the one that learns. Here both compute, in every
    projection of a layer, with states X and weight W,

        Y = R(X) R2(W)        dX = R(dY) R2(W)^T        dW = R(X)^T R(dY)

    R rounds groups of 128 numbers along the summed axis to E4M3 with scale max |group| / 448, R2 blocks of 128 x 128;
    gradients ignore the rounding, sums are float32, master weights and moments are not rounded. Unembedding,
    embeddings, norms and attention stay as they are. A run takes weight_dtype float8_blocks (or int8_blocks, if it is
    given), same_rounding and float32 activations by itself. The weights of both sides are then the same bits; an
    activation that the two programs compute with another last bit may be rounded to the next value, from which on the
    token's numbers differ by a rounding: see docs/performance.md for how far.

    The loss is GRPO's (clip_low, clip_high, kl_coefficient, scale, average): any on-policy loss takes these settings.
    The paper saves R(X) for dW and rounds that once more; here X itself is rounded.
    """
    return grpo(clip_low, clip_high, kl_coefficient, scale=scale, average=average)
