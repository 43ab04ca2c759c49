"""The fused matmuls for GPUs without one: who sends what to whom (simulated), the matmul of a device in JAX's GPU interpreter
with race detection (what it sends lands in a buffer, what others sent is there), what is refused, and which kernels gradients
use. Waits and signals between devices are in `test_gpu_protocols`."""

import functools

import gpu_virtual
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import gpu_race_detection, has_gpu_interpreter
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshpar_kernels import _compat, all_gather_matmul, matmul_reduce_scatter
from meshpar_kernels.collective_matmul import gpu, gpu_blackwell, gpu_fused, gpu_hopper
from meshpar_kernels.collective_matmul.gpu_order import PIECE, Order
from meshpar_kernels.grouped_matmul.gpu_parts import ROWS, Tile, share

RNG = np.random.default_rng(5)
BF16 = jnp.dtype(jnp.bfloat16)
NUM_SMS = 5
TILE = Tile(128, 64, 64, 2)
ORDERS = [(1, 128, 64, 64), (2, 100, 72, 136), (3, 300, 130, 64), (8, 129, 64, 200), (5, 64, 200, 320)]

interpreted = pytest.mark.skipif(
    not has_gpu_interpreter(), reason="the interpreter for Mosaic GPU kernels needs jax 0.11"
)
sizes = pytest.mark.parametrize(("devices", "rows", "k", "n"), ORDERS)


def numbers(total):
    """Which numbers each multiprocessor takes, as the kernels have them."""
    mine = [int(share(total, jnp.int32(sm), NUM_SMS)) for sm in range(NUM_SMS)]
    taken = [sm + i * NUM_SMS for sm in range(NUM_SMS) for i in range(mine[sm])]
    return jnp.asarray(sorted(taken), jnp.int32)


@sizes
@pytest.mark.parametrize("own_first", [True, False])
def test_every_tile_is_made_once_and_no_two_devices_share_a_block(devices, rows, k, n, own_first):
    order = Order(devices, rows, k, n, TILE, own_first)
    turn, row, column = (np.asarray(x) for x in order.at(numbers(order.tiles)))
    assert (np.diff(turn) >= 0).all()
    made = set(zip(turn.tolist(), row.tolist(), column.tolist(), strict=True))
    assert len(made) == len(turn) == devices * -(-rows // 128) * -(-n // 64)
    assert (max(row), max(column)) == (-(-rows // 128) - 1, -(-n // 64) - 1)
    for t in range(devices):
        blocks = [int(order.block(t, jnp.int32(r))) for r in range(devices)]
        assert sorted(blocks) == list(range(devices))
        assert (blocks == list(range(devices))) == (t == (0 if own_first else devices - 1))


def gathered(order):
    """(what every device has received, number of signals for each piece), after `push` on all devices."""
    blocks = RNG.normal(size=(order.devices, order.rows, order.k))
    received = np.full((order.devices, order.devices - 1, order.rows, order.k), np.nan)
    signals = np.zeros((order.devices, order.devices - 1, order.row_tiles), int)
    hop, row, column = (np.asarray(x) for x in order.chunk(numbers((order.devices - 1) * order.num_chunks)))
    for sender in range(order.devices):
        receivers = np.asarray(order.receiver(jnp.asarray(hop), jnp.int32(sender)))
        for h, r, c, receiver in zip(hop, row, column, receivers, strict=True):
            here = (slice(r * PIECE, (r + 1) * PIECE), slice(c * PIECE, (c + 1) * PIECE))
            assert np.isnan(received[receiver, h][here]).all()  # nobody has written there
            received[receiver, h][here] = blocks[sender][here]
            signals[receiver, h, r // (order.tile.m // PIECE)] += 1
    return blocks, received, signals


def check_gathered(order):
    blocks, received, signals = gathered(order)
    for rank in range(order.devices):
        for turn in range(1, order.devices):
            np.testing.assert_array_equal(received[rank, turn - 1], blocks[int(order.block(turn, jnp.int32(rank)))])
            expected = [int(order.expected(jnp.int32(i))) for i in range(order.row_tiles)]
            assert signals[rank, turn - 1].tolist() == expected


@sizes
def test_a_gather_brings_every_block_in_the_turn_that_works_with_it(devices, rows, k, n):
    check_gathered(Order(devices, rows, k, n, TILE, own_first=True))


class WrongReceiver(Order):
    def receiver(self, hop, rank):
        return (rank + 1 + hop) % self.devices


class TooFewPieces(Order):
    def expected(self, row):
        return super().expected(row) - (row == 0)


class WrongPiece(Order):
    def chunk(self, number):
        hop, row, column = super().chunk(number)
        return hop, row, column * 0


@pytest.mark.parametrize("mutant", [WrongReceiver, TooFewPieces, WrongPiece])
def test_the_simulation_notices_a_wrong_schedule(mutant):
    with pytest.raises(AssertionError):
        check_gathered(mutant(3, 200, 130, 64, TILE, own_first=True))


@sizes
def test_a_scatter_sends_all_sums_to_their_owner_and_one_word_for_each(devices, rows, k, n):
    """As `send`, `tell` and `add_up` name buffers and counts; every sender has a slot of its own."""
    order = Order(devices, rows, k, n, TILE, own_first=False)
    turn, row, column = (np.asarray(x) for x in order.at(numbers(order.tiles)))
    high = TILE.m // ROWS
    written = np.zeros((devices, max(devices - 1, 1), order.row_tiles, order.column_tiles), int)
    source = np.full_like(written, -1)
    signals = np.zeros((devices, order.row_tiles * high, order.column_tiles), int)
    for sender in range(devices):
        blocks = np.asarray(order.block(jnp.asarray(turn), jnp.int32(sender)))
        for t, i, j, receiver in zip(turn, row, column, blocks, strict=True):
            if t == devices - 1:
                assert receiver == sender
                continue
            written[receiver, t, i, j] += 1
            source[receiver, t, i, j] = sender
            signals[receiver, i * high : (i + 1) * high, j] += 1
    if devices > 1:
        assert (written == 1).all()
        assert (signals == devices - 1).all()
        for receiver in range(devices):
            senders = source[receiver, :, 0, 0].tolist()
            assert sorted(senders) == sorted(set(range(devices)) - {receiver})
            assert (source[receiver] == source[receiver][:, :1, :1]).all()


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), BF16)


def near(found, wanted, tolerance):
    wanted = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=tolerance * np.abs(wanted).max(), rtol=0)


both_kernels = pytest.mark.parametrize("kernels", [gpu_hopper, gpu_blackwell], ids=["hopper", "blackwell"])


@interpreted
@both_kernels
def test_the_matmul_of_a_single_device(kernels):
    """With transposed weights, and tiles that the rows do not fill."""
    m, k, n = 200, 128, 192
    x, w = normal(m, k), normal(n, k)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    gather = gpu.gather_order(m, k, n, 1, 2)
    dtypes = {"out_dtype": jnp.dtype(jnp.float32), "comm_dtype": jnp.dtype(jnp.float32)}
    scatter = gpu.scatter_order(m, k, n, 1, 2, **dtypes)
    options = {"transposed": True, "num_sms": 2}
    with gpu_race_detection():
        rounded = gpu_fused.all_gather_matmul(kernels, x, w, gather, "a", out_dtype=BF16, **options)
        exact = gpu_fused.matmul_reduce_scatter(kernels, x[None], w, scatter, "a", **dtypes, **options)
        jax.block_until_ready((rounded, exact))
    assert (rounded.shape, rounded.dtype) == ((1, m, n), BF16)
    near(rounded[0], want, 1e-2)
    near(exact, want, 1e-5)


DEVICES, RANK = 3, 1


@pytest.fixture
def one_of_several(monkeypatch):
    return functools.partial(gpu_virtual.run, monkeypatch)


@interpreted
@both_kernels
def test_a_gather_multiplies_received_rows_and_sends_its_own(kernels, one_of_several):
    """All turns of one device of three, but for the waiting."""
    m, k, n = 200, 128, 192
    x, w, others = normal(m, k), normal(k, n), normal(DEVICES - 1, m, k)
    order = gpu.gather_order(m, k, n, DEVICES, 2)
    options = {"out_dtype": BF16, "transposed": False, "num_sms": 2}
    out, sent = one_of_several(RANK, DEVICES, others, gpu_fused.all_gather_matmul, kernels, x, w, order, "a", **options)
    for rank, rows in {RANK: x, (RANK + 1) % DEVICES: others[0], (RANK + 2) % DEVICES: others[1]}.items():
        near(out[rank], np.asarray(rows, np.float64) @ np.asarray(w, np.float64), 1e-2)
    np.testing.assert_array_equal(sent[(RANK + 2) % DEVICES, 0], x)
    np.testing.assert_array_equal(sent[(RANK + 1) % DEVICES, 1], x)


@interpreted
@both_kernels
def test_a_scatter_sends_others_their_sums_and_adds_what_came(kernels, one_of_several):
    rows, k, n = 200, 64, 192
    x, w = normal(DEVICES, rows, k), normal(k, n)
    dtypes = {"out_dtype": jnp.dtype(jnp.float32), "comm_dtype": BF16 if kernels is gpu_hopper else jnp.dtype("f")}
    others = jnp.asarray(3 * RNG.normal(size=(DEVICES - 1, rows, n)), dtypes["comm_dtype"])
    order = gpu.scatter_order(rows, k, n, DEVICES, 2, **dtypes)
    options = {"transposed": False, "num_sms": 2, **dtypes}
    out, sent = one_of_several(
        RANK, DEVICES, others, gpu_fused.matmul_reduce_scatter, kernels, x, w, order, "a", **options
    )
    sums = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    near(out, sums[RANK] + np.asarray(others, np.float64).sum(0), 1e-5)
    for turn in range(DEVICES - 1):
        receiver = (RANK + 1 + turn) % DEVICES
        near(sent[receiver, turn], sums[receiver], 1e-2 if kernels is gpu_hopper else 1e-5)


def mesh_of(*sizes):
    names = ("a", "b")[: len(sizes)]
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def traced(op, x, w, mesh=None, axis="a", **options):
    """The program of a function of one device's x and w, for the GPU kernel."""
    mesh = mesh_of(4) if mesh is None else mesh
    f = functools.partial(op, axis_name=axis, implementation="pallas_gpu", **options)

    def loss(x, w):
        return f(x, w).astype(jnp.float32).sum()

    mapped = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return str(jax.make_jaxpr(mapped)(x, w))


@pytest.mark.parametrize(
    ("op", "x", "w", "options", "says"),
    [
        (all_gather_matmul, jnp.zeros((8, 64)), jnp.zeros((64, 64)), {}, "operands are float32 and float32; the tensor cores"),
        (all_gather_matmul, normal(8, 64), jnp.zeros((64, 64), jnp.float16), {}, "bfloat16 and float16; .* both alike"),
        (all_gather_matmul, normal(8, 60), normal(60, 64), {}, "K=60: rows of 120 bytes are no multiple of 16"),
        (all_gather_matmul, normal(8, 64), normal(64, 30), {}, "columns=30: rows of 60 bytes are no multiple of 16"),
        (all_gather_matmul, normal(8, 64), normal(64, 64), {"axis": ("a", "b"), "mesh": (2, 2)}, "over one mesh axis"),
        (all_gather_matmul, normal(0, 64), normal(64, 64), {}, "an operand is empty"),
        (matmul_reduce_scatter, normal(8, 64), normal(64, 64), {"comm_dtype": jnp.int8}, "comm_dtype is int8; the kernel takes"),
        (matmul_reduce_scatter, normal(8, 64), normal(64, 64), {"preferred_element_type": jnp.float64}, "out_dtype is float64"),
    ],
)  # fmt: skip
def test_what_the_kernels_cannot_take_is_refused(op, x, w, options, says):
    options = dict(options)
    if "mesh" in options:
        options["mesh"] = mesh_of(*options["mesh"])
    with pytest.raises(NotImplementedError, match=says):
        traced(op, x, w, **options)


def test_machines_without_nvlink_are_refused(monkeypatch):
    x, w = normal(8, 64), normal(64, 64)

    def reasons(devices=8):
        return " ".join(gpu.unsupported(x, w, "a", gpu.gather_order(8, 64, 64, devices, 2)))

    assert not reasons()
    assert "9 devices: NVLink joins at most 8 in one machine" in reasons(9)
    for kind in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL"):
        monkeypatch.setattr(_compat, "device_kind", lambda kind=kind: kind)
        assert f"{kind} has no NVLink switch" in reasons()
    monkeypatch.setattr(_compat, "device_kind", lambda: "NVIDIA H20")
    monkeypatch.setattr(_compat, "multiprocessors", lambda: 78)
    assert "NVIDIA H20 has 78 multiprocessors, and 100 blocks wait for each other" in reasons()
    assert not gpu.unsupported(x, w, "a", gpu.gather_order(8, 64, 64, 8, 2), num_sms=46)
    monkeypatch.setattr(_compat, "gpu_architecture", lambda: (8, 0))
    assert "the GPU is sm_80; there is a kernel for sm_90a and sm_100a" in reasons()


def test_the_gradient_of_each_collective_matmul_is_the_other():
    """The kernel's gradient of x is the other kernel; that of w stays with the ring."""
    x, w = normal(8, 64), normal(64, 64)
    gather, scatter = traced(all_gather_matmul, x, w), traced(matmul_reduce_scatter, x, w)
    for program in (gather, scatter):
        assert "meshpar_all_gather_matmul" in program
        assert "meshpar_matmul_reduce_scatter" in program
        assert "ppermute" in program
