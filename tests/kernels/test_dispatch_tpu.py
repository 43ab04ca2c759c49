"""Rows sent straight to their place, in the TPU interpreter with race detection, on 4 devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import race_detection
from jax.sharding import PartitionSpec
from kernel_cases import by_experts, expert_layer, mesh_of

from meshpar_kernels import expert_dispatch, ragged_all_to_all
from meshpar_kernels._collective_ids import COLLECTIVE_IDS, MESH_AXES, collective_id
from meshpar_kernels.dispatch import tpu

P = PartitionSpec
A, N, M, H = 4, 40, 48, 128


def abstract_mesh(sizes, names):
    return jax.sharding.AbstractMesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def on_devices(f, arguments, results, names=("a", "b")):
    """`f` on the first 4 devices, of which `names` are the axes, major first."""
    spec, how = P(names), {"mesh": mesh_of(2, 2), "check_vma": False}
    return jax.jit(jax.shard_map(f, in_specs=(spec,) * arguments, out_specs=(spec,) * results, **how))


def simulated(run, *args, mode="on_wait"):
    with race_detection(dma_execution_mode=mode, random_seed=0):
        return jax.tree.map(np.asarray, jax.block_until_ready(run(*args)))


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def random_runs(seed, top):
    """Sizes [from, to], where each run begins at its sender (shuffled, with gaps), and where at its receiver."""
    r = np.random.default_rng(seed)
    size = r.integers(0, top, (A, A))
    size[1] = 0  # one device sends nothing, and nothing comes to another
    size[:, 2] = 0
    start, target = np.zeros((A, A), int), np.zeros((A, A), int)
    for i in range(A):
        order = r.permutation(A)
        start[i, order] = np.cumsum(size[i, order] + 1) - size[i, order] - 1
        order = r.permutation(A)
        target[order, i] = np.cumsum(size[order, i] + 1) - size[order, i] - 1
    return start, size, target


def exchange(operand, output, start, size, target, came, *, names=("a", "b"), **options):
    out, dropped = ragged_all_to_all(
        operand, output, start[0], size[0], target[0], came[0], axis_name=names, implementation="pallas", **options
    )
    return out, dropped[None]


def expected(operand, output, start, size, target, rows=N):
    """(output, rows that each device could not send), by NumPy."""
    operand, want = operand.reshape(A, N, -1), output.reshape(A, M, -1).copy()
    lost = np.zeros(A, int)
    for i, j in np.ndindex(A, A):
        s, n, t = start[i, j], size[i, j], target[i, j]
        sent = 0 if s < 0 or t < 0 else max(0, min(n, rows, N - s, M - t))
        lost[i] += max(n, 0) - sent
        want[j, t : t + sent] = operand[i, s : s + sent]
    return want.reshape(output.shape), lost


def ints(*arrays):
    return [np.asarray(a, np.int32) for a in arrays]


def test_ragged_all_to_all(monkeypatch):
    """Runs of none, one and several blocks, and what remains of them."""
    monkeypatch.setattr(tpu, "BLOCK_BYTES", 4 * H * 4)
    operand, output = draw(A * N, H), draw(A * M, H, seed=1)
    start, size, target = random_runs(2, 12)
    run = on_devices(exchange, 6, 2)
    got, dropped = simulated(run, operand, output, *ints(start, size, target, size.T), mode="eager")
    want, _ = expected(operand, output, start, size, target)
    np.testing.assert_array_equal(got, want)
    assert not dropped.any()


@pytest.mark.parametrize("names", [("b",), ("b", "a")])
def test_over_some_of_the_axes_in_any_order(names):
    """Equal to the definition by gathering everything."""
    operand, output = draw(A * N, 2, 128, dtype=jnp.bfloat16), draw(A * M, 2, 128, dtype=jnp.bfloat16, seed=1)
    start, size, target = random_runs(1, 9)
    group = 2 ** len(names)

    def both(operand, output, start, size, target):
        runs = start[0, :group], size[0, :group], target[0, :group], size[0, :group]
        return tuple(
            ragged_all_to_all(operand, output, *runs, axis_name=names, implementation=i)[0]
            for i in ("pallas", "reference")
        )

    got, want = simulated(on_devices(both, 5, 2), operand, output, *ints(start, size, target))
    np.testing.assert_array_equal(got, want)
    assert (want != output).any()


def test_what_does_not_fit_is_counted_and_nothing_is_written_past():
    """Runs past the end of operand and output, longer than `rows`, of negative size and from and to negative rows."""
    operand, output = draw(A * N, H), draw(A * M, H, seed=1)
    start = np.array([[0, 9, 38, 20], [-1, 0, 9, 39], [0, 8, 16, 24], [50, 0, 3, 0]])
    size = np.array([[2**30, 9, 5, 3], [4, 3, 0, 9], [8, 8, 8, -8], [1, 2, 7, 0]])
    target = np.array([[0, 40, 0, -2], [9, 0, 9, 47], [20, 9, 30, 0], [30, 30, 45, 0]])
    run = on_devices(functools.partial(exchange, rows=7), 6, 2)
    got, dropped = simulated(run, operand, output, *ints(start, size, target, 0 * size))
    want, lost = expected(operand, output, start, size, target, rows=7)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(dropped, lost)
    np.testing.assert_array_equal(lost, [2**30 - 7 + 2 + 3 + 3, 4 + 0 + 8, 1 + 1 + 1, 1 + 4])


@pytest.mark.parametrize(("implementation", "rows"), [("padded", None), ("padded", 4), ("reference", 4)])
def test_the_others_define_it_alike(implementation, rows):
    operand, output = draw(A * N, 3), draw(A * M, 3, seed=1)
    start, size, target = (np.random.default_rng(s).integers(-3, top, (A, A)) for s, top in ((0, 50), (1, 9), (2, 50)))
    target[:] = np.arange(A)[:, None] * 12 + np.random.default_rng(2).integers(0, 9, (A, A))  # runs that do not meet
    target[0, 1] = -1

    def one(operand, output, start, size, target):
        out, dropped = ragged_all_to_all(
            operand, output, start[0], size[0], target[0], 0 * size[0], axis_name=("a", "b"), rows=rows,
            implementation=implementation,
        )  # fmt: skip
        return out, dropped[None]

    got, dropped = on_devices(one, 5, 2)(operand, output, *ints(start, size, target))
    want, lost = expected(operand, output, start, size, target, rows=rows or N)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(dropped, lost)


@pytest.mark.parametrize("twice", [False, True])
def test_gradients(twice):
    """Rows come back; those of the output are kept where nothing came. A device that sends a row twice has NaN."""
    operand, output, read = draw(A * N, 128), draw(A * M, 128, seed=1), draw(A * M, 128, seed=2)
    start, size, target = random_runs(5, 9)
    if twice:
        start[0, 3], size[0, 3], size[0, 1] = start[0, 1], 2, 3

    def one(operand, output, read, *runs):
        def f(operand, output):
            return exchange(operand, output, *runs)[0]

        return jax.vjp(f, operand, output)[1](read)

    to_operand, to_output = simulated(on_devices(one, 7, 2), operand, output, read, *ints(start, size, target, size.T))
    want, kept = np.zeros((A, N, 128)), read.reshape(A, M, 128).copy()
    for i, j in np.ndindex(A, A):
        came = slice(target[i, j], target[i, j] + size[i, j])
        want[i, start[i, j] : start[i, j] + size[i, j]] = read.reshape(A, M, 128)[j, came]
        kept[j, came] = 0
    if twice:
        want[0] = np.nan
    np.testing.assert_array_equal(to_operand.reshape(A, N, 128), want)
    np.testing.assert_array_equal(to_output.reshape(A, M, 128), kept)


# -- tokens to their experts


T, K, E = 12, 2, 8  # tokens of each device, choices, experts
LOADS = {
    "uneven": np.minimum(np.random.default_rng(3).geometric(0.4, (A * T, K)) - 1, E),
    "single": np.tile([3, E], (A * T, 1)),
}
MATRICES = draw(E, H, H, seed=4) / 16


layer = functools.partial(expert_layer, experts=E, implementation="reference")


@pytest.mark.parametrize(
    ("load", "rows", "rounds", "carried", "mode"),
    [("uneven", 24, 1, True, "on_wait"), ("single", 5, 2, False, "eager")],
)
def test_to_the_experts_and_back(load, rows, rounds, carried, mode):
    """Equal rows, whole tiles (24 and 8 rows) or not, in several rounds, although what is not in use is never written."""
    expert = LOADS[load].astype(np.int32)
    x, weight = draw(A * T, H), draw(A * T, K, seed=1)
    run = on_devices(functools.partial(layer, rows=rows, rounds=rounds, carried=carried, exchange="pallas"), 4, 3)
    y, dropped, _ = simulated(run, x, expert, weight, MATRICES, mode=mode)
    want = by_experts(x, expert, weight, MATRICES)
    if load == "single":  # tokens without room in the last round
        want.reshape(A, T, H)[:, rows * rounds :] = 0
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(dropped[:, -1], [max(T - rows * rounds, 0) if load == "single" else 0] * A)


# -- what it refuses, and how it is traced


def trace(f, *shapes, check_vma=True):
    specs = {"in_specs": P(("a", "b")), "out_specs": P(("a", "b")), "check_vma": check_vma}
    return jax.eval_shape(jax.shard_map(f, mesh=mesh_of(2, 2), **specs), *shapes)


def one_run(x, implementation="pallas"):
    zero = jnp.zeros(A, jnp.int32)
    return ragged_all_to_all(
        x, jnp.zeros_like(x), zero, zero, zero, zero, axis_name=("a", "b"), implementation=implementation
    )[0]


def test_what_it_refuses():
    struct = jax.ShapeDtypeStruct
    with pytest.raises(NotImplementedError, match=r"float16; the kernel takes[^\n]*\n[^\n]*5 elements, which must be"):
        trace(one_run, struct((8, 5), jnp.float16))

    def dispatch(x, **how):
        return expert_dispatch(x, jnp.zeros((len(x), 1), int), experts=8, **how)[0]

    with pytest.raises(NotImplementedError, match=r"expert_dispatch: .*\n.*a row has 96 elements"):
        trace(lambda x: dispatch(x, axis_name=("a", "b"), exchange="pallas"), struct((8, 96), jnp.float32))
    with pytest.raises(ValueError, match=r"exchange must be one of .*, got 'xla'"):
        trace(lambda x: dispatch(x, exchange="xla"), struct((8, 128), jnp.float32))
    two = abstract_mesh((1,) * 6 + (2,), tuple("tuvwxyz"))

    def far(x):
        zero = jnp.zeros(2, jnp.int32)
        return ragged_all_to_all(x, x, zero, zero, zero, zero, axis_name="z", implementation="pallas_tpu")[0]

    with pytest.raises(NotImplementedError, match="'z' is not among the first 6 of the mesh"):
        jax.eval_shape(jax.shard_map(far, mesh=two, in_specs=P("z"), out_specs=P("z")), struct((8, 128), jnp.float32))


def test_types_of_what_varies_are_kept():
    """Under `check_vma=True`, forward and backward, with an operand that is the same on all devices."""
    got = trace(lambda x: jax.grad(lambda x: one_run(x, "pallas_tpu").sum())(x), jax.ShapeDtypeStruct((64, 128), "f"))
    assert got.shape == (64, 128)

    def same(x):
        return jax.grad(lambda w: one_run(jnp.broadcast_to(w, x.shape), "pallas_tpu").sum())(jnp.ones(128)) + x

    assert trace(same, jax.ShapeDtypeStruct((64, 128), "f")).shape == (64, 128)


def test_every_set_of_axes_has_a_barrier_of_its_own():
    found = []
    mesh = abstract_mesh((2, 2), ("a", "b"))

    def look(x):
        found.extend(collective_id("ragged_all_to_all", axes) for axes in (("a",), ("b",), ("a", "b"), ("b", "a")))
        return x

    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=P(), out_specs=P()), jax.ShapeDtypeStruct((8,), "f"))
    first = COLLECTIVE_IDS["ragged_all_to_all"]
    assert found == [first + 1, first + 2, first + 3, first + 3]
    ids = COLLECTIVE_IDS.values()
    assert len(set(ids)) == len(ids)
    assert all(i >= 2**MESH_AXES and i % 2**MESH_AXES == 0 for i in ids)
