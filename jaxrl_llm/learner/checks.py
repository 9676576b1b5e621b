"""Checks of the arguments of an update. Each raises InputError; none adds anything to a compiled program.

Types, shapes and dtypes are checked on traced values too; values only where they can be read: token ids, planned steps,
donated buffers.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.core.needs import need_of, of_previous, of_reference, of_target
from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.shapes import check_batch
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers
from jaxrl_llm.models.checks import check_params, check_policy
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError, require, shown


def check_count(name: str, value: Any) -> None:
    """A whole number of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(f"{name} is {shown(value)}, but must be a whole number, at least 1")
    require(name, int(value), least=1)


def known(x: Any) -> bool:
    """Whether an array's numbers can be read here: it is not traced, and all of it is on this process's devices."""
    return isinstance(x, np.ndarray) or (
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    )


def check_optimizer_kind(optimizer: Any) -> None:
    """It is an optax optimiser."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise InputError(
            f"the optimiser is {shown(optimizer)}, but must be an optax optimiser, such as make_optimizer(...) gives"
        )


def check_alive(name: str, tree: Any, what_to_do: str) -> None:
    """No array was donated to an earlier call, which took its memory."""
    if any(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
           for x in jax.tree.leaves(tree)):  # fmt: skip
        raise InputError(f"{name} is gone: an update has taken its memory. {what_to_do}")


def check_learning(policy: Any, params: Any, frozen: Any = None) -> None:
    """The parameters, with those that are frozen, are the policy's."""
    check_policy(policy)
    if not isinstance(params, dict) or not (frozen is None or isinstance(frozen, dict)):
        check_params(policy, params if not isinstance(params, dict) else frozen)
    check_params(policy, combine(frozen, params))


def check_state(optimizer: optax.GradientTransformation, state: Any, params: Params) -> None:
    """An optimiser's state has the structure and shapes of one for these parameters."""
    expected = jax.eval_shape(optimizer.init, params)
    form: Any = jax.tree.structure(expected)
    wanted, found = jax.tree.leaves(expected), jax.tree.leaves(state)
    if form != jax.tree.structure(state) or [jnp.shape(x) for x in wanted] != [jnp.shape(x) for x in found]:
        raise InputError(
            "the state's moments are not of this optimiser and these parameters: make the state of both by "
            "init_state(params, optimizer)"
        )


def _check_tokens(policy: Any, batch: Trajectories) -> None:
    """Real tokens are of the vocabulary; traced ones are not known."""
    if not (known(batch.tokens) and known(batch.token_mask)):
        return
    tokens, real, size = np.asarray(batch.tokens), np.asarray(batch.token_mask), policy.config.vocab_size
    wrong = real & ((tokens < 0) | (tokens >= size))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise InputError(
            f"batch.tokens holds the token id {tokens[row, column]} (row {row}, position {column}), but the model's "
            f"vocabulary has {size}: was it encoded with another tokenizer?"
        )


def mark_of(tokens: np.ndarray, real: np.ndarray) -> int:
    """A checksum of a batch's real tokens and their places, below 2^32."""
    seen = np.where(real, tokens, -1).astype(np.int32)
    return zlib.crc32(seen.tobytes(), zlib.crc32(str(seen.shape).encode()))


def check_rows(policy: Any, batch: Any) -> None:
    """A policy, and a batch of its tokens."""
    check_policy(policy)
    check_batch(batch)
    _check_tokens(policy, batch)


def check_finite(name: str, values: Any, mask: Any) -> None:
    """InputError where values f32[N, L] at hand are infinite or NaN on the mask bool[N, L]; traced ones pass."""
    if not known(values) or not known(mask):
        return
    wrong = np.any(~np.isfinite(np.asarray(values)) & np.asarray(mask), axis=1)
    if wrong.any():
        raise InputError(
            f"{name} are infinite or NaN in {int(wrong.sum())} of {len(wrong)} rows: look for a division by 0 in the "
            "transform, and for rewards that are not finite"
        )


def check_batch_provides(batch: Trajectories, needs: Iterable[str]) -> None:
    """InputError where a batch, on the host, lacks what its source should have provided; one without actions may."""
    if not np.any(batch.action_mask):  # every rollout of the step failed
        return
    for text in sorted(needs):
        need = need_of(text)
        if need.provider is not None and need.of(batch) is None:
            raise InputError(
                f"the batch has no {need.where}, though the run's rollout or source says that it provides {need.name}"
            )


def check_others(
    policy: Policy,
    needs: frozenset[str],
    reference: Params | Mixture | None,
    previous: Params | None,
    target: Params | None,
    teacher: FrozenPolicy | Teachers | None = None,
) -> None:
    """InputError where a policy that is needed beside the one that learns is missing, donated, or of another model."""
    copies = [("reference", one) for one in (reference.policies if isinstance(reference, Mixture) else (reference,))]
    for name, copy in [*copies, ("previous", previous)]:
        if copy is not None:
            check_alive(f"a parameter of the {name} policy", copy, "Keep a copy that no update takes")
            check_params(policy, copy, needs_other=False)
    for one in () if teacher is None else teacher.policies if isinstance(teacher, Teachers) else (teacher,):
        check_params(one.policy, one.params, needs_other=False)
    if of_reference(needs, teacher is not None) and reference is None:
        raise InputError("this method needs a reference policy, but none is loaded")
    if of_previous(needs) and previous is None:
        raise InputError("this method needs the weights before the last update: give a copy of them, previous=...")
    if of_target(needs):
        if target is None:
            raise InputError("this method needs a target critic: give a copy of params['critic'], target=...")
        check_alive("a parameter of the target critic", target, "Keep a copy that no update takes")
