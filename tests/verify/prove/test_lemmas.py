"""Lemmas: a program of devices that is proven equals the function on 8 devices, and is not proven with other specs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import select_and_scatter_add_p
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.program.primitives import add_row_p
from meshpar._src.verify.prove import prove_program
from meshpar_kernels._choose import OUTLINE
from meshpar_kernels.collective_matmul.dot_dims import Dot
from meshpar_kernels.collective_matmul.ring import dots_scatter, gather_dots

RNG = np.random.default_rng(0)


def own(index, n):
    """(an index in the device's block of ``n`` rows, whether it is there)."""
    local = index - lax.axis_index("data") * n
    return local, (local >= 0) & (local < n)


def rows_of(table, shift=0):
    """Rows of a table that is sharded over `data`, as a partial sum."""
    local, mine = own(SLOTS + shift, table.shape[0])
    rows = table.at[jnp.where(mine, local, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return lax.psum(jnp.where(mine[:, None], rows, 0.0), "data")


def written_to(cache, new, shift: int | np.ndarray = 0):
    """A cache that is sharded over `data` along its slots, with rows at some of them."""
    local, mine = own(SLOTS + shift, cache.shape[0])
    return cache.at[jnp.where(mine, local, cache.shape[0])].set(new, mode="drop", wrap_negative_indices=False)


def bits_of(x, step=2):
    """The bits of the device's rows, which begin at ``step`` times its index, of [8, 4]."""
    row = jnp.arange(2, dtype=jnp.uint32) + lax.axis_index("data").astype(jnp.uint32) * np.uint32(step)
    count = row[:, None] * np.uint32(4) + jnp.arange(4, dtype=jnp.uint32)
    words = jax.random.key_data(jax.random.key(3))
    high, low = threefry2x32_p.bind(words[0], words[1], jnp.zeros_like(count), count)
    return x + (high ^ low).astype(jnp.float32)


def scan_of(x, w, reduce=lambda x: x):
    def body(carry, row):
        carry = jnp.tanh(carry + reduce(row @ w))
        return carry, carry * 2

    return lax.scan(body, jnp.zeros(w.shape[1], x.dtype), x)


def send(x, pairs):
    return lax.ppermute(x, "data", pairs)


def best(x, find=jnp.argmax, shift=0, of=None):
    """The index of the extremum along dim 1, which is sharded over `data`."""
    at = find(x, 1)[:, None]
    value = jnp.take_along_axis(x if of is None else of, at, 1)
    index = gather(at + lax.axis_index("data") * (x.shape[1] + shift), axis=1)
    return jnp.take_along_axis(index, find(gather(value, axis=1), 1)[:, None], 1)[:, 0]


def conv(x, w, stride=1, padding=((1, 1),)):
    return lax.conv_general_dilated(x, w, (stride,), padding, dimension_numbers=("NWC", "WIO", "NWC"))


UP, DOWN = [(0, 1), (1, 2), (2, 3)], [(1, 0), (2, 1), (3, 2)]


def window(x, up=UP, down=DOWN, n=1):
    """A device's rows of dim 1, with ``n`` rows of each neighbour."""
    return jnp.concatenate([send(x[:, -n:], up), x, send(x[:, :n], down)], 1)


def pool(x, padding=((0, 0), (1, 1), (0, 0))):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), padding)


def pool_of_window(x, fill=-jnp.inf, first=-1):
    x = window(x)
    row = lax.broadcasted_iota(np.int32, x.shape, 1) + (lax.axis_index("data") * (x.shape[1] - 2) + first)
    return pool(jnp.where((row >= 0) & (row < 16), x, fill), ((0, 0), (0, 0), (0, 0)))


def dilated(x, w, shift: int | np.ndarray = 0):
    """The transpose of a convolution of stride 2, of a window of `x` with a zero before each element, at tables of offsets."""
    x = lax.pad(window(x), np.float32(0), ((0, 0, 0), (1, 1, 1), (0, 0, 0)))
    x = lax.dynamic_slice_in_dim(
        x, jnp.asarray(np.array([2, 2, 2, 2], np.int32) + shift)[lax.axis_index("data")], 10, 1
    )
    return conv(x, w, padding=((0, 0),))


def matmul(contract, side=0):
    return Dot(((contract[:1], contract[1:]), ((), ())), side)


def rings(x, w, g, tile=1):
    """x @ w of gathered rows of x, and xᵀ @ g, a sum over these rows."""
    return gather_dots(x, [w, g], [matmul((1, 0)), matmul((0, 0))], "data", 0, tile=tile)


def scattered(x, w, y, v, tile=1):
    """A sum of matmuls and of a transposed one, reduce-scattered over `data` along its rows."""
    finish = lambda blocks: blocks[0] + blocks[1].T  # noqa: E731
    return dots_scatter(
        [(x, w), (y, v)], [matmul((1, 0)), matmul((1, 0))], [0, 1], "data", 0, jnp.float32, finish=finish, tile=tile
    )


def broken_ring(x, w, steps=4, shift=0, twice=False):
    """A ring that adds the matmuls of the blocks of ``steps`` devices."""
    me, total = lax.axis_index("data"), jnp.zeros((x.shape[1], w.shape[1]))
    for k in range(steps):
        rows = lax.dynamic_slice_in_dim(w, (me + 4 - k + shift) % 4 * x.shape[0], x.shape[0], 0)
        total += x.T @ rows
        x = x if twice else send(x, [*UP, (3, 0)])
    return total


def rolled(x, n=1):
    """The rows that are ``n`` before the device's own."""
    rows = (np.arange(8).reshape(4, 2) - n) % 8
    return gather(x).at[jnp.asarray(rows)[lax.axis_index("data")]].get(mode="clip", wrap_negative_indices=False)


def picked(x, device=2, row=1, other=0.0):
    """One element of two dims, of which the devices with it make a sum."""
    mine = (lax.axis_index("data") == device) & (lax.axis_index("model") == 1)
    return lax.psum(jnp.where(mine, x[row : row + 1, :1], other), ("data", "model"))[0, 0]


def row_at(x, at, shift=0, low=0, high=0):
    """The row of a table that is sharded over `data`, at an index that is data."""
    index = jnp.clip(at[0].astype(jnp.int32), 0, 4 * x.shape[0] - 1) + shift
    local = index - lax.axis_index("data") * x.shape[0]
    mine = (local >= low) & (local < x.shape[0] + high)
    row = lax.dynamic_index_in_dim(x, local, allow_negative_indices=False) if x.shape[0] > 1 else x
    return psum(jnp.where(mine, row, 0.0))


def keys_of(x, step=1):
    """The words of keys that are made of the rows of `x`."""
    keys = jax.random.wrap_key_data(jnp.abs(x).astype(jnp.uint32) * step, impl="threefry2x32")
    return jax.random.key_data(keys).astype(jnp.float32)


def grouped(x, w, groups=4, of=None):
    """A convolution by groups of features, and its gradient by the kernel."""
    groups = of or groups
    out = lambda w: lax.conv_general_dilated(  # noqa: E731
        x, w, (1,), ((1, 1),), dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
    )
    return out(w), jax.vjp(out, w)[1](jnp.cos(out(w)))[0]


def twice(x, first=jnp.tanh, second=jnp.tanh):
    """Two loops that differ by a function."""
    loop = lambda f: lax.scan(lambda c, _: (f(c) + 1, f(c)), x, None, 3)  # noqa: E731
    return loop(first), loop(second)


def add_row(total, row, index, where):
    return add_row_p.bind(total, row, index, where, late=False)


FLIP = [(0, 3), (1, 2), (2, 1), (3, 0)]
SLOTS = np.array([3, 15, 0, 9], np.int32)
psum = functools.partial(lax.psum, axis_name="data")
gather = functools.partial(lax.all_gather, axis_name="data", tiled=True)
ROWS = P(None, "data")
SWAPPED = [(j * 4 + i, i * 2 + j) for i in range(4) for j in range(2)]
CASES = {
    "reversed rows": (lambda x: x[::-1, ::-1], lambda x: send(x[::-1, ::-1], FLIP), [P("data")], P("data"), [(8, 4)], P()),
    "an element of two dims": (lambda x: x[5, 1], picked, [P("data", "model")], P(), [(8, 2)], P("data")),
    "a row at an index": (
        lambda x, at: lax.dynamic_index_in_dim(x, jnp.clip(at[0].astype(jnp.int32), 0, 7), allow_negative_indices=False),
        row_at, [P("data"), P()], P(), [(8, 6), (2,)], P("data"),
    ),
    "a row of one at an index": (
        lambda x, at: lax.dynamic_index_in_dim(x, jnp.clip(at[0].astype(jnp.int32), 0, 3), allow_negative_indices=False),
        row_at, [P("data"), P()], P(), [(4, 6), (2,)], P("data"),
    ),
    "a sum of rows in another order": (lambda x: x.sum(0), lambda x: psum(rolled(x).sum(0)), [P("data")], P(), [(8, 4)], P("data")),
    "two parts of rows": (
        lambda x: jnp.roll(x, 2, 0), lambda x: send(x, UP) + send(x, [(3, 0)]), [P("data")], P("data"), [(8, 4)], P(),
    ),
    "padding by concatenation": (
        lambda x: jnp.pad(x, ((0, 0), (2, 0))), lambda x: jnp.concatenate([jnp.zeros((x.shape[0], 2)), x], 1),
        [P("data")], P("data"), [(8, 4)], P(),
    ),
    "rows that are padded": (
        lambda x: jnp.pad(x, ((2, 4), (0, 0))), lambda x: jnp.where(lax.axis_index("data") == 1, x, 0.0),
        [P()], P("data"), [(2, 4)], P(),
    ),
    "words of keys": (keys_of, None, [P("data")], P("data"), [(8, 2)], P()),
    "groups of features": (
        grouped, functools.partial(grouped, of=1), [P(None, None, "data"), P(None, None, "data")],
        (P(None, None, "data"), P(None, None, "data")), [(2, 6, 8), (3, 2, 8)], (P(), P()),
    ),
    "equal loops": (twice, None, [P("data")], ((P("data"), P(None, "data")),) * 2, [(8, 4)], ((P("data"), P("data")),) * 2),
    "a function without a lemma": (
        lambda x: jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(4)), None, [P()], P(), [(4, 4)], P("data"),
    ),
    "no elements": (lambda x: (x[:, :0] * 2, x[:, :0].sum(1)), None, [P("data")], (P("data"), P("data")), [(8, 4)], (P(), P())),
    "elementwise": (lambda x: jnp.exp(x) * 2 + x, None, [P("data")], P("data"), [(8, 4)], P()),
    "contraction": (lambda x, w: x @ w, lambda x, w: psum(x @ w), [P(None, "data"), P("data")], P(), [(4, 8), (8, 6)], P("data")),
    "scatter of a sum": (
        lambda x, w: x @ w, lambda x, w: lax.psum_scatter(x @ w, "data", scatter_dimension=0, tiled=True),
        [P(None, "data"), P("data")], P("data"), [(8, 8), (8, 6)], P(None),
    ),
    "maximum": (lambda x: jnp.max(x, 0), lambda x: lax.pmax(jnp.max(x, 0), "data"), [P("data")], P(), [(8, 4)], P("data")),
    "cumulative maxima": (
        lambda x: lax.cummax(jnp.max(x, 0)), lambda x: lax.pmax(lax.cummax(jnp.max(x, 0)), "data"),
        [P("data")], P(), [(8, 4)], P("data"),
    ),
    "gather": (lambda x: jnp.cumsum(x, 0), lambda x: jnp.cumsum(gather(x), 0), [P("data")], P(), [(8, 4)], P("data")),
    "all-to-all": (
        lambda x: jnp.sort(x, 0), lambda x: jnp.sort(lax.all_to_all(x, "data", 1, 0, tiled=True), 0),
        [P("data")], P(None, "data"), [(8, 8)], P("data"),
    ),
    "iota": (
        lambda x: x * jnp.arange(8).astype(jnp.float32)[:, None],
        lambda x: x * (jnp.arange(2) + lax.axis_index("data") * 2).astype(jnp.float32)[:, None],
        [P("data")], P("data"), [(8, 4)], P(),
    ),
    "block": (
        lambda x: jnp.exp(x), lambda x: lax.dynamic_slice_in_dim(jnp.exp(x), lax.axis_index("data") * 2, 2, 0),
        [P()], P("data"), [(8, 4)], P(),
    ),
    "reshape": (lambda x: x.reshape(2, 4, 3), lambda x: x.reshape(-1, 4, 3), [P("model")], P("model"), [(8, 3)], P(None, "model")),
    "reshape that transposes": (
        lambda x: lax.reshape(jnp.exp(x), (12,), (1, 0)), lambda x: lax.reshape(jnp.exp(x), (3,), (1, 0)),
        [ROWS], P("data"), [(3, 4)], P(),
    ),
    "branches": (
        lambda x: lax.cond(jnp.any(x > 2), jnp.sin, jnp.cos, x),
        lambda x: lax.switch(lax.pmax(jnp.any(x > 2).astype(np.int32), "data"), [jnp.cos, jnp.sin], x),
        [P("data")], P("data"), [(8, 3)], P(),
    ),
    "permutation": (
        lambda x: x + 1, lambda x: lax.ppermute(x, ("data", "model"), SWAPPED) + 1,
        [P(("data", "model"))], P(("model", "data")), [(8, 4)], P(("data", "model")),
    ),
    "rows of a table": (
        lambda x: x.at[SLOTS].get(mode="promise_in_bounds", wrap_negative_indices=False), rows_of,
        [P("data")], P(), [(16, 3)], P("data"),
    ),
    "slots of a cache": (
        lambda x, new: x.at[SLOTS].set(new, mode="drop", wrap_negative_indices=False), written_to,
        [P("data"), P()], P("data"), [(16, 3), (4, 3)], P(),
    ),
    "random bits": (
        lambda x: x + jax.random.bits(jax.random.key(3), (8, 4)).astype(jnp.float32), bits_of,
        [P("data")], P("data"), [(8, 4)], P(),
    ),
    "argmax": (lambda x: jnp.argmax(x, 1), best, [ROWS], P(), [(6, 8)], P("data")),
    "argmin": (lambda x: jnp.argmin(x, 1), lambda x: best(x, jnp.argmin), [ROWS], P(), [(6, 8)], P("data")),
    "halo": (conv, lambda x, w: conv(window(x), w, padding=((0, 0),)), [ROWS, P()], ROWS, [(2, 16, 3), (3, 3, 4)], P()),
    "halo of a stride": (
        lambda x, w: conv(x, w, 2), lambda x, w: conv(window(x)[:, :-1], w, 2, ((0, 0),)), [ROWS, P()], ROWS,
        [(2, 16, 3), (3, 3, 4)], P(),
    ),
    "dilated window": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), ((1, 2),), (2,), dimension_numbers=("NWC", "WIO", "NWC")), dilated,
        [ROWS, P()], ROWS, [(2, 16, 3), (3, 3, 4)], P(),
    ),
    "gradient of a kernel": (
        lambda x, g: jax.vjp(lambda w: conv(x, w), jnp.zeros((3, 3, 4)))[1](g)[0],
        lambda x, g: psum(jax.vjp(lambda w: conv(window(x), w, padding=((0, 0),)), jnp.zeros((3, 3, 4)))[1](g)[0]),
        [ROWS, ROWS], P(), [(2, 16, 3), (2, 16, 4)], P("data"),
    ),
    "pooling": (pool, pool_of_window, [ROWS], ROWS, [(2, 16, 3)], P()),
    "ring of a gather": (
        lambda x, w, g: [x @ w, x.T @ g], rings, [P("data"), P(), P()], [P(), P()], [(8, 4), (4, 3), (8, 3)], P("data"),
    ),
    "ring of a gather, small blocks": (
        lambda x, w, g: [x @ w, x.T @ g], lambda *a: rings(*a, tile=256), [P("data"), P(), P()], [P(), P()],
        [(8, 4), (4, 3), (8, 3)], P("data"),
    ),
    "ring of a scatter": (
        lambda x, w, y, v: x @ w + (y @ v).T, scattered, [ROWS, P("data"), ROWS, P("data")], P("data"),
        [(8, 4), (4, 8), (8, 4), (4, 8)], P(),
    ),
    "ring of a sum": (lambda x, w: x.T @ w, broken_ring, [P("data"), P()], P(), [(8, 3), (8, 5)], P("data")),
    "a roll": (lambda x: jnp.concatenate([x[7:], x[:7]]), rolled, [P("data")], P("data"), [(8, 3)], P()),
    "a roll by a block": (
        lambda x: jnp.concatenate([x[6:], x[:6]]), lambda x: send(x, [*UP, (3, 0)]), [P("data")], P("data"), [(8, 3)], P(),
    ),
    "rows that are added": (
        lambda total, row, x: add_row(total, row, jnp.argmax(x, 1), x[:, 0] < 9),
        lambda total, row, x: add_row(total, row, jnp.argmax(x, 1), x[:, 0] < 9),
        [P(None, "data"), P("data"), P("data")], P(None, "data"), [(3, 4, 2), (4, 2), (4, 3)], P("data"),
    ),
    "a sum of rows of one device": (
        lambda x: x[:2, None].sum((0, 1)), lambda x: psum(jnp.where(lax.axis_index("data") == 0, x, 0.0)[:, None].sum((0, 1))),
        [P("data")], P(), [(8, 4)], P("data"),
    ),
    "updates that are subtracted": (
        lambda x, y: x.at[1].add(-y) - jnp.zeros_like(x).at[0].subtract(y), None, [P(None, "data"), P("data")], P(None, "data"),
        [(3, 8), (8,)], P("data"),
    ),
    "windows of products": (
        lambda x: lax.reduce_window(x, 1.0, lax.mul, (1, 2), (1, 1), "VALID"), None, [P("data")], P("data"), [(8, 5)], P(),
    ),
    "scan": (scan_of, lambda x, w: scan_of(x, w, psum), [P(None, "data"), P("data")], P(), [(5, 8), (8, 6)], P("data")),
}  # fmt: skip
WRONG = {
    "reversed rows": [lambda x: x[::-1, ::-1], lambda x: send(x[:, ::-1], FLIP), lambda x: send(x[::-1], FLIP)],
    "an element of two dims": [
        functools.partial(picked, device=1),
        functools.partial(picked, row=0),
        functools.partial(picked, other=1.0),
    ],
    "a row at an index": [functools.partial(row_at, shift=1)],
    "a sum of rows in another order": [
        lambda x: psum(rolled(x)[:1].sum(0)),
        lambda x: psum(jnp.concatenate([x, x]).sum(0)),
    ],
    "two parts of rows": [lambda x: send(x, UP) + send(x, UP), lambda x: send(x, UP) + send(x, [(2, 0)])],
    "padding by concatenation": [lambda x: jnp.concatenate([x, jnp.zeros((x.shape[0], 2))], 1)],
    "rows that are padded": [lambda x: jnp.where(lax.axis_index("data") == 2, x, 0.0)],
    "words of keys": [functools.partial(keys_of, step=2)],
    "groups of features": [lambda x, w: grouped(x[..., ::-1], w, of=1)],
    "equal loops": [functools.partial(twice, second=jnp.sin)],
    "a function without a lemma": [lambda x: jnp.linalg.cholesky(x.T @ x + 9 * jnp.eye(4))],
    "rows of a table": [lambda x: rows_of(x, 1)],
    "argmax": [
        lambda x: best(x, jnp.argmin),
        lambda x: best(x, shift=1),
        lambda x: jnp.argmax(x, 1),
        lambda x: jnp.argmax(gather(jnp.max(x, 1, keepdims=True), axis=1), 1),
        lambda x: best(x, of=gather(x, axis=1)),
        lambda x: best(x, of=send(x, [*UP, (3, 0)])),
    ],
    "halo": [
        lambda x, w: conv(window(x, DOWN, UP), w, padding=((0, 0),)),
        lambda x, w: conv(x, w),
        lambda x, w: conv(window(x, [*UP, (3, 0)]), w, padding=((0, 0),)),
        lambda x, w: conv(window(x)[:, ::-1], w, 1, ((0, 0),)),
        lambda x, w: conv(window(x, n=2)[:, :-2], w, padding=((0, 0),)),
        lambda x, w: conv(window(x) + 1, w, padding=((0, 0),)),
    ],
    "halo of a stride": [lambda x, w: conv(window(x)[:, 1:], w, 2, ((0, 0),))],
    "dilated window": [lambda x, w: dilated(x, w, 1), lambda x, w: dilated(x, w, np.array([0, 0, 0, 1], np.int32))],
    "gradient of a kernel": [
        lambda x, g: jax.vjp(lambda w: conv(window(x), w, padding=((0, 0),)), jnp.zeros((3, 3, 4)))[1](g)[0],
        lambda x, g: psum(jax.vjp(lambda w: conv(x, w), jnp.zeros((3, 3, 4)))[1](g)[0]),
    ],
    "pooling": [
        lambda x: pool_of_window(x, 0.0),
        lambda x: pool_of_window(x, first=0),
        lambda x: pool(window(x), ((0, 0),) * 3),
    ],
    "ring of a sum": [
        lambda x, w: broken_ring(x, w, 3),
        lambda x, w: broken_ring(x, w, 5),
        lambda x, w: broken_ring(x, w, shift=1),
        lambda x, w: broken_ring(x, w, twice=True),
    ],
    "ring of a scatter": [lambda x, w, y, v: scattered(x, w, y, v * 2), lambda x, w, y, v: scattered(x, w, x, w)],
    "branches": [
        lambda x: lax.switch(jnp.any(x > 2).astype(np.int32), [jnp.cos, jnp.sin], x),
        lambda x: lax.switch(lax.pmax(jnp.any(x > 2).astype(np.int32), "data"), [jnp.sin, jnp.cos], x),
    ],
    "a roll": [lambda x: rolled(x, 2), lambda x: rolled(x, -1)],
    "a roll by a block": [lambda x: send(x, DOWN), lambda x: send(x, UP)],
    "rows that are added": [
        lambda total, row, x: add_row(total, row, jnp.argmax(x, 1), x[:, 0] > 9),
        lambda total, row, x: add_row(total, row, (jnp.argmax(x, 1) + 1) % 3, x[:, 0] < 9),
    ],
    "slots of a cache": [
        lambda x, new: written_to(x, new, 1),
        lambda x, new: written_to(x, new, np.arange(4, dtype=np.int32)),
    ],
    "random bits": [lambda x: bits_of(x, 1), lambda x: bits_of(x, 0)],
    "block": [lambda x: jnp.exp(x)[:2]],
    "iota": [lambda x: x * jnp.arange(2).astype(jnp.float32)[:, None]],
    "maximum": [lambda x: jnp.max(x, 0), lambda x: psum(jnp.max(x, 0)), lambda x: -lax.pmax(-jnp.max(x, 0), "data")],
    "cumulative maxima": [
        lambda x: psum(lax.cummax(jnp.max(x, 0))),
        lambda x: lax.pmax(lax.cummin(jnp.max(x, 0)), "data"),
    ],
    "contraction": [lambda x, w: lax.pmax(x @ w, "data"), lambda x, w: x @ w, lambda x, w: psum(x @ w) * 2],
}
"""Local forms that compute something else."""


def of_rows(values):
    """The device's two rows of 8."""
    return lax.dynamic_slice_in_dim(values, lax.axis_index("data") * 2, 2, 0)


def filled(x, **fill):
    return x.at[np.array([1, 100])].get(mode="fill", wrap_negative_indices=False, **fill)


def added_to(x, new):
    return x.at[np.array([1, 3])].add(new, mode="drop", wrap_negative_indices=False)


def sum_of(x):
    return lax.reduce(x, x.dtype.type(0), lax.add, (0,))


def entry_of(x):
    """Rows at an entry of a table that devices with another coordinate along `model` do not read."""
    entry = lax.dynamic_slice(jnp.asarray(np.array([0, 2, 4, 6], np.int32)), [lax.axis_index("data")], [1])
    entry = jnp.where(lax.axis_index("model") == 0, entry, 0)
    return lax.psum(lax.dynamic_slice_in_dim(jnp.exp(x), lax.squeeze(entry, (0,)), 2, 0), "model")


def best_of_rows(x):
    """The extrema that devices have of other rows, side by side."""
    at = jnp.argmax(x, 1)[:, None]
    index, value = at + lax.axis_index("data") * x.shape[1], jnp.take_along_axis(x, at, 1)
    index, value = (gather(of_rows(v), axis=1) for v in (index, value))
    return jnp.take_along_axis(index, jnp.argmax(value, 1)[:, None], 1)[:, 0]


def selected(g, x, prim=lax.ge_p, padding=((0, 0), (1, 1), (0, 0))):
    """The gradient of windows of the largest (`le_p`: the smallest) elements."""
    what = {"select_prim": prim, "window_dimensions": (1, 3, 1), "window_strides": (1, 1, 1), "padding": padding}
    return select_and_scatter_add_p.bind(g, x, **what)


def selected_of_window(g, x, prim=lax.ge_p):
    row = lax.axis_index("data") * x.shape[1] - 2
    x = window(x, n=2)
    row += lax.broadcasted_iota(np.int32, x.shape, 1)
    x = jnp.where((row >= 0) & (row < 16), x, -jnp.inf)
    return selected(window(g), x, prim, ((0, 0),) * 3)[:, 2:-2]


def repeated(g, x):
    """The gradient of windows of one element of two, of elements that a device has twice."""
    what = {"select_prim": lax.ge_p, "window_dimensions": (1, 1, 1), "window_strides": (1, 2, 1)}
    found = select_and_scatter_add_p.bind(g, x, padding=((0, 0),) * 3, **what)
    if "data" not in jax.sharding.get_abstract_mesh().manual_axes:
        return found
    x = jnp.concatenate([x[:, 0:1], x[:, 0:1], x[:, 2:3], x[:, 2:3]], 1)
    twice = select_and_scatter_add_p.bind(g, x, padding=((0, 0),) * 3, **what)
    return jnp.concatenate([twice[:, 1:2], found[:, 1:2], twice[:, 3:4], found[:, 3:4]], 1)


def features(x, w):
    """A convolution of blocks of rows, over two of four blocks of the features."""
    up, down = (lax.ppermute(r, "model", [p]) for r, p in ((x[:, -1:], (0, 1)), (x[:, :1], (1, 0))))
    two = lambda v, d: jnp.concatenate([v, send(v, [*UP, (3, 0)])], d)  # noqa: E731
    return conv(two(jnp.concatenate([up, x, down], 1), 2), two(w, 1), padding=((0, 0),))


def slots_modulo(cache, new, slots):
    local, mine = own(slots, cache.shape[0])
    first = lax.rem(lax.div(slots, np.int32(1000)), np.int32(1000)) == 5
    local = jnp.where(first, 0, jnp.where(mine, local, cache.shape[0]))
    return cache.at[local].set(new, mode="drop", wrap_negative_indices=False)


def slots_and(wrong):
    """Rows at some slots, and at those at which `wrong(slots, device)` is true also at the first row of the device's block."""

    def local(cache, new, slots):
        at, mine = own(slots, cache.shape[0])
        at = jnp.where(wrong(slots, lax.axis_index("data")), 0, jnp.where(mine, at, cache.shape[0]))
        return cache.at[at].set(new, mode="drop", wrap_negative_indices=False)

    write = lambda x, new, at: x.at[at].set(new, mode="drop", wrap_negative_indices=False)  # noqa: E731
    return write, local, [P("data"), P(), P()], P("data")


def one_of(x, value):
    """The value on device 1 along `data`, 0 on the others."""
    return jnp.where(lax.axis_index("data") == 1, value, jnp.zeros_like(x))


def masked_by_other_slots(x, slots):
    local, mine = own(jnp.broadcast_to(slots[:, None], (4, 4)), x.shape[0])
    rows = x.at[jnp.where(mine, local, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    _, mine = own(jnp.broadcast_to(slots, (4, 4)), x.shape[0])
    return psum(jnp.where(mine[..., None], rows, 0.0))


def by_bits(x, other):
    """The maximum of rows as one of integers, some of which are of other rows: `nan` or `sign`."""
    every, low, largest = ("data", "model"), np.int32(0), np.iinfo(np.int32).max
    flip = lambda n, m: jnp.where(m < low, n ^ np.int32(largest), n)  # noqa: E731
    x, y = jnp.max(x, 0), jnp.max(lax.ppermute(x, every, SWAPPED), 0)
    n, m = (lax.bitcast_convert_type(v, np.int32) for v in (x, y if other == "sign" else x))
    image = jnp.where(x != (y if other == "nan" else x), np.int32(largest), flip(n, m))
    n = lax.pmax(image, every)
    return lax.bitcast_convert_type(flip(n, n), np.float32)


def added_twice(x, w):
    """A ring that adds the matmuls of the three other devices to one that device 0 has of all."""
    me, blocks = lax.axis_index("data"), []
    for k in range(4):
        blocks.append(x.T @ lax.dynamic_slice_in_dim(w, (me + 4 - k) % 4 * x.shape[0], x.shape[0], 0))
        x = send(x, [*UP, (3, 0)])
    every = jnp.where(me == 0, psum(blocks[0]), 0.0)
    n = every.shape[1]
    return jnp.concatenate([blocks[0], every], 1)[:, n:] + (blocks[1] + blocks[2] + blocks[3])


@mp.kernel_rule("rows cols -> rows cols")
def times(x, by=2.0):
    return x * by


def local_times(x):
    return x * 2.0


local_times.__name__ = "kernel of times"


def two_kernels(x):
    if "data" in jax.sharding.get_abstract_mesh().manual_axes:
        return jax.jit(local_times)(x) - jax.jit(local_times)(x)
    with OUTLINE(True):
        return times(x) - times(x, by=3.0)


def pad_rows(x):
    return lax.pad(x, np.float32(0), ((1, 1, 0), (0, 0, 0)))


def pad_columns(x):
    return lax.pad(x, np.float32(5), ((0, 0, 0), (0, 1, 1)))


def back(x):
    """The rows, twice in the opposite order."""
    return lax.rev(lax.rev(x, (0,)), (0,))


def half_of(x, number):
    """The device's rows of an array with a row of a number before and after it."""
    padded = lax.pad(x, np.float32(number), ((1, 1, 0), *[(0, 0, 0)] * (x.ndim - 1)))
    return lax.dynamic_slice_in_dim(padded, lax.axis_index("model") * 4, 4, 0)


def halves(x, w):
    """The matmuls of two blocks, and of the two others."""
    me, parts = lax.axis_index("data"), []
    for k in range(4):
        parts.append(x.T @ lax.dynamic_slice_in_dim(w, (me + 4 - k) % 4 * x.shape[0], x.shape[0], 0))
        x = send(x, [*UP, (3, 0)])
    return parts[0] + parts[1], parts[2] + parts[3]


def rows_at(x, index):
    return lax.gather(x, index, lax.GatherDimensionNumbers((), (0,), (0,)), (1,), mode="promise_in_bounds")


BYTES = jnp.full((8, 4), 60, jnp.int8)
ROTATED = np.array([3, 1, 4, 1, 5, 0, 2, 6], np.int32)[:, None]
LARGE = np.array([3, 5005, 0, 9], np.int32)
FAR = np.array([64, 2000, 200000, 10 - 2**31], np.int32)
SIGNS = jnp.asarray(RNG.permutation(np.arange(-16, 16)).reshape(8, 4), jnp.float32)
EDGES = {
    "a sum of partial maxima": (
        lambda x: jnp.max(x, 0),
        lambda x: lax.psum(jnp.where(lax.axis_index("data") == 0, jnp.max(x, 0), 0.0), ("data", "model")),
        [P("model")], P(), [(8, 4)],
    ),
    "the maximum of a disjunction of bits": (
        lambda x: lax.reduce_or(x.astype(jnp.uint32), (0,)), lambda x: lax.pmax(lax.reduce_or(x.astype(jnp.uint32), (0,)), "data"),
        [P("data")], P(), [2.0 ** np.arange(8.0).reshape(8, 1)],
    ),
    "padding of one row": (
        lambda x: jnp.zeros((4, 4)),
        lambda x: lax.dynamic_slice_in_dim(jnp.pad(x, ((0, 3), (0, 0))), lax.axis_index("data"), 1, 0),
        [P()], P("data"), [(1, 4)],
    ),
    "a wider sum": (lambda x: sum_of(x).astype(jnp.int32), lambda x: psum(sum_of(x).astype(jnp.int32)), [P("data")], P(), [BYTES]),
    "floats of a sum": (
        lambda x: sum_of(x).astype(jnp.float32), lambda x: psum(sum_of(x).astype(jnp.float32)), [P("data")], P(), [BYTES],
    ),
    "a multiple that wraps": (
        lambda x: jnp.max(x, 0) * np.int8(3), lambda x: lax.pmax(jnp.max(x, 0) * np.int8(3), "data"), [P("data")], P(),
        [jnp.arange(32, dtype=jnp.int8).reshape(8, 4) * 3],
    ),
    "an offset divided by 0": (
        jnp.exp, lambda x: lax.dynamic_slice_in_dim(jnp.exp(x), lax.div(lax.axis_index("data") * 2, np.int32(0)), 2, 0),
        [P()], P("data"), [(8, 4)],
    ),
    "an all-to-all along one dim": (
        lambda x: x + 1, lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True) + 1, [P("data")], P("data"), [(32, 4)],
    ),
    "numbers for rows out of range, of a partial value": (
        lambda x, w: filled(x @ w, fill_value=1.0), lambda x, w: psum(filled(x @ w, fill_value=1.0)),
        [ROWS, P("data")], P(), [(4, 8), (8, 6)],
    ),
    "updates of a partial zero": (
        lambda x: added_to(jnp.zeros((8, 3)), x),
        lambda x: psum(added_to(jnp.where(lax.axis_index("data") == 0, jnp.zeros((8, 3)), jnp.zeros((8, 3))), x)),
        [P()], P(), [(2, 3)],
    ),
    "a partial entry of a table": (lambda x: jnp.exp(x) * 2, entry_of, [P()], P("data"), [(8, 4)]),
    "windows of the smallest": (
        lambda g, x: selected(g, x, lax.le_p), lambda g, x: selected_of_window(g, x, lax.le_p), [ROWS, ROWS], ROWS,
        [(2, 16, 3), (2, 16, 3)],
    ),
    "windows of a constant": (
        lambda g, x: selected(g, jnp.broadcast_to(x, g.shape)).sum(0),
        lambda g, x: selected_of_window(g, jnp.broadcast_to(x, g.shape)).sum(0), [P("model", "data"), ROWS], P("data"),
        [(4, 16, 3), (1, 16, 3)],
    ),
    "windows of repeated elements": (repeated, repeated, [ROWS, ROWS], ROWS, [(2, 8, 3), (2, 16, 3)]),
    "extrema of other rows": (lambda x: jnp.argmax(x, 1), best_of_rows, [ROWS], P("data"), [(8, 8)]),
    "a convolution of some features": (
        conv, features, [P(None, "model", "data"), P(None, "data")], P(None, "model"), [(1, 8, 8), (3, 8, 4)],
    ),
    "another shape": (lambda x: jnp.zeros(8), lambda x: jnp.zeros(4), [P()], P(), [(4,)]),
    "the maximum of no elements": (
        lambda x: jnp.minimum(x, jnp.full(4, 3.0)), lambda x: jnp.minimum(x, lax.reduce_max(jnp.full((8, 4), 3.0)[:0], (0,))),
        [P()], P(), [(4,)],
    ),
    "slots modulo a number": (
        lambda x, new, at: x.at[at].set(new, mode="drop", wrap_negative_indices=False), slots_modulo,
        [P("data"), P(), P()], P("data"), [(16, 3), (4, 3), LARGE],
    ),
    "a multiple by a number of one device": (lambda x: x * 5.0, lambda x: x * one_of(x, 5.0), [P()], P(), [(8, 4)]),
    "a quotient by a number of one device": (lambda x: x / 5.0, lambda x: x / one_of(x, 5.0), [P()], P(), [(8, 4)]),
    "rows of a table by a mask of other slots": (
        lambda x, at: x.at[jnp.broadcast_to(at[:, None], (4, 4))].get(mode="promise_in_bounds", wrap_negative_indices=False),
        masked_by_other_slots, [P("data"), P()], P(), [(16, 3), SLOTS],
    ),
    "NaN of other extrema": (lambda x: jnp.max(x, 0), lambda x: by_bits(x, "nan"), [P(("data", "model"))], P(), [SIGNS]),
    "signs of other extrema": (lambda x: jnp.max(x, 0), lambda x: by_bits(x, "sign"), [P(("data", "model"))], P(), [SIGNS]),
    "slots that powers of 2 are": (*slots_and(lambda at, k: ((at & (at - 1)) == 0) & (at > 40)), [(16, 3), (4, 3), FAR]),
    "slots at multiples of a device": (*slots_and(lambda at, k: (at == k * 1000) & (k > 0)), [(16, 3), (4, 3), FAR]),
    "slots of a table": (
        *slots_and(lambda at, k: at == jnp.asarray(np.array([200000, 300000] * 2, np.int32))[k]), [(16, 3), (4, 3), FAR],
    ),
    "slots that wrap": (*slots_and(lambda at, k: (at - 8) < (at - 20)), [(16, 3), (4, 3), FAR]),
    "a gather of a diagonal": (
        lambda x, y: (x[:, None] * y).reshape(16), lambda x, y: gather((x[:, None] * y).reshape(1)),
        [P("data"), P("data")], P("data"), [(4,), (4,)],
    ),
    "a gather of columns of other rows": (
        lambda x: jnp.broadcast_to(x[:, None], (8, 4)), lambda x: gather(x[:, None], axis=1), [P("data")], P("data"), [(8,)],
    ),
    "a sum over blocks and one over all": (
        lambda x, w: x.T @ w, added_twice, [P("data"), P(None, "model")], P(None, "model"), [(8, 3), (8, 4)],
    ),
    "a clipped index": (
        lambda x, at: lax.dynamic_slice_in_dim(x, at[0], 2, 0),
        lambda x, at: lax.dynamic_slice_in_dim(x, jnp.minimum(at[0], 3), 2, 0),
        [P(), P()], P(), [(8, 3), np.array([5], np.int32)],
    ),
    "an index that is clamped to fewer elements": (
        lambda x, at: lax.dynamic_slice_in_dim(x, at[0], 2, 0),
        lambda x, at: lax.dynamic_slice_in_dim(x, lax.clamp(0, at[0], 3), 2, 0),
        [P(), P()], P(), [(8, 3), np.array([5], np.int32)],
    ),
    "a permutation by the names of axes in another order": (
        lambda x: jnp.concatenate([x[7:], x[:7]]),
        lambda x: lax.ppermute(x, ("model", "data"), [(k, (k + 1) % 8) for k in range(8)]),
        [P(("model", "data"))], P(("model", "data")), [(8, 4)],
    ),
    "another kernel of the same name": (two_kernels, two_kernels, [P("data")], P("data"), [(8, 4)]),
    "a sum of a diagonal": (
        lambda x, y: (x[:, None] * y).sum(), lambda x, y: psum((x[:, None] * y).sum()), [P("data"), P("data")], P(), [(8,), (8,)],
    ),
    "a contraction of a diagonal": (
        lambda x, y, w: jnp.einsum("ij,ij->", x[:, None] * y, w),
        lambda x, y, w: psum(jnp.einsum("ij,ij->", x[:, None] * y, of_rows(of_rows(w).T))), [P("data"), P("data"), P()], P(),
        [(8,), (8,), (8, 8)],
    ),
    "a scatter of a diagonal": (
        lambda x, y: jnp.zeros(2).at[jnp.zeros((8, 8), int)].add(x[:, None] * y),
        lambda x, y: psum(jnp.zeros(2).at[jnp.zeros((2, 2), int)].add(x[:, None] * y)), [P("data"), P("data")], P(), [(8,), (8,)],
    ),
    "a partial element among numbers": (
        lambda x: lax.pad(x.sum(0, keepdims=True), np.float32(5), ((1, 1, 0),)),
        lambda x: psum(jnp.where(jnp.arange(3) == 1, x.sum(0, keepdims=True), jnp.full(3, 5.0))), [P("data")], P(), [(8,)],
    ),
    "two numbers at a corner": (
        lambda x: pad_rows(pad_columns(x)),
        lambda x: back(pad_columns(lax.dynamic_slice_in_dim(pad_rows(x), lax.axis_index("model"), 3, 0))),
        [P("model", "data")], P("model", "data"), [(4, 8)],
    ),
    "rows at indices of another device": (
        lambda x: rows_at(x, ROTATED), lambda x: rows_at(x, send(of_rows(jnp.asarray(ROTATED)), [*UP, (3, 0)])), [P()], P("data"),
        [(8,)],
    ),
    "the sign of zeros outside": (
        lambda x: 1 / lax.pad(-x, np.float32(0), ((1, 1, 0),)),
        lambda x: 1 / back(-half_of(x, 0)),
        [P()], P("model"), [(6,)],
    ),
    "a sum of numbers outside": (
        lambda x: lax.pad(x.sum(1), np.float32(5), ((1, 1, 0),)), lambda x: back(half_of(x, 5).sum(1)), [P()], P("model"), [(6, 3)],
    ),
    "extrema of incomplete sums": (
        lambda x, w: jnp.max(x.T @ w, 1), lambda x, w: sum(jnp.max(b, 1) for b in halves(x, w)), [P("data"), P()], P(),
        [(8, 3), SIGNS],
    ),
    "an element among numbers at a corner": (
        lambda x: lax.pad(lax.pad(x, np.float32(0), ((0, 0, 0), (1, 1, 0))), np.float32(5), ((1, 1, 0), (0, 0, 0))),
        lambda x: back(jnp.where(lax.broadcasted_iota(np.int32, (4, 3), 1) == 1, half_of(x, 5), np.float32(0))), [P()], P("model"),
        [(6, 1)],
    ),
    "the sign of a zero": (lambda x: x / -jnp.zeros(4), lambda x: x / jnp.zeros(4), [P()], P(), [(4,)]),
    "a multiple by -0.0": (lambda x: 1 / (x * -0.0), lambda x: 1 / (x * 0.0), [P()], P(), [(4,)]),
    "a multiple by 0 and -1": (lambda x: 1 / ((x * 0.0) * -1), lambda x: 1 / (x * 0.0), [P()], P(), [(4,)]),
    "-0.0 in a constant": (lambda x: x / jnp.zeros(4), lambda x: x / np.array([0.0, -0.0] * 2, np.float32), [P()], P(), [(4,)]),
}  # fmt: skip
"""Programs that are wrong at an edge of a lemma: (function, local form, specs, shapes or arrays of the arguments)."""


def on_devices(local, ins, outs):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.shard_map(local, mesh=mesh, in_specs=tuple(ins), out_specs=outs, check_vma=False)


def proof_of(written, sharded, args):
    proof = prove_program(jax.make_jaxpr(written)(*args), jax.make_jaxpr(sharded)(*args))
    assert not proof.errors
    return proof


@pytest.mark.parametrize("name", EDGES)
def test_a_program_that_is_wrong_at_an_edge_of_a_lemma_is_not_proven(name):
    written, local, ins, outs, args = EDGES[name]
    args = [jnp.asarray(RNG.integers(1, 9, a), jnp.float32) if isinstance(a, tuple) else jnp.asarray(a) for a in args]
    sharded = on_devices(local, ins, outs)
    pairs = zip(jax.tree.leaves(jax.jit(sharded)(*args)), jax.tree.leaves(written(*args)), strict=True)
    assert not all(np.array_equal(found, wanted) for found, wanted in pairs)
    assert not proof_of(written, sharded, args).proven


UNREFUSED = {
    "rows that are repeated": (lambda x: jnp.concatenate([jnp.exp(x)] * 4), jnp.exp, [P()], P("data"), [(4, 6)]),
    "sharded rows that are repeated": (
        lambda x: jnp.concatenate([jnp.exp(x)] * 4), jnp.exp, [P("model")], P(("data", "model")), [(4, 6)],
    ),
    "bits of a disjunction": (
        lambda x: lax.reduce_or(x.astype(jnp.uint32), (0,)) | 1,
        lambda x: lax.reduce_or(lax.all_gather(lax.reduce_or(x.astype(jnp.uint32), (0,)) | 1, "data"), (0,)),
        [P("data")], P(), [(8, 4)],
    ),
    "a sum of blocks": (lambda x: x.reshape(4, 2, 4).sum(0), lambda x: psum(x), [P("data")], P(), [(8, 4)]),
    "a row that is added to rows": (
        lambda x: x + jnp.pad(jnp.exp(x)[2:3], ((2, 1), (0, 0))),
        lambda x: x + jnp.where(lax.axis_index("data") == 2, lax.all_gather(jnp.exp(x), "data", tiled=True)[2:3], 0.0),
        [P("data")], P("data"), [(4, 6)],
    ),
    "a quotient of a row": (
        lambda x: jnp.pad(jnp.exp(x)[2:3], ((2, 1), (0, 0))) / x,
        lambda x: jnp.where(lax.axis_index("data") == 2, lax.all_gather(jnp.exp(x), "data", tiled=True)[2:3], 0.0) / x,
        [P("data")], P("data"), [(4, 6)],
    ),
}  # fmt: skip
"""Programs that are right, of values that could be blocks as well as partial values."""


@pytest.mark.parametrize("name", UNREFUSED)
def test_a_program_that_is_right_is_not_refused(name):
    written, local, ins, outs, shapes = UNREFUSED[name]
    args, sharded = [jnp.asarray(RNG.integers(1, 4, s), jnp.float32) for s in shapes], on_devices(local, ins, outs)
    np.testing.assert_allclose(jax.jit(sharded)(*args), written(*args), rtol=1e-5)
    assert proof_of(written, sharded, args).status != "refused"


def programs(name, out=None, local=None):
    """(the function, its sharded form, arguments)."""
    written, right, ins, outs, shapes, _ = CASES[name]
    args = [jnp.asarray(RNG.integers(-3, 4, s), jnp.float32) for s in shapes]
    return written, on_devices(local or right or written, ins, outs if out is None else out), args


@pytest.mark.parametrize("name", CASES)
def test_a_proven_program_equals_the_function(name):
    written, sharded, args = programs(name)
    assert proof_of(written, sharded, args).proven
    for found, wanted in zip(jax.tree.leaves(jax.jit(sharded)(*args)), jax.tree.leaves(written(*args)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in CASES if n != "scan"])
def test_a_program_with_other_specs_is_not_proven(name):
    written, *_, wrong = CASES[name]
    _, sharded, args = programs(name, wrong)
    try:
        proof = proof_of(written, sharded, args)
    except (ValueError, AssertionError):  # shapes that JAX rejects
        return
    assert not proof.proven


@pytest.mark.parametrize(("name", "local"), [(name, local) for name, locals in WRONG.items() for local in locals])
def test_a_local_form_that_computes_something_else_is_not_proven(name, local):
    written, sharded, args = programs(name, local=local)
    pairs = zip(jax.tree.leaves(jax.jit(sharded)(*args)), jax.tree.leaves(written(*args)), strict=True)
    assert not all(np.array_equal(found, wanted) for found, wanted in pairs)
    assert not proof_of(written, sharded, args).proven


@pytest.mark.parametrize(("low", "high"), [(-1, 0), (1, 0), (0, -1), (0, 1)])
def test_a_mask_off_by_one_is_not_proven(low, high):
    """Also where the index that is given does not show it."""
    written, sharded, args = programs("a row at an index", local=functools.partial(row_at, low=low, high=high))
    assert not proof_of(written, sharded, args).proven


def test_the_cause_has_the_op_the_reason_and_the_line():
    step = lambda x: jnp.tanh(x.sum(0))  # noqa: E731
    proof = proof_of(step, on_devices(step, [P("data")], P()), [jnp.ones((8, 4))])
    assert proof.status == "refused"
    (cause,) = proof.failed
    assert (cause.op, cause.refused) == ("tanh", True)
    assert "partial over data" in cause.reason
    assert "test_lemmas.py" in cause.line


def test_a_result_that_is_another_value_is_a_cause_without_equations():
    proof = proof_of(jnp.cos, on_devices(lambda x: jnp.sin(x), [P("data")], P("data")), [jnp.ones((8, 4))])
    assert (proof.status, proof.share) == ("not verified", 1.0)
    assert proof.failed == {proof.results[0].cause: 0}
    assert "is not the value of the function as written: it has sin(" in str(proof)
    assert "in place of cos(" in str(proof)


def test_an_op_with_a_body_is_no_call():
    """The jaxpr of a reduction by a function of its own is not walked: the blocks of a dim are not reduced one by one."""
    mean = lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a * 2 + b, (0,))  # noqa: E731
    assert proof_of(mean, on_devices(mean, [P(None, "data")], P("data")), [jnp.ones((4, 8))]).proven
    proof = proof_of(mean, on_devices(mean, [P("data")], P()), [jnp.ones((8, 4))])
    assert proof.status == "not verified"
    assert [c.reason for c in proof.failed] == ["reduce along dim 0, which is sharded over data"]
