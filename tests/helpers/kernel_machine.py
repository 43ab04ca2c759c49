"""A machine that runs kernel bodies as they are, on NumPy arrays: threads, copies that land late, and who may touch what meanwhile.

JAX's interpreters show values and races of one order of events, index arrays logically, and know no barrier between devices. Here
each thread of a kernel is a thread of Python of which one runs at a time, and every asynchronous operation (a copy, a matmul of
the tensor cores) is in flight from its start until the machine lets it land. A `Schedule` says in which order: copies land at
once, as late as anything can wait for them, or at random; and one kind of thread is starved, so that all others run ahead of it.

What goes wrong has a name (`Fault.kind`):

- `race`: memory was touched that an operation in flight reads or writes, or that its writer did not make visible;
- `hang`: nothing can run, nothing is in flight, and threads still wait;
- `early`: a device wrote to a peer that had not entered the kernel;
- `late`: something landed at, or was in flight from, a device that had left the kernel;
- `barrier`: a phase passed before a thread waited for the one before it;
- `leftover`: a semaphore was not zero at the end;
- `written`: an element of a result was written more than once, or never;
- `value`: a result is wrong.

`gpu_machine` and `tpu_machine` give kernels the names that they call.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import linecache
import math
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from meshpar_kernels import _compat


class Fault(AssertionError):
    """A defect of a kernel; `kind` as in the module's docstring."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class _Stop(BaseException):
    """Ends the threads of a machine that has found a fault."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An order of events.

    Attributes:
      landing: "late", "at once" or "random".
      last: of what lands late, the kind of operation that lands last.
      starved: (coordinate, its value): threads that run only if no other can.
      seed: of everything random.
    """

    landing: str = "late"
    last: str = "store"
    starved: tuple[str, int] | None = None
    seed: int = 0


PLAIN = Schedule()

_STARVED = [
    (name, value)
    for name, values in (("warpgroup", 3), ("warp", 2), ("device", 3), ("block", 2))
    for value in range(values)
]

SCHEDULES = [
    *(Schedule("late", last) for last in ("store", "matmul", "load")),
    *(Schedule("at once", starved=starved) for starved in _STARVED),
    *(Schedule("late", last, starved) for starved in _STARVED for last in ("store", "matmul", "load")),
    *(Schedule("random", seed=seed) for seed in range(4)),
]
"""The schedules of events under which a kernel is run."""


class Buffer:
    """An array in one memory.

    Attributes:
      array: the elements.
      space: "gmem", "smem", "tmem", "registers" or "semaphores".
      tiling: rows and columns of the tiles that its last two dims are cut into, or None.
      device: whose it is.
      alias: buffers with the same one lie in the same memory.
      block: whose shared memory it is, or None.
      twins: the same memory of all blocks of the cluster, in their order.
      writes: how often each element was written, for results.
    """

    def __init__(self, array: np.ndarray, space: str, name: str, *, tiling=None, device: int = 0, alias: Any = None):
        self.array, self.space, self.name, self.tiling, self.device = array, space, name, tiling, device
        self.alias = alias if alias is not None else self
        self.writes: np.ndarray | None = None
        self.block: Any = None
        self.twins = [self]


class Ref:
    """A window of a buffer. As in a kernel it may reach beyond the array; only copies may use that."""

    def __init__(self, machine: Machine, buffer: Buffer, index: Sequence[Any] | None = None, transposed: bool = False):
        self.machine, self.buffer, self.transposed = machine, buffer, transposed
        self.index = [(0, n) for n in buffer.array.shape] if index is None else list(index)

    @property
    def shape(self) -> tuple[int, ...]:
        found = tuple(e[1] for e in self.index if isinstance(e, tuple))
        return (*found[:-2], *found[:-3:-1]) if self.transposed else found

    @property
    def dtype(self) -> np.dtype:
        return self.buffer.array.dtype

    @property
    def at(self) -> _At:
        return _At(self)

    @property
    def T(self) -> Ref:
        return Ref(self.machine, self.buffer, self.index, not self.transposed)

    def window(self, key: Any) -> Ref:
        """The part that `key` names: numbers, slices and `pl.ds`."""
        assert not self.transposed
        key = list(key) if isinstance(key, tuple) else [key]
        free = [d for d, e in enumerate(self.index) if isinstance(e, tuple)]
        if any(k is Ellipsis for k in key):
            at = next(i for i, k in enumerate(key) if k is Ellipsis)
            key[at : at + 1] = [slice(None)] * (len(free) - len(key) + 1)
        key += [slice(None)] * (len(free) - len(key))
        index = list(self.index)
        for d, k in zip(free, key, strict=True):
            start, size = index[d]
            if isinstance(k, slice):
                first, last, step = k.indices(size)
                assert step == 1
                index[d] = (start + first, last - first)
            elif hasattr(k, "size") and hasattr(k, "start"):
                index[d] = (start + int(k.start), int(k.size))
            else:
                index[d] = start + int(k)
        return Ref(self.machine, self.buffer, index)

    def box(self) -> list[tuple[int, int]]:
        """First and past-the-last element in each dim of the buffer, where there are elements."""
        spans = [e if isinstance(e, tuple) else (e, 1) for e in self.index]
        return [(max(s, 0), min(s + n, full)) for (s, n), full in zip(spans, self.buffer.array.shape, strict=True)]

    def nbytes(self) -> int:
        """Of the elements that there are."""
        return math.prod(max(last - first, 0) for first, last in self.box()) * self.dtype.itemsize

    def overlaps(self, other: Ref) -> bool:
        if self.buffer is not other.buffer:
            return self.buffer.alias is other.buffer.alias
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(self.box(), other.box(), strict=True))

    def _slices(self) -> tuple[Any, ...]:
        for e, full in zip(self.index, self.buffer.array.shape, strict=True):
            start, size = e if isinstance(e, tuple) else (e, 1)
            if not (start >= 0 and start + size <= full):
                raise Fault("value", f"{self} reaches beyond {self.buffer.array.shape}")
        return tuple(slice(e[0], e[0] + e[1]) if isinstance(e, tuple) else e for e in self.index)

    def load(self) -> np.ndarray:
        """The elements, without asking who may read them."""
        value = self.buffer.array[self._slices()]
        return np.array(np.swapaxes(value, -1, -2) if self.transposed else value)

    def store(self, value: Any) -> None:
        assert not self.transposed
        self.buffer.array[self._slices()] = value
        if self.buffer.writes is not None:
            self.buffer.writes[self._slices()] += 1

    def __getitem__(self, key: Any) -> Any:
        ref = self if key is Ellipsis else self.window(key)
        self.machine.touch(ref, writes=False)
        if self.buffer.space == "smem":
            self.machine.current.state.setdefault("reads", []).append(ref)
        value = ref.load()
        return value[()] if value.ndim == 0 else value

    def __setitem__(self, key: Any, value: Any) -> None:
        ref = self if key is Ellipsis else self.window(key)
        self.machine.touch(ref, writes=True)
        if self.buffer.space == "smem":
            self.machine.current.dirty.append(ref)
        ref.store(value)

    def __repr__(self) -> str:
        parts = (f"{e[0]}:{e[0] + e[1]}" if isinstance(e, tuple) else str(e) for e in self.index)
        return f"{self.buffer.name}@{self.buffer.device}[{', '.join(parts)}]"


class _At:
    def __init__(self, ref: Ref):
        self.ref = ref

    def __getitem__(self, key: Any) -> Ref:
        return self.ref.window(key)


@dataclasses.dataclass(eq=False)
class Op:
    """An asynchronous operation.

    Attributes:
      kind: "load", "store", "matmul" or "copy".
      what: for messages.
      queue: operations of one queue land in their order, and may touch each other's memory.
      reads, writes: windows that nobody else may write, or touch, while it is in flight.
      land: performs it. Returns an operation for the rest (a store that has read, but not written), or None.
      when_landed: called after the last part.
      in_parts: it reads first and writes later, and the next of its queue may read before it writes.
      task: who started it.
    """

    kind: str
    what: str
    queue: Any
    reads: list[Ref]
    writes: list[Ref]
    land: Callable[[], Op | None]
    when_landed: Callable[[], None] = lambda: None
    in_parts: bool = False
    task: Task | None = None


class Task:
    """One thread of a kernel.

    Attributes:
      at: its coordinates, by name.
      dirty: memory that it wrote for the copy engine or the tensor cores and did not commit yet.
      state: of the kind of machine. `state["reads"]`: memory that its threads have read since their last barrier.
    """

    def __init__(self, name: str, at: dict[str, int], work: Callable[[], None]):
        self.name, self.at, self.work = name, at, work
        self.condition: Callable[[], bool] | None = None
        self.waiting = ""
        self.done = False
        self.go = threading.Semaphore(0)
        self.dirty: list[Ref] = []
        self.state: dict[Any, Any] = {}


class Machine:
    """Runs tasks under a schedule; `dropped` names calls of the kernel that do nothing (see `site`).

    Attributes:
      copied: bytes of the copies that were started, by the name of the array that they are from, and "remote" for those to
        another device.
      estimates: cost estimates of the kernels, in the order of their launches.
    """

    def __init__(self, schedule: Schedule = PLAIN, dropped: str | Collection[str] | None = None):
        self.schedule = schedule
        self.dropped = {dropped} if isinstance(dropped, str) else set(dropped or ())
        self.random = np.random.default_rng(schedule.seed)
        self.tasks: list[Task] = []
        self.flying: list[Op] = []
        self.fault: BaseException | None = None
        self.finished = threading.Event()
        self.sites: dict[str, int] = {}
        self.here = threading.local()
        self.copied: collections.Counter[str] = collections.Counter()
        self.estimates: list[Any] = []

    # -- tasks

    @property
    def current(self) -> Task:
        return self.here.task

    def spawn(self, task: Task) -> Task:
        self.tasks.append(task)

        def body() -> None:
            task.go.acquire()
            self.here.task = task
            try:
                if self.fault is None:
                    with np.errstate(all="ignore"):
                        task.work()
            except _Stop:
                pass
            except BaseException as error:
                self.fault = self.fault or error
            task.done = True
            self._pass_on()

        threading.Thread(target=body, daemon=True).start()
        return task

    def run(self) -> None:
        """Run all tasks to their end, and complete the operations in flight.

        Raises:
          Fault: a defect.
        """
        if self.tasks:
            self._pass_on()
            self.finished.wait()
        if self.fault is not None:
            raise self.fault

    def _preference(self, task: Task) -> int:
        starved = self.schedule.starved
        return 0 if starved is None else int(task.at.get(starved[0]) == starved[1])

    def _next(self) -> Task | None:
        """The task that runs now; lets operations land until there is one. None at the end."""
        while True:
            live = self.tasks = [t for t in self.tasks if not t.done]
            if self.fault is not None:
                return live[0] if live else None
            ready = [t for t in live if t.condition is None or t.condition()]
            first = self._landable()
            if first and (self.schedule.landing == "random" and self.random.random() < 0.3):
                self._land(first[self.random.integers(len(first))])
                continue
            if ready:
                best = min(map(self._preference, ready))
                ready = [t for t in ready if self._preference(t) == best]
                return ready[self.random.integers(len(ready))]
            if first:
                try:
                    self._land(first[self.random.integers(len(first))])
                except Fault as fault:
                    self.fault = fault
                continue
            if live:
                waits = "; ".join(f"{t.name} waits for {t.waiting}" for t in live)
                self.fault = Fault("hang", waits)
                continue
            return None

    def _pass_on(self) -> None:
        try:
            task = self._next()
        except BaseException as error:
            self.fault = self.fault or error
            task = self._next()
        if task is None:
            self.finished.set()
        else:
            task.go.release()

    def _switch(self) -> None:
        task = self.current
        self._pass_on()
        task.go.acquire()
        if self.fault is not None:
            raise _Stop

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until the condition holds."""
        task = self.current
        self.pause()
        while not condition():
            task.condition, task.waiting = condition, what
            self._switch()
            task.condition = None

    def pause(self) -> None:
        """Let others run, if the schedule has it so."""
        if self.fault is not None:
            raise _Stop
        random = self.schedule.landing == "random" and self.random.random() < 0.3
        if random or self._preference(self.current):
            self._switch()

    # -- operations in flight

    def _landable(self) -> list[Op]:
        """What may land: the first of each queue, and the first in it that has not read yet. The latter go first, so that what
        is written to others comes last."""
        first: dict[Any, Op] = {}
        reading: dict[Any, Op] = {}
        for op in self.flying:
            first.setdefault(op.queue, op)
            if op.reads and reading.setdefault(op.queue, op) is op and not op.in_parts and first[op.queue] is not op:
                del reading[op.queue]
        found = list(reading.values()) or list(first.values())
        early = [op for op in found if op.kind != self.schedule.last]
        return early if early and self.schedule.landing == "late" else found

    def _land(self, op: Op) -> None:
        rest = op.land()
        at = self.flying.index(op)
        if rest is None:
            del self.flying[at]
            op.when_landed()
        else:
            rest.task = op.task
            self.flying[at] = rest

    def start(self, op: Op) -> None:
        """Begin an operation; a fault if one in flight touches its memory, or if its operands were not committed."""
        op.task = self.current
        for writes, refs in ((False, op.reads), (True, op.writes)):
            for ref in refs:
                self.touch(ref, writes, op.queue)
        for task in self.tasks:
            for dirty in task.dirty:
                if any(dirty.overlaps(ref) for ref in op.reads):
                    raise Fault("race", f"{op.what} reads {dirty}, which {task.name} wrote and did not commit")
        self.flying.append(op)
        if self.schedule.landing == "at once":
            while op.queue in {other.queue for other in self.flying}:
                self._land(next(other for other in self.flying if other.queue == op.queue))
        self.pause()

    def touch(self, ref: Ref, writes: bool, queue: Any = None) -> None:
        """A fault if an operation in flight, of another queue, must not be disturbed here."""
        for op in self.flying:
            if op.queue == queue:
                continue
            for busy in op.writes + (op.reads if writes else []):
                if ref.overlaps(busy):
                    doing = "written" if writes else "read"
                    raise Fault("race", f"{ref} is {doing} while {op.what} is in flight on {busy}")

    # -- sites

    def site(self) -> bool:
        """Whether the kernel's call of what calls this is to be left out. Its name is "module.function: line of code"."""
        frame = sys._getframe(2)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        module = ".".join(frame.f_globals["__name__"].split(".")[-2:])
        name = f"{module}.{frame.f_code.co_qualname.split('.')[0]}: {line}"
        self.sites[name] = self.sites.get(name, 0) + 1
        return name in self.dropped


class Semaphores:
    """Semaphores of one name on all devices."""

    def __init__(self, shape: tuple[int, ...], devices: int, name: str):
        self.value = np.zeros((devices, *shape), int)
        self.name = name


class Semaphore:
    """One of them, or several before they are indexed, as a device sees its own."""

    def __init__(self, of: Semaphores, rank: int, index: tuple[int, ...] = ()):
        self.of, self.rank, self.index = of, rank, index

    @property
    def at(self) -> Semaphore:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.value.shape[1 + len(self.index) :]

    def __getitem__(self, index: Any) -> Semaphore:
        more = index if isinstance(index, tuple) else (index,)
        return Semaphore(self.of, self.rank, (*self.index, *(int(i) for i in more)))

    def on(self, rank: int) -> Semaphore:
        return Semaphore(self.of, rank, self.index)

    @property
    def value(self) -> int:
        return int(self.of.value[(self.rank, *self.index)])

    def add(self, n: int) -> None:
        self.of.value[(self.rank, *self.index)] += n

    def __repr__(self) -> str:
        return f"{self.of.name}{list(self.index)}@{self.rank}"


class Devices:
    """Devices that run one kernel together: its launches are prepared one after the other, and then started."""

    def __init__(self, devices: int, schedule: Schedule, dropped: str | Collection[str] | None):
        self.devices = devices
        self.machine = Machine(schedule, dropped)
        self.launched: list[dict[str, Any]] = []
        self.semaphores: dict[Any, Semaphores] = {}
        self.rank = 0  # of the device whose launch is prepared

    def semaphore(self, key: Any, shape: tuple[int, ...], rank: int) -> Semaphore:
        """A device's semaphores of a key, which all devices have."""
        return Semaphore(self.semaphores.setdefault(key, Semaphores(shape, self.devices, f"semaphore {key}")), rank)

    def run(self, function: Callable[[int], Any]) -> list[list[np.ndarray]]:
        """The kernel's results on every device, when `function(rank)` launches it there.

        Raises:
          Fault: the kernel has a defect.
        """
        with self.instead_of_jax():
            for rank in range(self.devices):
                self.rank = rank
                function(rank)
            for launch in self.launched:
                self.start(launch)
            self.machine.run()
        return [[ref.buffer.array for ref in launch["results"]] for launch in self.launched]

    def instead_of_jax(self) -> contextlib.AbstractContextManager[None]:
        """Gives kernels the names that they call."""
        raise NotImplementedError

    def start(self, launch: dict[str, Any]) -> None:
        raise NotImplementedError


def unknown(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array whose elements nobody has written: NaN, or the least integer."""
    dtype = np.dtype(dtype)
    return np.full(shape, np.iinfo(dtype).min if dtype.kind in "iu" else np.nan, dtype)


def _fori_loop(first: Any, last: Any, body: Callable[..., Any], state: Any) -> Any:
    for i in range(int(first), int(last)):
        state = body(np.int32(i), state)
    return state


LAX = {
    "div": lambda a, b: np.int32(int(a) // int(b)),  # operands are never negative
    "rem": lambda a, b: np.int32(int(a) % int(b)),
    "fori_loop": _fori_loop,
}
"""Of `jax.lax`, what kernels of all machines call."""
PALLAS = {
    "when": lambda condition: lambda function: function() if condition else None,
    "ds": lambda start, size: types.SimpleNamespace(start=start, size=size),
}
COMPAT = [
    (_compat, "out_struct", lambda shape, dtype, *_: types.SimpleNamespace(shape=tuple(shape), dtype=dtype)),
    (_compat, "same_varying", lambda *arrays: arrays),
]


@contextlib.contextmanager
def instead_of_jax(
    modules: Sequence[Any], pairs: Sequence[tuple[Any, str, Any]], lax: dict[str, Any], pl: dict[str, Any], **names: Any
) -> Iterator[None]:
    """Give modules with kernels other values of the names that they have, and the launchers' calls of JAX, for the time of a block.

    Args:
      pairs: (owner, attribute, value) of other attributes.
      lax, pl: what `jax.lax` and `jax.experimental.pallas` have besides :data:`LAX` and :data:`PALLAS`.
    """
    names |= {"jnp": np, "lax": types.SimpleNamespace(**LAX, **lax), "pl": types.SimpleNamespace(**PALLAS, **pl)}
    pairs = [(m, name, value) for m in modules for name, value in names.items() if hasattr(m, name)] + COMPAT + [*pairs]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in pairs]
    try:
        for owner, name, value in pairs:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def noticed(run: Callable[..., Any], dropped: Any) -> Fault | None:
    """Faults in some order of events when calls of a kernel are removed."""
    for order in SCHEDULES:
        try:
            run(order, dropped)
        except Fault as fault:
            return fault
    return None
