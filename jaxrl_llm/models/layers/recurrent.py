"""Layers that carry a state from token to token: the gated delta rule (Qwen3.5) and short convolutions (LFM2).

Both have a causal convolution of a few taps along each channel; the delta rule also has a state of each head. What
differs between passes is how tokens follow each other: in rows, in the paths of a packing, or one a row in decoding.
That is a `Flow`. N rows, L tokens, D hidden, H heads with keys of k and values of v numbers, t taps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels.delta_rule import DeltaInputs

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.delta import CHUNK, in_rows, one_step
from jaxrl_llm.models.layers.parts import accumulation_dtype, rms_norm, rounded_once
from jaxrl_llm.models.layers.projections import ROWS, linear, project
from jaxrl_llm.models.parameters import LORA_IN
from jaxrl_llm.models.placement import ANYWHERE, Placement
from jaxrl_llm.models.quantised import Weight

Array = jax.Array
Layer = dict[str, Any]
PARTS = 4  # of `in_parts`


class Carried(NamedTuple):
    """What a layer carries: the last inputs of its convolution, and the state of each head."""

    windows: tuple[Array, ...]  # of each convolution, [N, t - 1, channels], the oldest first
    heads: Array | None = None  # [N, H, k, v], float32; None for convolutions alone


def empty_state(config: ModelConfig, rows: int, dtype: Any) -> Carried:
    """The state of rows that begin with nothing, of one kind of layer. dtype: of caches; of windows where floating."""
    dtype = dtype if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1 else jnp.float32
    if (delta := config.delta) is None:
        return Carried((jnp.zeros((rows, config.convolution - 1, config.hidden_size), dtype),))
    keys, values = delta.keys * delta.key, delta.values * delta.value
    windows = tuple(jnp.zeros((rows, delta.taps - 1, channels), dtype) for channels in (keys, keys, values))
    return Carried(windows, jnp.zeros((rows, delta.values, delta.key, delta.value), jnp.float32))


class Flow(NamedTuple):
    """How the tokens of a pass follow each other, and what they leave. No window: rows begin with nothing."""

    convolve: Callable[[Array, Array, Array | None], Array]  # x [N, L, C], weight [taps, C], window -> see `convolve`
    delta: Callable[[DeltaInputs, Array | None], tuple[Array, Any]]  # outputs [N, L, H, v], the states afterwards
    window: Callable[[Array, Array | None, int], Any]  # x, window, taps -> the window afterwards


def convolve(x: Array, weight: Array, before: Callable[[Array, int], Array]) -> Array:
    """sum_j weight_j x_{t - j} of each channel: x [N, L, C], weight [taps, C], the last of the token itself.

    before: x and a number of steps to x of the tokens so many before.
    """
    out = x * weight[-1]
    for back in range(1, weight.shape[0]):
        out = out + before(x, back) * weight[-1 - back]
    return out


@jax.named_scope("delta_rule")
def delta_mixer(
    y: Array, layer: Layer, config: ModelConfig, flow: Flow, memory: Carried | None, placement: Placement = ANYWHERE
) -> tuple[Array, Carried | None]:
    """What the gated delta rule makes of states y [N, L, D], and what it carries on."""
    sizes = config.delta
    assert sizes is not None
    windows, state = ((None,) * 3, None) if memory is None else memory

    def projected(name: str, through: Any = project) -> Array:
        return through(y, layer[name], layer, name, name in placement.joined)

    def convolved(x: Array, name: str, window: Array | None) -> Array:
        taps = layer[f"{name}_taps"]
        out = rounded_once(jax.nn.silu)(flow.convolve(x, taps.reshape(sizes.taps, -1), window))
        return out.reshape(*x.shape[:2], *taps.shape[1:])

    # Each by itself: heads of the three are sharded alike.
    names, wide = ("query", "key", "value"), accumulation_dtype(y.dtype)
    mixed = [projected(f"delta_{name}", project if name == "value" else in_parts) for name in names]
    q, k, v = (convolved(*each) for each in zip(mixed, names, windows, strict=True))
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q.astype(wide), k.astype(wide)))
    q, k = (q * sizes.key**-0.5).astype(y.dtype), k.astype(y.dtype)
    rate = jnp.exp(layer["log_rate"].astype(wide))
    g = -rate * jax.nn.softplus(projected("delta_decay").astype(wide) + layer["decay_bias"].astype(wide))
    out, state = flow.delta(DeltaInputs(q, k, v, g, jax.nn.sigmoid(projected("delta_rate").astype(wide))), state)
    gate = projected("delta_gate").reshape(out.shape)
    out = rms_norm(out.astype(y.dtype), layer["delta_norm"], config.norm_epsilon)
    out = (out.astype(wide) * jax.nn.silu(gate.astype(wide))).astype(y.dtype)
    out = out.reshape(*out.shape[:2], -1)
    out = project(out, layer["delta_out"], layer, "delta_out", "delta_out" in placement.joined)
    after = tuple(flow.window(x, window, sizes.taps) for x, window in zip(mixed, windows, strict=True))
    return out, None if after[0] is None else Carried(after, state)


def in_parts(x: Array, weight: Weight, layer: Layer, name: str, joined: bool = False) -> Array:
    """`project`, where that is a product in float32 with a sum for each of some parts of the inputs.

    Their rounding is half of one sum's, which matters to outputs that are scaled to length one: where inputs nearly
    cancel, scaling magnifies it.
    """
    K = x.shape[-1]
    if x.dtype.itemsize < 4 or K % PARTS or not isinstance(weight, Array) or {name + LORA_IN, ROWS} & {*layer}:
        return project(x, weight, layer, name, joined)
    a, b, c, d = (linear(x[..., i : i + K // PARTS], weight[i : i + K // PARTS]) for i in range(0, K, K // PARTS))
    return (a + b) + (c + d)


@jax.named_scope("convolution")
def convolution_mixer(
    y: Array, layer: Layer, config: ModelConfig, flow: Flow, memory: Carried | None, placement: Placement = ANYWHERE
) -> tuple[Array, Carried | None]:
    """What a gated short convolution makes of states y [N, L, D], and what it carries on (LFM2)."""
    window = None if memory is None else memory.windows[0]
    gate_in, gate_out, x = (
        project(y, layer[name], layer, name, name in placement.joined)
        for name in ("conv_in", "conv_gate", "conv_value")
    )
    x = gate_in * x
    out = gate_out * flow.convolve(x, layer["conv_taps"], window)
    after = flow.window(x, window, config.convolution)
    out = project(out, layer["conv_out"], layer, "conv_out", "conv_out" in placement.joined)
    return out, None if after is None else Carried((after,))


def rows_flow(length: Array) -> Flow:
    """Rows that begin with `length` (int32[N]) tokens, which follow each other."""

    def delta(x: DeltaInputs, state: Array | None) -> tuple[Array, Array]:
        return in_rows(only(x, jnp.arange(x.g.shape[1]) < length[:, None]), CHUNK, state)

    def window(x: Array, old: Array | None, taps: int) -> Array:
        whole = _with_window(x, old, taps - 1)
        return jnp.take_along_axis(whole, (length[:, None] + jnp.arange(taps - 1))[:, :, None], axis=1)

    return Flow(_in_order, delta, window)


def only(x: DeltaInputs, real: Array) -> DeltaInputs:
    """Inputs with which tokens that are not real, bool[N, L], leave states as they are."""
    real = real[..., None]
    return x._replace(g=jnp.where(real, x.g, 0), beta=jnp.where(real, x.beta, 0))


def _in_order(x: Array, weight: Array, window: Array | None) -> Array:
    """`Flow.convolve` where the tokens of a row follow each other."""
    return convolve(x, weight, lambda x, steps: _with_window(x, window, steps)[:, : x.shape[1]])


def _with_window(x: Array, window: Array | None, steps: int) -> Array:
    """Inputs [N, L, C] with those of so many tokens before, [N, steps + L, C]."""
    shape = (x.shape[0], steps, x.shape[2])
    past = jnp.zeros(shape, x.dtype) if window is None else window[:, window.shape[1] - steps :].astype(x.dtype)
    return jnp.concatenate([past, x], axis=1)


def segments_flow(segments: Array) -> Flow:
    """Rows of several segments, int32[N, L], 0 for padding: each begins with nothing, and nothing is left."""
    L = segments.shape[1]
    real = segments > 0
    latest = jax.lax.cummax(jnp.where(real, jnp.arange(L), -1), axis=1)
    one_before = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    same = jnp.take_along_axis(segments, jnp.maximum(one_before, 0), axis=1) == segments
    one_before = jnp.where((one_before >= 0) & same & real, one_before, -1)

    def delta(x: DeltaInputs, state: Array | None) -> tuple[Array, None]:
        return in_rows(only(x, real), CHUNK, None, segments)[0], None

    def convolved(x: Array, weight: Array, window: Array | None) -> Array:
        return convolve(x, weight, lambda x, steps: along(x, one_before, steps))

    return Flow(convolved, delta, lambda x, window, taps: None)


def along(x: Array, one_before: Array, steps: int) -> Array:
    """x [N, L, C] of the tokens so many before, by the place of the one before, int32[N, L]; -1, and zeros: none."""
    at = jnp.broadcast_to(jnp.arange(one_before.shape[1]), one_before.shape)
    for _ in range(steps):
        at = jnp.where(at >= 0, jnp.take_along_axis(one_before, jnp.maximum(at, 0), axis=1), -1)
    found = jnp.take_along_axis(x, jnp.maximum(at, 0)[:, :, None], axis=1)
    return jnp.where((at >= 0)[:, :, None], found, 0)


def step_flow(live: Array) -> Flow:
    """One token of each row, which changes the states of rows that are live (bool[N]) alone."""

    def delta(x: DeltaInputs, state: Array | None) -> tuple[Array, Array]:
        assert state is not None
        out, after = one_step(jax.tree.map(lambda y: y[:, 0], only(x, live[:, None])), state)
        return out[:, None], after

    def window(x: Array, old: Array | None, taps: int) -> Array:
        assert old is not None
        after = jnp.concatenate([old[:, 1:], x.astype(old.dtype)], axis=1)
        return jnp.where(live[:, None, None], after, old)

    return Flow(_in_order, delta, window)


class Pending(NamedTuple):
    """What a layer carried before some tokens of each row, and what these bring: of how many is decided later."""

    old: Any
    new: Any


def pending_flow() -> Flow:
    """Rows of some tokens, computed one by one as in decoding, of which only the first may count (`committed`)."""

    def delta(x: DeltaInputs, state: Array | None) -> tuple[Array, Pending]:
        assert state is not None
        each = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), x)
        _, out = jax.lax.scan(lambda s, token: one_step(token, s)[::-1], state, each)
        return jnp.moveaxis(out, 0, 1), Pending(state, x)

    return Flow(_in_order, delta, lambda x, window, taps: Pending(window, x))


def committed(state: Carried, count: Array) -> Carried:
    """What a layer carries after the first `count` (int32[N]) of the tokens of a pass by `pending_flow`."""
    windows = tuple(rows_flow(count).window(new, old, old.shape[1] + 1).astype(old.dtype) for old, new in state.windows)
    if state.heads is None:
        return Carried(windows)
    heads, x = state.heads
    each = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), x)

    def step(carry: tuple[Array, Array], token: DeltaInputs) -> tuple[tuple[Array, Array], None]:
        number, s = carry
        _, after = one_step(token, s)
        return (number + 1, jnp.where((number < count)[:, None, None, None], after, s)), None

    (_, after), _ = jax.lax.scan(step, (jnp.int32(0), heads), each)
    return Carried(windows, after)
