"""The success rate of a prompt, predicted by attention to reference prompts whose rates were measured (2506.05316).

With a prompt's embedding e and references of embeddings e_k and mean rewards d_k, of mean m and standard deviation s:

    w_k = softmax_k(e . e_k / width),    p0 = sum_k w_k d_k
    p = sigmoid(logit(clip(p0, 1e-4, 1 - 1e-4)) / clip(softplus(u), 1e-2, 10) + tanh(v))

u = u_0 + u_1 m + u_2 s, and v alike. The paper has small networks in place of the embeddings' product and of u and v,
trained before the run. Here width, u and v are 7 numbers that the run itself learns, by the same cross-entropy, from
references of one round predicted from those of the round before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
EDGE = 1e-4


def start_predictor(width: float = 0.2) -> Array:
    """f64[7]: log 1/width, then u and v, with which p is p0."""
    return np.array([-np.log(width), np.log(np.e - 1), 0.0, 0.0, 0.0, 0.0, 0.0])


def predict(predictor: Array, queries: Array, keys: Array, labels: Array) -> Array:
    """f64[n]: the predicted success rates of prompts with embeddings `queries` f32[n, D], see above.

    keys f32[K, D], labels f64[K]: embeddings and mean rewards of the references.

    >>> keys = np.array([[1.0, 0], [0, 1], [1, 1]])
    >>> predict(start_predictor(2**0.5), keys[:1], keys, np.array([0.2, 0.8, 0.5])).round(6).tolist()
    [0.438999]
    """
    return _forward(predictor, queries, keys, labels)[0]


def _forward(predictor: Array, queries: Array, keys: Array, labels: Array) -> tuple[Array, Array]:
    """Predictions f64[n], and the derivatives f64[n, 7] of their logits."""
    a = np.exp(predictor[0])
    similar = (queries @ keys.T).astype(np.float64)
    weight = np.exp(a * (similar - similar.max(axis=1, keepdims=True)))
    weight /= weight.sum(axis=1, keepdims=True)
    plain = weight @ labels
    p0 = np.clip(plain, EDGE, 1 - EDGE)
    facts = np.array([1.0, labels.mean(), labels.std()])
    u, v = predictor[1:4] @ facts, predictor[4:7] @ facts
    soft = np.logaddexp(0.0, u)
    flat, logit = np.clip(soft, 1e-2, 10.0), np.log(p0) - np.log1p(-p0)
    p = 1 / (1 + np.exp(-(logit / flat + np.tanh(v))))
    # d p0 / d log a is a times the covariance of similarity and label under the weights.
    moved = a * (((weight * similar) @ labels) - (weight * similar).sum(axis=1) * plain) * (p0 == plain)
    by_u = -logit / flat**2 * (flat == soft) / (1 + np.exp(-u))
    by_v = np.full(len(p), 1 - np.tanh(v) ** 2)
    slopes = [(moved / (p0 * (1 - p0)) / flat)[:, None], by_u[:, None] * facts, by_v[:, None] * facts]
    return p, np.concatenate(slopes, axis=1)


def cross_entropy(predicted: Array, measured: Array) -> float:
    """The mean of -(d log p + (1 - d) log(1 - p)), with p kept off 0 and 1."""
    p = np.clip(predicted, 1e-12, 1 - 1e-12)
    return float(-np.mean(measured * np.log(p) + (1 - measured) * np.log1p(-p)))


def fitted(
    predictor: Array, queries: Array, measured: Array, keys: Array, labels: Array, steps: int = 20, rate: float = 0.05
) -> Array:
    """The predictor after `steps` steps of Adam on the cross-entropy of measured rates f64[n]; the best of them all.

    The step size is `rate`. Nothing is learnt where there is nothing to predict.
    """
    if not len(measured) or not len(labels):
        return predictor
    first, second, now, best = np.zeros(7), np.zeros(7), predictor, (np.inf, predictor)
    for step in range(1, steps + 2):
        p, slopes = _forward(now, queries, keys, labels)
        best = min(best, (cross_entropy(p, measured), now), key=lambda one: one[0])
        gradient = ((p - measured)[:, None] * slopes).mean(axis=0)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        now = now - rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return best[1]
