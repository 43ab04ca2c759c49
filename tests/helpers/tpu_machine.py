"""TPUs as Pallas kernels that talk to each other see them, on NumPy arrays: DMA, semaphores, and who is in the kernel.

A copy is in flight from its start until its semaphores count its bytes. One to another device has two ends: its sender's semaphore
counts when the source has been read, its receiver's, later, when the target has been written. In between nobody may write the one
or touch the other. A device whose turn comes late may not be written to before it is in the kernel (the entry barrier's purpose),
and when it leaves, its semaphores must be at zero and nothing of it in flight.

Blocks that a grid brings and takes are copied at once, before and after a step: that part of Pallas is not under test.

    tpus = Tpus((4,), ("a",))
    results = tpus.run(lambda rank: some_kernel(x[rank], ...))   # of every device
"""

from __future__ import annotations

import contextlib
import itertools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from kernel_machine import PLAIN, Buffer, Devices, Fault, Op, Ref, Schedule, Semaphore, Task, instead_of_jax, unknown

from meshpar_kernels import _compat
from meshpar_kernels.collective_matmul import tpu_common as fused
from meshpar_kernels.collective_matmul import tpu_gather, tpu_scatter
from meshpar_kernels.collectives import ring_tpu
from meshpar_kernels.collectives import run_by_ppermute as ppermute
from meshpar_kernels.collectives import tpu_one_shot_all_reduce as small
from meshpar_kernels.dispatch import tpu as exchange
from meshpar_kernels.exchange import tpu as dense

KERNEL_MODULES = [small, ring_tpu, exchange, dense, fused, tpu_gather, tpu_scatter, ppermute]


class _Copy:
    """`make_async_copy`, or `make_async_remote_copy` where it has a receiver."""

    def __init__(self, tpus: Tpus, source: Ref, target: Ref, sent: Any, came: Semaphore, receiver: int | None):
        self.tpus, self.source, self.target = tpus, source, target
        self.sent, self.came, self.receiver = sent, came, receiver

    def _bytes(self, ref: Ref) -> int:
        return math.prod(ref.shape) * ref.dtype.itemsize

    def start(self) -> None:
        machine = self.tpus.machine
        if machine.site():
            return
        target, came = self.target, self.came
        if self.receiver is not None:
            target, came = self.tpus.there(target, self.receiver), came.on(self.receiver)
            machine.copied["remote"] += self._bytes(self.source)
        what = f"the copy of {self.source} to {target}"
        queue = object()
        assert self.source.shape == target.shape, what

        def write(value: np.ndarray) -> Op:
            def land() -> None:
                if self.receiver is not None:
                    self.tpus.must_be_in(self.receiver, what)
                target.store(value)
                came.add(self._bytes(target))

            return Op("copy", what, queue, [], [target], land)

        def read() -> Op:
            value = self.source.load()
            if self.sent is not None:
                self.sent.add(self._bytes(self.source))
            return write(value)

        machine.start(Op("copy", what, queue, [self.source], [target], read))

    def wait(self) -> None:
        if self.tpus.machine.site():
            return
        if self.sent is not None:
            self.tpus.wait_for(self.sent, self._bytes(self.source))
        self.tpus.wait_for(self.came, self._bytes(self.target))

    def wait_send(self) -> None:
        if not self.tpus.machine.site():
            self.tpus.wait_for(self.sent, self._bytes(self.source))

    def wait_recv(self) -> None:
        if not self.tpus.machine.site():
            self.tpus.wait_for(self.came, self._bytes(self.target))


class Tpus(Devices):
    """TPUs on a mesh, and the names under which kernels use one of them.

    Args:
      sizes, axes: of the mesh.
      schedule, dropped: see `kernel_machine.Machine`.
    """

    def __init__(
        self, sizes: Sequence[int], axes: Sequence[str], schedule: Schedule = PLAIN, dropped: str | None = None
    ):
        self.sizes, self.axes = tuple(sizes), tuple(axes)
        super().__init__(math.prod(sizes), schedule, dropped)
        self.barrier = self.semaphore("barrier", (), 0)
        self.inside = ["before"] * self.devices

    # -- launching

    def pallas_call(
        self, kernel: Any, *, out_shape: Any, grid_spec: Any = None, in_specs: Any = None, out_specs: Any = None,
        scratch_shapes: Any = (), input_output_aliases: Any = None, cost_estimate: Any = None, **_: Any,
    ) -> Any:  # fmt: skip
        spec = grid_spec or types.SimpleNamespace(
            num_scalar_prefetch=0, grid=(), in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch_shapes
        )

        def call(*operands: Any) -> Any:
            rank = self.rank
            self.machine.estimates.append(cost_estimate)
            several = isinstance(out_shape, (list, tuple))
            shapes = list(out_shape) if several else [out_shape]
            specs = list(spec.out_specs) if isinstance(spec.out_specs, (list, tuple)) else [spec.out_specs]
            inputs = [self._buffer(np.array(x), f"input {i}", rank) for i, x in enumerate(operands)]
            aliases = {out: given for given, out in (input_output_aliases or {}).items()}
            results = [
                inputs[aliases[i]] if i in aliases else self._buffer(unknown(s.shape, s.dtype), f"result {i}", rank)
                for i, s in enumerate(shapes)
            ]
            self.launched.append({
                "kernel": kernel, "prefetch": inputs[: spec.num_scalar_prefetch], "grid": tuple(spec.grid),
                "inputs": list(zip(inputs[spec.num_scalar_prefetch :], spec.in_specs, strict=True)),
                "outputs": list(zip(results, specs, strict=True)), "results": results,
                "scratch": spec.scratch_shapes, "rank": rank, "refs": [],
            })  # fmt: skip
            arrays = [r.buffer.array for r in results]
            return arrays if several else arrays[0]

        return call

    def _buffer(self, array: np.ndarray, name: str, rank: int) -> Ref:
        return Ref(self.machine, Buffer(array, "hbm", name, device=rank))

    def start(self, launch: dict[str, Any]) -> None:
        rank = launch["rank"]

        def scratch(i: int, kind: Any) -> Any:
            if kind.semaphore:
                return self.semaphore(i, kind.shape, rank)
            return self._buffer(unknown(kind.shape, kind.dtype), f"scratch {i}", rank)

        kept = [scratch(i, kind) for i, kind in enumerate(launch["scratch"])]

        def block(ref: Ref, spec: Any) -> Ref:
            if spec.memory_space == "any" or spec.index_map is None:
                return ref
            shape = spec.block_shape
            return self._buffer(np.full(shape, np.nan, ref.dtype), f"block of {ref.buffer.name}", rank)

        inputs = [(block(ref, spec), ref, spec) for ref, spec in launch["inputs"]]
        outputs = [(block(ref, spec), ref, spec) for ref, spec in launch["outputs"]]
        refs = [*launch["prefetch"], *(b for b, *_ in inputs), *(b for b, *_ in outputs), *kept]
        launch["refs"] = refs

        def place(ref: Ref, spec: Any, at: tuple[Any, ...]) -> Ref:
            index = spec.index_map(*at, *launch["prefetch"])
            starts = [(int(i) * n, n) for i, n in zip(index, spec.block_shape, strict=True)]
            return Ref(self.machine, ref.buffer, starts)

        def work() -> None:
            task = self.machine.current
            self.inside[rank] = "in"
            self.machine.pause()
            before: list[Any] = [None] * len(outputs)
            for at in itertools.product(*map(range, launch["grid"])):
                at = tuple(np.int32(i) for i in at)
                task.state["step"] = (at, launch["grid"])
                for here, ref, spec in inputs:
                    if here is not ref:
                        here.store(place(ref, spec, at).load())
                for i, (here, ref, spec) in enumerate(outputs):
                    if here is not ref:
                        now = place(ref, spec, at)
                        if before[i] is not None and before[i].index != now.index:
                            before[i].store(here.load())
                        before[i] = now
                launch["kernel"](*refs)
            for was, (here, *_) in zip(before, outputs, strict=True):
                if was is not None:
                    was.store(here.load())
            self.inside[rank] = "left"
            for sems in self.semaphores.values():
                if sems.value[rank].any():
                    raise Fault("leftover", f"device {rank} leaves {sems.name} at {sems.value[rank].tolist()}")
            for op in self.machine.flying:
                if any(ref.buffer.device == rank for ref in op.reads + op.writes):
                    raise Fault("late", f"device {rank} has left the kernel while {op.what} is in flight")

        self.machine.spawn(Task(f"device {rank}", {"device": rank}, work))

    # -- other devices

    def number(self, device: dict[str, Any]) -> int:
        """Rank of a device that a kernel names by its coordinates."""
        assert set(device) == set(self.axes), device
        return int(np.ravel_multi_index([int(device[a]) for a in self.axes], self.sizes))

    def there(self, ref: Ref, rank: int) -> Ref:
        """The same window of another device's memory."""
        mine = self.launched[ref.buffer.device]["refs"]
        at = next(i for i, r in enumerate(mine) if isinstance(r, Ref) and r.buffer is ref.buffer)
        return Ref(self.machine, self.launched[rank]["refs"][at].buffer, ref.index)

    def must_be_in(self, rank: int, what: str) -> None:
        if self.inside[rank] == "before":
            raise Fault("early", f"{what} reaches device {rank}, which is not in the kernel yet")
        if self.inside[rank] == "left":
            raise Fault("late", f"{what} reaches device {rank}, which has left the kernel")

    def wait_for(self, semaphore: Semaphore, n: int) -> None:
        self.machine.wait(lambda: semaphore.value >= n, f"{n} of {semaphore}, which is {semaphore.value}")
        semaphore.add(-n)

    def semaphore_signal(self, semaphore: Semaphore, n: int = 1, *, device_id: Any = None) -> None:
        if self.machine.site():
            return
        rank = self.machine.current.at["device"] if device_id is None else self.number(device_id)
        if semaphore.of is not self.barrier.of or self.inside[rank] == "left":
            self.must_be_in(rank, f"a signal of {semaphore.of.name}")
        semaphore.on(rank).add(int(n))
        self.machine.pause()

    def semaphore_wait(self, semaphore: Semaphore, n: int = 1) -> None:
        if not self.machine.site():
            self.wait_for(semaphore, int(n))

    # -- instead of jax

    def axis_index(self, name: str) -> np.int32:
        task = getattr(self.machine.here, "task", None)
        rank = self.rank if task is None else task.at["device"]
        return np.int32(np.unravel_index(rank, self.sizes)[self.axes.index(name)])

    def instead_of_jax(self) -> contextlib.AbstractContextManager[None]:
        def loop(first: Any, last: Any) -> Callable[[Callable[[Any], Any]], None]:
            def run(body: Callable[[Any], Any]) -> None:
                for i in range(int(first), int(last)):
                    body(np.int32(i))

            return run

        def dot_general(a: Any, b: Any, dims: Any, **_: Any) -> np.ndarray:
            ((_, right), _) = dims
            a, b = a.astype(np.float32), b.astype(np.float32)
            return a @ (b if right == (0,) else b.T)

        def semaphores(shape: Any = ()) -> Any:
            return types.SimpleNamespace(semaphore=True, shape=tuple(shape))

        def memory(shape: Any, dtype: Any) -> Any:
            return types.SimpleNamespace(semaphore=False, shape=tuple(shape), dtype=dtype)

        semaphores.semaphore, semaphores.shape = True, ()  # pyright: ignore[reportFunctionMemberAccess]

        def spec(block_shape: Any = None, index_map: Any = None, *, memory_space: Any = None) -> Any:
            return types.SimpleNamespace(block_shape=block_shape, index_map=index_map, memory_space=memory_space)

        def remote_copy(source: Ref, target: Ref, sent: Semaphore, came: Semaphore, device_id: Any) -> _Copy:
            return _Copy(self, source, target, sent, came, self.number(device_id))

        lax = {"axis_index": self.axis_index, "dot_general": dot_general}
        lax["axis_size"] = lambda name: self.sizes[self.axes.index(name)]
        pl = {
            "multiple_of": lambda value, _: value,
            "loop": loop,
            "program_id": lambda d: self.machine.current.state["step"][0][d],
            "num_programs": lambda d: self.machine.current.state["step"][1][d],
            "semaphore_signal": self.semaphore_signal,
            "semaphore_wait": self.semaphore_wait,
            "pallas_call": self.pallas_call,
            "BlockSpec": spec,
            "ANY": "any",
            "CostEstimate": types.SimpleNamespace,
        }
        pltpu = types.SimpleNamespace(
            make_async_copy=lambda source, target, sem: _Copy(self, source, target, None, sem, None),
            make_async_remote_copy=remote_copy,
            get_barrier_semaphore=lambda: self.barrier.on(self.machine.current.at["device"]),
            VMEM=memory,
            SemaphoreType=types.SimpleNamespace(DMA=semaphores, REGULAR=semaphores),
            CompilerParams=lambda **_: None,
            PrefetchScalarGridSpec=types.SimpleNamespace,
        )
        pairs = [
            (_compat, "varying_over", lambda axes, *arrays: arrays),
            (_compat, "one_slice", lambda op, axes, x: x),
        ]
        return instead_of_jax(KERNEL_MODULES, pairs, lax, pl, pltpu=pltpu, collective_id=lambda *_: 0)
