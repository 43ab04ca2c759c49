"""Train steps of a two-layer network with scaled matmuls, in NumPy: the definitions of the formats of ``mp.train.Precision``."""

import jax
import ml_dtypes
import numpy as np

BLOCK = {"float8": 1, "mxfp8": 32, "nvfp4": 16}
EXPERT = ("gate", "up", "down")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def power(largest, code):
    """The smallest powers of two s with ``largest / s <= code``, at least 2**-100."""
    mantissa, exponent = np.frexp(np.float32(largest) / np.float32(code))
    return np.ldexp(np.float32(1), np.maximum(np.where(mantissa == 0.5, exponent - 1, exponent), -100)).astype(
        np.float32
    )


def largest_in(x, tile):
    """[m, n] → the largest magnitude of the tile of each element."""
    (m, n), (a, b) = x.shape, tile
    return np.abs(x).reshape(m // a, a, n // b, b).max((1, 3)).repeat(a, 0).repeat(b, 1)


def nearest(x, dtype):
    return x.astype(dtype).astype(np.float32)


def four_bits(x, tile, stochastic):
    amax = np.abs(x).max()
    common = power(amax, 6 * 448)
    scale = nearest(largest_in(x, tile) / (6 * common), ml_dtypes.float8_e4m3fn) * common
    size = np.minimum(np.abs(x) * np.divide(1, scale, out=np.zeros_like(x), where=scale > 0), 6)
    if not stochastic:
        return np.sign(x) * nearest(size, ml_dtypes.float4_e2m1fn) * scale
    seed = np.asarray(amax, ml_dtypes.bfloat16).view(np.uint16)
    split = [
        n for size, block in zip(x.shape, tile, strict=True) for n in ([size // block, block] if block > 1 else [size])
    ]
    bits = np.asarray(jax.random.bits(jax.random.key(seed), split, "uint32")).reshape(x.shape)
    below = E2M1[np.searchsorted(E2M1, size, "right") - 1]
    above = E2M1[np.minimum(np.searchsorted(E2M1, size, "right"), 7)]
    part = np.divide(size - below, above - below, out=np.zeros_like(size), where=above > below)
    return np.sign(x) * np.where(part + np.float32(2.0**-24) * (bits >> 8) >= 1, above, below) * scale


def encoded(name, x, tile, gradient=False):
    """The values of the codes of an array [m, n], with a scale for each tile."""
    if name == "float8":
        dtype = ml_dtypes.float8_e5m2 if gradient else ml_dtypes.float8_e4m3fn
        scale = power(np.abs(x).max(), float(ml_dtypes.finfo(dtype).max))
        return nearest(x / scale, dtype) * scale
    if name == "mxfp8":
        scale = power(largest_in(x, tile), 448)
        return nearest(x / scale, ml_dtypes.float8_e4m3fn) * scale
    return four_bits(x, tile, gradient)


def rotated(x):
    """Blocks of 16 rows, times a Hadamard matrix with random signs."""
    matrix = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]) / 4
    matrix *= np.random.default_rng(2025).choice([-1.0, 1.0], 16)[:, None]
    return np.einsum("bin,ij->bjn", x.reshape(-1, 16, x.shape[1]), matrix).reshape(x.shape).astype(np.float32)


def gradients(name, params, x, shards):
    """Of the mean square of ``relu(x @ w) @ v``: the sums of the gradients of ``shards`` parts of the batch, in bfloat16 each."""
    b = BLOCK[name]
    w, v = (encoded(name, params[k].astype(ml_dtypes.bfloat16).astype(np.float32), (b, b)) for k in ("w", "v"))

    def product(a, c):
        return (a.astype(np.float64) @ c).astype(np.float32)

    def of_weight(x, g):
        x, g = (rotated(x), rotated(g)) if name == "nvfp4" else (x, g)
        parts = (np.split(a, shards) for a in (encoded(name, x, (b, 1)), encoded(name, g, (b, 1), True)))
        return sum(nearest(product(x.T, g), ml_dtypes.bfloat16) for x, g in zip(*parts, strict=True))

    h = np.maximum(product(encoded(name, x, (1, b)), w), 0)
    y = product(encoded(name, h, (1, b)), v)
    gy = 2 * y / np.float32(y.size)
    gh = product(encoded(name, gy, (1, b), True), v.T) * (h > 0)
    return {"w": of_weight(x, gh), "v": of_weight(h, gy)}


def trained(name, params, x, steps, rate, shards=1):
    """The weights after steps of gradient descent."""
    for _ in range(steps):
        g = gradients(name, params, x, shards)
        params = {k: p - np.float32(rate) * g[k] for k, p in params.items()}
    return params


def expert_gradients(block, params, x):
    """Of the mean square of a mixture of gated experts, of which the router selects two for each token.

    Operands are float8_e4m3fn with a scale for ``block`` elements of a row, and ``block`` × ``block`` of a weight; None: bfloat16
    weights, and exact rows.
    """

    def rows(x, tile=(1, block)):
        return (encoded("mxfp8", x.astype(np.float32), tile) if block else x).astype(np.float64)

    half = {k: p.astype(ml_dtypes.bfloat16).astype(np.float32) for k, p in params.items()}
    weights = {k: [rows(m, (block, block)) for m in half[k]] for k in EXPERT}
    wide = {k: np.zeros(p.shape) for k, p in params.items()}
    logits = x.astype(np.float64) @ half["kernel"]
    chosen = np.argsort(-logits, 1, kind="stable")[:, :2]
    weight = np.exp(np.take_along_axis(logits - logits.max(1, keepdims=True), chosen, 1))
    weight /= weight.sum(1, keepdims=True)
    seen, y, passed = rows(x), np.zeros(x.shape), []
    for e, (gate, up, down) in enumerate(zip(*(weights[k] for k in EXPERT), strict=True)):
        t, j = np.nonzero(chosen == e)
        a, u = (seen[t] @ m for m in (gate, up))
        s = 1 / (1 + np.exp(-a))
        h = rows(a * s * u)
        y[t] += weight[t, j][:, None] * (h @ down)
        passed.append((t, j, a, u, s, h))
    g, to_weight = rows(2 * y / y.size), np.zeros(weight.shape)
    for e, (t, j, a, u, s, h) in enumerate(passed):
        back = g[t] @ weights["down"][e].T
        to_weight[t, j] = (back * h).sum(1)
        wide["down"][e] = (h * weight[t, j][:, None]).T @ g[t]
        back *= weight[t, j][:, None]
        for k, d in (("gate", back * u * s * (1 + a * (1 - s))), ("up", back * a * s)):
            wide[k][e] = seen[t].T @ rows(d)
    to_logits = np.zeros(logits.shape)
    np.put_along_axis(to_logits, chosen, weight * (to_weight - (weight * to_weight).sum(1, keepdims=True)), 1)
    wide["kernel"] = x.T @ to_logits
    return {k: nearest(v, ml_dtypes.bfloat16) for k, v in wide.items()}
