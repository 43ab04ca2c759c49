"""The GPU kernels that wait and signal, on a model of the machine, in many orders of events; each wait and signal removed once."""

import gpu_runs
import pytest
from kernel_machine import SCHEDULES, Fault, noticed, unnoticed

from meshpar_kernels.collective_matmul import gpu_peers
from meshpar_kernels.grouped_matmul import gpu_parts

KERNELS = gpu_runs.kernels()
kernels = pytest.mark.parametrize("name", KERNELS)


@pytest.mark.slow
@kernels
def test_every_wait_and_signal_is_missed(name):
    """Without it there is a fault in some order of events."""
    assert not unnoticed(KERNELS[name])


@kernels
def test_in_every_order_of_events_the_result_is_right(name):
    for order in SCHEDULES[:: 25 if "blackwell" in name or "scaled" in name else 10]:
        KERNELS[name](order)


def test_a_sender_with_too_few_slots_is_noticed(monkeypatch):
    monkeypatch.setattr(gpu_peers, "SLOTS", 2)
    with pytest.raises(Fault, match="race"):
        KERNELS["all_gather_matmul, hopper"](SCHEDULES[0])


@pytest.mark.parametrize("name", [name for name in KERNELS if "in clusters" in name])
def test_a_stage_that_one_block_of_a_cluster_still_reads_is_not_loaded_again(name, monkeypatch):
    """As it would be if each block counted its own arrivals alone."""
    monkeypatch.setattr(gpu_parts, "cluster_barrier", lambda gpu, _, **options: gpu.Barrier(**options))
    assert noticed(lambda order, _: KERNELS[name](order), None) is not None


@pytest.mark.parametrize("module", gpu_runs.FUSED.values(), ids=gpu_runs.FUSED)
def test_blocks_that_do_not_all_run_at_once_deadlock(module):
    """A device some of whose multiprocessors are taken, by another collective that waits for a peer, say: the blocks that run
    wait for pieces which the peer's other blocks are to send, and the other way round."""
    gpu_runs.gather(module, num_sms=2, multiprocessors=2, rows=8, n=64)
    with pytest.raises(Fault, match="hang"):
        gpu_runs.gather(module, num_sms=4, multiprocessors=2, rows=136, n=64, k=256)
