"""Tokens to their experts' devices and back, on 8 virtual devices: even, uneven, empty and single-expert loads."""

import functools

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_cases import by_experts, expert_layer, mesh_of

from meshpar_kernels import RoutePlan, expert_combine, expert_dispatch, grouped_matmul, ragged_all_to_all, route
from meshpar_kernels.dispatch.gpu import unsupported

A, T, K, E, H = 8, 6, 2, 16, 4  # devices, tokens of each, choices, experts, width
R = np.random.default_rng(0)
X = R.normal(size=(A * T, H)).astype("f")
SPLIT = P(("a", "b"))
WEIGHT = R.normal(size=(A * T, K)).astype("f")
MATRICES = (R.normal(size=(E, H, H)) / 2).astype("f")


def even():
    first = np.arange(A * T) % E
    return np.stack([first, (first + 5) % E], -1)


def uneven():
    skewed = np.minimum(R.geometric(0.35, (A * T, 4 * K)) - 1, E)  # E: no choice
    chosen = [np.unique(row)[:K] for row in skewed]
    return np.stack([np.pad(row, (0, K - len(row)), constant_values=E) for row in chosen])


LOADS = {
    "even": even(),
    "uneven": uneven(),
    "single": np.tile([3, E], (A * T, 1)),
    "empty": np.full((A * T, K), E),
    "out of range": np.where(R.random((A * T, K)) < 0.5, -1, even()),
}


def on_devices(f):
    return jax.jit(jax.shard_map(f, mesh=mesh_of(4, 2), in_specs=(SPLIT,) * 4, out_specs=SPLIT, check_vma=False))


def expected(expert, x=X, weight=WEIGHT, matrices=MATRICES):
    return by_experts(x, expert, weight, matrices)


layer = functools.partial(expert_layer, experts=E)


@functools.cache
def compiled(strategy, carried):
    return on_devices(functools.partial(layer, strategy=strategy, carried=carried))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("strategy", "carried"), [("a2a", True), ("a2a", False), ("ring", True)])
def test_there_and_back(load, strategy, carried):
    expert = LOADS[load].astype(np.int32)
    y, left, most = compiled(strategy, carried)(X, expert, WEIGHT, MATRICES)
    np.testing.assert_allclose(y, expected(expert), rtol=1e-5, atol=1e-5)
    assert not np.asarray(left).any()
    valid = (expert >= 0) & (expert < E)
    source, owner = np.repeat(np.arange(A), T)[:, None] + 0 * expert, expert // (E // A)
    pairs = np.zeros((A, A), int)
    np.add.at(pairs, (source[valid], owner[valid]), 1)
    want = pairs.max(1) if strategy == "a2a" else pairs.sum(0)
    np.testing.assert_array_equal(most, want)


@pytest.mark.parametrize("strategy", ["a2a", "ring"])
def test_what_does_not_fit_is_counted_and_comes_in_another_round(strategy):
    expert = LOADS["single"].astype(np.int32)
    rows = 2 if strategy == "a2a" else 16  # 6 rows of each of 8 devices for one: three rounds
    how = {"strategy": strategy, "carried": True, "rows": rows}
    y, left, most = on_devices(functools.partial(layer, rounds=3, **how))(X, expert, WEIGHT, MATRICES)
    np.testing.assert_allclose(y, expected(expert), rtol=1e-5, atol=1e-5)
    left = np.asarray(left)
    if strategy == "a2a":
        np.testing.assert_array_equal(left, [[4, 2, 0]] * A)
    else:  # expert 3 is on device 1
        np.testing.assert_array_equal(left, [[32, 16, 0] if i == 1 else [0, 0, 0] for i in range(A)])
    assert int(np.asarray(most).max()) == (6 if strategy == "a2a" else 48)
    y, left, _ = on_devices(functools.partial(layer, **how))(X, expert, WEIGHT, MATRICES)
    kept = (abs(np.asarray(y)) > 0).any(-1)
    assert kept.sum() == 16  # the first of each device, or of all: the rest was dropped, and nothing written past
    np.testing.assert_allclose(np.asarray(y)[kept], expected(expert)[kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["a2a", "ring"])
def test_gradients(strategy):
    expert = LOADS["uneven"].astype(np.int32)
    read = R.normal(size=(A * T, H)).astype("f")

    def value(x, weight, matrices):
        y, _, _ = on_devices(functools.partial(layer, strategy=strategy, carried=True))(x, expert, weight, matrices)
        return (y * read).sum()

    grads = jax.grad(value, (0, 1, 2))(X, WEIGHT, MATRICES)
    for i, (grad, at) in enumerate(zip(grads, (X, WEIGHT, MATRICES), strict=True)):
        v = R.normal(size=at.shape)
        args = [[X, WEIGHT, MATRICES][j].astype(float) for j in range(3)]
        ends = []
        for h in (1e-6, -1e-6):
            moved = [a + h * v if j == i else a for j, a in enumerate(args)]
            ends.append((expected(expert, *moved) * read).sum())
        np.testing.assert_allclose((grad * v).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-3, atol=1e-4)


def test_one_device_sends_nothing():
    expert = LOADS["uneven"].astype(np.int32)

    def alone(x, expert, weight, matrices):
        buffer, d = expert_dispatch(x, expert, experts=E, weight=weight)
        return expert_combine(grouped_matmul(buffer, matrices, d.group_sizes, row_scale=d.row_scale), d)

    run = jax.jit(alone).trace(X, expert, WEIGHT, MATRICES)
    assert "all_to_all" not in str(run.jaxpr)
    got = run.lower().compile()(X, expert, WEIGHT, MATRICES)
    np.testing.assert_allclose(got, expected(expert), rtol=1e-5, atol=1e-5)


def test_many_places_a_token():
    """As Expert Choice has them: a place for each expert, of which few are used; such rows are summed by scatter."""
    expert = np.where(R.random((A * T, E)) < 0.1, np.arange(E), E).astype(np.int32)
    weight = R.normal(size=(A * T, E)).astype("f")

    def one(x, expert, weight, matrices):
        buffer, d = expert_dispatch(x, expert, experts=E, weight=weight, axis_name=("a", "b"), rows=8)
        y = grouped_matmul(buffer, matrices, d.group_sizes, row_scale=d.row_scale)
        return expert_combine(y, d), d.dropped[None]

    y, left = on_devices(one)(X, expert, weight, MATRICES)
    assert not np.asarray(left).any()
    np.testing.assert_allclose(y, expected(expert, weight=weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["a2a", "ring"])
def test_a_plan_whose_rows_the_matmul_gathers(strategy):
    """`route` with a capacity ranks the choices; the first matmul reads what arrived by its indices; gradients too."""
    logits, hidden = R.normal(size=(A * T, E)).astype("f"), R.normal(size=(E, H, H)).astype("f")

    def layer(x, logits, matrices, copy):
        plan = route(logits, K, capacity=2)
        rows, d = expert_dispatch(x, plan, weight=plan.weight, axis_name=("a", "b"), copy=copy, strategy=strategy)
        how = {} if copy else {"lhs_indices": d.lhs_indices}
        y = grouped_matmul(rows, matrices, d.group_sizes, row_scale=d.row_scale, **how)
        return expert_combine(y, d)

    def step(x, logits, matrices, copy):
        def loss(*args):
            y = layer(*args, copy)
            return (y * jnp.cos(y)).sum(), y

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, logits, matrices)

    want = np.zeros((A * T, H))
    for i in range(A):
        own = slice(i * T, (i + 1) * T)
        expert, weight, _, rank, offsets, _ = oracle.route(logits[own], K, capacity=2)
        local_expert = np.where(oracle.buffer_rows(expert, rank, offsets) >= 0, expert, E)
        for t, j in np.argwhere(local_expert < E):
            want[i * T + t] += weight[t, j] * (X[i * T + t].astype(float) @ hidden[local_expert[t, j]])
    split = (SPLIT, SPLIT, SPLIT)
    results = []
    for copy in (False, True):
        one = functools.partial(step, copy=copy)
        on = jax.shard_map(one, mesh=mesh_of(4, 2), in_specs=split, out_specs=(split, SPLIT), check_vma=False)
        results.append(jax.jit(on)(X, logits, hidden))
    np.testing.assert_allclose(results[0][1], want, rtol=1e-5, atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *results)


# -- bad input


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"experts": 6, "axis_name": None, "expert": np.zeros((3, 2), int)}, "x must be"),
        ({"strategy": "sparse"}, "strategy must be one of"),
        ({"experts": 12}, "experts=12 do not divide over 8 devices"),
        ({"rows": 0}, "rows=0 must be at least 1"),
        ({"weight": np.ones((T, 3), "f")}, "weight must be"),
        ({"expert": np.zeros((T, K), "f")}, "expert must be integers"),
        ({"experts": None}, "experts=, the number of experts, is required"),
        (
            {"expert": jax.eval_shape(lambda: RoutePlan.of(jnp.zeros((T, K), int), 8))},
            "experts=16, but the plan is of 8",
        ),
    ],
)
def test_bad_dispatch(change, says):
    def one(x, *_):
        given = {"expert": jnp.zeros((T, K), int), "experts": E, "axis_name": ("a", "b"), **change}
        return expert_dispatch(x, given.pop("expert"), **given)[0]

    with pytest.raises(ValueError, match=says):
        on_devices(one)(X, X, X, X)


def test_what_the_gpu_kernel_refuses():
    pytest.importorskip("absl", reason="jax.experimental.pallas.mosaic_gpu needs absl-py")
    assert unsupported(jnp.bfloat16, 7168, 8) == ()
    assert [*unsupported(jnp.dtype(jnp.int8), 100, 16)] == [
        "the rows are int8; the kernel takes float32, bfloat16, float16 and int32",
        "a row has 100 elements, which must be a multiple of 128",
        "16 devices: NVLink joins at most 8 in one machine",
    ]
    assert "more than 200 KiB of shared memory" in unsupported(jnp.float32, 1 << 14, 2)[0]


def test_bad_combine():
    def combined(rows, weight=None):
        def call(x, expert):
            buffer, d = expert_dispatch(x, expert, experts=E)
            return expert_combine(buffer[:rows], d, weight=weight)

        return jax.eval_shape(call, X, LOADS["even"])

    with pytest.raises(ValueError, match=r"y must be \[96, H\]"):
        combined(5)
    with pytest.raises(ValueError, match=r"weight must be \[48, 2\]"):
        combined(96, jnp.asarray(WEIGHT[:5]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"output": jnp.ones((4, 2))}, "the same trailing dims"),
        ({"send_sizes": jnp.zeros(3, int)}, r"send_sizes must be int \[8\]"),
        ({"rows": 0}, "rows=0"),
        ({"implementation": "cuda"}, "no implementation 'cuda'"),
    ],
)
def test_bad_ragged(change, says):
    def one(x, *_):
        zero = jnp.zeros(A, int)
        given = {"operand": x, "output": x, "input_offsets": zero, "send_sizes": zero, "output_offsets": zero,
                 "recv_sizes": zero, "axis_name": ("a", "b"), **change}  # fmt: skip
        return ragged_all_to_all(**given)[0]

    with pytest.raises(ValueError, match=says):
        on_devices(one)(X, X, X, X)
