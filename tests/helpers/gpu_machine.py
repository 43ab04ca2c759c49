"""NVIDIA GPUs as Mosaic GPU kernels see them, on NumPy arrays: above all the copy engine, which does not index as arrays do.

A copy between global and tiled shared memory goes through a descriptor of the *global* array with the same tiles: an array
[rows, columns] in tiles of (8, 64) has the dims [rows / 8, columns / 64, 8, 64], and a window that begins at (r, c) begins there at
(r // 8, c // 64, r % 8, c % 64). The engine compares each coordinate with the bounds of its own dim: beyond them a load brings
zeros and a store drops. So a window that does not begin at a multiple of 8 rows has neither the last r % 8 rows of each tile nor
what should be in their stead (`copy_map`).

Of the rest only what kernels can get wrong is here: when copies land and matmuls have read their operands, barriers with phases,
counts in the memory of peers, writes that the copy engine does not see until they are committed, and blocks that start when a
multiprocessor is free. Blocks of a cluster start together; a copy for all of them (`collective_axes`) is made of one for each, of
its part, which lands in every block by itself and is counted there; an arrival at a `ClusterBarrier` counts in every block, is of
one thread for its warpgroup, and must find the blocks there. Arrays hold numbers that float32 adds exactly, so results are compared
bit for bit.

    gpus = Gpus(devices=2)
    results = gpus.run(lambda rank: some_kernel(x[rank], ...))   # of every device
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from kernel_machine import PLAIN, Buffer, Devices, Fault, Op, Ref, Schedule, Semaphore, Task, instead_of_jax, unknown

from meshpar_kernels import _compat, _nvlink
from meshpar_kernels.collective_matmul import gpu_blackwell, gpu_hopper, gpu_kernels, gpu_order, gpu_peers
from meshpar_kernels.collectives import gpu_nvls_gather_and_scatter as nvls
from meshpar_kernels.collectives import gpu_one_shot_all_reduce as small
from meshpar_kernels.dispatch import gpu as exchange
from meshpar_kernels.grouped_matmul import blackwell, hopper, hopper_scaled
from meshpar_kernels.grouped_matmul import gpu_common as gpu_tiles
from meshpar_kernels.routing import gpu_rows

KERNEL_MODULES = [hopper, hopper_scaled, blackwell, gpu_tiles, small, nvls, gpu_rows, exchange, _nvlink]
KERNEL_MODULES += [gpu_hopper, gpu_blackwell, gpu_kernels, gpu_order, gpu_peers]
WARPS = 4


def copy_map(start: int, length: int, size: int, tile: int | None) -> np.ndarray:
    """Which element of a dim each element of a copy's window is in the global array: -1 for none.

    Args:
      start: first element of the window, as the kernel says.
      length: of the window.
      size: of the dim.
      tile: by which the dim is cut, or None.

    Raises:
      Fault: the descriptor cannot be made, as the compiler says ("dimension must be a multiple of its tiling").
    """
    there = np.arange(length)
    if tile is None:
        there = start + there
        return np.where((there >= 0) & (there < size), there, -1)
    extent = min(tile, size)  # of the innermost dim of the descriptor
    if size > tile and size % tile:
        raise Fault("value", f"{size} elements are no multiple of the tile of {tile}")
    block = start // tile + there // tile
    inside = start % tile + there % tile
    valid = (block >= 0) & (block < size // extent) & (inside < extent)
    return np.where(valid, block * extent + inside, -1)


def _maps(window: Ref, tiling: tuple[int, ...] | None) -> tuple[np.ndarray, ...]:
    """`copy_map` of each dim of a window of global memory."""
    tiled = [d for d, e in enumerate(window.index) if isinstance(e, tuple)]
    tiles = dict(zip(tiled[::-1], (tiling or ())[::-1], strict=False))
    found = []
    for d, (e, size) in enumerate(zip(window.index, window.buffer.array.shape, strict=True)):
        start, length = e if isinstance(e, tuple) else (e, 1)
        if not isinstance(e, tuple) and not 0 <= e < size:
            raise Fault("value", f"{window} names no part of {window.buffer.array.shape}")
        found.append(copy_map(start, length, size, tiles.get(d)))
    return tuple(found)


def engine_load(window: Ref, tiling: tuple[int, ...] | None) -> np.ndarray:
    """The array that the copy engine reads from a window of global memory."""
    maps = _maps(window, tiling)
    value = window.buffer.array[np.ix_(*(np.maximum(m, 0) for m in maps))]
    valid = functools.reduce(np.minimum, np.ix_(*maps)) >= 0
    return np.where(valid, value, 0).astype(value.dtype).reshape(window.shape)


def engine_store(window: Ref, value: np.ndarray, tiling: tuple[int, ...] | None) -> None:
    """Write an array to a window of global memory, as the copy engine does."""
    maps = _maps(window, tiling)
    value = value.reshape([len(m) for m in maps])
    kept = np.ix_(*(np.flatnonzero(m >= 0) for m in maps))
    there = np.ix_(*(m[m >= 0] for m in maps))
    window.buffer.array[there] = value[kept]
    if window.buffer.writes is not None:
        window.buffer.writes[there] += 1


class _Barrier:
    """A barrier in shared memory: a phase ends when all have arrived and all bytes that they expect are there.

    Args:
      slot: its index among those made with it, None if it is alone.
      everywhere: an arrival counts in each of its `twins`, the barriers of the cluster's blocks; of one thread for its warpgroup.
    """

    def __init__(
        self, arrivals: int, name: str, slot: int | None = None, *, everywhere: bool = False, ordered: bool = False
    ):
        self.arrivals, self.name, self.slot = arrivals, name, slot
        self.everywhere, self.ordered = everywhere, ordered
        self.arrived = self.expected = self.phases = 0
        self.waited: dict[Any, int] = {}
        self.block: Any = None
        self.twins = [self]

    def arrive(self, expected: int = 0) -> None:
        if self.arrived == self.arrivals:
            raise Fault("barrier", f"{self.name} has all its arrivals of a phase, and one more")
        self.arrived += 1
        self.landed(-expected)

    def landed(self, count: int) -> None:
        """So many bytes came; may be before they are expected."""
        self.expected -= count
        if self.arrived == self.arrivals and self.expected == 0:
            self.arrived, self.phases = 0, self.phases + 1


class _Barriers:
    """`Barrier(num_barriers=...)`: also one alone."""

    def __init__(self, each: list[_Barrier]):
        self.each, self.at = each, self

    def __getitem__(self, i: Any) -> _Barrier:
        return self.each[int(i)]


def _join(block: Any, same: Sequence[Any]) -> None:
    """Make the scratch memory and barriers of the blocks of a cluster known to each other; `block(i)` names the i-th."""
    if isinstance(same[0], list):
        for parts in zip(*same, strict=True):
            _join(block, parts)
    elif isinstance(same[0], _Barriers):
        for parts in zip(*(barriers.each for barriers in same), strict=True):
            for i, barrier in enumerate(parts):
                barrier.block, barrier.twins = block(i), list(parts)
    else:
        for i, ref in enumerate(same):
            ref.buffer.block, ref.buffer.twins = block(i), [other.buffer for other in same]


class _Types:
    """Makers of scratch memory, as the kernels ask for it."""

    def __init__(self, make: Callable[[Gpus, str, int], Any], shape: tuple[int, ...] = (), dtype: Any = None):
        self.make, self.shape, self.dtype = make, shape, dtype
        self.collective = False


class Gpus(Devices):
    """Some GPUs, and the names under which kernels use one of them.

    Args:
      devices: number of GPUs that NVLink joins along one axis "a".
      schedule, dropped: see `kernel_machine.Machine`.
      multiprocessors: number of blocks that a GPU runs at the same time, or the numbers of each GPU; None for no limit.
    """

    def __init__(
        self,
        devices: int = 1,
        schedule: Schedule = PLAIN,
        dropped: str | None = None,
        multiprocessors: int | Sequence[int] | None = None,
    ):
        super().__init__(devices, schedule, dropped)
        one = multiprocessors is None or isinstance(multiprocessors, int)
        self.free = [multiprocessors] * devices if one else [*multiprocessors]
        self.left = [0] * devices  # blocks that have not ended
        self.ended: set[Any] = set()
        self.joined = 1  # blocks of the cluster that is made

    # -- launching

    def run(self, function: Callable[[int], Any], once: bool = True) -> list[list[np.ndarray]]:
        """As of all `Devices`; `once`: every element of the first result must have been written once."""
        found = super().run(function)
        for rank, launch in enumerate(self.launched):
            for ref in launch["results"][: 1 if once else 0]:
                writes = ref.buffer.writes
                if not (writes == 1).all():
                    twice, never = int((writes > 1).sum()), int((writes == 0).sum())
                    what = f"of {writes.size} elements {never} never, {twice} more than once"
                    raise Fault("written", f"device {rank}: {what}")
        return found

    def kernel(
        self, body: Any, *, out_type: Any, scratch_types: Any = (), grid: Any = (), grid_names: Any = (), cluster: Any = (),
        cluster_names: Any = (), num_threads: int = 1, thread_name: str | None = None, kernel_name: str = "", **_: Any,
    ) -> Any:  # fmt: skip
        def call(*operands: Any) -> Any:
            rank = self.rank
            inputs = [
                Ref(self.machine, Buffer(np.asarray(x), "gmem", f"input {i}", device=rank))
                for i, x in enumerate(operands)
            ]
            several = isinstance(out_type, (list, tuple))
            results = []
            for i, t in enumerate(out_type if several else [out_type]):
                buffer = Buffer(unknown(t.shape, t.dtype), "gmem", f"result {i}", device=rank)
                buffer.writes = np.zeros(t.shape, int)
                results.append(Ref(self.machine, buffer))
            self.launched.append({
                "body": body, "inputs": inputs, "results": results, "scratch": scratch_types,
                "clusters": math.prod(grid), "grid": (grid, grid_names), "cluster": (cluster, cluster_names),
                "threads": (num_threads, thread_name), "rank": rank, "started": 0,
            })  # fmt: skip
            arrays = [r.buffer.array for r in results]
            return arrays if several else arrays[0]

        return call

    def _here_to_stay(self, ref: Ref, task: Task | None = None) -> None:
        """Raise a fault if a device writes to another device that has left the kernel."""
        task = task or next((op.task for op in self.machine.flying if ref in op.writes), None)
        if task is not None and task.at["device"] != ref.buffer.device and not self.left[ref.buffer.device]:
            raise Fault("late", f"{task.name} writes to {ref}, which has left the kernel")

    def start(self, launch: dict[str, Any]) -> None:
        size, clusters = math.prod(launch["cluster"][0]), launch["clusters"]
        self.left[launch["rank"]] = size * clusters
        free = self.free[launch["rank"]]
        for _ in range(clusters if free is None else min(free // size, clusters)):
            self._start_cluster(launch)

    def _start_cluster(self, launch: dict[str, Any]) -> None:
        cluster, rank = launch["started"], launch["rank"]
        if cluster == launch["clusters"]:
            return
        launch["started"] += 1
        size = self.joined = math.prod(launch["cluster"][0])
        blocks = range(cluster * size, (cluster + 1) * size)
        scratch = [self._make(list(launch["scratch"]), f"scratch of block {block}", rank) for block in blocks]
        _join(lambda i: (rank, blocks[i]), scratch)
        running, threads = [size], [size * launch["threads"][0]]
        together = any(getattr(kind, "collective", False) for kind in launch["scratch"])

        def leave() -> None:
            threads[0] -= 1
            if together:
                self.machine.wait(lambda: threads[0] == 0, "the other blocks of its cluster")

        def ended() -> None:
            running[0] -= 1
            if not running[0]:
                self._start_cluster(launch)

        for i, block in enumerate(blocks):
            at = {"device": rank, "block": block, "in cluster": i}
            for (sizes, names), number in ((launch["grid"], cluster), (launch["cluster"], i)):
                if sizes:
                    at |= zip(names, (int(n) for n in np.unravel_index(number, sizes)), strict=True)
            self._start_block(launch, at, scratch[i], leave, ended)

    def _start_block(self, launch: dict[str, Any], at: dict[str, int], scratch: Any, leave: Any, ended: Any) -> None:
        rank, this = at["device"], (at["device"], at["block"])
        threads, thread_name = launch["threads"]
        refs = [*launch["inputs"], *launch["results"], *scratch]
        running, name = [threads], f"device {rank} block {at['block']} "

        def work() -> None:
            launch["body"](*refs)
            leave()
            running[0] -= 1
            if running[0] == 0:
                for op in self.machine.flying:
                    if any(ref.buffer.block == this for ref in op.reads + op.writes):
                        raise Fault("late", f"{name}ended while {op.what} was in flight")
                self.ended.add(this)
                self.left[rank] -= 1
                if self.left[rank] == 0:
                    for op in self.machine.flying:
                        for ref in op.writes:
                            self._here_to_stay(ref, op.task)
                ended()

        for t in range(threads):
            where = at | ({thread_name: t} if thread_name else {})
            self.machine.spawn(Task(f"{name}warpgroup {t}", where, work))

    def _make(self, kind: Any, name: str, rank: int) -> Any:
        if isinstance(kind, (list, tuple)):
            return [self._make(k, f"{name}.{i}", rank) for i, k in enumerate(kind)]
        return kind.make(self, name, rank)

    # -- memory and barriers

    def _memory(self, space: str, shape: Sequence[int], dtype: Any, tiling: Any = None, alias: Any = None) -> _Types:
        def make(gpus: Gpus, name: str, rank: int) -> Ref:
            dtype_ = np.dtype(dtype)
            zeros = dtype_.kind != "f" or space == "registers"
            array = np.zeros(shape, dtype_) if zeros else unknown(shape, dtype_)
            return Ref(gpus.machine, Buffer(array, space, f"{space} {name}", tiling=tiling, device=rank, alias=alias))

        return _Types(make, tuple(shape), dtype)

    def SMEM(self, shape: Sequence[int], dtype: Any, transforms: Sequence[Any] = ()) -> _Types:
        tiling = next((t.tiling for t in transforms if hasattr(t, "tiling")), None)
        return self._memory("smem", shape, dtype, tiling)

    def TMEM(self, shape: Sequence[int], dtype: Any, collective: bool = False) -> _Types:
        """Where it is collective, the blocks of a cluster end together, as it is given back."""
        memory = self._memory("tmem", shape, dtype)
        memory.collective = collective
        return memory

    def ACC(self, shape: Sequence[int], dtype: Any) -> _Types:
        return self._memory("registers", shape, dtype)

    def RefUnion(self, *kinds: _Types) -> _Types:
        def make(gpus: Gpus, name: str, rank: int) -> list[Ref]:
            refs = [k.make(gpus, f"{name}.{i}", rank) for i, k in enumerate(kinds)]
            for ref in refs:
                ref.buffer.alias = refs[0].buffer
            return refs

        return _Types(make)

    def Barrier(self, num_arrivals=1, num_barriers=1, orders_tensor_core=False, collective_axes=None) -> _Types:
        def make(gpus: Gpus, name: str, rank: int) -> Any:
            arrivals = num_arrivals * (gpus.joined if collective_axes else 1)
            how = {"everywhere": bool(collective_axes), "ordered": orders_tensor_core}
            slots = range(num_barriers) if num_barriers > 1 else [None]
            return _Barriers([_Barrier(arrivals, f"barrier {name}[{i or 0}]@{rank}", i, **how) for i in slots])

        return _Types(make)

    ClusterBarrier = Barrier
    CopyPartition = types.SimpleNamespace(PARTITIONED=lambda axis: axis)

    TilingTransform = staticmethod(lambda tiling: types.SimpleNamespace(tiling=tiling))
    SwizzleTransform = staticmethod(lambda swizzle: types.SimpleNamespace(swizzle=swizzle))
    CompilerParams = staticmethod(lambda **_: None)
    LoweringSemantics = types.SimpleNamespace(Lane=None, Warpgroup=None)
    SemaphoreType = types.SimpleNamespace(REGULAR=lambda shape=(): tuple(shape))

    class Layout:
        class _Any:
            def reduce(self, _: Any) -> None: ...

        WGMMA = TCGEN05 = _Any()
        WG_STRIDED = staticmethod(lambda *_: None)

    @staticmethod
    def find_swizzle(bits: int) -> int:
        return next(s for s in (128, 64, 32, 16) if bits % (s * 8) == 0)

    def set_max_registers(self, *_: Any, **__: Any) -> None: ...

    @staticmethod
    def layout_cast(value: Any, _: Any) -> Any:
        return value

    @staticmethod
    def broadcasted_iota(dtype: Any, shape: Any, dimension: int, layout: Any = None) -> np.ndarray:
        del layout
        index = np.arange(shape[dimension], dtype=dtype).reshape(
            [-1 if d == dimension else 1 for d in range(len(shape))]
        )
        return np.broadcast_to(index, shape)

    def _one(self, barrier: Any) -> _Barrier:
        return barrier[0] if isinstance(barrier, _Barriers) else barrier

    def barrier_wait(self, barrier: Any) -> None:
        if self.machine.site():
            return
        barrier = self._one(barrier)
        task = self.machine.current
        who = task.name
        seen = barrier.waited.get(who, 0)
        self.machine.wait(lambda: barrier.phases > seen, barrier.name)
        if barrier.phases > seen + 1:
            raise Fault("barrier", f"{barrier.name} passed {barrier.phases - seen} phases before {who} waited for one")
        barrier.waited[who] = seen + 1
        if barrier.slot is not None:
            task.state.setdefault("separate", []).append(barrier.slot)

    def barrier_arrive(self, barrier: Any) -> None:
        if self.machine.site():
            return
        barrier, state = self._one(barrier), self.machine.current.state
        if barrier.everywhere and not barrier.ordered:
            issued = [slots for op, slots in state.get("issued", []) if op in self.machine.flying]
            if barrier.slot in sum(issued, state.get("separate", [])):
                raise Fault("race", f"{barrier.name}: one warp arrives, and others may still wait for its slot")
        state["reads"] = []
        for twin in barrier.twins if barrier.everywhere else [barrier]:
            self._arrive(twin)
        self.machine.pause()

    def _arrive(self, barrier: _Barrier, expected: int = 0) -> None:
        if barrier.block in self.ended:
            raise Fault("late", f"{self.machine.current.name} arrives at {barrier.name}, whose block has ended")
        barrier.arrive(expected)

    # -- the copy engine

    def copy_gmem_to_smem(
        self, source: Ref, target: Ref, barrier: Any, collective_axes: Any = None, leader_tracked: int | None = None
    ) -> None:
        barrier, me = self._one(barrier), self.machine.current.at["in cluster"]
        for read in self.machine.current.state.get("reads", []):
            if read.overlaps(target):
                raise Fault("race", f"{target} is loaded while other threads of the warpgroup may still read {read}")
        blocks, bytes_here = [me], target.nbytes()
        if leader_tracked is not None:  # each block loads its part for itself, and the first one counts
            source = self._part(source, target.shape[leader_tracked], me, leader_tracked)
            barrier, bytes_here = barrier.twins[0], bytes_here * len(barrier.twins) * (me == 0)
        elif collective_axes is not None:
            blocks = range(len(barrier.twins))
            rows, tile = target.shape[0] // len(blocks), (target.buffer.tiling or (1,))[0]
            if rows % tile or target.shape[0] % len(blocks):
                raise Fault("value", f"{target} cannot be loaded in {len(blocks)} parts, in tiles of {tile}")
            source, target = (self._part(ref, rows, me) for ref in (source, target))
        self.machine.copied[source.buffer.name] += source.nbytes()
        targets = [Ref(self.machine, target.buffer.twins[i], target.index) for i in blocks]
        for there in targets:
            self.machine.touch(there, writes=True)
            there.store(unknown(there.shape, there.dtype))  # the old content is lost immediately
        if bytes_here:
            self._arrive(barrier, bytes_here)
        for i, there in zip(blocks, targets, strict=True):

            def land(there: Ref = there) -> None:
                there.store(engine_load(source, there.buffer.tiling))

            counted = barrier if leader_tracked is not None else barrier.twins[i]
            landed = functools.partial(counted.landed, there.nbytes())
            self.machine.start(Op("load", f"the load of {source}", object(), [source], [there], land, landed))

    @staticmethod
    def _part(ref: Ref, size: int, number: int, dim: int = 0) -> Ref:
        """So many elements of a dim, by the number of the part."""
        return ref.window((slice(None),) * dim + (slice(number * size, (number + 1) * size),))

    def copy_smem_to_gmem(self, source: Ref, target: Ref) -> None:
        queue, what = ("stores", self.machine.current.name), f"the store to {target}"
        if target.buffer.device != self.machine.current.at["device"]:
            self.machine.copied["remote"] += target.nbytes()

        def write(value: np.ndarray) -> Op:
            def land() -> None:
                self._here_to_stay(target)
                engine_store(target, value, source.buffer.tiling)

            return Op("store", what, queue, [], [target], land)

        self.machine.start(Op("store", what, queue, [source], [target], lambda: write(source.load()), in_parts=True))

    def wait_smem_to_gmem(self, n: int, wait_read_only: bool = False) -> None:
        if self.machine.site():
            return
        queue = ("stores", self.machine.current.name)

        def pending() -> int:
            mine = [op for op in self.machine.flying if op.queue == queue]
            return sum(bool(op.reads) for op in mine) if wait_read_only else len(mine)

        self.machine.wait(lambda: pending() <= n, f"all but {n} of its stores")
        self._meet()

    def commit_smem(self) -> None:
        if self.machine.site():
            return
        self.machine.current.dirty.clear()
        self._meet()

    def _meet(self) -> None:
        """All warps of the warpgroup are here."""
        self.machine.current.state |= {"reads": [], "separate": []}

    # -- the tensor cores

    def wgmma(self, total: Ref, left: Ref, right: Ref) -> None:
        def land() -> None:
            total.store(total.load() + left.load().astype(np.float32) @ right.load().astype(np.float32))

        task = self.machine.current
        op = Op("matmul", f"the matmul of {left} and {right}", ("matmuls", task.name), [left, right], [total], land)
        issued = [pair for pair in task.state.get("issued", []) if pair[0] in self.machine.flying]
        issued.append((op, task.state.pop("separate", [])))  # it is done when all warps have begun it
        task.state["issued"] = issued
        self.machine.start(op)

    def wgmma_wait(self, n: int) -> None:
        if self.machine.site():
            return
        queue = ("matmuls", self.machine.current.name)
        self.machine.wait(lambda: sum(op.queue == queue for op in self.machine.flying) <= n, f"all but {n} matmuls")

    def tcgen05_mma(self, total: Ref, left: Ref, right: Ref, accumulate: Any, collective_axis: Any = None) -> None:
        totals, lefts, rights = (self._of_blocks(ref, collective_axis) for ref in (total, left, right))
        for task in self.machine.tasks:
            for busy in task.state.get("tensor memory", []):
                for ref in totals:
                    if busy.overlaps(ref):
                        raise Fault("race", f"{ref} is multiplied into while {task.name} still reads it")

        def land() -> None:
            columns = np.concatenate([ref.load().astype(np.float32) for ref in rights], 1)
            for sums, rows in zip(totals, lefts, strict=True):
                first = sums.load() if accumulate else np.zeros(sums.shape, np.float32)
                sums.store(first + rows.load().astype(np.float32) @ columns)

        queue = ("matmuls", self.machine.current.name)
        self.machine.start(Op("matmul", f"the matmul of {left} and {right}", queue, [*lefts, *rights], totals, land))

    def _of_blocks(self, ref: Ref, collective_axis: Any) -> list[Ref]:
        """The same of all blocks of the cluster, of which the first speaks for all."""
        if collective_axis is None:
            return [ref]
        if self.machine.current.at["in cluster"]:
            name = self.machine.current.name
            raise Fault("value", f"{name} starts matmuls of its cluster, and is not of its first block")
        return [Ref(self.machine, buffer, ref.index, ref.transposed) for buffer in ref.buffer.twins]

    def tcgen05_commit_arrive(self, barrier: Any, collective_axis: Any = None) -> None:
        if self.machine.site():
            return
        barrier = self._one(barrier)
        signalled = [barrier] if collective_axis is None else barrier.twins
        queue = ("matmuls", self.machine.current.name)

        def report() -> None:
            for one in signalled:
                self._arrive(one)

        self.machine.start(Op("matmul", "a commit", queue, [], [], lambda: None, report))

    def async_load_tmem(self, ref: Ref, layout: Any = None) -> np.ndarray:
        del layout
        self.machine.touch(ref, writes=False)
        self.machine.current.state.setdefault("tensor memory", []).append(ref)
        return ref.load()

    def wait_load_tmem(self) -> None:
        if self.machine.site():
            return
        self.machine.current.state["tensor memory"] = []

    # -- threads and peers

    def warp_map(self, function: Callable[[Any], None]) -> None:
        """Run the function as each warp of the warpgroup, and wait for all."""
        parent = self.machine.current
        warps = []
        for w in range(WARPS):
            name = f"{parent.name} warp {w}"
            task = Task(name, parent.at | {"warp": w}, functools.partial(function, np.int32(w)))
            warps.append(self.machine.spawn(task))
        self.machine.wait(lambda: all(t.done for t in warps), "its warps")

    def remote_ref(self, ref: Ref, device: dict[str, Any]) -> Ref:
        mine = self.launched[ref.buffer.device]["results"]
        at = next(i for i, r in enumerate(mine) if r.buffer is ref.buffer)
        there = self.launched[int(device.get("a", 0))]["results"][at]
        return Ref(self.machine, there.buffer, ref.index)

    def multimem_store(self, value: np.ndarray, ref: Ref, collective_axes: Any) -> None:
        del collective_axes
        if self.machine.site():
            return
        for rank in range(self.devices):
            there = self.remote_ref(ref, {"a": rank})
            self._here_to_stay(there, self.machine.current)
            there[...] = value

    def multimem_load_reduce(self, ref: Ref, *, collective_axes: Any, reduction_op: str) -> np.ndarray:
        assert reduction_op == "add"
        del collective_axes
        at = next(i for i, r in enumerate(self.launched[ref.buffer.device]["inputs"]) if r.buffer is ref.buffer)
        total = np.float32(0)
        for rank, launch in enumerate(self.launched):
            if not self.left[rank]:
                name = self.machine.current.name
                raise Fault("late", f"{name} reads the operand of device {rank}, which has left the kernel")
            total = total + Ref(self.machine, launch["inputs"][at].buffer, ref.index)[...].astype(np.float32)
        self.machine.pause()
        return np.asarray(total).astype(ref.dtype)

    def semaphore_signal_multicast(self, count: Semaphore, *, collective_axes: Any) -> None:
        del collective_axes
        if self.machine.site():
            return
        for rank in range(self.devices):
            count.on(rank).add(1)
        self.machine.pause()

    def get_global(self, shape: Any) -> Any:
        shape = shape() if callable(shape) else shape
        task = self.machine.current
        number = task.state["globals"] = task.state.get("globals", 0) + 1
        return self.semaphore(number, shape, task.at["device"])

    def semaphore_wait(self, count: Semaphore, value: Any, decrement: bool = True) -> None:
        if self.machine.site():
            return
        assert not decrement
        self.machine.wait(lambda: count.value >= int(value), f"{value} of {count}")

    def semaphore_signal(self, count: Semaphore, value: int, device_id: dict[str, Any]) -> None:
        if self.machine.site():
            return
        count.on(int(device_id.get("a", 0))).add(value)
        self.machine.pause()

    # -- instead of jax

    def axis_index(self, name: str) -> np.int32:
        return np.int32(self.machine.current.at[name])

    def run_scoped(self, body: Callable[..., Any], *kinds: Any) -> Any:
        task = self.machine.current
        return body(*(self._make(k, f"of {task.name}", task.at["device"]) for k in kinds))

    def instead_of_jax(self) -> contextlib.AbstractContextManager[None]:
        def broadcast_in_dim(x: np.ndarray, shape: Any, dims: Any) -> np.ndarray:
            return np.broadcast_to(
                x.reshape([x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]), shape
            )

        def group(axes: Any, sizes: Any) -> _nvlink.DeviceGroup:
            rank: Any = self.axis_index("device")
            return _nvlink.DeviceGroup(tuple(axes), tuple(sizes), rank, {"a": rank})

        def store_smem(ref: Ref, value: Any) -> None:
            ref[...] = value

        pairs = [
            (_compat, "mosaic_gpu", lambda: self),
            (_compat, "load_gmem", lambda ref, index, layout: ref[index]),
            (_compat, "store_smem", store_smem),
            (_nvlink.DeviceGroup, "of", group),
        ]
        lax = {"axis_index": self.axis_index, "broadcast_in_dim": broadcast_in_dim}
        same = ("run_scoped", "get_global", "semaphore_wait", "semaphore_signal")
        pl = {"cdiv": lambda a, b: -(-a // b), **{name: getattr(self, name) for name in same}}
        return instead_of_jax(KERNEL_MODULES, pairs, lax, pl)
