"""NVIDIA GPUs as Mosaic GPU kernels see them, on NumPy arrays: above all the copy engine, which does not index as arrays do.

A copy between global and tiled shared memory goes through a descriptor of the *global* array with the same tiles: an array
[rows, columns] in tiles of (8, 64) has the dims [rows / 8, columns / 64, 8, 64], and a window that begins at (r, c) begins there at
(r // 8, c // 64, r % 8, c % 64). The engine compares each coordinate with the bounds of its own dim: beyond them a load brings
zeros and a store drops. So a window that does not begin at a multiple of 8 rows has neither the last r % 8 rows of each tile nor
what should be in their stead (`copy_map`).

Of the rest only what kernels can get wrong is here: when copies land and products have read their operands, barriers with phases,
counts in the memory of peers, writes that the copy engine does not see until they are committed, and blocks that start when a
multiprocessor is free. Arrays hold numbers that float32 adds exactly, so results are compared bit for bit.

    gpus = Gpus(devices=2)
    results = gpus.run(lambda rank: some_kernel(x[rank], ...))   # of every device
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from kernel_machine import PLAIN, Buffer, Fault, Machine, Op, Ref, Schedule, Task, patched

from meshpar_kernels import _compat, _nvlink
from meshpar_kernels.collective_matmul import gpu_blackwell, gpu_hopper, gpu_order, gpu_peers
from meshpar_kernels.collectives import gpu as small
from meshpar_kernels.dispatch import gpu as exchange
from meshpar_kernels.grouped_matmul import blackwell, gpu_parts, hopper

__all__ = ["Gpus", "copy_map"]

KERNEL_MODULES = [
    hopper,
    blackwell,
    gpu_parts,
    gpu_hopper,
    gpu_blackwell,
    gpu_order,
    gpu_peers,
    small,
    exchange,
    _nvlink,
]
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
    """What the copy engine brings from a window of global memory."""
    maps = _maps(window, tiling)
    value = window.buffer.array[np.ix_(*(np.maximum(m, 0) for m in maps))]
    valid = functools.reduce(np.minimum, np.ix_(*maps)) >= 0
    return np.where(valid, value, 0).astype(value.dtype).reshape(window.shape)


def engine_store(window: Ref, value: np.ndarray, tiling: tuple[int, ...] | None) -> None:
    """What the copy engine writes to a window of global memory."""
    maps = _maps(window, tiling)
    value = value.reshape([len(m) for m in maps])
    kept = np.ix_(*(np.flatnonzero(m >= 0) for m in maps))
    there = np.ix_(*(m[m >= 0] for m in maps))
    window.buffer.array[there] = value[kept]
    if window.buffer.writes is not None:
        window.buffer.writes[there] += 1


class _Barrier:
    def __init__(self, arrivals: int, name: str):
        self.arrivals, self.name = arrivals, name
        self.arrived = self.phases = 0
        self.waited: dict[Any, int] = {}

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.arrivals:
            self.arrived, self.phases = 0, self.phases + 1


class _Barriers:
    """`Barrier(num_barriers=...)`: also one alone."""

    def __init__(self, each: list[_Barrier]):
        self.each, self.at = each, self

    def __getitem__(self, i: Any) -> _Barrier:
        return self.each[int(i)]


class _Counts:
    """Counts in the memory of the devices, of which each sees its own."""

    def __init__(self, shape: tuple[int, ...], devices: int):
        self.value = np.zeros((devices, *shape), int)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape[1:]

    @property
    def at(self) -> _Counts:
        return self

    def __getitem__(self, index: Any) -> _Count:
        return _Count(self, tuple(int(i) for i in (index if isinstance(index, tuple) else (index,))))


class _Count:
    def __init__(self, counts: _Counts, index: tuple[int, ...]):
        self.counts, self.index = counts, index


class _Types:
    """Makers of scratch memory, as the kernels ask for it."""

    def __init__(self, make: Callable[[Gpus, str, int], Any], shape: tuple[int, ...] = (), dtype: Any = None):
        self.make, self.shape, self.dtype = make, shape, dtype


class Gpus:
    """Some GPUs, and the names under which kernels use one of them.

    Args:
      devices: number of GPUs that NVLink joins along one axis "a".
      schedule, dropped: see `kernel_machine.Machine`.
      multiprocessors: how many blocks a GPU runs at the same time, or those of each GPU. None: as many as there are.
    """

    def __init__(
        self, devices: int = 1, schedule: Schedule = PLAIN, dropped: str | None = None,
        multiprocessors: int | Sequence[int] | None = None,
    ):  # fmt: skip
        self.devices = devices
        self.machine = Machine(schedule, dropped)
        self.free = [multiprocessors] * devices if multiprocessors is None or isinstance(multiprocessors, int) else [
            *multiprocessors
        ]  # fmt: skip
        self.globals: dict[int, _Counts] = {}
        self.launched: list[dict[str, Any]] = []
        self.left = [0] * devices  # blocks that have not ended
        self.rank = 0  # of the device whose launch is prepared

    # -- launching

    def run(self, function: Callable[[int], Any], once: bool = True) -> list[list[np.ndarray]]:
        """The kernel's results on every device, when `function(rank)` launches it there.

        Args:
          once: every element of the first result must have been written once.

        Raises:
          Fault: what the kernel does wrong.
        """
        with self._instead_of_jax():
            for rank in range(self.devices):
                self.rank = rank
                function(rank)
            for launch in self.launched:
                self._start(launch)
            self.machine.run()
        for rank, launch in enumerate(self.launched):
            for ref in launch["results"][: 1 if once else 0]:
                writes = ref.buffer.writes
                if not (writes == 1).all():
                    twice, never = int((writes > 1).sum()), int((writes == 0).sum())
                    raise Fault(
                        "written", f"device {rank}: of {writes.size} elements {never} never, {twice} more than once"
                    )
        return [[ref.buffer.array for ref in launch["results"]] for launch in self.launched]

    def kernel(self, body: Any, *, out_type: Any, scratch_types: Any = (), grid: Any = (), grid_names: Any = (),
               num_threads: int = 1, thread_name: str | None = None, kernel_name: str = "", **_: Any) -> Any:  # fmt: skip
        def call(*operands: Any) -> Any:
            rank = self.rank
            inputs = [
                Ref(self.machine, Buffer(np.asarray(x), "gmem", f"input {i}", device=rank))
                for i, x in enumerate(operands)
            ]
            several = isinstance(out_type, (list, tuple))
            results = []
            for i, t in enumerate(out_type if several else [out_type]):
                dtype = np.dtype(t.dtype)
                array = np.full(t.shape, np.nan if dtype.kind == "f" else np.iinfo(dtype).min, dtype)
                buffer = Buffer(array, "gmem", f"result {i}", device=rank)
                buffer.writes = np.zeros(t.shape, int)
                results.append(Ref(self.machine, buffer))
            self.launched.append({
                "body": body, "inputs": inputs, "results": results, "scratch": scratch_types, "blocks": math.prod(grid),
                "grid": (grid, grid_names), "threads": (num_threads, thread_name), "rank": rank, "started": 0,
            })  # fmt: skip
            arrays = [r.buffer.array for r in results]
            return arrays if several else arrays[0]

        return call

    def _here_to_stay(self, ref: Ref, task: Task | None = None) -> None:
        """A fault if what is written to a device comes from another, and the device has left the kernel."""
        task = task or next((op.task for op in self.machine.flying if ref in op.writes), None)
        if task is not None and task.at["device"] != ref.buffer.device and not self.left[ref.buffer.device]:
            raise Fault("late", f"{task.name} writes to {ref}, which has left the kernel")

    def _start(self, launch: dict[str, Any]) -> None:
        self.left[launch["rank"]] = launch["blocks"]
        free = self.free[launch["rank"]]
        for _ in range(launch["blocks"] if free is None else min(free, launch["blocks"])):
            self._start_block(launch)

    def _start_block(self, launch: dict[str, Any]) -> None:
        block, rank = launch["started"], launch["rank"]
        if block == launch["blocks"]:
            return
        launch["started"] += 1
        (grid, names), (threads, thread_name) = launch["grid"], launch["threads"]
        at = dict(zip(names, (int(i) for i in np.unravel_index(block, grid)), strict=True)) if grid else {}
        scratch = [self._make(t, f"scratch {i} of block {block}", rank) for i, t in enumerate(launch["scratch"])]
        refs = [*launch["inputs"], *launch["results"], *scratch]
        running, name = [threads], f"device {rank} block {block} "

        def work() -> None:
            launch["body"](*refs)
            running[0] -= 1
            if running[0] == 0:
                for op in self.machine.flying:
                    if op.task is not None and op.task.name.startswith(name) and any(
                        ref.buffer.space == "smem" for ref in op.reads + op.writes
                    ):  # fmt: skip
                        raise Fault("late", f"{name}ended while {op.what} was in flight")
                self.left[rank] -= 1
                if self.left[rank] == 0:
                    for op in self.machine.flying:
                        for ref in op.writes:
                            self._here_to_stay(ref, op.task)
                self._start_block(launch)

        for t in range(threads):
            where = at | {"device": rank, "block": block} | ({thread_name: t} if thread_name else {})
            self.machine.spawn(Task(f"{name}warpgroup {t}", where, work))

    def _make(self, kind: Any, name: str, rank: int) -> Any:
        if isinstance(kind, (list, tuple)):
            return [self._make(k, f"{name}.{i}", rank) for i, k in enumerate(kind)]
        return kind.make(self, name, rank)

    # -- memory and barriers

    def _memory(self, space: str, shape: Sequence[int], dtype: Any, tiling: Any = None, alias: Any = None) -> _Types:
        def make(gpus: Gpus, name: str, rank: int) -> Ref:
            dtype_ = np.dtype(dtype)
            unknown = dtype_.kind == "f" and space != "registers"  # which begin as zeros
            array = np.full(shape, np.nan, dtype_) if unknown else np.zeros(shape, dtype_)
            return Ref(gpus.machine, Buffer(array, space, f"{space} {name}", tiling=tiling, device=rank, alias=alias))

        return _Types(make, tuple(shape), dtype)

    def SMEM(self, shape: Sequence[int], dtype: Any, transforms: Sequence[Any] = ()) -> _Types:
        tiling = next((t.tiling for t in transforms if hasattr(t, "tiling")), None)
        return self._memory("smem", shape, dtype, tiling)

    def TMEM(self, shape: Sequence[int], dtype: Any) -> _Types:
        return self._memory("tmem", shape, dtype)

    def ACC(self, shape: Sequence[int], dtype: Any) -> _Types:
        return self._memory("registers", shape, dtype)

    def RefUnion(self, *kinds: _Types) -> _Types:
        def make(gpus: Gpus, name: str, rank: int) -> list[Ref]:
            refs = [k.make(gpus, f"{name}.{i}", rank) for i, k in enumerate(kinds)]
            for ref in refs:
                ref.buffer.alias = refs[0].buffer
            return refs

        return _Types(make)

    def Barrier(self, num_arrivals: int = 1, num_barriers: int = 1, orders_tensor_core: bool = False) -> _Types:
        del orders_tensor_core

        def make(gpus: Gpus, name: str, rank: int) -> Any:
            each = [_Barrier(num_arrivals, f"barrier {name}[{i}]@{rank}") for i in range(num_barriers)]
            return _Barriers(each)

        return _Types(make)

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

    def barrier_arrive(self, barrier: Any) -> None:
        if self.machine.site():
            return
        self.machine.current.state["reads"] = []
        self._one(barrier).arrive()
        self.machine.pause()

    # -- the copy engine

    def copy_gmem_to_smem(self, source: Ref, target: Ref, barrier: Any) -> None:
        barrier = self._one(barrier)
        for read in self.machine.current.state.get("reads", []):
            if read.overlaps(target):
                raise Fault("race", f"{target} is loaded while other threads of the warpgroup may still read {read}")
        poison = np.nan if target.dtype.kind == "f" else np.iinfo(target.dtype).min

        def land() -> None:
            target.store(engine_load(source, target.buffer.tiling))

        op = Op("load", f"the load of {source}", object(), [source], [target], land, barrier.arrive)
        self.machine.copied[source.buffer.name] += source.nbytes()
        self.machine.touch(target, writes=True)
        target.store(np.full(target.shape, poison, target.dtype))  # what was there is lost at once
        self.machine.start(op)

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
        self.machine.current.state["reads"] = []

    def commit_smem(self) -> None:
        if self.machine.site():
            return
        self.machine.current.dirty.clear()
        self.machine.current.state["reads"] = []

    # -- the tensor cores

    def wgmma(self, total: Ref, left: Ref, right: Ref) -> None:
        def land() -> None:
            total.store(total.load() + left.load().astype(np.float32) @ right.load().astype(np.float32))

        queue = ("products", self.machine.current.name)
        self.machine.start(Op("product", f"the product of {left} and {right}", queue, [left, right], [total], land))

    def wgmma_wait(self, n: int) -> None:
        if self.machine.site():
            return
        queue = ("products", self.machine.current.name)
        self.machine.wait(lambda: sum(op.queue == queue for op in self.machine.flying) <= n, f"all but {n} products")

    def tcgen05_mma(self, total: Ref, left: Ref, right: Ref, accumulate: Any) -> None:
        for task in self.machine.tasks:
            for busy in task.state.get("tensor memory", []):
                if busy.overlaps(total):
                    raise Fault("race", f"{total} is multiplied into while {task.name} still reads it")

        def land() -> None:
            first = total.load() if accumulate else np.zeros(total.shape, np.float32)
            total.store(first + left.load().astype(np.float32) @ right.load().astype(np.float32))

        queue = ("products", self.machine.current.name)
        self.machine.start(Op("product", f"the product of {left} and {right}", queue, [left, right], [total], land))

    def tcgen05_commit_arrive(self, barrier: Any) -> None:
        if self.machine.site():
            return
        barrier = self._one(barrier)
        queue = ("products", self.machine.current.name)
        self.machine.start(Op("product", "a commit", queue, [], [], lambda: None, barrier.arrive))

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
            task = Task(name, parent.at | {"warp": w}, functools.partial(function, np.int32(w)), parent)
            warps.append(self.machine.spawn(task))
        self.machine.wait(lambda: all(t.done for t in warps), "its warps")

    def remote_ref(self, ref: Ref, device: dict[str, Any]) -> Ref:
        mine = self.launched[ref.buffer.device]["results"]
        at = next(i for i, r in enumerate(mine) if r.buffer is ref.buffer)
        there = self.launched[int(device.get("a", 0))]["results"][at]
        return Ref(self.machine, there.buffer, ref.index)

    def get_global(self, shape: Any) -> Any:
        shape = shape() if callable(shape) else shape
        task = self.machine.current
        number = task.state["globals"] = task.state.get("globals", 0) + 1
        counts = self.globals.setdefault(number, _Counts(shape, self.devices))
        return counts if shape else _Count(counts, ())

    def semaphore_wait(self, count: _Count, value: Any, decrement: bool = True) -> None:
        if self.machine.site():
            return
        assert not decrement
        rank = self.machine.current.at["device"]
        value = int(value)
        self.machine.wait(
            lambda: count.counts.value[(rank, *count.index)] >= value, f"a count of {value} at {count.index}"
        )

    def semaphore_signal(self, count: _Count, value: int, device_id: dict[str, Any]) -> None:
        if self.machine.site():
            return
        count.counts.value[(int(device_id.get("a", 0)), *count.index)] += value
        self.machine.pause()

    # -- instead of jax

    def axis_index(self, name: str) -> np.int32:
        return np.int32(self.machine.current.at[name])

    def fori_loop(self, first: Any, last: Any, body: Callable[..., Any], state: Any) -> Any:
        for i in range(int(first), int(last)):
            state = body(np.int32(i), state)
        return state

    def run_scoped(self, body: Callable[..., Any], *kinds: Any) -> Any:
        task = self.machine.current
        return body(*(self._make(k, f"of {task.name}", task.at["device"]) for k in kinds))

    @contextlib.contextmanager
    def _instead_of_jax(self) -> Iterator[None]:
        lax = types.SimpleNamespace(
            div=lambda a, b: np.int32(int(a) // int(b)),  # of what is never negative
            rem=lambda a, b: np.int32(int(a) % int(b)),
            axis_index=self.axis_index,
            fori_loop=self.fori_loop,
            broadcast_in_dim=lambda x, shape, dims: np.broadcast_to(
                x.reshape([x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]), shape
            ),
        )

        def when(condition: Any) -> Callable[[Callable[[], None]], None]:
            return lambda function: function() if condition else None

        pl = types.SimpleNamespace(
            when=when,
            ds=lambda start, size: types.SimpleNamespace(start=start, size=size),
            cdiv=lambda a, b: -(-a // b),
            run_scoped=self.run_scoped,
            get_global=self.get_global,
            semaphore_wait=self.semaphore_wait,
            semaphore_signal=self.semaphore_signal,
        )
        pairs = [
            (module, name, value)
            for module in KERNEL_MODULES
            for name, value in (("lax", lax), ("jnp", np), ("pl", pl))
            if hasattr(module, name)
        ]

        def store_smem(ref: Ref, value: Any) -> None:
            ref[...] = value

        pairs += [
            (_compat, "mosaic_gpu", lambda: self),
            (_compat, "out_struct", lambda shape, dtype, *_: types.SimpleNamespace(shape=tuple(shape), dtype=dtype)),
            (_compat, "same_varying", lambda *arrays: arrays),
            (_compat, "load_gmem", lambda ref, index, layout: ref[index]),
            (_compat, "store_smem", store_smem),
            (_compat, "transpose_ref", lambda ref: ref.T),
            (_nvlink.Peers, "of", lambda axes, sizes: _nvlink.Peers(
                tuple(axes), tuple(sizes), self.axis_index("device"), {"a": self.axis_index("device")})),
        ]  # fmt: skip
        with patched(pairs):
            yield
