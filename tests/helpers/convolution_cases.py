"""Convolutions of which each device has a few rows, against the unsharded run: ``python convolution_cases.py ROWS SEED COUNT``.

A convolution may abort the compiler, and so the process: each case is printed before it runs.
"""

import itertools
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import meshpar as mp

DEVICES = 4
CASES = [
    {
        "window_strides": (s, s),
        "lhs_dilation": (d, d),
        "rhs_dilation": (w, w),
        "padding": [p, p],
        "kernel": k,
        "format": f,
    }
    for k, s, d, w, p, f in itertools.product(
        (1, 2, 3, 4, 5, 7), (1, 2, 3), (1, 2, 3), (1, 2), ((0, 0), (1, 1), (2, 2), (0, 3), (3, 1)), ("NCHW", "NHWC")
    )
]


def by_hand(x, w, numbers, window_strides, padding, lhs_dilation=(1, 1), rhs_dilation=(1, 1)):
    """The convolution of operands that are padded and dilated explicitly; XLA for CPUs is wrong on some of the others."""
    spatial = [numbers[0].index(d) for d in "HW"]
    wide = {d: (*padding[k], lhs_dilation[k] - 1) for k, d in enumerate(spatial)}
    x = lax.pad(x, 0.0, [wide.get(d, (0, 0, 0)) for d in range(4)])
    w = lax.pad(w, 0.0, [(0, 0, 0), (0, 0, 0), *((0, 0, n - 1) for n in rhs_dilation)])
    y = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=numbers)
    strides = dict(zip(spatial, window_strides, strict=True))
    return y[tuple(slice(None, None, strides.get(d, 1)) for d in range(4))]


def run(rows: int, case: dict, lowering: str) -> None:
    """Compare a convolution and its gradients, sharded by rows, with the unsharded ones."""
    options = {n: v for n, v in case.items() if n not in ("kernel", "format")}
    numbers = (case["format"], "OIHW", case["format"])
    shape = dict(zip("NCHW", (2, 3, rows * DEVICES, 6), strict=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=[shape[d] for d in case["format"]]).astype(np.float32)
    w = rng.normal(size=(4, 3, case["kernel"], case["kernel"])).astype(np.float32)

    def conv(x, w):
        return lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)

    if 0 in jax.eval_shape(conv, x, w).shape:
        return
    step = jax.value_and_grad(lambda x, w: jnp.sin(conv(x, w)).sum(), (0, 1))
    dims = {"x": " ".join("height" if d == "H" else "_" for d in case["format"])}
    expected = jax.value_and_grad(lambda x, w: jnp.sin(by_hand(x, w, numbers, **options)).sum(), (0, 1))(x, w)
    got = mp.jit(step, mesh=f"space={DEVICES}", layout="height: space", dims=dims, lowering=lowering)(x, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


if __name__ == "__main__":
    mp.virtual_devices(DEVICES)
    rows, seed, count = map(int, sys.argv[1:4])
    print(f"conv_general_dilated, {rows} rows per device")
    upsampling = {"window_strides": (1, 1), "lhs_dilation": (2, 2), "padding": [(2, 2), (2, 2)]}
    run(rows, {**upsampling, "kernel": 4, "format": "NCHW"}, "shard_map")
    for case in random.Random(seed).sample(CASES, count):
        lowering = random.Random(str(case)).choice(["shard_map", "jit"])
        print(lowering, case, flush=True)
        run(rows, case, lowering)
