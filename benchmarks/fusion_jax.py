"""Models of `fusion_cases` as JAX trains K of each: one `jit` of a `vmap`, the optimizers written out.

    PYTHON_WITH_JAX benchmarks/fusion_jax.py mlp 32

It prints the seconds of a step of all trials at once, and needs nothing but JAX: an environment of its own will do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

LEAST_STEPS, MOST_SECONDS = 5, 10.0
WARM = 2
"""Steps that are left out: the first compiles."""

Tree = Any


class Model(NamedTuple):
    """One trial: `init(key)` gives its parameters, `loss(params, batch)` its loss and running statistics."""

    init: Callable[[Array], Tree]
    loss: Callable[[Tree, Any], tuple[Array, Tree]]
    batch: Callable[[], Any]
    optimizer: str
    lr: float


def seconds_per_step(name: str, trials: int) -> float:
    """Median seconds of a step of all trials at once: forward, backward and update, without compilation."""
    model = MODELS[name]
    batch, rates = model.batch(), model.lr * jnp.logspace(0, 1, trials)
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(2), trials))
    moments = jax.tree.map(jnp.zeros_like, (params, params) if model.optimizer == "adamw" else (params,))
    running = jax.vmap(lambda p: model.loss(p, batch)[1])(params)
    update = {"adamw": _adamw, "sgd": _sgd}[model.optimizer]

    def step(params: Tree, moments: Tree, running: Tree, lr: Array, t: float, batch: Any) -> Any:
        (loss, seen), grads = jax.value_and_grad(model.loss, has_aux=True)(params, batch)
        running = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, running, seen)
        return *update(params, moments, grads, lr, t), running, loss

    run = jax.jit(jax.vmap(step, in_axes=(0, 0, 0, 0, None, None)), donate_argnums=(0, 1, 2))
    times, began = list[float](), time.perf_counter()
    while len(times) < LEAST_STEPS + WARM or (time.perf_counter() - began < MOST_SECONDS and len(times) < 1000):
        start = time.perf_counter()
        params, moments, running, loss = run(params, moments, running, rates, len(times) + 1.0, batch)
        loss.block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM:])


def _adamw(params: Tree, moments: Tree, grads: Tree, lr: Array, t: float) -> tuple[Tree, Tree]:
    decay, beta1, beta2, eps = 0.01, 0.9, 0.999, 1e-8
    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, moments[1], grads)

    def updated(p: Array, m: Array, v: Array) -> Array:
        direction = m / (1 - beta1**t) / (jnp.sqrt(v / (1 - beta2**t)) + eps)
        return p * (1 - lr * decay) - lr * direction

    return jax.tree.map(updated, params, first, second), (first, second)


def _sgd(params: Tree, moments: Tree, grads: Tree, lr: Array, t: float) -> tuple[Tree, Tree]:
    buffer = jax.tree.map(lambda m, g: 0.9 * m + g, moments[0], grads)
    return jax.tree.map(lambda p, m: p - lr * m, params, buffer), (buffer,)


def _cross_entropy(scores: Array, target: Array) -> Array:
    logs = jax.nn.log_softmax(scores)
    return -jnp.take_along_axis(logs, target[..., None], -1).mean()


def _linear(key: Array, i: int, o: int) -> tuple[Array, Array]:
    return jax.random.normal(key, (i, o)) / i**0.5, jnp.zeros(o)


def _mlp() -> Model:
    sizes = (784, 32, 32, 10)

    def init(key: Array) -> Tree:
        return [_linear(k, i, o) for k, i, o in zip(jax.random.split(key, 3), sizes, sizes[1:])]

    def loss(params: Tree, batch: Any) -> tuple[Array, Tree]:
        x, target = batch
        for weight, bias in params[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        return _cross_entropy(x @ params[-1][0] + params[-1][1], target), ()

    return Model(init, loss, lambda: _images(64, 784), "adamw", 1e-4)


def _transformer() -> Model:
    """Two pre-norm layers of width 32 with 4 heads, 1000 words, causal, 8 windows of 32 tokens."""
    words, width, heads, length = 1000, 32, 4, 32
    shapes = {"attend": (width, 3 * width), "mix": (width, width), "up": (width, 128), "down": (128, width)}

    def init(key: Array) -> Tree:
        keys = iter(jax.random.split(key, 16))
        norms = {name: (jnp.ones(width), jnp.zeros(width)) for name in ("norm1", "norm2")}
        layers = [norms | {name: _linear(next(keys), *shape) for name, shape in shapes.items()} for _ in range(2)]
        shared = {"words": jax.random.normal(next(keys), (words, width)), "out": _linear(next(keys), width, words)}
        return shared | {"places": 0.02 * jax.random.normal(next(keys), (length, width)), "layers": layers}

    def norm(x: Array, scale: Array, shift: Array) -> Array:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-5) * scale + shift

    def linear(x: Array, layer: tuple[Array, Array]) -> Array:
        return x @ layer[0] + layer[1]

    def attention(x: Array, layer: Tree) -> Array:
        parts = linear(norm(x, *layer["norm1"]), layer["attend"]).reshape(*x.shape[:-1], 3, heads, width // heads)
        q, k, v = (parts[:, :, part] for part in range(3))
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) * (width // heads) ** -0.5
        shares = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf))
        return linear(jnp.einsum("nhqk,nkhd->nqhd", shares, v).reshape(x.shape), layer["mix"])

    def loss(params: Tree, tokens: Array) -> tuple[Array, Tree]:
        x = params["words"][tokens[:, :-1]] + params["places"]
        for layer in params["layers"]:
            x = x + attention(x, layer)
            x = x + linear(jax.nn.relu(linear(norm(x, *layer["norm2"]), layer["up"])), layer["down"])
        return _cross_entropy(linear(x, params["out"]), tokens[:, 1:]), ()

    return Model(init, loss, lambda: jax.random.randint(jax.random.key(0), (8, length + 1), 0, words), "adamw", 1e-4)


def _conv() -> Model:
    """Two convolutions of 8 and 16 channels, each with BatchNorm, ReLU and max-pooling, on 28 x 28 pixels."""

    def init(key: Array) -> Tree:
        keys = jax.random.split(key, 3)
        kernels = [
            (jax.random.normal(k, (3, 3, i, o)) / (9 * i) ** 0.5, jnp.zeros(o), jnp.ones(o), jnp.zeros(o))
            for k, i, o in ((keys[0], 1, 8), (keys[1], 8, 16))
        ]
        return {"blocks": kernels, "out": _linear(keys[2], 16 * 7 * 7, 10)}

    def loss(params: Tree, batch: Any) -> tuple[Array, Tree]:
        (x, target), seen = batch, []
        for kernel, bias, scale, shift in params["blocks"]:
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            x = jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * scale + shift)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            seen.append((mean, var))
        weight, bias = params["out"]
        return _cross_entropy(x.reshape(len(x), -1) @ weight + bias, target), lax.stop_gradient(seen)

    return Model(init, loss, lambda: _images(64, 28, 28, 1), "sgd", 1e-2)


def _images(samples: int, *shape: int) -> tuple[Array, Array]:
    x = jax.random.normal(jax.random.key(0), (samples, *shape))
    return x, jax.random.randint(jax.random.key(1), (samples,), 0, 10)


MODELS = {"mlp": _mlp(), "transformer": _transformer(), "conv": _conv()}


def main() -> None:
    """Print the seconds of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(MODELS))
    parser.add_argument("trials", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores that it may use")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
    print(seconds_per_step(given.case, given.trials))


if __name__ == "__main__":
    main()
