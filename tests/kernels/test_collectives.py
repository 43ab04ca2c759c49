"""Collectives on 8 devices against sums and blocks put together by NumPy."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from kernel_cases import mesh_of as plain_mesh
from kernel_cases import on_devices

from meshpar_kernels.collectives import all_gather, all_reduce, all_reduce_small, reduce_scatter
from meshpar_kernels.collectives.api import ALGORITHMS

P = PartitionSpec
MESHES = {
    "8": ((8,), ("a",), ("a",)),
    "2x4": ((2, 4), ("a", "b"), ("a", "b")),
    "4x2, major last": ((4, 2), ("a", "b"), ("b", "a")),
    "2x2x2": ((2, 2, 2), ("a", "b", "c"), ("a", "b", "c")),
    "6": ((6,), ("a",), ("a",)),
    "3 of 2x3": ((2, 3), ("idle", "a"), ("a",)),
    "1x8": ((1, 8), ("a", "b"), ("a", "b")),
}


def mesh_of(name):
    shape, names, axes = MESHES[name]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names), axes


def draw(mesh, axes, *shape, dtype=np.float32):
    group = int(np.prod([mesh.shape[a] for a in axes]))
    return np.random.default_rng(0).integers(-8, 8, (group, *shape)).astype(dtype)


HERE = [a for a in ALGORITHMS if a != "pallas"]  # that one is tried in the interpreter
CASES = [
    *((a, m, {}) for a in HERE for m in ("8", "2x4")),
    *(("ring", m, {}) for m in list(MESHES)[2:]),
    ("hierarchical", "2x2x2", {}),
    ("staged", "4x2, major last", {}),
    ("ring", "2x4", {"rings": (True, False)}),  # an axis that does not wrap around
    ("native", "2x4", {"axis": 1}),
    ("ring", "2x4", {"axis": 1}),
    *(("ring", "2x4", {"shape": shape}) for shape in [(17, 2, 3), (16,), (1, 1)]),
]
"""Algorithm, mesh, options. Blocks of 5 rows, or of 17, 16 and 1, which no number of colours divides, of one to three dims."""


@pytest.mark.parametrize(("algorithm", "name", "how"), CASES)
def test_values(algorithm, name, how):
    """Integers, so that sums are exact."""
    mesh, axes = mesh_of(name)
    shape, axis = how.get("shape", (5, 3)), how.get("axis", 0)
    options = {"implementation": algorithm, "outer": axes[:1] if algorithm == "hierarchical" else ()}
    options |= {name: how[name] for name in how if name != "shape"}
    # a result that is the same on all devices is made to vary over the idle axis too
    check_vma = "idle" not in mesh.shape
    x = draw(mesh, axes, *shape)
    y = draw(mesh, axes, *(n * len(x) if d == axis else n for d, n in enumerate(shape)))
    both = lambda v, w: (all_gather(v, axes, **options), reduce_scatter(w, axes, **options))  # noqa: E731
    gathered, scattered = on_devices(both, mesh, x, y, order=axes, check_vma=check_vma)
    np.testing.assert_array_equal(gathered, np.broadcast_to(np.concatenate(list(x), axis), gathered.shape))
    np.testing.assert_array_equal(scattered, np.stack(np.split(y.sum(0), len(x), axis)))
    options.pop("axis", None)
    summed = on_devices(lambda v: all_reduce(v, axes, **options), mesh, x, order=axes, check_vma=False)
    np.testing.assert_array_equal(summed, np.broadcast_to(x.sum(0), summed.shape))


def test_sums_are_the_same_on_all_devices():
    """Bit for bit, where the order of a sum matters."""
    mesh, axes = mesh_of("2x4")
    x = np.random.default_rng(1).normal(size=(8, 1000)).astype(np.float32)
    got = on_devices(lambda v: all_reduce(v, axes, implementation="ring"), mesh, x, order=axes)
    np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))
    np.testing.assert_allclose(got[0], x.astype(np.float64).sum(0), atol=1e-5)


@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
def test_gradients(algorithm):
    """Each is linear: <dL/dy, f(x)> over all devices is <gradient, x>."""
    mesh, axes = mesh_of("2x4")
    options = {"implementation": algorithm, "outer": axes[:1] if algorithm == "hierarchical" else ()}
    x, y, z = draw(mesh, axes, 2, 3), draw(mesh, axes, 16, 3), draw(mesh, axes, 2, 3)
    functions = {
        "gather": (lambda v: all_gather(v, axes, **options), x, y),
        "scatter": (lambda v: reduce_scatter(v, axes, **options), y, x),
        "reduce": (lambda v: all_reduce(v, axes, **options), x, z),
    }
    for name, (function, operand, cotangent) in functions.items():
        value = on_devices(function, mesh, operand, order=axes, check_vma=False)
        pull = lambda v, c, function=function: jax.vjp(function, v)[1](c)[0]  # noqa: E731
        gradient = on_devices(pull, mesh, operand, cotangent, order=axes, check_vma=False)
        assert gradient.shape == operand.shape
        assert (value * cotangent).sum() == (gradient * operand).sum(), name


def test_bad_input():
    mesh, axes = mesh_of("2x4")
    x = draw(mesh, axes, 12, 3)

    def run(function):
        on_devices(function, mesh, x, order=axes)

    with pytest.raises(ValueError, match="no implementation 'rings'; there are 'native', 'staged'"):
        run(lambda v: all_gather(v, axes, implementation="rings"))
    with pytest.raises(ValueError, match=r"dimension 0 of x\[12, 3\] is no multiple of the 8 devices of a, b"):
        run(lambda v: reduce_scatter(v, axes))
    with pytest.raises(ValueError, match="several different ones"):
        run(lambda v: all_gather(v, ("a", "a")))
    with pytest.raises(ValueError, match="rings says of 1 axes"):
        run(lambda v: all_gather(v, axes, rings=(True,)))
    with pytest.raises(ValueError, match="has no dimension 2"):
        run(lambda v: all_gather(v, axes, axis=2))
    for options in (
        {"implementation": "hierarchical"},
        {"outer": ("a",)},
        {"implementation": "hierarchical", "outer": ("z",)},
    ):
        with pytest.raises(ValueError, match="'hierarchical' needs outer="):
            run(lambda v, options=options: all_gather(v, axes, **options))


@pytest.mark.parametrize(
    ("implementation", "check_vma"),
    [*covering.each(["native", "staged", "hierarchical", "ring", "small"], [True, False]), ("small", False)],
)
def test_an_all_reduce_replaces_psum_whatever_shard_map_checks(implementation, check_vma):
    """The sum, its gradient, and the gradient of that, with `out_specs=P()`."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32)

    def summed(v):
        if implementation == "small":
            return all_reduce_small(v, ("a", "b"))
        outer = ("a",) if implementation == "hierarchical" else ()
        return all_reduce(v, ("a", "b"), implementation=implementation, outer=outer)

    def loss(x, function):
        specs = {"mesh": plain_mesh(4, 2), "in_specs": P(("a", "b")), "out_specs": P(), "check_vma": check_vma}
        return (jax.shard_map(function, **specs)(x) ** 3).sum()

    def gradients(function):
        first = jax.grad(loss)
        return jax.jit(
            lambda x: (loss(x, function), first(x, function), jax.grad(lambda x: first(x, function)[0, 0])(x))
        )(x)

    total = np.asarray(x, np.float64).sum(0)
    value, grad, second = gradients(summed)
    np.testing.assert_allclose(value, (total**3).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, np.broadcast_to(3 * total**2, x.shape), rtol=1e-5)
    wanted = np.zeros(x.shape)
    wanted[:, 0] = 6 * total[0]
    np.testing.assert_allclose(second, wanted, rtol=1e-5, atol=1e-5)
