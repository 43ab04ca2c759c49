"""Workarounds: each names its test, and the compiler still has the defect that it works around."""

import ast
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from same_results import assert_close

import meshpar as mp
from meshpar._src import passes
from meshpar._src.compat import quirks
from meshpar._src.compat.quirks import QUIRKS
from meshpar._src.lower import shard_map
from meshpar._src.lower.collectives import scattered
from meshpar._src.passes import barriers
from meshpar._src.plan.steps import Run

FIXED = "the compiler is fixed: meshpar._src.compat.quirks says what can be removed"
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")


STATEMENTS = ast.parse(Path(quirks.__file__).read_text()).body
TEXTS = {
    ast.unparse(constant.targets[0]): text.value.value
    for constant, text in itertools.pairwise(STATEMENTS)
    if isinstance(constant, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
}
"""Constant of :mod:`compat.quirks` → the text after it."""


@pytest.mark.parametrize("quirk", QUIRKS)
def test_a_workaround_names_its_test_the_compiler_and_when_it_can_be_removed(quirk):
    path, _, name = QUIRKS[quirk].partition("::")
    assert f"def {name}(" in (Path(__file__).parents[2] / path).read_text()
    assert re.search(
        r"^In [^;]*\b(?:libtpu|jax) \d+\.\d+[^;]*;\s+the\s+workaround\s+can\s+be\s+removed\s", TEXTS[quirk], re.M
    )


def compiled_to(shape, dim, scatter):
    """The collectives of a TPU program that reduce-scatters a bfloat16 array over 4 devices."""
    spec = P(*["a" if i == dim else None for i in range(len(shape))])
    mesh = mp.mesh("b=4, a=4", topology="v5e:4x4")  # over one torus dim
    run = jax.shard_map(lambda x: scatter(2 * x), mesh=mesh, in_specs=P(), out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.sharding.NamedSharding(mesh, P()))
    return [c.op for c in mp.compile(jax.jit(run), x, mesh=mesh).final_collectives]


@needs_libtpu
@pytest.mark.parametrize(("shape", "dim"), [((2048, 4, 128), 0), ((1792, 512), 1), ((1, 2048, 256), 1)])
def test_scatters_that_the_tpu_compiler_makes_all_reduces(shape, dim):
    plain = compiled_to(shape, dim, lambda x: lax.psum_scatter(x, "a", scatter_dimension=dim, tiled=True))
    assert plain == ["all-reduce"], FIXED
    assert compiled_to(shape, dim, lambda x: scattered(x, ("a",), dim, "native", {"a": 4})) == ["reduce-scatter"]


@needs_libtpu
@pytest.mark.slow
def test_transposes_that_the_compiler_moves_through_elementwise_ops(monkeypatch):
    """Without constraints, exponentials of an attention are computed in both dim orders of its matmuls."""

    def loss(q, k, v):
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k).astype(jnp.float32) * 0.1
        p = jax.nn.softmax(scores, -1).astype(q.dtype)
        return jnp.einsum("bkgqs,bskd->bqkgd", p, v).astype(jnp.float32).sum()

    def exponentials():
        grad = jax.grad(jax.checkpoint(loss), (0, 1, 2))
        options = {"layout": "batch: data", "dims": {"*": "batch ..."}, "lowering": "shard_map"}
        q, k = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((8, 256, 2, 2, 128), (8, 256, 2, 128)))
        c = mp.compile(grad, q, k, k, mesh="data=4", topology="v5e:2x2", **options)
        return len(re.findall(r" exponential\(", c.partitioned_text()))

    assert exponentials() == 1
    monkeypatch.setattr(shard_map, "constrain_local", lambda x: x)
    assert exponentials() == 2, FIXED


def test_a_slice_of_a_slice_stays_within_it():
    """A row that is added to an array that the program holds: its devices read no row behind their own."""
    x = jnp.arange(12.0)
    merged = jax.jit(lambda i, j: lax.dynamic_slice(lax.dynamic_slice(x, (i,), (3,)), (j,), (1,)))(3, 3)
    assert float(merged[0]) == (6 if jax.__version_info__ < (0, 11) else 5), FIXED

    table, row = np.arange(24, dtype=np.float32).reshape(6, 4), np.arange(4, dtype=np.float32)

    def f(v):
        return v + table, jnp.take(v, jnp.asarray(3), axis=0) * 0.5

    def with_gradient(f, v):
        out, back = jax.vjp(f, v)
        return *out, *back((table, row))

    want = table.copy()
    want[3] += row / 2
    for lowering in ("jit", "shard_map"):
        options = {"mesh": "x=2, y=2, idle=2", "layout": "f: x", "dims": {"*": "f _"}, "lowering": lowering}
        inside = mp.jit(lambda v: with_gradient(f, v), **options)
        outside = mp.jit(f, **options)
        for run in (inside, jax.jit(lambda v, outside=outside: with_gradient(outside, v))):
            np.testing.assert_array_equal(run(table)[-1], want)
        added = mp.jit(lambda v: v * 0 - (table + jnp.zeros((6, 4)).at[3].add(row)), **options)
        np.testing.assert_array_equal(added(table), -(table + np.eye(6)[3][:, None] * row))


def test_a_batched_sum_of_which_one_axis_is_scattered():
    x = np.random.default_rng(0).integers(-4, 5, (16, 12)).astype(np.float32)
    want = (x * x).sum(1)
    mesh = mp.mesh("x=2, y=2, z=2")
    made, kept = NamedSharding(mesh, P("z", ("x", "y"))), NamedSharding(mesh, P(("z", "x")))
    plain = jax.jit(lambda x: jnp.einsum("ab,ab->a", x, x), in_shardings=made, out_shardings=kept)
    assert np.any(np.asarray(plain(x)) != want), FIXED
    for lowering in ("jit", "shard_map"):
        options = {"mesh": mesh, "layout": "f: x+y; g: z+x", "dims": {"x": "g f"}, "lowering": lowering}
        step = mp.jit(lambda x: jnp.einsum("ab,ab->a", x, x), **options)
        np.testing.assert_array_equal(step(x), want)
        found = jax.grad(lambda x, step=step: step(x).sum())(x)
        np.testing.assert_array_equal(found, 2 * x)
        later = mp.jit(lambda x: jnp.einsum("ab,ab->a", x, x) * 0.5, **options)  # the sum is combined behind another op
        np.testing.assert_array_equal(later(x), want / 2)


def test_one_element_with_a_long_stride():
    x = np.random.default_rng(0).integers(-8, 9, (2, 8)).astype(np.float32)
    mesh = mp.mesh("x=2, y=4")
    split = NamedSharding(mesh, P("x"))
    plain = jax.jit(lambda x: lax.with_sharding_constraint(x, split)[1::3], out_shardings=NamedSharding(mesh, P()))
    assert np.any(np.asarray(plain(x)) != x[1::3]), FIXED
    for lowering in ("jit", "shard_map"):
        step = mp.jit(
            lambda x, w: ((x @ w)[1::3], (x @ w).reshape(16), x[:1, 1::7]),  # the second is split, and so the product is
            mesh=mesh, layout="f?: x+y", dims={"x": "f _"}, lowering=lowering,
        )  # fmt: skip
        row, whole, one = step(x, np.eye(8, dtype=np.float32))
        np.testing.assert_array_equal(one, x[:1, 1::7])
        np.testing.assert_array_equal(row, x[1::3])
        np.testing.assert_array_equal(whole, x.reshape(16))


@pytest.mark.filterwarnings("ignore::meshpar.errors.JoinWarning")
def test_a_matmul_over_axes_in_another_order_than_the_mesh():
    """A matmul whose result is sharded over ``y+x``, on a mesh with ``x`` before ``y``: by plain ``jax.jit``, and in a loop."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 8, 8)).astype(np.float32)
    mesh = mp.mesh("x=2, y=2, z=2")

    def sharded(*axes):
        return NamedSharding(mesh, P(*axes))

    def plain(a, b):
        b = lax.with_sharding_constraint(b, sharded("z", None))
        return lax.with_sharding_constraint(a.T @ b, sharded("z", ("y", "x")))

    placed = [jax.device_put(v, sharded("z", ("y", "x"))) for v in (a, b)]
    assert np.abs(jax.jit(plain)(*placed) - a.T @ b).max() > 1, FIXED

    def step(x, weights):
        """A loop over matmuls, and the gradient of its weights."""

        def run(weights):
            out = lax.scan(lambda c, w: (c @ (w / (1 + (w * w).sum(1, keepdims=True))), None), x, weights)[0]
            return jnp.sin(out).sum(), out

        return jax.grad(run, has_aux=True)(weights)

    weights = rng.normal(size=(3, 8, 8)).astype(np.float32)
    want = jax.jit(step)(a, weights)
    for lowering in ("jit", "shard_map"):
        run = mp.jit(
            step, mesh=mesh, layout="c, f: z; d: y+x", dims={"x": "c d", "weights": "_ d f"}, lowering=lowering
        )
        assert_close(run(a, weights), want, 1e-4, 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_nan_in_an_extremum_over_devices(dtype):
    """One NaN in a column, as the first and as the last row of a device; infinities and zeros of both signs as without a layout."""
    x = np.random.default_rng(0).normal(size=(16, 8))
    x[3, 0], x[4, 1], x[0, 2], x[15, 3], x[:, 4], x[::2, 5], x[:, 6] = *(np.nan,) * 4, -np.inf, np.inf, -0.0
    x = x.astype(dtype)
    mesh = mp.mesh("data=4, idle=2")
    plain = jax.shard_map(lambda x: lax.pmax(x.max(0), "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    lost = not np.isnan(np.asarray(jax.jit(plain)(x)).astype(float)[:4]).all()
    assert lost or dtype != "float32", FIXED

    def extrema(x):
        return x.max(0), x.min(0), jnp.abs(x).max(), jnp.maximum(x, 0).max(0)

    for lowering in ("jit", "shard_map"):
        step = mp.jit(extrema, mesh=mesh, layout="batch: data", dims={"x": "batch _"}, lowering=lowering)
        for got, want in zip(step(x), jax.jit(extrema)(x), strict=True):
            np.testing.assert_array_equal(np.asarray(got).astype(float), np.asarray(want).astype(float))
        if dtype == "float32":
            y = np.nan_to_num(x, neginf=-9, posinf=9)
            gradients = [jax.grad(lambda y, f=f: (f(y)[0] * np.arange(8)).sum())(y) for f in (step, extrema)]
            np.testing.assert_allclose(*gradients, rtol=1e-6)


def alone(*arguments):
    """A Python process with this package, which its compiler may abort."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "NPROC": "2", "XLA_FLAGS": quick.FLAGS, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300)


MANY_CALLS = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import numpy as np
from jax import lax
import meshpar as mp

def step(w, x):
    y = lax.cond(x.sum() > 0, lambda: x @ w, lambda: (x @ w.T) * 2)
    y = lax.while_loop(lambda s: (s[0] < 2) & (s[1].sum() < 1e9), lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, y))[1]
    return w - 0.01 * (x.T @ y), (x * 2 @ w).sum()

w, x = np.eye(16, dtype=np.float32), np.ones((8, 16), np.float32)
mesh, layout, dims = mp.mesh("data=4, model=2"), "batch: data; embed: model", {"x": "batch embed", "w": "embed _"}
for lowering in ("shard_map", "jit"):
    for donated in (None, "w"):
        run = mp.jit(step, mesh=mesh, layout=layout, dims=dims, lowering=lowering, donate_argnames=donated)
        alone = jax.jit(step)
        mine, at = run.put(w, x)
        theirs = w
        for _ in range(150):
            mine, total = run(mine, at)
        for _ in range(150):
            theirs, same = alone(theirs, x)
        np.testing.assert_allclose(total, same, rtol=1e-3)
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)
"""


@pytest.mark.slow
def test_many_calls_in_flight():
    """Some hundred calls without a wait, of programs with collectives in a conditional and a loop, on threads as few as devices."""
    done = alone("-c", MANY_CALLS)
    assert done.returncode == 0, done.stderr[-2000:]


DILATED = """
import jax
import numpy as np
from jax import lax
from meshpar._src.compat.quirks import not_a_group

rng = np.random.default_rng(0)
x, w = (rng.normal(size=s).astype(np.float32) for s in ((2, 8, 3, 8), (2, 8, 2, 16)))

def conv(x, padding, dilation=2):
    options = {"lhs_dilation": (dilation, 2), "dimension_numbers": lax.ConvDimensionNumbers(*[(1, 0, 2, 3)] * 3)}
    return jax.jit(lambda x: lax.conv_general_dilated(x, w, (1, 1), [padding, (2, 2)], **options))(x)

by_hand = conv(np.insert(x, [1, 2], 0, axis=2), (0, 0), 1)
np.testing.assert_allclose(conv(*not_a_group(x, 2, 2, 1, (0, 0), 2)), by_hand, rtol=1e-5, atol=1e-5)
print("equal", flush=True)
conv(x, (0, 0))
"""


def test_a_dilated_convolution_whose_operands_the_compiler_exchanges():
    done = alone("-c", DILATED)
    assert "equal" in done.stdout
    assert done.returncode < 0, FIXED


@pytest.mark.parametrize(("rows", "count"), [(1, 0), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_convolutions_with_few_rows_per_device(rows, count):
    """An upsampling convolution, and random strides, dilations, paddings and kernels, with both gradients."""
    done = alone(str(Path(__file__).parents[1] / "helpers" / "convolution_cases.py"), str(rows), "0", str(count))
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])


@needs_libtpu
def test_a_matmul_of_one_row_is_computed_with_eight():
    shapes = jax.ShapeDtypeStruct((1, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((2048, 1024), jnp.int8)

    def project(x, w):
        return x @ w.astype(jnp.bfloat16)

    mesh = mp.mesh("model=8", topology="v6e:2x4")
    args = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, P())) for s in shapes]
    plain = mp.compile(jax.jit(project), *args, mesh=mesh, effort="fast").as_text()
    assert "convolution(" not in plain, FIXED
    ours = mp.compile(project, *shapes, mesh=mesh, layout="", dims={}, effort="fast").as_text()
    assert "convolution(" in ours


@pytest.mark.parametrize(
    ("spec", "left", "right"),
    [
        ("bse,ehd->bshd", (1, 1, 64), (64, 4, 32)),
        ("em,be->mb", (64, 96), (1, 64)),
        ("kbe,kem->kbm", (3, 1, 64), (3, 64, 32)),
    ],
)
def test_rows_that_are_added_change_no_result(spec, left, right, monkeypatch):
    monkeypatch.setattr(passes, "PASSES", (passes.Pass(barriers.pad_rows),))
    monkeypatch.setattr(barriers, "MIN_SINGLE_ROW_ELEMENTS", 1)
    left, right = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in (left, right))
    step = mp.jit(lambda x, y: jnp.einsum(spec, x, y), mesh="data=2, model=4", layout="", dims={}, lowering="shard_map")
    runs = [s for s in step.plan(left, right).body.all_steps if isinstance(s, Run)]
    assert [s.rows for s in runs if s.op.primitive.family == "dot"] == [8]
    np.testing.assert_allclose(step(left, right), np.einsum(spec, left, right), atol=1e-4)
