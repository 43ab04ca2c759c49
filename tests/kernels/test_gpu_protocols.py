"""Waits and signals of the GPU kernels: the order that each ensures, and the fault without it. Each is removed once."""

import gpu_runs
import pytest
from kernel_machine import SCHEDULES, Fault, Protocols, noticed

from meshpar_kernels.collective_matmul import gpu_peers
from meshpar_kernels.grouped_matmul import gpu_parts

EARLY = "race barrier value late"
"""A wait that is missing lets someone run ahead."""

TABLES = {
    "grouped_matmul.hopper": {
        "load_stages: gpu.barrier_wait(empty.at[slot])": (EARLY, "a stage is loaded when both warpgroups have multiplied it"),
        "drain: gpu.barrier_wait(empty.at[base + parts.ring(stages, step - 1 - i)])":
            ("late", "the other block has freed all stages, and arrives here no more"),
        "multiply_stages: gpu.barrier_wait(full.at[slot])": (EARLY, "a stage is multiplied when both operands are there"),
        "multiply_stages: gpu.wgmma_wait(1)": (EARLY, "the matmuls of the step before have read their stage"),
        "multiply_stages: gpu.barrier_arrive(empty.at[base + parts.ring(stages, step - 1)])": ("hang", "a stage is free"),
        "multiply_stages: gpu.wgmma_wait(0)": (EARLY, "the sums of a tile are complete"),
        "skip: gpu.barrier_wait(full.at[slot])": (EARLY, "a stage that this warpgroup has no rows in is there"),
        "skip: gpu.commit_smem()": ("race", "all warps have seen it, for whom one thread arrives in both blocks"),
        "skip: gpu.barrier_arrive(empty.at[slot])": ("hang", "and is free"),
        "store: gpu.wait_smem_to_gmem(0, wait_read_only=True)": (EARLY, "the staging memory was read"),
        "store: gpu.commit_smem()": (EARLY, "the copy engine sees the staged rows"),
        "walk: gpu.wait_smem_to_gmem(0)": ("late", "shared memory was read when the block ends"),
        "_mask_stage: gpu.commit_smem()": (EARLY, "the tensor cores see the zeros of a stage"),
        "_mask_stage: gpu.barrier_arrive(masked)": ("hang", "this warpgroup has zeroed its columns"),
        "_mask_stage: gpu.barrier_wait(masked)": (EARLY, "both have"),
        "_transpose_kernel: gpu.wait_smem_to_gmem(0)": ("late", "shared memory was read when the block ends"),
    },
    "grouped_matmul.hopper_scaled": {
        "_kernel: gpu.barrier_wait(full.at[slot])": (EARLY, "a stage is multiplied when both operands are there"),
        "_kernel: gpu.wgmma_wait(0)": (EARLY, "the sums of a stage are complete, and it has been read"),
        "_kernel: gpu.barrier_arrive(empty.at[slot])": ("hang", "a stage is free"),
    },
    "grouped_matmul.blackwell": {
        "multiply_tiles: gpu.barrier_wait(loaded.at[stage])": (EARLY, "a stage is multiplied when both operands are there"),
        "multiply_tiles: gpu.barrier_wait(read.at[slot])": (EARLY, "an accumulator slot is reused after it was read"),
        "multiply_tiles: gpu.tcgen05_commit_arrive(empty.at[stage], **pair)": ("hang", "a stage is free"),
        "multiply_tiles: gpu.tcgen05_commit_arrive(done.at[slot], **pair)": ("hang", "the sums of a tile are complete"),
        "walk: gpu.wait_smem_to_gmem(0)": ("late", "shared memory was read when the block ends"),
        "read_accumulator: gpu.barrier_wait(done.at[slot])": (EARLY, "accumulators are read when they are complete"),
        "read_accumulator: gpu.wait_load_tmem()": (EARLY, "the accumulators are in registers"),
        "read_accumulator: gpu.barrier_arrive(read.at[slot])": ("hang", "an accumulator slot is free"),
        "_store: gpu.wait_smem_to_gmem(0, wait_read_only=True)": (EARLY, "the staging memory was read"),
        "_store: gpu.wait_smem_to_gmem(1, wait_read_only=True)": (EARLY, "this slot of it was read"),
        "_store: gpu.commit_smem()": (EARLY, "the copy engine sees the staged values"),
        "_mask_tile: gpu.barrier_wait(full.at[stage])": (EARLY, "a stage is masked when both operands are there"),
        "_mask_tile: gpu.commit_smem()": (EARLY, "the tensor cores see the zeros of a stage"),
        "_mask_tile: gpu.barrier_arrive(masked.at[stage])": ("hang", "a stage's other rows are zero"),
        "_transpose_kernel: gpu.barrier_wait(masked.at[stage])": (EARLY, "a stage is multiplied when they are"),
        "_mask_tile: gpu.barrier_arrive(empty.at[stage])": ("hang", "a stage is masked, for all that masks it"),
    },
    "grouped_matmul.gpu_parts": {
        "write: gpu.wait_smem_to_gmem(0 if fresh else 1, wait_read_only=True)": (EARLY, "this slot of the staging was read"),
        "write: gpu.commit_smem()": (EARLY, "the copy engine sees the staged values"),
    },
    "collective_matmul.gpu_fused": {
        "_gather_kernel: pl.semaphore_wait(arrived.at[step_index - 1, row], order.expected(row), decrement=False)":
            (EARLY, "a tile's rows are loaded when the peer has sent all of their chunks"),
        "_scatter_kernel: pl.semaphore_wait(summed.at[row * parts + part, column], order.devices - 1, decrement=False)":
            (EARLY, "partial sums are added when all peers have sent them"),
    },
    "collective_matmul.gpu_peers": {
        "push: gpu.barrier_wait(loaded.at[slot])": (EARLY, "a chunk is sent when it is in its slot"),
        "push: gpu.wait_smem_to_gmem(LAG)": (EARLY, "the chunk that is signalled to the peer has been written"),
        "push: gpu.wait_smem_to_gmem(0)": (EARLY, "and so the last ones"),
        "push: pl.semaphore_signal(count, 1, device_id=nvlink.device(order.receiver(hop, nvlink.rank)))":
            ("hang", "one more chunk is in the peer's memory"),
        "send: gpu.wait_smem_to_gmem(1, wait_read_only=True)": (EARLY, "this slot of partial sums was read"),
        "send: gpu.commit_smem()": (EARLY, "the copy engine sees the partial sums"),
        "signal_tile: gpu.wait_smem_to_gmem(0)": (EARLY, "the partial sums that are signalled to the peer have been written"),
        "signal_tile: pl.semaphore_signal(summed.at[row * high + part, column], 1, device_id=nvlink.device(receiver))":
            ("hang", "one more sender's partial sums are in the peer's memory"),
        "add_up: gpu.commit_smem()": (EARLY, "the copy engine sees the result; all threads have read what came"),
        "add_up: gpu.barrier_wait(landed(slot))": (EARLY, "a peer's partial sums are in their slot"),
        "add_up: gpu.wait_smem_to_gmem(0, wait_read_only=True)": (EARLY, "the staging memory was read"),
    },
    "collectives.gpu": {
        "_kernel: pl.semaphore_signal(arrived.at[block], 1, device_id=nvlink.device(r))": ("hang", "this block's chunks written"),
        "_kernel: pl.semaphore_wait(arrived.at[block], devices, decrement=False)": (EARLY, "the chunks of all devices are"),
    },
    "collectives.nvls": {
        "_gather_kernel: gpu.multimem_store(_compat.load_gmem(x, elements, layout), out.at[nvlink.rank, elements], every)":
            ("written", "stores a chunk on all devices"),
        "_each_chunk: gpu.semaphore_signal_multicast(arrived.at[block], collective_axes=axes)":
            ("hang", "to all devices: this block has stored its chunks, or read theirs"),
        "_each_chunk: pl.semaphore_wait(arrived.at[block], devices, decrement=False)":
            (EARLY, "all devices have stored, or read this device's operand"),
    },
    "dispatch.gpu": {
        "_kernel: gpu.barrier_wait(loaded.at[slot])": (EARLY, "a row is sent when it is in its slot"),
        "_kernel: gpu.wait_smem_to_gmem(LAG)": (EARLY, "the row before has left the slot that is fetched into next"),
        "_kernel: gpu.wait_smem_to_gmem(0)": (EARLY, "the peer has all rows that are signalled"),
        "_kernel: pl.semaphore_signal(arrived, 1, device_id=device)": ("hang", "this block's rows are there"),
        "_kernel: pl.semaphore_wait(arrived, (devices - 1) * blocks, decrement=False)": (EARLY, "rows of all peers received"),
    },
}  # fmt: skip
"""Module → call in the kernel → (kind of fault without it, the fact that it signals or waits for)."""

KERNELS = gpu_runs.kernels()
PROTOCOLS = Protocols(TABLES, KERNELS)
kernels = pytest.mark.parametrize("name", KERNELS)


@kernels
def test_every_wait_and_signal_is_in_the_table_and_missed_by_name(name):
    PROTOCOLS.check(name)


def test_the_table_has_no_call_that_is_gone():
    PROTOCOLS.check_rows()


@kernels
def test_in_every_order_of_events_the_result_is_right(name):
    for order in SCHEDULES[:: 16 if "blackwell" in name else 6]:
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
