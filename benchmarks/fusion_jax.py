"""The MLP of `fusion_cases` as JAX trains K of it: one `jit` of a `vmap`, AdamW written out."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

SIZES = (784, 32, 32, 10)
SAMPLES = 64
WEIGHT_DECAY, BETA1, BETA2, EPS = 0.01, 0.9, 0.999, 1e-8


def seconds_per_step(trials: int, repeats: int = 30) -> float:
    """Median seconds of a step of all trials at once: forward, backward and update, compilation left out."""
    x = jax.random.normal(jax.random.key(0), (SAMPLES, SIZES[0]))
    y = jax.random.randint(jax.random.key(1), (SAMPLES,), 0, SIZES[-1])
    rates = 1e-4 * jnp.logspace(0, 1, trials)
    params = jax.vmap(_init)(jax.random.split(jax.random.key(2), trials))
    moments = jax.tree.map(jnp.zeros_like, (params, params))
    step = jax.jit(jax.vmap(_step, in_axes=(0, 0, 0, None, None, None)), donate_argnums=(0, 1))
    times = []
    for t in range(1, repeats + 1):
        start = time.perf_counter()
        params, moments, loss = step(params, moments, rates, float(t), x, y)
        loss.block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def _init(key: Any) -> Any:
    keys = jax.random.split(key, len(SIZES) - 1)
    pairs = zip(keys, SIZES, SIZES[1:])
    return [(jax.random.normal(k, (i, o)) / i**0.5, jnp.zeros(o)) for k, i, o in pairs]


def _loss(params: Any, x: Any, y: Any) -> Any:
    for weight, bias in params[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    scores = jax.nn.log_softmax(x @ params[-1][0] + params[-1][1])
    return -jnp.take_along_axis(scores, y[:, None], 1).mean()


def _step(params: Any, moments: Any, lr: Any, t: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(params, x, y)
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, moments[1], grads)

    def update(p: Any, m: Any, v: Any) -> Any:
        direction = m / (1 - BETA1**t) / (jnp.sqrt(v / (1 - BETA2**t)) + EPS)
        return p * (1 - lr * WEIGHT_DECAY) - lr * direction

    return jax.tree.map(update, params, first, second), (first, second), loss
