"""Checks of what users give a policy: parameters, tokens and random keys.

Only shapes and types are looked at where values are traced, so the checks work inside jit too.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.shapes import FLOATS, INTEGERS, NUMBERS, has_shape, is_array, is_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kinds import shown
from jaxrl_llm.models.parameters import LORA_SCALE, adapted_weights, adapter_axes, head_shapes, shape_of, weights
from jaxrl_llm.models.parameters.weight import Shape, Weight
from jaxrl_llm.models.quantised import is_rounded
from jaxrl_llm.utils.errors import InputError


def check_policy(policy: Any) -> None:
    """InputError unless this is a policy, as `load_policy` gives it."""
    if not isinstance(getattr(policy, "config", None), ModelConfig):
        raise InputError(f"the policy is {shown(policy)}, but must be a Policy, the first that load_policy gives")


def check_tokens(tokens: Any, mask: Any, vocab_size: int) -> None:
    """InputError unless tokens are whole numbers [N, L], N and L at least 1, and those of the mask in the vocabulary.

    mask: None, or numbers or truth values [N, L]. Of traced values only shapes and types are looked at.
    """
    arrays = {}
    for name, value in (("tokens", tokens), ("mask", mask)):
        if value is not None:
            try:
                arrays[name] = value if isinstance(value, jax.Array) else np.asarray(value)
            except (ValueError, TypeError):  # rows of different lengths
                raise InputError(f"{name} must be an array [rows, length]: its rows are of different lengths") from None
    ids, real = arrays.get("tokens", np.zeros(0)), arrays.get("mask")
    if not has_shape(ids, ("rows", "length")) or 0 in ids.shape or not is_of(ids, INTEGERS):
        raise InputError(
            f"tokens are {ids.dtype}{list(ids.shape)}, but must be whole numbers [rows, length], neither of them 0"
        )
    if real is not None and not (has_shape(real, ids.shape) and is_of(real, NUMBERS)):
        raise InputError(
            f"mask is {real.dtype}{list(real.shape)}, but must be bool{list(ids.shape)}, as the tokens are"
        )
    if isinstance(ids, jax.core.Tracer) or isinstance(real, jax.core.Tracer):
        return
    wrong = (np.asarray(ids) < 0) | (np.asarray(ids) >= vocab_size)
    wrong &= True if real is None else np.asarray(real).astype(bool)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise InputError(
            f"token {int(np.asarray(ids)[row, column])} (row {row}, column {column}) is not in the vocabulary of "
            f"{vocab_size} tokens"
        )


def check_params(policy: Any, params: Any, *, needs_critic: bool = False, needs_other: bool = True) -> None:
    """InputError naming the first parameter that is missing, unknown, or not of this policy's shape.

    Allowed are layers stacked or as a tuple, adapters (`lora`) of any rank, and the weights of a critic, which must be
    there only with `needs_critic`, and those of the second policy of the policy's hook, which must be there unless
    `needs_other` is false. Arrays may be of JAX or numpy, shapes without numbers, or traced: nothing is
    computed.
    """
    check_policy(policy)
    if not isinstance(params, Mapping):
        raise InputError(
            f"the parameters are {_kind_of(params)}, but must be a dictionary of arrays, the second that load_policy "
            "gives"
        )
    _decoder(params, policy.config, "", extra=("critic", "other", "teacher", "moments"))
    hook = getattr(policy, "hook", None)
    if hook is not None and hook.other is not None and (needs_other or "other" in params):
        _decoder(_section(params, "other", ""), policy.config, "other/")
    critic = policy.critic
    if critic is None or not (needs_critic or "critic" in params):
        return
    entry = _section(params, "critic", "")
    if critic.kind != "likelihood":
        head = head_shapes(policy.config, critic.hidden, critic.heads)
        _arrays(_section(entry, "head", "critic/"), head, "critic/head/")
    if critic.kind != "shared":
        without = ("unembed",) if critic.kind == "tower" else ()
        _decoder(_section(entry, "tower", "critic/"), policy.config, "critic/tower/", without=without)


def _decoder(
    params: Mapping[str, Any],
    config: ModelConfig,
    prefix: str,
    extra: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> None:
    """The parameters of a decoder. extra: further entries that it may have; without: weights that it must not have."""
    n = config.num_layers
    own = [weight for weight in weights(config).values() if weight.name not in without]
    ends = {weight.name: weight.shape for weight in own if "layers" not in weight.axes}
    ends |= _adapters(params, [one for one in adapted_weights(config).values() if one.name in ends], config, ())
    _arrays(params, ends, prefix, ("layers", *extra))
    layers, names = params.get("layers"), [kind.name for kind in config.kinds] or [""]
    of_kind = {name: {w.name: w.shape[1:] for w in own if "layers" in w.axes and w.kind == name} for name in names}
    if isinstance(layers, tuple):
        if len(layers) != n:
            raise InputError(f"the parameters have {len(layers)} layers, but the policy has {n}")
        for number, each in enumerate(layers):
            kind = names[config.kind_of_layer[number]] if config.kinds else ""
            _layer(each, of_kind[kind], (), config.of_layer(number), f"{prefix}layers/{number}/")
        return
    stacked = _section(params, "layers", prefix)
    for number, (kind, shapes) in enumerate(of_kind.items()):
        found = _section(stacked, kind, f"{prefix}layers/") if kind else stacked
        lead = (len(config.layers_of(number)),)
        _layer(found, shapes, lead, config.each_kind[number], f"{prefix}layers/{kind}{'/' * bool(kind)}")
    if unknown := set(stacked) - set(names) if config.kinds else ():
        raise InputError(f"the parameter {prefix}layers/{sorted(unknown)[0]} is not part of this policy")


def _layer(found: Any, shapes: dict[str, Shape], lead: Shape, config: ModelConfig, prefix: str) -> None:
    """One layer's dictionary, or, with its axis in `lead`, that of all."""
    if not isinstance(found, Mapping):
        raise InputError(f"the parameter {prefix[:-1]} is {_kind_of(found)}, but must be a dictionary of arrays")
    wanted = {name: lead + shape for name, shape in shapes.items()}
    adapted = [weight for weight in adapted_weights(config).values() if "layers" in weight.axes]
    _arrays(found, wanted | _adapters(found, adapted, config, lead), prefix)


def _adapters(found: Mapping[str, Any], own: Iterable[Weight], config: ModelConfig, lead: Shape) -> dict[str, Shape]:
    """The shapes of the adapters of some weights that a dictionary has, and of their factor."""
    wanted: dict[str, Shape] = {}
    for weight in own:
        matrices = adapter_axes(weight)
        if any(name in found for name in matrices):
            first, _ = matrices
            rank = (getattr(found.get(first), "shape", ()) or (0,))[-1]
            of_one = {name: [axis for axis in axes if axis != "layers"] for name, axes in matrices.items()}
            wanted |= {name: lead + shape_of(axes, config, rank=rank) for name, axes in of_one.items()}
    return wanted | ({LORA_SCALE: lead} if LORA_SCALE in found else {})


def _section(params: Mapping[str, Any], name: str, prefix: str) -> Mapping[str, Any]:
    if name not in params:
        raise InputError(f"the parameters lack {prefix}{name}: they are not this policy's")
    if not isinstance(params[name], Mapping):
        raise InputError(
            f"the parameter {prefix}{name} is {_kind_of(params[name])}, but must be a dictionary of arrays"
        )
    return dict(params[name])


def _arrays(found: Mapping[str, Any], wanted: dict[str, Shape], prefix: str, others: tuple[str, ...] = ()) -> None:
    """Each of the wanted arrays is there, of its shape and of floats, and nothing else but `others`."""
    for name, shape in wanted.items():
        if name not in found:
            raise InputError(f"the parameters lack {prefix}{name}: they are not this policy's")
        array, rounded = found[name], is_rounded(found[name])
        if not rounded and not is_array(array):
            raise InputError(f"the parameter {prefix}{name} is {_kind_of(array)}, but must be an array")
        if tuple(array.shape) != shape if rounded else not has_shape(array, shape):
            raise InputError(
                f"the parameter {prefix}{name} has shape {tuple(array.shape)}, but the policy's configuration implies "
                f"{shape}: these are another model's parameters"
            )
        if not rounded and not is_of(array, FLOATS):
            raise InputError(f"the parameter {prefix}{name} is of {array.dtype}, but must be of floats")
    for name in found:
        if name not in wanted and name not in others:
            raise InputError(f"the parameter {prefix}{name} is not part of this policy")


def check_key(key: Any) -> None:
    """InputError unless this is one random key of JAX, typed or of the older kind, uint32[2]."""
    shape, dtype = getattr(key, "shape", None), getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not ((typed and shape == ()) or (dtype == jnp.uint32 and shape == (2,))):
        raise InputError(f"the key is {_kind_of(key)}, but must be one random key: jax.random.key(0)")


def _kind_of(value: Any) -> str:
    """What something that is no array is, in a few words, without its contents where these are many."""
    return shown(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
