"""Slices, concatenations and reshapes of split dims stay split: equal to the unsharded run, with few bytes sent."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowered import assert_sends_the_plan

import meshpar as mp

JAX_012 = jax.__version_info__ >= (0, 12)
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
LAYOUT = "rows: data; columns: model"
DIMS = {"x": "rows columns"}
BOTH = ("jit", "shard_map")
ROW = 4 * 8 // 2  # bytes of a shard of one row
AROUND = [(i, (i + 1) % 16) for i in range(16)]


def over_rows(fn):
    return jax.vmap(fn, axis_name="i")


def around(x):
    return over_rows(lambda r: lax.ppermute(r, "i", AROUND))(x)


def heat(x):
    """A stencil on the interior of both dims."""
    inner = x[1:-1, 1:-1] * 4 - x[2:, 1:-1] - x[:-2, 1:-1] - x[1:-1, 2:] - x[1:-1, :-2]
    return jnp.sum(jnp.square(inner))


def moved_in_a_loop(x):
    def one(x, _):
        return 0.5 * (jnp.roll(x, 1, 0) + around(x)), None

    return lax.scan(one, x, None, length=3)[0]


def second_difference(x):
    d = x[1:] - x[:-1]
    return jnp.mean(jnp.abs(d[1:] - d[:-1]))


def by_row(x):
    y = jnp.tanh(x[1:])
    return jnp.sum(jnp.square(y - y.mean(1)[:, None]) * jnp.arange(15.0)[:, None])


WITH_BYTES = {  # and the bytes that each device sends, except for scalars
    "roll": (lambda x: jnp.roll(x, 1, 0), ROW), "roll back": (lambda x: jnp.roll(x, -3, 0), 3 * ROW),
    "ppermute": (around, ROW),
    "permuted": (lambda x: x[np.arange(16)[::-1]], 4 * ROW), "looked up": (lambda x: x[jnp.array([3, 1, 2, 9])], 2 * ROW),
    "difference": (lambda x: jnp.sum(jnp.square(x[1:] - x[:-1])), ROW), "diff": (lambda x: jnp.sum(jnp.diff(x, axis=0) ** 2), ROW),
    "second difference": (second_difference, 2 * ROW), "every third": (lambda x: jnp.max(x[::3]), 2 * ROW),
    "some rows": (lambda x: jnp.sum(jnp.sin(x[2:9])), 2 * ROW), "by row": (by_row, ROW + 2 * 4 * 4 // 2),
    "shifted in zeros": (lambda x: x + jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]]), ROW),
    "wrapped": (lambda x: (p := jnp.pad(x, ((1, 1), (0, 0)), mode="wrap"))[2:] + p[:-2] - 2 * x, 2 * ROW),
    "halves exchanged": (lambda x: jnp.concatenate([x[8:], x[:8]]), 4 * ROW), "in a loop": (moved_in_a_loop, 6 * ROW),
    "vdot": (lambda x: jnp.vdot(x, x), 0), "moved in zeros": (lambda x: jnp.pad(x[:-2], ((1, 1), (0, 0))) + x, ROW),
    "interior": (lambda x: jnp.pad(x[2:] + x[:-2] - 2 * x[1:-1], ((1, 1), (0, 0))), 4 * ROW),
}  # fmt: skip
OTHERS = {
    "stencil": heat, "extrema": lambda x: (jnp.max(x[2:9], 0), jnp.min(x[::3], 1), jnp.prod(x[1:], 0)),
    "matmuls": lambda x: (x[1:].T @ x[:-1], jnp.einsum("ab,ab->a", x[1:], x[:-1]).sum(), jnp.sin(x[1:] @ x.T).sum()),
    "returned": lambda x: x[1:] - x[:-1], "padded": lambda x: jnp.pad(jnp.sin(x[1:]), ((0, 1), (0, 0))) + x,
    "reversed": lambda x: (x[::-1][3:].sum(), jnp.flip(x[1:], 0).sum(0)),
    "ones": lambda x: (x[1:, None] * x[:-1, :, None]).sum((0, 1)).ravel(), "sorted": lambda x: jnp.sort(x[1:], 0) + x[:-1],
    "masked": lambda x: jnp.where(jnp.arange(15)[:, None] % 2 == 0, x[1:], 0).sum(0),
    "chosen": lambda x: lax.cond(x.sum() > 0, lambda x: jnp.roll(x, 2, 0), lambda x: x[::-1], x),
    "remade": lambda x: jax.checkpoint(lambda x: jnp.sum(jnp.tanh(x[1:] * x[:-1])))(x),
    "rectified": lambda x: jax.nn.relu(x[1:] - x[:-1]).sum(), "repeated": lambda x: x[jnp.array([0, 0, 5, 5, 0, 1, 2, 3])],
    "two dims of indices": lambda x: (x[np.array([[3, 1], [2, 5]])], x[:, np.array([[3, 1], [2, 5]])]),
    "part of merged": lambda x: jnp.ravel(x)[:5] * jnp.ravel(x)[-5:], "bits": lambda x: jnp.any(x[1:] > 2, 0),
}  # fmt: skip


def loss_of(results):
    """A scalar of results, with a different weight per element; gradients are as large as the results."""

    def weighted(y):
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return weights * jnp.sin(jnp.float32(2**-8) * y) * 2**8  # sin(1000) is ill-conditioned

    return sum(jnp.sum(weighted(y)) for y in jax.tree.leaves(results))


def with_gradients(cases):
    """(array of each case, arguments of all) → gradients of the arrays, and the results."""

    def every(xs, *args):
        def total(xs):
            found = {name: fn(xs[name], *args) for name, fn in cases.items()}
            return loss_of(found), found

        return jax.grad(total, has_aux=True)(xs)

    return every


def assert_equals_the_unsharded_run(fn, *args, rtol=1e-5, atol=1e-5, mesh="data=4, model=2", **how):
    """In numbers, dtypes and signs of zeros; a difference has the name of its case."""
    got, want = mp.jit(fn, mesh=mesh, **how)(*args), jax.jit(fn)(*args)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, name
        a, b = (np.asarray(x, np.float32 if b.dtype == jnp.bfloat16 else b.dtype) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)
        if (
            JAX_012 and name == "[0]['by row']"
        ):  # there XLA multiplies the gradient after it has padded it: -0.0 in the unsharded run
            continue
        np.testing.assert_array_equal(np.signbit(a[b == 0]), np.signbit(b[b == 0]), err_msg=name)


@pytest.mark.parametrize("name", WITH_BYTES)
def test_only_missing_elements_are_sent(name):
    fn, sent = WITH_BYTES[name]
    plan = assert_sends_the_plan(fn, X, layout=LAYOUT, dims=DIMS)
    assert sum(c.total_bytes for c in plan.collectives if c.shape) == sent


@pytest.mark.parametrize(
    ("mesh", "layout", "lowering"),
    [("data=4, model=2", LAYOUT, "shard_map"), ("data=2, model=4", "rows: data+model", "jit")],
)
def test_results_and_gradients_equal_the_unsharded_run(mesh, layout, lowering):
    """Of all cases in one program, each with its own array."""
    cases = {name: fn for name, (fn, _) in WITH_BYTES.items()} | OTHERS
    xs = {name: X * (1 + k / 64) for k, name in enumerate(cases)}
    how = {"mesh": mesh, "layout": layout, "dims": {"xs/*": "rows columns"}, "lowering": lowering}
    assert_equals_the_unsharded_run(with_gradients(cases), xs, rtol=2e-4, atol=2e-5, **how)


def tripled_jvp(fn):
    """The function with three times its derivative."""
    call = jax.custom_jvp(fn)
    call.defjvp(lambda xs, ts: (fn(*xs), 3 * jax.jvp(fn, xs, ts)[1]))
    return call


def tripled_vjp(fn):
    call = jax.custom_vjp(fn)
    call.defvjp(lambda *xs: (fn(*xs), xs), lambda xs, g: jax.vjp(fn, *xs)[1](3 * g))
    return call


@pytest.mark.parametrize("call", [tripled_jvp, tripled_vjp, jax.checkpoint])
@pytest.mark.parametrize("inside", [False, True])
def test_views_that_enter_and_leave_calls_stay_split(call, inside):
    """As those of ``jax.jit`` do; a derivative from outside is that of the call's own rule."""
    difference, tail = call(lambda a, b: jnp.sin(a) - b), call(lambda a: a[1:] * 2)
    jitted = jax.jit(lambda a, b: jnp.sin(a) - b), jax.jit(lambda a: a[1:] * 2)

    def loss(x, difference=difference, tail=tail):
        return jnp.sum(difference(x[1:], x[:-1]) ** 2) + jnp.sum((tail(x) - x[:-1]) ** 2)

    how = {"mesh": "data=4, model=2", "layout": LAYOUT, "dims": DIMS, "lowering": "shard_map"}
    of = jax.grad if inside else lambda fn: fn
    run, plain = mp.jit(of(loss), **how), mp.jit(of(lambda x: loss(x, *jitted)), **how)
    assert run.plan(X).bytes_sent == plain.plan(X).bytes_sent < 8 * ROW
    gradient = run if inside else jax.grad(run)
    np.testing.assert_allclose(gradient(X), jax.grad(loss)(X), rtol=1e-5, atol=1e-5)
    if inside and call is jax.checkpoint:
        assert "opt-barrier" in run.lower(X).as_text("hlo")


def reductions_of_slices(n, u, b, h):
    """Reductions of indivisible slices of integers, booleans and narrow floats without an element equal to the identity."""
    below, above = -2 - abs(n), abs(n) + 2
    return {
        "max": (jnp.max(below[1:], 0), below[2:9].max(), u[1:].max(0), (-1 - abs(h))[1:].max(0)),
        "min": (jnp.min(above[1:], 0), (u | 8)[1:].min(0), (1 + abs(h))[1:].min(0)),
        "prod": (jnp.prod(n[2:7] | 1, 0), jnp.prod((u | 1)[1:], 0), jnp.prod((1 + (h > 0))[1:].astype(h.dtype), 0)),
        "sum": (n[1:].sum(0), u[1:].sum(0, dtype=u.dtype), b[1:].sum(0), n[1:].T @ n[1:]),
        "and": (lax.reduce_and(below[1:], (0,)), lax.reduce_and((u | 8)[1:], (0,)), jnp.all((b | True)[1:], 0)),
        "or": (lax.reduce_or(above[1:] << 1, (0,)), lax.reduce_or((u & 6)[1:], (0,)), jnp.any(b[1:] & False, 0)),
        "xor": (lax.reduce_xor(n[1:], (0,)), lax.reduce_xor(b[1:], (0,))),
        "first": (jnp.argmax(below[1:], 0), jnp.argmin((1 + abs(h))[1:], 0), jnp.argmax(b[1:], 0)),
        "padded": (jnp.pad(n[1:], ((0, 1), (0, 0)), constant_values=-7), ~b[1:][::-1]),
        "written": n[1:].at[3].set(n[0]).at[4:].multiply(3),
    }


@pytest.mark.parametrize("lowering", BOTH)
def test_padding_does_not_change_reductions_of_integers_and_booleans(lowering):
    rng = np.random.default_rng(2)
    n = rng.integers(-9, 9, (16, 8)).astype(np.int32)
    u, b = rng.integers(0, 16, (16, 8)).astype(np.uint8), rng.random((16, 8)) < 0.8
    h = jnp.asarray(rng.integers(-8, 9, (16, 8)) / 4, jnp.bfloat16)
    dims = dict.fromkeys("nubh", "rows columns")
    how = {"layout": LAYOUT, "dims": dims, "lowering": lowering}
    assert_equals_the_unsharded_run(reductions_of_slices, n, u, b, h, rtol=0, atol=0, **how)


ALONG_COLUMNS = {
    "sort": lambda y: jnp.sort(y, 1), "cumulative": lambda y: jnp.cumsum(y, 1), "largest": lambda y: lax.top_k(y, 3)[0],
    "first": lambda y: jnp.argmax(y, 1), "split": lambda y: jnp.split(y, 2, 1)[1], "slice": lambda y: y[:, 2:7:2],
    "dynamic slice": lambda y: lax.dynamic_slice(y, (0, 1), (15, 4)), "flip": lambda y: y[:, ::-1],
    "roll": lambda y: jnp.roll(y, 1, 1),
    "pad": lambda y: jnp.pad(y, ((0, 0), (1, 0))), "joined": lambda y: jnp.concatenate([y, y * 2], 1),
    "reshape": lambda y: y.reshape(15, 2, 4).swapaxes(1, 2),
    "softmax": jax.nn.softmax, "convolution": lambda y: lax.conv(y[:, None], jnp.ones((2, 1, 3)), (1,), "SAME"),
    "pooled": lambda y: lax.reduce_window(y, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "lowering"), covering.each(ALONG_COLUMNS, BOTH))
def test_ops_along_the_columns_of_15_rows_run_on_16(name, lowering):
    def step(x):
        return jnp.sum(ALONG_COLUMNS[name](jnp.sin(x[1:])).astype(jnp.float32), 0)

    how = {"mesh": "data=4, model=2", "layout": "rows: data", "dims": DIMS}
    assert {c.op for c in mp.plan(step, X, **how).collectives} == {"collective-permute", "all-reduce"}
    assert_equals_the_unsharded_run(step, X, lowering=lowering, **how)


@pytest.mark.parametrize("name", ["roll", "difference", "looked up", "vdot", "wrapped"])
def test_gradients_send_few_bytes(name):
    fn, sent = WITH_BYTES[name]
    plan = assert_sends_the_plan(jax.grad(lambda x: loss_of(fn(x))), X, layout=LAYOUT, dims=DIMS)
    assert sum(c.total_bytes for c in plan.collectives if c.shape) <= 5 * sent


def test_a_program_without_split_slices_is_not_rewritten():
    """And a replan starts from the traced program."""
    plan = mp.plan(lambda x: jnp.roll(x, 1, 0) + x, X, mesh="data=4, model=2", layout=LAYOUT, dims=DIMS)
    assert plan.program.original is not None
    replanned = plan.replan(layout="columns: model").program
    assert replanned is plan.program.original
    assert replanned.original is None


COLUMN_OF_ROW = np.random.default_rng(1).integers(-8, 8, 16)
OWN_ROWS = {
    "loss of labels": lambda x, i: -jax.nn.log_softmax(x)[jnp.arange(16), i].mean(),
    "flattened": lambda x, i: x.reshape(4, 4, 8)[jnp.arange(4)[:, None], jnp.arange(4)[None], i.reshape(4, 4)].sum(),
    "second": lambda x, i: x.T[i, np.arange(16)] * 2,
    "written": lambda x, i: x.at[jnp.arange(16), i].set(0.5),
    "added": lambda x, i: jnp.sin(x).at[np.arange(16), i].add(x[:, 0]),
    "largest": lambda x, i: x.at[jnp.arange(16), i].max(0.1),
    "in a loop": lambda x, i: lax.scan(
        lambda x, j: (x - jax.grad(lambda x: x[jnp.arange(16), (i + j) % 8].sum())(x), None), x, jnp.arange(3)
    )[0],
    "clipped": lambda x, i: x.at[jnp.arange(16), 3 * i].get(mode="clip"),
    "filled": lambda x, i: x.at[jnp.arange(16), 3 * i].get(mode="fill", fill_value=7.0),
    "remade": lambda x, i: jax.checkpoint(lambda x: jnp.exp(x)[jnp.arange(16), i].sum())(x),
}


@pytest.mark.parametrize("name", OWN_ROWS)
def test_a_lookup_in_its_own_row_gathers_no_row(name):
    fn = OWN_ROWS[name]
    dims = {"x": "rows _", "i": "rows"}
    for of in (fn, jax.grad(lambda x, i: jnp.sum(jnp.sin(fn(x, i))))):
        plan = assert_sends_the_plan(of, X, COLUMN_OF_ROW, layout="rows: data", dims=dims)
        assert not [c for c in plan.collectives if c.shape]


OTHER_ROWS = {
    "reversed": lambda x, i: x[jnp.arange(16)[::-1], i],
    "half": lambda x, i: x[jnp.arange(8), i[:8]],
    "all but the first": lambda x, i: x[jnp.arange(16) - 1, i],
    "modulo 4": lambda x, i: x[jnp.arange(16).astype("uint2"), i],
    "0 and 1": lambda x, i: x[jnp.arange(16).astype(bool).astype(int), i],
    "counted": lambda x, i: x[jnp.arange(16), jnp.arange(16) % 8],
    "of a slice": lambda x, i: x[:8][jnp.arange(8), jnp.arange(8)],
    "all of each": lambda x, i: x[jnp.arange(16)[:, None], i[None]],
    "sorted": lambda x, i: x[jnp.arange(16), i] + x[jnp.argsort(i), i],
}


@pytest.mark.parametrize(
    ("cases", "dims", "layout", "lowering"),
    [(OWN_ROWS, "rows _", "rows: data", "jit"), (OTHER_ROWS, "rows columns", LAYOUT, "shard_map")],
)
def test_lookups_in_own_and_other_rows_equal_the_unsharded_run(cases, dims, layout, lowering):
    """Of all cases in one program, with gradients."""
    how = {"layout": layout, "dims": {"xs/*": dims, "i": "rows"}, "lowering": lowering}

    def every(xs, i):
        return with_gradients(cases)(xs, i)

    assert_equals_the_unsharded_run(every, dict.fromkeys(cases, X), COLUMN_OF_ROW, **how)


LABELS = np.random.default_rng(2).integers(0, 8, (4, 16))
SLICED_LOOKUPS = {  # in x[4, 16, 8], whose second dim is split and sliced to 15
    "labels": (lambda x, y: jnp.take_along_axis(x[:, :-1], y[:, 1:, None], 2).sum(2), LABELS),
    "labels out of bounds": (lambda x, y: jnp.take_along_axis(x[:, :-1], y[:, 1:, None] * 2, 2, mode="fill", fill_value=3), LABELS),
    "labels of full rows": (lambda x, y: jnp.take_along_axis(x, y[:, :, None], 2)[:, 1:], LABELS),
    "a column": (lambda x, i: jnp.take(x[:, 1:], i, axis=2), np.array([5, 2, -1])),
    "columns of one index": (lambda x, i: x[:, :-1, i], np.int32(3)),
    "rows of a table": (lambda x, y: jnp.take(x[0], y[:, 1:], axis=0), LABELS),
    "added": (lambda x, y: jnp.ones((4, 15, 9)).at[jnp.arange(4)[:, None], jnp.arange(15), y[:, 1:]].add(x[:, 1:, 0]), LABELS),
    "written": (lambda x, y: x[:, :-1].at[:, :, y[0, 0]].set(7), LABELS),
    "largest": (lambda x, i: x[:, :-1].at[:, :, i].max(1), np.array([1, 1, 6])),
    "histogram": (lambda x, y: jnp.zeros(8).at[y[:, 1:]].add(x[:, :-1, 0]), LABELS),
    "product": (lambda x, y: jnp.full(8, 2.0).at[y[:, 1:]].multiply(lax.stop_gradient(x[:, :-1, 0])), LABELS),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    covering.each(SLICED_LOOKUPS, ["rows: data", "batch: model; rows: data", "batch: data; rows: model"]),
)
def test_lookups_in_sliced_dims_equal_the_unsharded_run(name, layout):
    fn, y = SLICED_LOOKUPS[name]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 8)), jnp.float32)
    dims = {"x": "batch rows columns", **({"y": "batch rows"} if y is LABELS else {})}

    def step(x, y):
        return fn(x, y), jax.grad(lambda x: jnp.sum(jnp.sin(fn(x, y))))(x)

    assert_equals_the_unsharded_run(step, x, y, layout=layout, dims=dims)


CONCATENATED = {
    "first row and a shift": lambda x: jnp.concatenate([x[:1] * 2, jnp.cos(x[:-1])]),
    "uneven": lambda x: jnp.concatenate([x[:3], jnp.cos(x[5:])]) * 3,
    "uneven, reduced": lambda x: jnp.sum(jnp.concatenate([x[:3], jnp.cos(x[5:])]) ** 2, 0),
    "three arrays": lambda x: jnp.concatenate([x[1:2], jnp.sin(x)[2:9], jnp.cos(x)[::2]]),
    "one array is not split": lambda x: jnp.concatenate([jnp.ones((2, 8)) * x[3, 0], x[2:]]),
    "running sums": lambda x: lax.associative_scan(jnp.add, x),
    "running products": lambda x: lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.cos(x), x))[
        1
    ],
    "running sums of 15": lambda x: lax.associative_scan(jnp.add, x[1:], reverse=True),
    "padded with -0": lambda x: lax.pad(x[1:], np.float32(-0.0), ((1, 0, 0), (0, 0, 0))),
    "shifted in -0": lambda x: lax.pad(x, np.float32(-0.0), ((2, -2, 0), (0, 0, 0))),
    "a row of -0": lambda x: jnp.concatenate([x[1:], jnp.full((1, 8), -0.0)]),
    "not a number elsewhere": lambda x: jnp.concatenate([x[:4], jnp.log(x - x)[4:8], -jnp.zeros_like(x[:8])]),
}


@pytest.mark.parametrize(("name", "layout"), covering.each(CONCATENATED, ["rows: data", "rows: data+model"]))
def test_concatenated_slices_of_several_arrays_equal_the_unsharded_run(name, layout):
    fn = CONCATENATED[name]

    def step(x):
        return fn(x), jax.grad(lambda x: jnp.sum(jnp.sin(fn(x))))(x)

    assert_equals_the_unsharded_run(step, X, rtol=2e-5, layout=layout, dims=DIMS)


INDICES = {"negative": -1, "past the end": 16, "in bounds": 3}


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_constant_indices_out_of_bounds(mode):
    """``lax.gather`` does not count negative indices from the end, as ``jnp`` does."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def rows(x):
        at = {name: np.array([[2], [index], [5], [0]], np.int32) for name, index in INDICES.items()}
        return {name: lax.gather(x, i, numbers, (1, 8), mode=mode, fill_value=0.5) for name, i in at.items()}

    found = mp.jit(rows, mesh="data=2, model=2", layout="rows: data", dims=DIMS, lowering="shard_map")(X)
    for name, index in INDICES.items():
        position = np.clip(index, 0, 15)
        want = X[[2, position, 5, 0]]
        want[1] = 0.5 if mode == "fill" and position != index else want[1]
        np.testing.assert_array_equal(found[name], want, err_msg=name)
