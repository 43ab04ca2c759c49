"""Kernels that wait and signal, on models of the machines, in many orders of events; each wait and signal is removed once."""

import functools

import gpu_runs
import numpy as np
import pytest
import tpu_runs
from kernel_machine import SCHEDULES, Fault, noticed

from meshpar_kernels.collective_matmul import gpu_peers
from meshpar_kernels.collectives import ring_tpu
from meshpar_kernels.collectives.schedule_table import table_of
from meshpar_kernels.grouped_matmul import gpu_common as gpu_tiles

TPU, GPU = tpu_runs.kernels(), gpu_runs.kernels()
KERNELS = {f"TPU, {name}": run for name, run in TPU.items()} | {f"GPU, {name}": run for name, run in GPU.items()}


def family(name):
    """Kernels for GPUs share lines."""
    if name.startswith("TPU"):
        return name
    return f"GPU, {'grouped' if 'grouped' in name else 'fused' if ', ' in name[5:] else 'other'} kernels"


FAMILIES = {f: [n for n in KERNELS if family(n) == f] for f in map(family, KERNELS)}


@pytest.mark.parametrize("names", FAMILIES.values(), ids=FAMILIES)
def test_every_wait_and_signal_is_missed(names):
    """Without it there is a fault in some order of events. What several forms of a kernel share is removed in the first."""
    known = set()
    for name in names:
        sites = KERNELS[name](SCHEDULES[0]).sites.keys() - known
        assert [site for site in sites if noticed(KERNELS[name], site) is None] == [], name
        known |= sites


@pytest.mark.parametrize("name", KERNELS)
def test_in_every_order_of_events_the_result_is_right(name):
    slow = "blackwell" in name or "scaled" in name
    for order in SCHEDULES[:: 20 if name.startswith("TPU") else 25 if slow else 16]:
        KERNELS[name](order)


@pytest.mark.parametrize("name", TPU)
def test_without_its_entry_barrier_a_kernel_writes_to_devices_that_are_not_there(name):
    """Neither a signal nor a wait, so that nothing is left over."""
    meeting = {site for site in TPU[name](SCHEDULES[0]).sites if "barrier" in site}
    assert len(meeting) == 2
    fault = noticed(TPU[name], meeting)
    assert fault is not None
    assert fault.kind == "early"


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_without_free_slot_signals_buffers_are_overwritten(name):
    free_slots = {
        site for site in TPU[name](SCHEDULES[0]).sites if "free_slots" in site or "Ring: pl.semaphore_signal" in site
    }
    assert len(free_slots) == 2
    fault = noticed(TPU[name], free_slots)
    assert fault is not None
    assert fault.kind in ("race", "value")


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2, 2)])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_rings_over_other_meshes(kind, sizes):
    for order in SCHEDULES[::30]:
        tpu_runs.ring(kind, order, sizes=sizes)


@pytest.mark.parametrize("pairs", [[(0, 1), (1, 2), (2, 0)], [(2, 0)], [(1, 1)], []])
def test_permutes_with_other_pairs(pairs):
    for order in SCHEDULES[::20]:
        tpu_runs.permute(order, pairs=pairs)
        tpu_runs.all_to_all(order, sizes=(2, 2))


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
def test_matmuls_on_rings_of_other_sizes(sizes):
    for order in SCHEDULES[::30]:
        tpu_runs.gather(order, sizes=sizes, keep=sizes == (3,))
        tpu_runs.scatter(order, sizes=sizes, wire=np.dtype("float16" if sizes == (2, 2) else "float32"))


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


def test_a_sender_with_too_few_slots_is_noticed(monkeypatch):
    monkeypatch.setattr(gpu_peers, "SLOTS", 2)
    with pytest.raises(Fault, match="race"):
        GPU["all_gather_matmul, hopper"](SCHEDULES[0])


@pytest.mark.parametrize("name", [name for name in GPU if "in clusters" in name])
def test_a_stage_that_one_block_of_a_cluster_still_reads_is_not_loaded_again(name, monkeypatch):
    """As it would be if each block counted its own arrivals alone."""
    monkeypatch.setattr(gpu_tiles, "cluster_barrier", lambda gpu, _, **options: gpu.Barrier(**options))
    assert noticed(lambda order, _: GPU[name](order), None) is not None


@pytest.mark.parametrize("module", gpu_runs.FUSED.values(), ids=gpu_runs.FUSED)
def test_blocks_that_do_not_all_run_at_once_deadlock(module):
    """A device some of whose multiprocessors are taken, by another collective that waits for a peer, say: the blocks that run
    wait for pieces which the peer's other blocks are to send, and the other way round."""
    gpu_runs.gather(module, num_sms=2, multiprocessors=2, rows=8, n=64)
    with pytest.raises(Fault, match="hang"):
        gpu_runs.gather(module, num_sms=4, multiprocessors=2, rows=136, n=64, k=256)
