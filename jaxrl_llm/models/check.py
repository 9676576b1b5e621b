"""Whether parameters are those of a policy. Only shapes and types are looked at, so it works on traced values too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.huggingface import parameter_shapes
from jaxrl_llm.models.keys import kind_of
from jaxrl_llm.models.lora import IN, OUT, SCALE, TARGETS, input_axes
from jaxrl_llm.models.settings import shown

Shape = tuple[int, ...]


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
    if ids.ndim != 2 or 0 in ids.shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InputError(
            f"tokens are {ids.dtype}{list(ids.shape)}, but must be whole numbers [rows, length], neither of them 0"
        )
    if real is not None and (real.shape != ids.shape or real.dtype.kind not in "bif"):
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


def check_params(policy: Any, params: Any, *, needs_critic: bool = False) -> None:
    """InputError naming the first parameter that is missing, unknown, or not of this policy's shape.

    Allowed are layers stacked or as a tuple, adapters (`lora`) of any rank, and the weights of a critic, which must be
    there only with `needs_critic`. Arrays may be of JAX or numpy, shapes without numbers, or traced: nothing is
    computed.
    """
    check_policy(policy)
    if not isinstance(params, Mapping):
        raise InputError(
            f"the parameters are {kind_of(params)}, but must be a dictionary of arrays, the second that load_policy "
            "gives"
        )
    _decoder(params, policy.config, "", ("embed", "final_norm", "unembed"), extra=("critic",))
    if policy.critic is None or not (needs_critic or "critic" in params):
        return
    critic = policy.critic
    entry = _section(params, "critic", "")
    D, width = policy.config.hidden_size, critic.hidden or policy.config.hidden_size
    head: dict[str, Shape] = {"weight": (width, critic.heads), "bias": (critic.heads,)}
    if critic.hidden:
        head |= {"norm": (D,), "norm_bias": (D,), "up": (D, critic.hidden), "up_bias": (critic.hidden,)}
    _arrays(_section(entry, "head", "critic/"), head, "critic/head/")
    if critic.kind == "tower":
        _decoder(_section(entry, "tower", "critic/"), policy.config, "critic/tower/", ("embed", "final_norm"))


def _decoder(
    params: Mapping[str, Any], config: ModelConfig, prefix: str, tops: tuple[str, ...], extra: tuple[str, ...] = ()
) -> None:
    shapes, n = parameter_shapes(config), config.num_layers
    _arrays(params, {name: shapes[name,] for name in tops if (name,) in shapes}, prefix, ("layers", *extra))
    layer = {path[1]: shape[1:] for path, shape in shapes.items() if path[0] == "layers"}
    layers = params.get("layers")
    if isinstance(layers, tuple):
        if len(layers) != n:
            raise InputError(f"the parameters have {len(layers)} layers, but the policy has {n}")
        for number, each in enumerate(layers):
            _layer(each, layer, (), config, f"{prefix}layers/{number}/")
    else:
        _layer(_section(params, "layers", prefix), layer, (n,), config, f"{prefix}layers/")


def _layer(found: Any, shapes: dict[str, Shape], lead: Shape, config: ModelConfig, prefix: str) -> None:
    """One layer's dictionary, or, with its axis in `lead`, that of all."""
    if not isinstance(found, Mapping):
        raise InputError(f"the parameter {prefix[:-1]} is {kind_of(found)}, but must be a dictionary of arrays")
    wanted = {name: lead + shape for name, shape in shapes.items()}
    for name in TARGETS:
        if name in shapes and (name + IN in found or name + OUT in found):
            thin = getattr(found.get(name + IN), "shape", ())
            rank = thin[-1] if thin else 0
            split, shape = input_axes(name), shapes[name]
            wanted[name + IN] = (*lead, *shape[:split], rank)
            wanted[name + OUT] = (*lead, rank, *shape[split:])
    if SCALE in found:
        wanted[SCALE] = lead
    _arrays(found, wanted, prefix)


def _section(params: Mapping[str, Any], name: str, prefix: str) -> Mapping[str, Any]:
    if name not in params:
        raise InputError(f"the parameters lack {prefix}{name}: they are not this policy's")
    if not isinstance(params[name], Mapping):
        raise InputError(f"the parameter {prefix}{name} is {kind_of(params[name])}, but must be a dictionary of arrays")
    return dict(params[name])


def _arrays(found: Mapping[str, Any], wanted: dict[str, Shape], prefix: str, others: tuple[str, ...] = ()) -> None:
    """Each of the wanted arrays is there, of its shape and of floats, and nothing else but `others`."""
    for name, shape in wanted.items():
        if name not in found:
            raise InputError(f"the parameters lack {prefix}{name}: they are not this policy's")
        array = found[name]
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise InputError(f"the parameter {prefix}{name} is {kind_of(array)}, but must be an array")
        if tuple(array.shape) != shape:
            raise InputError(
                f"the parameter {prefix}{name} has shape {tuple(array.shape)}, but the policy's configuration implies "
                f"{shape}: these are another model's parameters"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(f"the parameter {prefix}{name} is of {array.dtype}, but must be of floats")
    for name in found:
        if name not in wanted and name not in others:
            raise InputError(f"the parameter {prefix}{name} is not part of this policy")
