"""Critics: state values from hidden states, by a head on the policy or by a copy of it ("tower") with a head.

The weights are one more entry of the policy's parameters, params["critic"]; see `init_critic`. A value belongs to the
state that an action was chosen from, so it depends on the tokens before the action and not on the action itself.

A critic of the kind "likelihood" has no head: it is a language model that starts as the policy and learns beside it,
and judges by the log-probabilities of tokens, as implicit reward models do.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.needs import value_of
from jaxrl_llm.core.needs import values_of as values_of_need
from jaxrl_llm.core.shapes import FLOATS, in_words, is_array, is_of
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models.checks import check_key, check_params
from jaxrl_llm.models.hooked import of_a_reference
from jaxrl_llm.models.kinds import FLAG, require_kind, shown, whole
from jaxrl_llm.models.layers.projections import linear
from jaxrl_llm.models.packed_states import View, logp_at, view_of
from jaxrl_llm.models.packing import Packing
from jaxrl_llm.models.parameters import head_shapes, head_weights, without_critic
from jaxrl_llm.models.parameters.weight import IDENTITY, NORMAL, ZEROS
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError, require_choice

LIKELIHOOD = "likelihood"
KINDS = ("tower", "shared", LIKELIHOOD)
EPSILON = 1e-5  # of the layer norm
SPREAD = 0.1  # values at the start are of about this size


@dataclass(frozen=True)
class Critic:
    """What kind of critic. Hashable, so that it can be a static argument of `jit`.

    kind: "tower" is a decoder of its own, which starts as a copy of the policy; "shared" reads the policy's states;
    "likelihood" is a copy of the whole policy, without values, and none of what follows means anything to it.
    heads: values per state; 1 has no axis of its own. hidden: units of an MLP with layer norm before the values, 0 for
    a linear head. detach: a shared critic's loss does not move the policy's weights. spread: the last layer starts at
    random instead of at 0, so that heads which learn the same differ. Raises InputError otherwise.
    """

    kind: str = "tower"
    heads: int = 1
    hidden: int = 0
    detach: bool = False
    spread: bool = False

    def __post_init__(self) -> None:
        require_choice("critic kind", self.kind, KINDS)
        require_kind("critic heads", self.heads, whole(1))
        require_kind("critic hidden units", self.hidden, whole(0))
        require_kind("critic detach", self.detach, FLAG)
        require_kind("critic spread", self.spread, FLAG)


def init_critic(key: jax.Array, policy: Policy, params: Params, critic: Critic) -> Params:
    """The parameters with those of a critic as `params["critic"]`; what they had there is replaced.

    {"head": {"weight" [D or hidden, heads], "bias" [heads]}}, with "norm", "norm_bias" [D], "up" [D, hidden] and
    "up_bias" [hidden] too for an MLP, all float32. For a tower also "tower": a copy of the policy's "embed", "layers"
    and "final_norm" in their dtypes. The last layer is zero, so every value starts at 0, or with `spread` normal with
    the deviation SPREAD / sqrt(D or hidden). For "likelihood" a "tower"
    alone, which has the policy's "unembed" too where there is one. InputError for parameters of another policy, and for
    arguments of other types.
    """
    check_key(key)
    if not isinstance(critic, Critic):
        raise InputError(f"the critic is {shown(critic)}, but must be a Critic")
    check_params(policy, without_critic(params) if isinstance(params, dict) else params)
    # Real copies: an update that donates its buffers must not be given the same one twice.
    if critic.kind == LIKELIHOOD:
        return {**params, "critic": {"tower": jax.tree.map(jnp.copy, without_critic(params))}}
    shapes = head_shapes(policy.config, critic.hidden, critic.heads)
    starts: dict[str, Callable[[tuple[int, ...]], jax.Array]] = {
        ZEROS: jnp.zeros,
        IDENTITY: jnp.ones,
        NORMAL: lambda shape: jax.random.normal(key, shape) / shape[0] ** 0.5,
    }
    head = {weight.name: starts[weight.initialiser](shapes[weight.name]) for weight in head_weights(critic.hidden)}
    if critic.spread:
        shape = shapes["weight"]
        head["weight"] = SPREAD * jax.random.normal(jax.random.fold_in(key, 1), shape) / shape[0] ** 0.5
    entry: Params = {"head": head}
    if critic.kind == "tower":
        decoder = {name: x for name, x in params.items() if name not in ("unembed", "critic")}
        entry["tower"] = jax.tree.map(jnp.copy, decoder)
    return {**params, "critic": entry}


def start_as_reward_model(policy: Policy, params: Params, reward: Policy, weights: Params) -> Params:
    """The parameters with a critic, a linear tower, that starts as a reward model: its decoder, and its scores as
    values.

    reward, weights: of `load_reward_model`, as many labels as the critic has heads. The arrays are not copied.
    InputError for another kind of critic, and a reward model of another architecture, size or number of labels.
    """
    critic: Critic = policy.critic
    if critic.kind != "tower" or critic.hidden:
        raise InputError("a critic that starts as a reward model is a tower with a linear head: give it that kind")
    own = dataclasses.replace(policy, critic=None, config=dataclasses.replace(policy.config, score=reward.config.score))
    labels = len(reward.config.score.labels) if reward.config.score else 0
    if labels != critic.heads or reward.config.family != policy.config.family:
        raise InputError(
            f"the critic has {critic.heads} values and is a {policy.config.family} model, but the reward model that it "
            f"shall start as has {labels} labels and is a {reward.config.family} model: take one that is alike"
        )
    try:
        check_params(own, weights)
    except InputError as error:
        raise InputError(
            f"the reward model that the critic shall start as is not of the policy's size: {error}"
        ) from None
    head = {"weight": weights["score"].astype(jnp.float32), "bias": jnp.zeros(labels, jnp.float32)}
    return {**params, "critic": {"head": head, "tower": {name: x for name, x in weights.items() if name != "score"}}}


def critic_of(needs: Iterable[str], kind: str = "tower") -> Critic | None:
    """The critic of a method with these needs, of this kind if it has values; None for a method without one.

    With a target critic it has a `spread`: the heads of such methods are twins, whose minimum is taken.

    InputError for a method that needs both values and an implicit reward model.
    """
    asked = {name for name, _ in map(value_of, needs)}
    if "implicit_logp" in asked:
        if "values" in asked:
            raise InputError("a method has values or an implicit reward model, but this one needs both: leave one out")
        return Critic(LIKELIHOOD)
    if "values" not in asked:
        return None
    return Critic(kind, int(max(values_of_need(needs, "values"), default=1)), spread="target_values" in asked)


def values_of(critic: Critic, params: Params, states: jax.Array) -> jax.Array:
    """Values f32[...] (or f32[..., heads]) of hidden states [..., D].

    The states are the policy's where the critic is shared, and the tower's otherwise; `params` the policy's.
    With an MLP, v = W gelu(U layer_norm(x) + b) + c; else v = W x + c. In float32. InputError for other states.
    """
    head: dict[str, Any] = params["critic"]["head"]
    width = head["norm" if critic.hidden else "weight"].shape[0]
    if not (is_array(states) and is_of(states, FLOATS) and states.shape[-1:] == (width,)):
        raise InputError(f"the states are {in_words(states)}, but must be {FLOATS} [..., {width}]")
    x = states.astype(jnp.float32)
    if critic.detach and critic.kind == "shared":
        x = jax.lax.stop_gradient(x)
    if critic.hidden:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + EPSILON)
        x = jax.nn.gelu(linear(scaled * head["norm"] + head["norm_bias"], head["up"]) + head["up_bias"])
    out = linear(x, head["weight"]) + head["bias"]
    return out[..., 0] if critic.heads == 1 else out


@jax.named_scope("critic")
def values_at(policy: Policy, params: Params, view: View, batch: Trajectories, packing: Packing | None) -> jax.Array:
    """Values f32[M] or [M, heads] of the states that the view's tokens were chosen from. InputError without values."""
    if policy.critic is None or "critic" not in params or policy.critic.kind == LIKELIHOOD:
        raise InputError("this method needs values: give the policy a critic (models.critic)")
    states = view.states
    if policy.critic.kind == "tower":
        exact = dataclasses.replace(policy, rounding=None)  # nothing is sampled from it
        # Its router is its own.
        states = view_of(exact, params["critic"]["tower"], batch.replace(experts=None), packing).states
    return values_of(policy.critic, params, states)


@jax.named_scope("critic")
def implicit_logp(policy: Policy, params: Params, batch: Trajectories, packing: Packing | None) -> jax.Array:
    """Log-probabilities f32[M] of the chosen tokens under the implicit reward model, as under a reference."""
    if policy.critic is None or "critic" not in params or policy.critic.kind != LIKELIHOOD:
        raise InputError("this method needs an implicit reward model: give the policy Critic('likelihood')")
    own, rows = of_a_reference(dataclasses.replace(policy, rounding=None), batch.replace(experts=None))
    tower = params["critic"]["tower"]
    return logp_at(own, tower, view_of(own, tower, rows, packing))[0]
