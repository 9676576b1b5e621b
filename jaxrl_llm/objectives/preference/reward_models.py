"""Losses of reward models: functions of scores, one value for each pair, sequence or token."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Number


def bradley_terry_loss(
    chosen: jax.Array, rejected: jax.Array, margin: jax.Array | Number = 0.0, centring: Number = 0.0
) -> jax.Array:
    """-log sigmoid(w - l - margin) + centring (w + l)^2 of pairs, f[n], at least 0; its mean is TRL's RewardTrainer's.

    chosen, rejected f[n]: scores w and l, unbounded. margin f[n]: by how much w shall exceed l. centring, at least 0,
    keeps scores near 0, which the first term alone does not (Eisenstein et al. 2023, arXiv 2312.09244).
    Source: Bradley and Terry 1952; margins: Touvron et al. 2023, arXiv 2307.09288.

    >>> print(bradley_terry_loss(jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0]), centring=0.5).round(4))
    [2.6931 0.6931]
    """
    return jax.nn.softplus(rejected - chosen + margin) + centring * (chosen + rejected) ** 2


def regression_loss(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """Squared error of scores f[N, K] for targets f[N, K], mean over labels, f[N]; NaN targets are left out.

    >>> regression_loss(jnp.array([[1.0, 2.0], [0.0, 5.0]]), jnp.array([[0.0, 0.0], [2.0, jnp.nan]])).tolist()
    [2.5, 4.0]
    """
    known = ~jnp.isnan(targets)
    error = jnp.where(known, scores - jnp.where(known, targets, 0.0), 0.0)
    return jnp.sum(error**2, axis=-1) / jnp.maximum(jnp.sum(known, axis=-1), 1)


def class_loss(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax of the label's score, f[...]; 0 for a negative label, which is none.

    scores f[..., K], labels int[...] below K. Of a process reward model they are those of all tokens, and labels stand
    at the ends of steps (`data.step_labels`).

    >>> print(class_loss(jnp.zeros((3, 2)), jnp.array([0, 1, -100])).round(4))
    [0.6931 0.6931 0.    ]
    """
    logp = jax.nn.log_softmax(scores, axis=-1)
    of_label = jnp.take_along_axis(logp, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(labels < 0, 0.0, -of_label)


def multilabel_loss(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """-log sigmoid of scores f[N, K] whose label (0 to 1, f[N, K]) holds, and of -score where not; mean of K, f[N].

    >>> print(multilabel_loss(jnp.zeros((1, 3)), jnp.array([[1.0, 0.0, 0.0]])).round(4))
    [0.6931]
    """
    return jnp.mean(jax.nn.softplus(scores) - labels * scores, axis=-1)
