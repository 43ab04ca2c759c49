"""Matmuls fused with gathers and scatters, on 8 virtual devices, against NumPy in float64; odd rings, sizes, and gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_cases import mesh_of

from meshpar_kernels import all_gather_matmul, matmul_reduce_scatter
from meshpar_kernels.collective_matmul import Dot, dot_scatter, gather_dots, gather_hops

RNG = np.random.default_rng(0)
CASES = [
    ("ring", 1, 1), ("ring", 2, 256), ("ring", 3, 1), ("ring", 5, 4), ("ring", 8, 256), ("xla", 8, 1), ("reference", 3, 1),
]  # fmt: skip
EACH = [("ring", 3), ("xla", 8), ("reference", 8)]


def draw(*shape):
    return RNG.normal(size=shape).astype("f")


def close(found, wanted, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=tolerance, atol=tolerance * 10)


def on(mesh, f, specs, out, check=True):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check))


def gather(mesh, axis="a", **options):
    """`all_gather_matmul` of an array whose rows, and of one whose columns are sharded."""
    call = functools.partial(all_gather_matmul, axis_name=axis, **options)
    return on(mesh, call, (P(axis, None), P(None, axis)), P(None, axis))


def scatter(mesh, axis="a", **options):
    """`matmul_reduce_scatter` of arrays whose contracted dims are sharded."""
    call = functools.partial(matmul_reduce_scatter, axis_name=axis, **options)
    return on(mesh, call, (P(None, axis), P(axis, None)), P(axis, None))


@pytest.mark.parametrize(("implementation", "devices", "tile"), CASES)
def test_both_matmuls(implementation, devices, tile):
    options = {"implementation": implementation, "tile": tile}
    x, w = draw(devices * 3, 5), draw(5, devices * 2)
    close(gather(mesh_of(devices), **options)(x, w), x.astype(float) @ w.astype(float))
    x, w = draw(devices * 3, devices * 4), draw(devices * 4, 7)
    close(scatter(mesh_of(devices), **options)(x, w), x.astype(float) @ w.astype(float))


def test_several_axes_are_one_ring_the_first_major():
    x, w, both = draw(16, 8), draw(8, 16), ("a", "b")
    close(gather(mesh_of(4, 2), both, implementation="ring")(x, w), x.astype(float) @ w.astype(float))
    close(scatter(mesh_of(4, 2), both, implementation="ring")(w.T, x.T), w.T.astype(float) @ x.T.astype(float))


@pytest.mark.parametrize(("implementation", "devices"), EACH)
def test_gradients_equal_the_unsharded_matmul(implementation, devices):
    x, w, weight = draw(devices * 2, devices), draw(devices, devices * 2), draw(devices * 2, devices * 2)
    for make in (gather, scatter):
        f = make(mesh_of(devices), implementation=implementation)
        dx, dw = jax.grad(lambda x, w, f=f: (f(x, w) * weight).sum(), (0, 1))(x, w)
        close(dx, weight.astype(float) @ w.T.astype(float))
        close(dw, x.T.astype(float) @ weight.astype(float))


def test_the_gradient_of_a_weight_that_all_devices_share_is_summed():
    x, w, weight = draw(8, 5), draw(5, 3), draw(8, 3)
    call = lambda x, w: all_gather_matmul(x, w, "a", implementation="ring")[None]  # noqa: E731
    f = on(mesh_of(4), call, (P("a", None), P(None, None)), P("a"))
    dw = jax.grad(lambda w: (f(x, w) * weight).sum())(w)
    close(dw, 4 * x.T.astype(float) @ weight.astype(float))


def test_sums_in_bfloat16_are_made_in_float32_and_travel_as_asked():
    x, w = (draw(8, 64).astype(jnp.bfloat16), draw(64, 8).astype(jnp.bfloat16))
    exact = x.astype(float) @ w.astype(float)
    error = {}
    for wire in (None, jnp.bfloat16):
        f = scatter(mesh_of(8), implementation="ring", comm_dtype=wire)
        found = f(x, w)
        assert found.dtype == jnp.bfloat16
        sent = [line for line in f.lower(x, w).as_text().splitlines() if "collective_permute" in line]
        assert all(("xf32>" if wire is None else "xbf16>") in line for line in sent)
        assert len(sent) == sum(h.count for h in gather_hops(8, 1))
        error[wire] = np.abs(np.asarray(found, float) - exact).max()
    assert error[None] <= np.abs(exact).max() * 2**-8
    assert error[None] <= error[jnp.bfloat16]


@pytest.mark.parametrize("devices", [2, 3])
def test_dot_generals_that_share_one_ring(devices):
    """The gathered operand on the right, in the middle; its gathered dim free, contracted and a batch dim."""
    x = draw(2, devices * 3, 4)
    free, middle, batch = draw(5, 4), draw(devices * 3, 2, 6), draw(devices * 3, 5, 4)
    dots = [
        Dot((((1,), (2,)), ((), ())), side=1),
        Dot((((1, 0), (0, 1)), ((), ())), side=0),
        Dot((((2,), (2,)), ((1,), (0,))), side=0),
    ]
    wanted = [
        np.einsum("ok,bsk->obs", free.astype(float), x.astype(float)),
        np.einsum("bsk,sbh->kh", x.astype(float), middle.astype(float)),
        np.einsum("bsk,sok->sbo", x.astype(float), batch.astype(float)),
    ]
    whole = P(None, None, None)
    f = on(mesh_of(devices), lambda x, *o: gather_dots(x, o, dots, "a", 1),
           (P(None, "a"), P(None, None), whole, whole), [P()] * 3, check=False)  # fmt: skip
    for found, want in zip(f(x, free, middle, batch), wanted, strict=True):
        close(found, want)
    sent = [line for line in f.lower(x, free, middle, batch).as_text().splitlines() if "collective_permute" in line]
    assert len(sent) == sum(h.count for h in gather_hops(devices, 3))


@pytest.mark.parametrize(("dim", "devices"), [(0, 8), (1, 5), (2, 2), (2, 8)])
def test_any_dim_of_a_dot_general_is_scattered(devices, dim):
    n = devices * 2
    lhs, rhs = draw(n, devices * 2, n), draw(devices * 2, n, n)  # [batch, k, i] · [k, batch, j]
    dot = Dot((((1,), (0,)), ((0,), (1,))))
    out = P(*[("a" if d == dim else None) for d in range(3)])
    f = on(mesh_of(devices), lambda x, w: dot_scatter(x, w, dot, "a", dim), (P(None, "a"), P("a")), out)
    close(f(lhs, rhs), np.einsum("bki,kbj->bij", lhs.astype(float), rhs.astype(float)))


@pytest.mark.parametrize(("devices", "unrolled", "x64"), [(3, 0, True), (8, 0, False), (8, 16, True)])
def test_rings_unrolled_and_as_loops(devices, unrolled, x64, monkeypatch):
    monkeypatch.setattr("meshpar_kernels.collective_matmul.ring.UNROLLED", unrolled)
    x, w = draw(devices * 3, devices * 2), draw(devices * 2, devices * 2)
    with jax.enable_x64(x64):  # which changes the dtype of loop counters
        for make in (gather, scatter):
            close(make(mesh_of(devices), implementation="ring")(x, w), x.astype(float) @ w.astype(float))


def test_a_ring_sends_what_an_all_gather_sends():
    for devices, rows in itertools.product([1, 2, 3, 4, 5, 8, 16, 255], [1, 2, 3, 64]):
        assert sum(h.rows * h.count for h in gather_hops(devices, rows)) == (devices - 1) * rows


def test_what_does_not_fit_is_refused():
    x, w = draw(8, 4), draw(4, 8)
    with pytest.raises(ValueError, match=r"x must be \[rows, K\] and w \[K, columns\], got \[8, 4\] and \[8, 4\]"):
        all_gather_matmul(x, x, "a")
    with pytest.raises(ValueError, match=r"no mesh axis 'a' is bound: .*\n.*jax.shard_map\(lambda x, w"):
        all_gather_matmul(jnp.asarray(x), jnp.asarray(w), "a")
    with pytest.raises(ValueError, match="axis_name has no axis"):
        matmul_reduce_scatter(x, w, ())
    with pytest.raises(ValueError, match="tile=0 must be at least 1"):
        all_gather_matmul(x, w, "a", tile=0)

    def refuses(words, function, x=x):
        with pytest.raises(ValueError, match=words):
            on(mesh_of(4), function, (P(), P()), P("a"))(x, w)

    odd = draw(6, 4)
    refuses(r"the 6 rows of x\[6, 4\] do not divide over 4 devices", lambda x, w: matmul_reduce_scatter(x, w, "a"), odd)
    refuses(
        r"no implementation 'nccl'; there are None, 'pallas', .*'ring', 'xla'",
        lambda x, w: all_gather_matmul(x, w, "a", implementation="nccl"),
    )
    scatter = lambda x, w: dot_scatter(x, w, Dot((((1,), (0,)), ((), ()))), "a", 0)  # noqa: E731
    refuses(r"dim 0 of the result \[6, 8\] does not divide over 4 devices", scatter, odd)
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh_of(4), P("a")))
    with pytest.raises(ValueError, match=r"x\[8, 4\] is sharded over 'a'"):
        all_gather_matmul(sharded, w, "a")


def test_an_axis_of_one_sends_nothing():
    f = on(mesh_of(1), functools.partial(all_gather_matmul, axis_name="a"), (P("a"), P()), P("a"))
    assert "collective_permute" not in f.lower(draw(4, 4), draw(4, 4)).as_text()
