"""The waits and signals of the TPU kernels that talk to other devices, as a table: what each orders, and how its absence shows."""

import functools

import pytest
import tpu_runs
from kernel_machine import SCHEDULES, Protocols, noticed

from meshpar_kernels.collectives import ring_tpu
from meshpar_kernels.collectives.table import table_of

EARLY = "race value late leftover"
"""A wait that is missing lets its device run ahead, and leaves a count behind."""

TABLES = {
    "collectives.tpu": {
        "entry_barrier: pl.semaphore_signal(barrier, 1, device_id=device)": (
            "hang", "to all that send here: this device is in the kernel"
        ),
        "entry_barrier: pl.semaphore_wait(barrier, len(devices))": (EARLY, "all that are sent to are in the kernel"),
        "_small_kernel: copy.start()": ("hang", "sends this device's array to a peer"),
        "_small_kernel: copy.wait()": (EARLY, "a peer has the array, and another peer's was received"),
    },
    "collectives.ring_tpu": {
        "_kernel: keep.start()": ("hang", "the device's own part, to its place"),
        "_kernel: keep.wait()": (EARLY, "it is there, and may be sent"),
        "_kernel: copy_of(n, False).start()": ("hang", "a message of this step, to the neighbour"),
        "_kernel: copy_of(n, True).wait_recv()": (EARLY, "what comes in this step is there"),
        "_kernel: copy_of(plan.of(channel, use - DEPTH), False).wait_send()": (EARLY, "the semaphore counts one message at a time"),
        "_kernel: copy_of(plan.of(channel, use), False).wait_send()": (EARLY, "the last messages have left"),
        "_add: copy.start()": ("hang", "a block of both operands, to chip memory"),
        "_add: copy.wait()": (EARLY, "it is there"),
        "_add: write(i).start()": ("hang", "the sum, to its place"),
        "_add: write(i - 2).wait()": (EARLY, "the sum before last has left its slot"),
        "_add: write(jnp.int32(i)).wait()": (EARLY, "the last two have left, and may be sent"),
    },
    "dispatch.tpu": {
        "_kernel: pl.semaphore_signal(barrier, 1, device_id=coordinates(receiver(k), axes, sizes))":
            ("hang", "tells all peers that this device is in the kernel"),
        "_kernel: pl.semaphore_wait(barrier, devices - 1)": (EARLY, "all peers are in the kernel"),
        "_kernel: ).start()": ("hang", "sends a block of rows to a peer"),
        "_kernel: pltpu.make_async_copy(*part(rank, ahead, length), copy_sem).start()": ("hang", "the rows that stay"),
        "_kernel: copy_rows(total(3), lambda ahead, length: like(ahead, length).wait_recv())": (EARLY, "all rows came"),
        "_kernel: copy_rows(total(1), lambda ahead, length: like(ahead, length).wait_send())": (EARLY, "all rows have left"),
        "_kernel: pltpu.make_async_copy(chunk, chunk, copy_sem).wait()": (EARLY, "the rows that stay are there"),
    },
    "exchange.tpu": {
        "_group_barrier: pl.semaphore_signal(barrier, 1, device_id=coordinates(device, axes, sizes))":
            ("hang", "to all devices: this device is in the kernel"),
        "_group_barrier: pl.semaphore_wait(barrier, devices - 1)": (EARLY, "all devices are in the kernel"),
        "_all_to_all_kernel: own.start()": ("hang", "the block that remains"),
        "_all_to_all_kernel: own.wait()": (EARLY, "it is in the result"),
        "_all_to_all_kernel: send(k).start()": ("hang", "sends a block to a peer"),
        "_all_to_all_kernel: send(k).wait_recv()": (EARLY, "a peer's block was received"),
        "_all_to_all_kernel: send(k).wait_send()": (EARLY, "a peer has its block"),
        "_permute_kernel: pl.when(target == rank)(lambda: own.start())": ("hang", "the array that remains"),
        "_permute_kernel: pl.when(target == rank)(lambda: own.wait())": (EARLY, "it is in the result"),
        "_permute_kernel: pl.when(sends)(lambda: copy(target).start())": ("hang", "sends the array to its target"),
        "_permute_kernel: pl.when((source >= 0) & (source != rank))(lambda: copy(source).wait_recv())":
            (EARLY, "the source's array was received"),
        "_permute_kernel: pl.when(sends)(lambda: copy(target).wait_send())": (EARLY, "the target has the array"),
    },
    "collective_matmul.tpu": {
        "Ring: pl.semaphore_signal(free_slots.at[channel], 1, device_id=self.sender[channel])":
            ("hang", "to a channel's sender: this buffer of the channel is free"),
    },
    "collective_matmul.tpu_gather": {
        "_gather_kernel: messages.each(phase, lambda copy: copy.start())": ("hang", "the messages of this phase"),
        "_gather_kernel: load(at, parity, lambda copy: copy.start())": ("hang", "the first row tile, to chip memory"),
        "_gather_kernel: load((phase, *order.at(v + 1)[1:]), 1 - parity, lambda copy: copy.start())":
            ("hang", "the next row tile, to chip memory"),
        "_gather_kernel: load(at, parity, lambda copy: copy.wait())": (EARLY, "the row tile is there"),
        "_gather_kernel: messages.each(phase - 1, lambda copy: copy.wait_recv())": (EARLY, "the blocks of this phase came"),
        "_gather_kernel: messages.each(phase, lambda copy: copy.wait_send())": (EARLY, "they were sent on"),
        "_gather_kernel: pl.semaphore_wait(free_slots.at[one], 1)": (EARLY, "the receiver's buffer is free"),
    },
    "collective_matmul.tpu_scatter": {
        "_Tile: self.outgoing(channel, lax.rem(self.number, 2)).start()": ("hang", "sends a tile to the neighbour"),
        "_Tile: self._replace(parity=parity).outgoing(tpu.UP, 0).wait_send()": (EARLY, "the tile before last has left its slot"),
        "_Tile: ).wait_recv()": (EARLY, "the partial sums of a row tile were received"),
        "_scatter_kernel: tile.incoming(channel).start()": ("hang", "a tile of them, to chip memory"),
        "_scatter_kernel: tile.incoming(channel).wait()": (EARLY, "it is there"),
        "_Tile: pl.semaphore_wait(self.refs.free_slots.at[channel], 1)": (EARLY, "the receiver's buffer is free"),
    },
}  # fmt: skip
"""Module → call in the kernel → (kind of fault without it, the fact that it signals or waits for)."""

KERNELS = tpu_runs.kernels()
PROTOCOLS = Protocols(TABLES, KERNELS)
kernels = pytest.mark.parametrize("name", KERNELS)


@kernels
def test_every_wait_and_signal_is_in_the_table_and_missed_by_name(name):
    PROTOCOLS.check(name)


def test_the_table_has_no_call_that_is_gone():
    PROTOCOLS.check_rows()


@kernels
def test_without_its_entry_barrier_a_kernel_writes_to_devices_that_are_not_there(name):
    """Neither a signal nor a wait, so that nothing is left over."""
    meeting = {site for site in PROTOCOLS.sites_of(name) if "barrier" in site}
    assert len(meeting) == 2
    fault = noticed(KERNELS[name], meeting)
    assert fault is not None
    assert fault.kind == "early"


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_without_free_slot_signals_buffers_are_overwritten(name):
    free_slots = {
        site for site in PROTOCOLS.sites_of(name) if "free_slots" in site or "Ring: pl.semaphore_signal" in site
    }
    assert len(free_slots) == 2
    fault = noticed(KERNELS[name], free_slots)
    assert fault is not None
    assert fault.kind in ("race", "value")


@kernels
def test_in_every_order_of_events_the_result_is_right(name):
    for order in SCHEDULES[::8]:
        KERNELS[name](order)


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_rings_over_other_meshes(kind, sizes):
    for order in SCHEDULES[::20]:
        tpu_runs.ring(kind, order, sizes=sizes)


@pytest.mark.parametrize("pairs", [[(0, 1), (1, 2), (2, 0)], [(2, 0)], [(1, 1)], []])
def test_permutes_with_other_pairs(pairs):
    for order in SCHEDULES[::20]:
        tpu_runs.permute(order, pairs=pairs)
        tpu_runs.all_to_all(order, sizes=(2, 2))


@pytest.mark.parametrize("devices", [2, 3, 4, 5])
def test_matmuls_on_rings_of_other_sizes(devices):
    for order in SCHEDULES[::30]:
        tpu_runs.gather(order, sizes=(devices,), keep=devices == 3)
        tpu_runs.scatter(order, sizes=(devices,), wire=tpu_runs.F16 if devices == 4 else tpu_runs.F32)


def test_a_ring_both_ways_never_overtakes_its_receivers(monkeypatch):
    """Which is why the ring kernels have no word for a free buffer; with one buffer for a channel they would need it."""

    def enough(*sizes):
        tables = (table_of(kind, sizes, (True,) * len(sizes)) for kind in ("all_gather", "reduce_scatter"))
        return all(map(ring_tpu.never_overtakes, tables))

    for sizes in [(2,), (5,), (16,), (2, 4), (4, 4), (8, 6), (2, 2, 3), (4, 4, 4)]:
        assert enough(*sizes)
    monkeypatch.setattr(ring_tpu, "DEPTH", 1)
    assert not enough(8)
    assert "could send more than its receiver has room for" in str(
        ring_tpu.unsupported(table_of("all_gather", (8,), (True,)), (8, 128), ring_tpu.jnp.dtype("float32"))
    )
    fault = noticed(functools.partial(tpu_runs.ring, "reduce_scatter", sizes=(8,)), None)
    assert fault is not None
    assert fault.kind in ("race", "value")
