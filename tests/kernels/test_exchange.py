"""Dense all-to-all and collective-permute on CPU devices, against NumPy: values, gradients, and invalid arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import mesh_of, on_devices

from meshpar_kernels import _compat, all_to_all, collective_permute, ragged_all_to_all
from meshpar_kernels.exchange import gpu
from meshpar_kernels.exchange.tpu import unsupported

RNG = np.random.default_rng(3)
PAIRS = [(0, 3), (3, 1), (5, 5), (7, 0)]


def exchanged(x, split, concat):
    """`all_to_all` of x [devices, …] in NumPy."""
    blocks = [np.array_split(v, len(x), split) for v in x]
    return np.stack([np.concatenate([b[r] for b in blocks], concat) for r in range(len(x))])


def permuted(x, pairs):
    """`collective_permute` of x [devices, …] in NumPy."""
    out = np.zeros_like(x)
    for s, t in pairs:
        out[t] = x[s]
    return out


@pytest.mark.parametrize(
    ("split", "concat", "order"),
    [(0, 0, ("a", "b")), (1, 0, ("b", "a")), (0, 2, ("a", "b")), (-1, 1, ("b", "a"))],
)
def test_all_to_all_sends_block_i_to_device_i(split, concat, order):
    x = RNG.normal(size=(8, 16, 8, 24)).astype(np.float32)
    got = on_devices(
        lambda v: all_to_all(v, order, split_axis=split, concat_axis=concat), mesh_of(4, 2), x, order=order
    )
    np.testing.assert_array_equal(got, exchanged(x, split, concat))


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_collective_permute_sends_to_targets_and_gives_zeros_elsewhere(order):
    x = RNG.normal(size=(8, 3, 5)).astype(np.float32)
    got = on_devices(lambda v: collective_permute(v, order, PAIRS), mesh_of(4, 2), x, order=order)
    np.testing.assert_array_equal(got, permuted(x, PAIRS))


def test_gradients_are_the_reverse_exchanges():
    x, c = RNG.normal(size=(2, 8, 16, 3)).astype(np.float32)

    def pull(function):
        return on_devices(lambda v, c: jax.vjp(function, v)[1](c)[0], mesh_of(8), x, c)

    def swapped(v):
        return all_to_all(v.reshape(8, 2, 3), "a", split_axis=0, concat_axis=1).reshape(16, 3)

    cotangent = np.moveaxis(c.reshape(8, 8, 2, 3), 0, 1)  # of the receiver's block, at its sender
    np.testing.assert_array_equal(pull(swapped), cotangent.reshape(8, 16, 3))
    want = permuted(c, [(t, s) for s, t in PAIRS])
    np.testing.assert_array_equal(pull(lambda v: collective_permute(v, "a", PAIRS)), want)


def test_one_device_keeps_its_array():
    x = RNG.normal(size=(1, 4, 6)).astype(np.float32)
    got = on_devices(lambda v: all_to_all(v, "a", split_axis=1, concat_axis=0), mesh_of(1), x)
    np.testing.assert_array_equal(got, x)
    for pairs, want in (([(0, 0)], x), ([], 0 * x)):
        got = on_devices(lambda v, p=pairs: collective_permute(v, "a", p), mesh_of(1), x)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda v: all_to_all(v, "a", split_axis=2), "split_axis=2, and x.* has no such dimension"),
        (lambda v: all_to_all(v, "a", split_axis=1), "dimension 1 of x.* is no multiple of the 8 devices of a; pad it"),
        (lambda v: all_to_all(v, ("a", "a")), "one mesh axis or several different ones"),
        (lambda v: all_to_all(v, "a", implementation="ring"), "no implementation 'ring'"),
        (lambda v: collective_permute(v, "a", [(0, 8)]), "target 8 is no rank of 8 devices; ranks are 0 to 7"),
        (
            lambda v: collective_permute(v, "a", [(0, 1), (0, 2)]),
            "rank 0 is a source 2 times; each rank may be a source once",
        ),
        (lambda v: collective_permute(v, "a", [(0, 1), (2, 1)]), "rank 1 is a target 2 times"),
    ],
)
def test_invalid_arguments_are_errors(call, says):
    with pytest.raises(ValueError, match=says):
        on_devices(call, mesh_of(8), np.zeros((8, 8, 5), np.float32))


def test_kernels_refuse_booleans():
    mesh = jax.sharding.AbstractMesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert "x is bool; the kernel takes dtypes of 1, 2 and 4 bytes" in unsupported(np.bool_, ("a",), (8,))[0]
        assert unsupported(jnp.int8, ("a",), (8,)) == ()
        assert "x is float16" in unsupported(jnp.float16, ("a",), (8,))[0]
    pytest.importorskip("absl")
    assert "x is float64" in gpu.unsupported(np.float64, ("a",), (8,))[0]
    assert "16 devices: NVLink joins at most 8" in gpu.unsupported(np.float32, ("a",), (16,))[0]


def test_runs_of_the_gpu_kernel(monkeypatch):
    """The kernel replaced by the padded exchange, which sends the same runs."""

    def send(operand, units, rows, runs, axes, sizes):
        flat = operand.reshape(len(operand), -1)
        zeros = _compat.same_varying(jnp.zeros((units, flat.shape[1]), flat.dtype), flat)[0]
        out, dropped = ragged_all_to_all(
            flat, zeros, runs.start, runs.size, runs.target, runs.recv_size * 0, axis_name=axes, rows=units
        )
        del dropped
        return out.reshape(units, *operand.shape[1:])

    monkeypatch.setattr(gpu.gpu, "send", send)
    x = RNG.integers(-99, 99, (8, 16, 5)).astype(np.int8)
    mesh, order = mesh_of(4, 2), ("b", "a")
    got = on_devices(lambda v: gpu.all_to_all(v.reshape(8, 2, 5), order, (2, 4)).reshape(16, 5), mesh, x, order=order)
    np.testing.assert_array_equal(got, exchanged(x, 0, 0))
    got = on_devices(lambda v: gpu.collective_permute(v, order, (2, 4), PAIRS), mesh, x, order=order)
    np.testing.assert_array_equal(got, permuted(x, PAIRS))


@pytest.mark.parametrize(
    ("dtype", "elements"), [("int8", 5), ("bfloat16", 128), ("float32", 640), ("float8_e4m3fn", 70_000), ("int8", 640)]
)
def test_bytes_in_rows_for_the_copy_engine_are_restored(dtype, elements):
    """Rows of at most 16 KiB, padded by at most a sixteenth and the last row of a block."""
    x = jnp.asarray(RNG.integers(-99, 99, (3, elements)), dtype)
    rows = gpu._as_rows(x)
    np.testing.assert_array_equal(gpu._as_blocks(rows, x.shape, x.dtype).astype(np.float32), x.astype(np.float32))
    assert rows.shape[2] % 128 == 0
    assert rows.shape[2] * 4 <= gpu.ROW_BYTES
    assert rows.nbytes <= x.nbytes * 17 / 16 + 3 * 512
