"""Reads and writes at run-time indices along sharded dims."""

import functools
from collections import Counter

import arrays
import covering
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives_of import planned_and_compiled
from jax import lax
from same_results import assert_as_unsharded, assert_close

import meshpar as mp

RNG = np.random.default_rng(1)
LOWERINGS = ["shard_map", "jit"]
MESH = "data=4, model=2"


normal = functools.partial(arrays.normal, RNG)


def loss(p, tokens):
    x = p["table"][tokens]
    logits = jnp.tanh(x) @ p["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean() - picked.mean()


def test_losses_and_lookups_over_a_split_vocabulary_stay_split():
    p = {"table": normal(32, 8), "head": normal(8, 32)}
    tokens = RNG.integers(0, 32, (4, 6)).astype(np.int32)
    dims = {"p/table": "vocab embed", "p/head": "embed vocab", "tokens": "batch seq"}
    step = jax.value_and_grad(loss)
    options = {"mesh": MESH, "layout": "batch: model; vocab: data", "dims": dims}
    assert_as_unsharded(step, p, tokens, atol=1e-6, **options)
    plan = mp.plan(step, p, tokens, **options)
    assert Counter(c.op for c in plan.collectives if c.axes == ("data",)).keys() == {"all-reduce"}
    assert not any("vocab" in c.dims and "data" in c.axes for c in plan.collectives)


def definitions(a, q, x):
    """Functions that newer JAX traces to one primitive, which it replaces by its definition when it lowers."""
    rows, columns = jnp.nonzero(x > 0, size=12, fill_value=-1)
    return {
        "left": jnp.searchsorted(a, q),
        "right, by sorting": jnp.searchsorted(a, q, side="right", method="sort"),
        "batch": jax.vmap(jnp.searchsorted)(jnp.stack([a, a + 1]), q[:2]),
        "nonzero": (rows, columns),
        "frexp": jnp.frexp(x),
        "ldexp": jnp.ldexp(x, jnp.int32(3)),
    }


@pytest.mark.parametrize(
    ("layout", "lowering"), [("rows: data+model", "jit"), ("bins: data; columns: model", "shard_map")]
)
def test_composite_primitives(layout, lowering):
    a, q, x = np.sort(normal(16)), normal(8, 4), normal(8, 4)
    q[0], q[1, 0] = a[3], np.nan
    dims = {"a": "bins", "q": "rows columns", "x": "rows columns"}
    got = mp.jit(definitions, mesh=MESH, layout=layout, dims=dims, lowering=lowering)(a, q, x)
    assert np.array_equal(got["left"], np.searchsorted(a, q))
    assert np.array_equal(got["right, by sorting"], np.searchsorted(a, q, side="right"))
    assert np.array_equal(got["batch"], [np.searchsorted(a, q[0]), np.searchsorted(a + 1, q[1])])
    for ours, theirs in zip(got["nonzero"], np.nonzero(x > 0), strict=True):
        assert np.array_equal(ours, np.concatenate([theirs, np.full(12, -1)])[:12])
    for ours, theirs in zip(got["frexp"], np.frexp(x), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(got["ldexp"], np.ldexp(x, 3))


# -- every form of read and write, against the unsharded run

N, C, B = 16, 4, 4
SHAPES = {"x": (N, C), "b": (B, N, C), "u": (18, C)}
DIMS = {"x": "rows cols", "b": "batch rows cols", "u": "updates cols"}


def rows(x, i, size, mode):
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0,))
    return lax.gather(x, i[:, None], numbers, (size, C), mode=mode, fill_value=2.5)


def write_rows(op, x, i, u, mode):
    return op(x, i[:, None], u, lax.ScatterDimensionNumbers((1, 2), (), (0,)), mode=mode)


def reads(x, b, u, i, j, s):
    one_each = jnp.arange(B)
    return {
        "vector": [x[i], x[i.reshape(2, 3)], x[:, j], jnp.take(x, i.astype(jnp.int8), 0, mode="clip")],
        "modes": [x.at[i].get(mode=m, fill_value=2.5) for m in ("fill", "clip")],
        "two columns": [x.at[i, j].get(mode=m, fill_value=-1.5) for m in ("fill", "clip")],
        "scalar": [x[s], x[s, j[0]], b[:, s], lax.dynamic_index_in_dim(x, s, 0)],
        "slices": [lax.dynamic_slice_in_dim(x, s, n, 0) for n in (1, 3, 4, 9, 16)],
        "slice of both": lax.dynamic_slice(x, (s, j[0]), (3, 2)),
        "one array": jax.vmap(lambda s: lax.dynamic_slice_in_dim(x, s, 3))(i),
        "batch": [jax.vmap(lambda b, s: lax.dynamic_slice_in_dim(b, s, n))(b, i[:B]) for n in (1, 9)],  # noqa: B023
        "pairs": [b[one_each, i[:B] % N], jnp.take_along_axis(b, (i[:B] % N)[:, None, None], 1)],
        "windows": [rows(x, i, n, m) for n in (1, 6) for m in ("clip", "fill")],
    }


def writes(x, b, u, i, j, s):
    one_each, distinct = jnp.arange(B), (jnp.arange(6) * 5 + i[0]) % N
    v = u[:6]
    return {
        "set": [x.at[distinct].set(v), x.at[distinct].set(v, unique_indices=True), x.at[s].set(v[0], mode="drop")],
        "add": [x.at[i].add(v), x.at[i].add(v, mode="clip"), x.at[s].add(v[0]), x.at[s].add(v[0], mode="clip")],
        "two columns": [x.at[i, j].add(v[:, 0], mode=m) for m in ("drop", "clip")],
        "unique": [x.at[distinct].multiply(v, unique_indices=True), x.at[distinct].add(v, unique_indices=True)],
        "columns": x.at[:, j].add(u[:N, :1], mode="drop"),
        "updates": [lax.dynamic_update_slice_in_dim(x, u[:n], s, 0) for n in (1, 3, 4, 9, 16)],
        "update of both": lax.dynamic_update_slice(x, u[:3, :2], (s, j[0])),
        "batch": [jax.vmap(lambda b, s: lax.dynamic_update_slice_in_dim(b, u[:n], s, 0))(b, i[:B]) for n in (1, 9)],  # noqa: B023
        "pairs": [b.at[one_each, i[:B]].set(u[:B], mode="drop"), b.at[one_each, i[:B]].add(u[:B], mode="clip")],
        "windows": [write_rows(lax.scatter_add, x, i, u.reshape(6, 3, C), m) for m in ("clip", "drop")],
    }


def overwrites(x, b, u, i, j, s):
    """Writes without a gradient in JAX: their indices are not unique, or their order matters."""
    scatters = (lax.scatter, lax.scatter_min, lax.scatter_max, lax.scatter_mul, lax.scatter_sub)
    return {
        "modes": [write_rows(op, x, i, u.reshape(6, 3, C), m) for op in scatters for m in ("clip", "drop")],
        "methods": [getattr(x.at[i], m)(u[:6]) for m in ("set", "min", "max", "multiply", "subtract")],
        "one": [getattr(x.at[s], m)(u[0]) for m in ("set", "min", "max", "multiply", "subtract")],
    }


def with_gradients(f):
    def run(x, b, u, i, j, s):
        out, pull = jax.vjp(lambda x, b, u: f(x, b, u, i, j, s), x, b, u)
        return out, pull(jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape), out))

    return run


def negative_zeros(rng, *shape):
    """Multiples of 1/4, with negative zeros and a NaN with a payload."""
    x = rng.integers(-8, 8, shape).astype(np.float32) / 4
    x[x == 0] = -0.0
    x.reshape(-1).view(np.uint32)[5] = 0x7FC12345
    return x


PROGRAMS = {"reads": with_gradients(reads), "writes": with_gradients(writes), "overwrites": overwrites}
UNSHARDED = {name: jax.jit(step) for name, step in PROGRAMS.items()}
LAYOUTS = [
    "rows: data+model",
    "batch: data; rows: model",
    "updates: model; rows: data; cols: model",
    "rows: model; cols: data",
]


@pytest.mark.parametrize(
    ("name", "layout", "lowering"),
    [
        *covering.each(["reads", "writes"] * 2, LAYOUTS, ["shard_map"]),
        *covering.each(["writes", "reads", "overwrites", "overwrites"], LAYOUTS, ["jit", "jit", "shard_map", "jit"]),
    ],
)
def test_reads_and_writes_equal_the_unsharded_run(name, layout, lowering):
    rng = np.random.default_rng(LAYOUTS.index(layout))
    arrays = [negative_zeros(rng, *shape) for shape in SHAPES.values()]
    i, j, s = (rng.integers(-n - 2, n + 3, shape).astype(np.int32) for n, shape in ((N, 6), (C, 6), (N, ())))
    run = mp.jit(PROGRAMS[name], mesh=MESH, layout=layout, dims=DIMS, lowering=lowering)
    got, want = run(*arrays, i, j, s), UNSHARDED[name](*arrays, i, j, s)
    values, expected = (got, want) if name == "overwrites" else (got[0], want[0])
    for (path, a), b in zip(jax.tree.leaves_with_path(values), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if "updates" in layout:  # results are added over devices, on CPUs from +0.0 on
            a, b = (np.where(x == 0, np.zeros((), x.dtype), x) for x in (a, b))
        assert a.tobytes() == b.tobytes(), path
    if name != "overwrites":
        assert_close(got[1], want[1], 1e-5, 1e-5)


def test_indices_of_every_integer_type():
    """For more rows than the dtype can count, and for indices beyond the largest int32."""
    x = np.arange(512, dtype=np.float32).reshape(256, 2)
    read = lax.GatherDimensionNumbers((1,), (0,), (0,))
    write = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    indices = {
        "int8": np.array([1, 100, -3, 127], np.int8),
        "uint8": np.array([1, 200, 255, 0], np.uint8),
        "int16": np.array([300, -300, 255, 7], np.int16),
        "uint32": np.array([2**32 - 1, 2**31, 255, 7], np.uint32),
    }
    wide = {
        t: np.clip(i.astype(np.int64), -1000, 1000).astype(np.int32) for t, i in indices.items()
    }  # XLA's int8 wraps

    def step(x, indices):
        return {
            (t, mode): (
                lax.gather(x, i[:, None], read, (1, 2), mode=mode, fill_value=0.5),
                lax.scatter_add(x, i[:, None], jnp.full((4, 2), 0.25), write, mode=mode),
            )
            for t, i in indices.items()
            for mode in ("clip", "fill")
        }

    want = jax.jit(step)(x, wide)
    for lowering in LOWERINGS:
        run = mp.jit(step, mesh=MESH, layout="rows: data+model", dims={"x": "rows _"}, lowering=lowering)
        assert_close(run(x, indices), want, 0, 0)


def test_a_function_applied_to_elements():
    """A scatter whose meaning is a function in its parameters: elements that a device does not own are unchanged."""

    def step(x, b, i, s):
        square = jnp.square
        return {
            "constant": [x.at[at].apply(square) for at in (3, -1, slice(5, 6), slice(1, 9))],
            "columns": [x.at[..., -1].apply(jnp.sin), x.at[:, jnp.array([1])].apply(square)],
            "run-time": [x.at[s].apply(square), x.at[s, i[0]].apply(square), b.at[:, s].apply(square)],
            "modes": [x.at[k].apply(square, mode=m) for m in ("drop", "clip") for k in (s + N, s - 2 * N)],
            "several": [x.at[i].apply(square, unique_indices=True), x.at[i].apply(lambda v: v * 2 + 1)],
            "batch": jax.vmap(lambda r, k: r.at[k].apply(square))(b, i),
        }

    x, b, i, s = *map(jnp.asarray, (normal(N, C), normal(B, N, C))), np.array([3, 9, 2, 14], np.int32), np.int32(5)
    dims = {name: DIMS[name] for name in "xb"}
    expected = jax.jit(step)(x, b, i, s)
    for layout, lowering in zip(("rows: data+model", "rows: data; cols: model"), LOWERINGS, strict=True):
        run = mp.jit(step, mesh=MESH, layout=layout, dims=dims, lowering=lowering)
        assert_close(run(x, b, i, s), expected, 1e-6, 0)


def test_dtypes_without_addition_or_zero():
    """Random keys, one-byte floats (``float8_e8m0fnu`` has no zero), booleans and complex numbers."""
    bits = np.arange(32, dtype=np.uint8).reshape(8, 4) * 8 + 1
    xs = {
        "keys": jax.random.split(jax.random.key(0), (8, 4)),
        "e8m0": bits.view(jnp.float8_e8m0fnu),
        "bool": bits % 3 == 0,
        "bfloat16": np.full((8, 4), -0.0, jnp.bfloat16),
        "complex": np.full((8, 4), complex(-0.0, 1), np.complex64),
    }

    def step(xs, i, s):
        def each(x):
            reads = [x[i], x[s], x[3], lax.dynamic_slice_in_dim(x, s, 3), x[i].T]
            return [*reads, x.at[i].set(x[:3]), x.at[s].set(x[0]), lax.dynamic_update_slice_in_dim(x, x[:3], s, 0)]

        return {name: each(x) for name, x in xs.items()}, xs["e8m0"][i].astype(jnp.float32)

    args = xs, np.array([6, 1, 4], np.int32), np.int32(4)
    want = jax.tree.leaves(jax.jit(step)(*args))
    for lowering in LOWERINGS:
        run = mp.jit(step, mesh=MESH, layout="rows: data", dims={"xs/*": "rows cols"}, lowering=lowering)
        for (path, a), b in zip(jax.tree.leaves_with_path(run(*args)), want, strict=True):
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


# -- bytes that are sent

SENT = {  # (function, name of the dim of updates and indices, bytes sent, before the factor of 3/4 for 4 devices)
    "update": (lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i[0], 0), "rows", 8 * 32 * 4),
    "set": (lambda x, u, i: x.at[i].set(u), "new", 0),
    "add": (lambda x, u, i: x.at[i].add(u), "new", 0),
    "one": (lambda x, u, i: x.at[i[0]].set(u[0]), "new", 0),
    "queue": (lambda x, u, i: x.at[(i[0] + jnp.arange(8)) % 64].set(u), "new", 0),
    "slice": (lambda x, u, i: lax.dynamic_slice_in_dim(x, i[0], 8, 0), "new", 2 * 8 * 32 * 4),
    "take": (lambda x, u, i: x[i], "new", 2 * 8 * 32 * 4),
    "most of it": (lambda x, u, i: lax.dynamic_slice_in_dim(x, i[0], 48, 0), "new", 64 * 32 * 4),
    "set by batch": (lambda x, u, i: x.at[i].set(u), "batch", 8 * 33 * 4),
    "take by batch": (lambda x, u, i: x[i] * 2, "batch", 2 * 8 * 32 * 4),
}


@pytest.mark.parametrize(
    ("name", "layout"), [(n, "batch: data; rows: data" if "batch" in n else "rows: data") for n in SENT]
)
def test_bytes(name, layout):
    """Writes send sharded updates only; reads send the elements that are read, or the array if it is smaller."""
    f, dim, volume = SENT[name]
    dims = {"x": "rows cols", "u": f"{dim} cols", "i": "new" if dim == "rows" else dim}
    rules = "; ".join(r for r in layout.split("; ") if r.split(":")[0] in (*dims["x"].split(), dim))
    x, u, i = np.zeros((64, 32), np.float32), np.zeros((8, 32), np.float32), np.arange(8, dtype=np.int32)
    _, planned, compiled = planned_and_compiled(f, x, u, i, layout=rules, dims=dims)
    assert planned == compiled
    assert sum(size * count for (_, size), count in compiled.items()) <= volume * 3 / 4


# -- decoding with a cache that is split by length


def attend(cache, q, mask):
    scores = jnp.where(mask, jnp.einsum("bhd,bshd->bhs", q, cache["k"]), -1e9)
    return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), cache["v"])


def one_position(cache, new, q, position):
    cache = {n: lax.dynamic_update_slice(cache[n], new[n][:, None], (0, position, 0, 0)) for n in cache}
    return attend(cache, q, jnp.arange(cache["k"].shape[1]) <= position), cache


def position_of_each(cache, new, q, positions):
    write = jax.vmap(lambda c, x, p: lax.dynamic_update_slice(c, x[None], (p, 0, 0)))
    cache = {n: write(cache[n], new[n], positions) for n in cache}
    return attend(cache, q, jnp.arange(cache["k"].shape[1]) <= positions[:, None, None]), cache


def row_of_each(cache, new, q, positions):
    cache = {n: cache[n].at[jnp.arange(len(positions)), positions].set(new[n]) for n in cache}
    return attend(cache, q, jnp.arange(cache["k"].shape[1]) <= positions[:, None, None]), cache


@pytest.mark.parametrize(
    ("step", "layout", "lowering"),
    covering.each(
        [one_position, position_of_each, row_of_each] * 2,
        ["cache: model", *["cache: data+model", "batch: data; cache: model"] * 2, "cache: model"],
        LOWERINGS,
    ),
)
def test_decoding_with_a_cache_that_is_split_by_length(step, layout, lowering):
    """The cache is written without communication; the softmax sends statistics and outputs."""
    b, s, h, d = 4, 32, 2, 8
    cache = {n: normal(b, s, h, d) for n in "kv"}
    new = {n: normal(b, h, d) for n in "kv"}
    q, position = normal(b, h, d), np.array([5, 31, 0, 17], np.int32)
    position = position[1] if step is one_position else position
    dims = {"cache/*": "batch cache heads head_dim", "new/*": "batch heads head_dim", "q": "batch heads head_dim"}
    if step is not one_position:
        dims["positions"] = "batch"
    run = mp.jit(step, mesh=MESH, layout=layout, dims=dims, lowering=lowering)
    (out, after), (want, expected) = run(cache, new, q, position), jax.jit(step)(cache, new, q, position)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    for n in cache:
        np.testing.assert_array_equal(after[n], expected[n])
        assert after[n].sharding.shard_shape(after[n].shape)[1] < s
    sent = run.plan(cache, new, q, position).collectives
    assert {c.op for c in sent} == {"all-reduce"}
    assert {c.shape for c in sent} <= {(b, h), (b, h, 1), (b, h, d)}


@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
def test_ops_after_a_read_keep_the_sign_of_zero(lowering):
    """A device without the element contributes -0.0; a negation before the reduction would make it +0.0."""
    x = jnp.zeros((16, 4)).at[3].set(-0.0)

    def reads(x, i):
        return 1 / -x[i], 1 / (x[i] * -2), 1 / jax.lax.dynamic_update_slice_in_dim(x, -x[:1], i, 0)

    run = mp.jit(reads, mesh=MESH, layout="batch: data", dims={"x": "batch embed"}, lowering=lowering)
    for i in (3, 5):
        for got, want in zip(run(x, i), reads(x, i), strict=True):
            np.testing.assert_array_equal(got, want)
