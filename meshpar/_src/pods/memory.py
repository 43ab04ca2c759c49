"""Copies of a state in host memory: ``mp.Checkpoints(path, memory="slice")``.

Each process writes the shards of its devices to a folder in the memory of its host, so that a restart reads no disk. A copy is of
use if it outlives the host that made it. Where a mesh axis replicates an array over the groups of hosts that are lost together,
each group has all of the array anyway, and nothing is sent. The shards of other arrays are also sent to the devices of the next
group, whose hosts store both.

.. code-block:: text

    FOLDER/RUN/STEP/PROCESS/facts.json     facts of the state, and the place of each block in the file
    FOLDER/RUN/STEP/PROCESS/blocks         the blocks, one after the other

A block is a shard that several devices may have; one process of a group stores it. A folder gets the name ``PROCESS`` when it is
complete.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import secrets
import shutil
import socket
import socketserver
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ...errors import CheckpointError, DigestError
from ..compat.jax import HOST_MEMORY
from ..compat.processes import MEMORY, coordinator, process_count, process_index
from ..dims import near
from ..global_arrays import of_parts
from ..runs.failures import KEPT
from ..units import format_memory, mesh_text
from .agree import exchange
from .digest import digest_on_host, starts_of

Blocks = dict[tuple[int, ...], Any]
"""Start of a block in its array → the block."""


class MemoryPlan(NamedTuple):
    """What a copy of a state in host memory takes; of the device, or process, for which it is most.

    Attributes:
      sent: bytes that a device sends to another group of hosts.
      stored: bytes that a process stores per copy; it has three of them.
      groups: number of groups of hosts; 1: a copy outlives the processes, but not the host.
    """

    sent: int
    stored: int
    groups: int

    def __str__(self) -> str:
        where = "in another group of hosts" if self.groups > 1 else "on this host alone"
        sent, stored, most = map(format_memory, (self.sent, self.stored, (KEPT + 1) * self.stored))
        return f"a copy in memory, {where}: a device sends {sent}, a process stores {stored} a copy, at most {most}"


@dataclass(frozen=True)
class Groups:
    """The groups of hosts that are lost together, as an array's devices are in them.

    Attributes:
      devices: of each group, in one order.
      blocks: device → (start, shape) of its shard.
    """

    devices: tuple[tuple[Any, ...], ...]
    blocks: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]]

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, sharding: Any, shape: tuple[int, ...], axis: str) -> Groups:
        """The groups of the devices of an array: those of a process are together, and those of one index of ``axis``, if its mesh
        has it."""
        mesh = sharding.mesh
        rows: dict[int, set[int]] = {}  # process → its indices along the axis
        if axis in mesh.axis_names:
            for place, device in np.ndenumerate(mesh.devices):
                rows.setdefault(device.process_index, set()).add(place[mesh.axis_names.index(axis)])
        groups: dict[Any, list[Any]] = {}
        for device in mesh.devices.flat:
            groups.setdefault(frozenset(rows.get(device.process_index, {device.process_index})), []).append(device)
        blocks = {
            d: (starts_of(index), tuple(len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)))
            for d, index in sharding.devices_indices_map(shape).items()
        }
        return cls(tuple(map(tuple, groups.values())), blocks)

    @functools.cached_property
    def source(self) -> dict[Any, Any]:
        """Device → the device that sends it its shard: of the group before; empty if each group has all of the array, if there is
        one group only.

        Raises:
          CheckpointError: the groups differ in size, so that a device has no counterpart.
        """
        groups, every = self.devices, {start for start, _ in self.blocks.values()}
        if len(groups) < 2 or all({self.blocks[d][0] for d in group} == every for group in groups):
            return {}
        if len({len(group) for group in groups}) > 1:
            sizes = ", ".join(str(len(group)) for group in groups)
            text = f"copies in memory need groups of hosts of one size, and these have {sizes} devices"
            raise CheckpointError(text, fixes=["a mesh with as many devices in each, or no memory="])
        return {d: s for k, group in enumerate(groups) for d, s in zip(group, groups[k - 1], strict=True)}

    @functools.cached_property
    def stored(self) -> dict[Any, tuple[bool, bool]]:
        """Device → whether its process stores its shard, and the one that it receives: it is the first of its group with it."""
        out: dict[Any, tuple[bool, bool]] = {}
        for group in self.devices:
            known: set[tuple[int, ...]] = set()
            own = {d: not (start in known or known.add(start)) for d in group for start in (self.blocks[d][0],)}
            sent = {d: self.blocks[self.source[d]][0] for d in group if d in self.source}
            got = {d: not (start in known or known.add(start)) for d, start in sent.items()}
            out.update((d, (own[d], got.get(d, False))) for d in group)
        return out


def memory_plan(leaves: Mapping[str, Any], axis: str) -> MemoryPlan:
    """What a copy takes; ``leaves``: path → array, or shape, dtype and sharding.

    Raises:
      CheckpointError: a mesh has no such axis, but one of nearly the same name.
    """
    sent: dict[Any, int] = {}
    stored: dict[int, int] = {}
    count = 1
    for x in filter(_on_mesh, leaves.values()):
        check_axis(x.sharding.mesh, axis)
        groups = Groups.of(x.sharding, tuple(x.shape), axis)
        count = max(count, len(groups.devices))
        size = math.prod(x.sharding.shard_shape(tuple(x.shape))) * x.dtype.itemsize
        for device in groups.blocks:
            stored[device.process_index] = stored.get(device.process_index, 0) + sum(groups.stored[device]) * size
            sent[device] = sent.get(device, 0) + (device in groups.source) * size
    return MemoryPlan(max(sent.values(), default=0), max(stored.values(), default=0), count)


def check_axis(mesh: Mesh, axis: str) -> None:
    """Raise CheckpointError if a mesh has no axis of this name, but one of nearly the same."""
    if axis not in mesh.axis_names and (similar := near(axis, mesh.axis_names)):
        text = f"memory={axis!r}: the mesh {mesh_text(mesh.shape)} has no such axis"
        raise CheckpointError(text, fixes=[f"did you mean {similar[0]!r}?"])


def _on_mesh(x: Any) -> bool:
    """Whether an array, or its shape, has a sharding over a mesh."""
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)


# -- the copies of a state on the devices and in host memory


@functools.lru_cache(maxsize=8)
def _copies(shardings: tuple[Any, ...], sources: tuple[tuple[tuple[int, int], ...], ...]) -> Callable[..., Any]:
    """A function from arrays of one mesh to (their copies, the shards that their devices receive; None: no permutation).

    The results are in host memory where devices have memory of their own: the copy is made while later steps run, and the
    arrays may be donated to these.
    """

    def received(x: jax.Array, s: NamedSharding, pairs: Sequence[tuple[int, int]]) -> jax.Array | None:
        send = lambda x: jax.lax.ppermute(x, s.mesh.axis_names, pairs)  # noqa: E731
        run = jax.shard_map(send, mesh=s.mesh, in_specs=s.spec, out_specs=s.spec, check_vma=False)
        return run(x) if pairs else None

    def run(xs: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array | None]]:
        return [(jnp.copy(x), received(x, s, pairs)) for x, s, pairs in zip(xs, shardings, sources, strict=True)]

    def on_host(s: Any) -> Any:
        device = next(iter(s.addressable_devices))  # of this process: all processes make one program
        kinds = {m.kind for m in device.addressable_memories()}
        return s.with_memory_kind(HOST_MEMORY) if device.platform != "cpu" and HOST_MEMORY in kinds else s

    hosts = [on_host(s) for s in shardings]
    return jax.jit(run, out_shardings=[(h, h if pairs else None) for h, pairs in zip(hosts, sources, strict=True)])


def _shards(leaves: Mapping[str, Any], axis: str) -> Callable[[], dict[str, Blocks]]:
    """A function that waits for the copies of ``leaves``, which are started, and returns path → blocks that this process stores."""
    meshes: dict[Mesh, dict[str, Any]] = {}
    for p, x in leaves.items():
        if _on_mesh(x):
            meshes.setdefault(x.sharding.mesh, {})[p] = x
    copies: dict[str, tuple[Groups, tuple[jax.Array, jax.Array | None]]] = {}
    for mesh, arrays in meshes.items():
        check_axis(mesh, axis)
        place = {d: k for k, d in enumerate(mesh.devices.flat)}
        groups = [Groups.of(x.sharding, tuple(x.shape), axis) for x in arrays.values()]
        sources = tuple(tuple((place[s], place[d]) for d, s in g.source.items()) for g in groups)
        made = _copies(tuple(x.sharding for x in arrays.values()), sources)(list(arrays.values()))
        copies.update(zip(arrays, zip(groups, made, strict=True), strict=True))
    others = {p: np.array(x) for p, x in leaves.items() if p not in copies}  # each process has them

    def stored() -> dict[str, Blocks]:
        out: dict[str, Blocks] = {p: {(0,) * x.ndim: x} for p, x in others.items()}
        for p, (of, both) in copies.items():
            out[p] = {}
            for k, array in enumerate(both):
                for shard in array.addressable_shards if array is not None else ():
                    if of.stored[shard.device][k]:
                        origin = of.source[shard.device] if k else shard.device
                        out[p][of.blocks[origin][0]] = np.asarray(shard.data)
        return out

    return stored


# -- the folder


def host_memory() -> Path:
    """A folder in the memory of this host, where the system has one; else the folder of temporary files."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def _root(path: str) -> Path:
    """The folder of the copies of a folder of checkpoints, in the memory of this host."""
    root = Path(os.environ.get(MEMORY) or host_memory() / f"meshpar-{getattr(os, 'getuid', int)()}")
    return root / hashlib.sha256(path.encode()).hexdigest()[:16]


class _Held(NamedTuple):
    """A block in a file on this host, its dtype by name, and its digest."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    digest: tuple[int, int]

    def array(self) -> np.ndarray:
        """The block, read from the file.

        Raises:
          DigestError: it is not as it was written.
        """
        dtype = jnp.dtype(self.dtype)
        size = math.prod(self.shape) * dtype.itemsize
        with self.file.open("rb") as file:
            file.seek(self.offset)
            read = file.read(size)
        if len(read) < size:
            raise DigestError(f"a copy in memory is cut: {self.file}", fixes=["restore the last state on disk"])
        return np.frombuffer(read, dtype).reshape(self.shape)


class Memory:
    """The copies of the states of one run.

    Args:
      path: of its checkpoints.
      axis: of meshes: the hosts of one index are lost together.
    """

    def __init__(self, path: str, axis: str):
        self.path, self.axis, self.root = path, axis, _root(path)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="meshpar memory")
        self._writing: Future[None] | None = None

    def save(self, run: str, step: int, leaves: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Start to copy the arrays ``leaves`` (path → array of JAX or NumPy) of a step, and return.

        Args:
          run: the name of the run; copies of other runs are deleted.
          facts: JSON values that describe the state.

        Raises:
          CheckpointError: the copy before could not be written.
        """
        self.wait()
        made = _shards(leaves, self.axis)
        stored = {p: list(np.shape(x)) for p, x in leaves.items()}
        self._writing = self._pool.submit(self._write, run, step, made, {**facts, "stored": stored})

    def wait(self) -> None:
        """Until the last copy is complete in this process.

        Raises:
          CheckpointError: it could not be written.
        """
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            fixes = ["free memory of the host, or give mp.Checkpoints no memory="]
            raise CheckpointError(f"a copy cannot be written to {self.root}: {error}", fixes=fixes) from error

    def _write(self, run: str, step: int, made: Callable[[], dict[str, Blocks]], facts: dict[str, Any]) -> None:
        for other in self.root.iterdir() if self.root.exists() else ():
            if other.name != run:
                shutil.rmtree(other, ignore_errors=True)
        for old in sorted(self._steps(run))[:-KEPT]:
            shutil.rmtree(self.root / run / str(old), ignore_errors=True)
        folder = self.root / run / str(step)
        target, begun = folder / str(process_index()), folder / f"{process_index()}.{secrets.token_hex(4)}"
        begun.mkdir(parents=True)
        places: dict[str, list[Any]] = {}
        with (begun / "blocks").open("wb") as file:
            for path, blocks in made().items():
                for start, block in blocks.items():
                    block = np.ascontiguousarray(block).reshape(block.shape)
                    digest = [n & 0xFFFFFFFF for n in digest_on_host(block, start)]
                    places.setdefault(path, []).append([start, block.shape, str(block.dtype), file.tell(), digest])
                    file.write(block.reshape(-1).view(np.uint8).data if block.size else b"")
        (begun / "facts.json").write_text(json.dumps({"facts": facts, "blocks": places}))
        if target.exists():  # of an earlier attempt
            shutil.rmtree(target)
        begun.rename(target)

    def _steps(self, run: str) -> list[int]:
        """The steps of a run with a complete copy of this process."""
        folder = self.root / run
        found = [p for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []
        return [int(p.name) for p in found if (p / str(process_index())).exists()]

    def close(self, delete: bool) -> None:
        """Wait for the last copy; ``delete`` all copies of this host: the run has ended in all processes, which call this."""
        try:
            self.wait()
            if delete:
                exchange("end the copies in memory", True)  # other processes of the host may still write
                shutil.rmtree(self.root, ignore_errors=True)
        finally:
            self._pool.shutdown()

    # -- restore

    def newest(self, run: str) -> Copy | None:
        """The newest state of a run of which the hosts together have all blocks; None: there is none. All processes call it."""
        here: dict[int, dict[str, dict[tuple[int, ...], _Held]]] = {}
        known: dict[int, Any] = {}
        folder = self.root / run
        for step in (p for p in (folder.iterdir() if folder.exists() else ()) if p.name.isdigit()):
            for entry in (p for p in step.iterdir() if p.name.isdigit()):
                with contextlib.suppress(OSError, ValueError):  # of no use, as if it were absent
                    read = json.loads((entry / "facts.json").read_text())
                    known[int(step.name)] = read["facts"]
                    blocks = here.setdefault(int(step.name), {})
                    for path, places in read["blocks"].items():
                        for start, shape, dtype, offset, digest in places:
                            held = _Held(entry / "blocks", offset, tuple(shape), dtype, tuple(digest))
                            blocks.setdefault(path, {})[tuple(start)] = held
        mine = [
            [step, known[step], [[p, s, h.shape, h.dtype, h.digest] for p, of in b.items() for s, h in of.items()]]
            for step, b in here.items()
        ]
        found = exchange("list the copies in memory", mine, _complete)
        if found is None:
            return None
        step, facts, blocks = found
        return Copy(step, facts, blocks, here.get(step, {}))


def _complete(said: Sequence[Sequence[Any]]) -> list[Any] | None:
    """[step, facts, blocks] of the newest complete state among what all processes list; a block is
    [path, start, shape, dtype, digest, process that has it]. None: no state is complete."""
    steps: dict[int, tuple[Any, dict[tuple[str, tuple[int, ...]], list[Any]]]] = {}
    for process, listed in enumerate(said):
        for step, facts, blocks in listed:
            _, known = steps.setdefault(step, (facts, {}))
            for path, start, shape, dtype, digest in blocks:
                known.setdefault((path, tuple(start)), [path, start, shape, dtype, digest, process])
    for step, (facts, known) in sorted(steps.items(), reverse=True):
        sizes: dict[str, int] = {}
        for path, _, shape, *_ in known.values():
            sizes[path] = sizes.get(path, 0) + math.prod(shape)
        if all(sizes.get(p, -1) == math.prod(shape) for p, shape in facts["stored"].items()):
            return [step, facts, list(known.values())]
    return None


class CopyError(CheckpointError):
    """A copy in memory that cannot be read, or is damaged."""


class Copy:
    """A state in the memory of all hosts.

    Attributes:
      step: of the state.
      facts: as they were saved.
    """

    def __init__(
        self, step: int, facts: dict[str, Any], blocks: Sequence[Any], here: dict[str, dict[tuple[int, ...], _Held]]
    ):
        self.step, self.facts, self._here = step, facts, here
        self._blocks: dict[str, list[Any]] = {}
        for path, *block in blocks:
            self._blocks.setdefault(path, []).append(block)

    def read(self, targets: Mapping[str, jax.ShapeDtypeStruct | None]) -> dict[str, Any]:
        """path → array in the shape, dtype and sharding of ``targets``; None: as a NumPy array.

        Each process reads the blocks that its devices need, from its host or over a connection to the process that lists them. All
        processes call it, and each must wait for the others before it ends.

        Raises:
          CopyError: a block is not as it was written, or a process cannot read one; in every process.
        """
        out: dict[str, Any] = {}
        mine: Exception | None = None
        with _Exchange(self._here) as others:
            try:
                for path, target in targets.items():
                    part = _Part(path, self._blocks[path], others)
                    if target is None:
                        out[path] = part((slice(None),) * len(self.facts["stored"][path]))
                    else:
                        out[path] = of_parts(target.shape, target.sharding, part)
            except (OSError, CheckpointError) as error:
                mine = error
            # the others may still read from this process
            said = exchange("read a copy in memory", None if mine is None else str(mine).splitlines()[0])
        for p, text in enumerate(said):
            if text is not None:
                text = f"the copy of step {self.step} in memory cannot be read by process {p}: {text}"
                raise CopyError(text, fixes=["the last state on disk is restored instead"]) from mine
        return out


class _Part:
    """A function from the index of a part of an array to the part, made of blocks, each of which is read once."""

    def __init__(self, path: str, blocks: Sequence[Any], others: _Exchange):
        self.path, self.blocks, self.others = path, blocks, others
        self.shape = [max(s[d] + n[d] for s, n, *_ in blocks) for d in range(len(blocks[0][0]))]
        self._read: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, index: tuple[slice, ...]) -> np.ndarray:
        wanted = [s.indices(n)[:2] for s, n in zip(index or (slice(None),) * len(self.shape), self.shape, strict=True)]
        out = np.empty([stop - start for start, stop in wanted], jnp.dtype(self.blocks[0][2]))
        for start, shape, dtype, digest, process in self.blocks:
            low = [max(a, w[0]) for a, w in zip(start, wanted, strict=True)]
            high = [min(a + n, w[1]) for a, n, w in zip(start, shape, wanted, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                block = self._block(tuple(start), tuple(shape), dtype, digest, process)
                into = tuple(slice(a - w[0], b - w[0]) for a, b, w in zip(low, high, wanted, strict=True))
                out[into] = block[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
        return out

    def _block(self, start: tuple[int, ...], shape: Any, dtype: str, digest: Sequence[int], process: int) -> np.ndarray:
        if start not in self._read:
            block = self.others.block(self.path, start, shape, dtype, process)
            if [n & 0xFFFFFFFF for n in digest_on_host(block, start)] != list(digest):
                text = f"the copy in memory of `{self.path}` differs from its digest"
                raise DigestError(text, path=self.path, fixes=["the last state on disk is restored instead"])
            self._read[start] = block
        return self._read[start]


class _Exchange(contextlib.ExitStack):
    """Connections between all processes, over which each reads blocks that the others have in memory.

    A request is a line of JSON with a secret of the run, which the coordinator's store gives to its processes; the reply is the
    bytes of the block.
    """

    def __init__(self, here: Mapping[str, Mapping[tuple[int, ...], _Held]]):
        super().__init__()
        self._here = here
        self._connections: dict[int, Any] = {}

    def __enter__(self) -> _Exchange:
        if process_count() > 1:
            here, secret = self._here, secrets.token_hex(16)

            class Handler(socketserver.StreamRequestHandler):
                def handle(self) -> None:
                    for line in self.rfile:
                        asked = json.loads(line)
                        if asked["secret"] != secret:
                            return
                        block = here[asked["path"]][tuple(asked["start"])].array()
                        self.wfile.write(block.tobytes())

            server = socketserver.ThreadingTCPServer(("", 0), Handler)
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            self.callback(server.server_close)
            self.callback(server.shutdown)
            self._others = exchange("the addresses of the copies", [_address(), server.server_address[1], secret])
        return self

    def block(self, path: str, start: tuple[int, ...], shape: Sequence[int], dtype: str, process: int) -> np.ndarray:
        """A block from this host, or from the process that lists it."""
        if start in self._here.get(path, {}):
            return self._here[path][start].array()
        host, port, secret = self._others[process]
        if process not in self._connections:
            connection = self.enter_context(socket.create_connection((host, port), timeout=60))
            self._connections[process] = self.enter_context(connection.makefile("rwb"))
        stream = self._connections[process]
        stream.write(json.dumps({"secret": secret, "path": path, "start": start}).encode() + b"\n")
        stream.flush()
        size = math.prod(shape) * jnp.dtype(dtype).itemsize
        read = stream.read(size)
        if len(read) < size:
            text = f"process {process} does not send the copy in memory of `{path}`"
            raise CheckpointError(text, path=path, fixes=["the last state on disk is restored instead"])
        return np.frombuffer(read, jnp.dtype(dtype)).reshape(shape)


def _address() -> str:
    """The address of this host, as it is seen on the way to process 0."""
    host, _, port = coordinator().rpartition(":")
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(address)  # sends nothing
            return s.getsockname()[0]
    return socket.gethostname()
