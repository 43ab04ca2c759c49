"""Batches: rows in an order that depends on a seed and the batch number; each process reads the rows of its own devices.

The order of an epoch is a permutation that is computed, not stored: a Feistel network over the next power of four, applied until
the result is a row number (cycle walking; Black & Rogaway 2002). So batch ``n`` depends on (seed, n) only, not on the number of
processes, and the position in the data is one integer.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...errors import DataPositionError, MeshError, PatternError
from ..compat.jax import axes_of_spec
from ..dims import PathDims, did_you_mean, parse_dims
from ..global_arrays import of_parts
from ..layout import Layout
from .state_by_name import by_name

ROWS = "batch ..."
"""The dims of a leaf that no pattern names: its rows are the batch."""

_SpecOf = Callable[[str, tuple[int, ...]], PartitionSpec]
"""(path, global shape) of a leaf of a batch → its spec."""

ORDER = "feistel-4"
_ROUNDS = 4
SAMPLE_ROWS = 16

SAMPLES: dict[str, None] = {}
"""A line for all batches over several processes that have been read: the order, and a digest of sample rows. Processes compare
these lines before the first run of a function."""


class Source(Protocol):
    """Random access to rows: arrays, lists, grain's ``MapDataset``, datasets of Hugging Face."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


# -- order


def permuted(places: np.ndarray, rows: int, seed: int, epoch: int) -> np.ndarray:
    """The rows at these places of an epoch; int64, a permutation of ``0 … rows-1``."""
    half = max(1, (max(rows - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64)
    x = places.astype(np.uint64)
    todo = np.ones(x.shape, bool)
    while todo.any():
        left, right = x[todo] >> np.uint64(half), x[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        x[todo] = (left << np.uint64(half)) | right
        todo[todo] = x[todo] >= np.uint64(rows)
    return x.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


# -- arrays of host values


def put(batch: Any, *, mesh: Mesh, layout: Any, dims: Any = None, rows: Literal["all", "mine"] = "all") -> Any:
    """A batch of host arrays as arrays on the mesh, sharded by the layout.

    Args:
      batch: a tree of numpy arrays.
      mesh, layout: as in :func:`meshpar.jit`; rules for dims that the batch does not have are ignored.
      dims: the dims of every leaf, ``"batch seq"``, or tree-path patterns → dims; other leaves are ``"batch ..."``.
      rows: ``"all"``: every process has the global batch. ``"mine"``: each process has only the rows (of the first dim) of its own
        devices, in their order; all processes with different rows have equally many.

    Returns:
      The tree, with ``jax.Array`` leaves.

    Raises:
      DivisibilityError, RankError: the batch does not fit the layout.
      MeshError: with ``rows="mine"``, a number of rows that the devices of this process cannot have.

    Example:
      >>> batch = mp.data.put({"x": np.ones((32, 64))}, mesh=mesh, layout="batch: data")
      >>> tuple(batch["x"].sharding.spec)
      ('data',)
    """
    if rows not in ("all", "mine"):
        fix = 'rows="all": every process has the global batch; rows="mine": its own rows'
        raise MeshError(f"rows={rows!r}: it is 'all' or 'mine'", fixes=[fix])

    def own(path: str, shape: tuple[int, ...], spec_of: _SpecOf) -> tuple[Sequence[int], int] | None:
        return None if rows == "all" else _own_rows(mesh, spec_of(path, (0, *shape[1:])), shape, path)

    return _sharded(batch, mesh, Layout(layout), dims, own)


def _sharded(
    batch: Any,
    mesh: Mesh,
    layout: Layout,
    dims: Any,
    own: Callable[[str, tuple[int, ...], _SpecOf], tuple[Sequence[int], int] | None],
) -> Any:
    """A tree of host arrays as arrays on the mesh.

    Args:
      own: (path, shape of the host array) → the rows of the global array that the host array has, and the number of global rows;
        None: it has all.
    """
    leaves, back = by_name(batch)
    spec_of = _specs(mesh, layout, dims, leaves)

    def placed(path: str, x: np.ndarray) -> jax.Array:
        rows = own(path, x.shape, spec_of)
        if rows is None:
            return of_parts(x.shape, NamedSharding(mesh, spec_of(path, x.shape)), lambda index: x[index])
        held, total = rows
        shape = (total, *x.shape[1:])

        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(total)
            return x[(slice(held.index(start), held.index(stop - 1) + 1), *index[1:])]

        return of_parts(shape, NamedSharding(mesh, spec_of(path, shape)), part)

    arrays = {path: np.asarray(x) for path, x in leaves.items()}
    narrow = {path: x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False) for path, x in arrays.items()}
    return back({path: placed(path, x) for path, x in narrow.items()})


def _own_rows(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...], path: str) -> tuple[list[int], int]:
    """(the rows of this process's devices, the number of global rows) of a batch whose local shape is ``shape``."""
    rows = shape[0]
    axes = axes_of_spec(spec, len(shape))[0]
    parts = math.prod(mesh.shape[a] for a in axes)
    sharding = NamedSharding(mesh, PartitionSpec(axes or None))
    held = _held(sharding, parts)
    if rows % len(held):
        text = f"put: `{path}` has {rows} rows in this process, which {len(held)} groups of devices cannot share"
        raise MeshError(text, path=path, fixes=[f"a multiple of {len(held)} rows in every process"])
    each = rows // len(held)
    return [part * each + r for part in held for r in range(each)], each * parts


def _held(sharding: NamedSharding, size: int) -> list[int]:
    """The indices of an array [size] whose elements this process's devices have, in order."""
    spans = {index[0].indices(size) for index in sharding.addressable_devices_indices_map((size,)).values() if index}
    return sorted({i for span in spans for i in range(*span)})


def _specs(mesh: Mesh, layout: Layout, dims: Any, leaves: Mapping[str, Any]) -> _SpecOf:
    """A function (path, shape of a leaf) → its ``PartitionSpec``."""
    if dims is None or isinstance(dims, str):
        patterns = PathDims({"*": dims or ROWS})
    else:
        patterns = dims if isinstance(dims, PathDims) else PathDims(dims)
        unused = [p for p, _ in patterns.items if not any((m := patterns.match(q)) and m[0] == p for q in leaves)]
        if unused:
            text = f"the dims= pattern {unused[0]!r} matches no leaf of the batch"
            raise PatternError(text, path=unused[0], fixes=did_you_mean(unused[0], leaves, "leaves"))

    def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The ``PartitionSpec`` of the leaf at ``path``: by the matching ``dims=`` pattern, else by ``ROWS``; a scalar
        is replicated."""
        found = patterns.match(path)
        named = parse_dims(ROWS) if found is None else found[1]
        if not shape and found is None:
            return PartitionSpec()
        return layout.spec(["..." if d is ... else d for d in named], mesh, shape, path=path)

    return spec


# -- batches


@dataclass(eq=False, repr=False)
class Batches:
    """An iterator over batches of a source, as sharded arrays; made by :func:`batches`. :meth:`from_` iterates from a
    given batch.

    Attributes:
      position: the number of the next batch.
      per_epoch: batches in an epoch.
      rows_read: rows that this process has read.
    """

    source: Source
    batch: int
    seed: int
    mesh: Mesh
    layout: Layout
    dims: Any
    prefetch: int
    last: Literal["drop", "pad"]
    shuffle: bool
    epochs: int | None

    def __post_init__(self) -> None:
        """Check the batch size and begin at batch 0; no row is read before the first batch is requested.

        Raises:
          DataPositionError: the batch size is below 1, or an epoch has no batch.
        """
        self.rows = len(self.source)
        self.position = self.rows_read = 0
        size = max(1, self.batch)
        self.per_epoch = self.rows // size if self.last == "drop" else -(-self.rows // size)
        if self.batch < 1 or self.per_epoch == 0:
            fixes = ["make the batch smaller", 'last="pad" pads it']
            raise DataPositionError(f"batch={self.batch}: the source has {self.rows} rows", fixes=fixes)

    def rows_of(self, n: int) -> np.ndarray:
        """The rows of batch ``n``, int64 [batch]; -1 where it is padded."""
        epoch, k = divmod(n, self.per_epoch)
        places = np.arange(k * self.batch, (k + 1) * self.batch)
        there = places < self.rows
        out = np.full(self.batch, -1, np.int64)
        out[there] = permuted(places[there], self.rows, self.seed, epoch) if self.shuffle else places[there]
        return out

    def __getitem__(self, n: int) -> Any:
        """Batch ``n`` on the devices: the tree of a row, with a first dim; with ``last="pad"``, the pair of it and a mask."""
        sample = self._sample  # in the thread that reads
        if len({d.process_index for d in self.mesh.devices.flat}) > 1:
            SAMPLES[f"{', '.join(f'{k}={v}' for k, v in self._order().items())}: {sample or 'not compared'}"] = None
        rows = self.rows_of(n)
        sharding = NamedSharding(self.mesh, self.layout.spec("batch", self.mesh, (self.batch,), path="the batch"))
        mine = _held(sharding, self.batch)
        wanted = rows[mine]
        read = self._read(np.where(wanted < 0, 0, wanted))
        self.rows_read += int((wanted >= 0).sum())
        sharded = lambda x, dims: _sharded(x, self.mesh, self.layout, dims, lambda *_: (mine, self.batch))  # noqa: E731
        x = sharded(read, self.dims)
        return x if self.last == "drop" else (x, sharded(wanted >= 0, None))

    def _read(self, rows: np.ndarray) -> Any:
        """These rows, stacked; a tree of numpy arrays."""
        if isinstance(self.source, np.ndarray):
            return self.source[rows]
        several = getattr(self.source, "__getitems__", None)
        found = several(rows.tolist()) if several is not None else [self.source[int(r)] for r in rows]
        return jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *found)

    @functools.cached_property
    def _sample(self) -> str:
        """A digest of ``SAMPLE_ROWS`` evenly spaced rows; "" if they cannot be read, or differ when they are read again.

        Such sources are allowed: one that has only this process's rows, and one that changes rows at random.
        """
        rows = np.unique(np.linspace(0, self.rows - 1, SAMPLE_ROWS).astype(np.int64))
        try:
            first, second = self._digest(rows), self._digest(rows)
        except Exception:  # of the user's source, for rows that this process may never need
            return ""
        return first if first == second else ""

    def _digest(self, rows: np.ndarray) -> str:
        """SHA-256 of the paths, dtypes, shapes and bytes of these rows."""
        made = hashlib.sha256()
        for path, x in by_name(self._read(rows))[0].items():
            x = np.ascontiguousarray(x)
            made.update(f"{path} {x.dtype} {x.shape} ".encode() + x.tobytes())
        return made.hexdigest()[:32]

    # -- iteration

    def __iter__(self) -> Iterator[Any]:
        return (x for _, x in self.from_(self.position))

    def from_(self, position: int) -> Iterator[tuple[int, Any]]:
        """Yields (n, batch n) for n = ``position``, …; ``prefetch`` batches are read and sent to the devices before
        they are requested."""
        if position < 0:
            fix = "the number of a batch, as `position` of an earlier run says it"
            raise DataPositionError(f"position {position}: batches are numbered from 0", fixes=[fix])
        self.position = position
        end = None if self.epochs is None else self.epochs * self.per_epoch
        numbers = itertools.count(position) if end is None else iter(range(position, end))
        ahead: deque[tuple[int, Future[Any]]] = deque()
        with ThreadPoolExecutor(1, "meshpar batches") as reader:
            try:
                while True:
                    for n in itertools.islice(numbers, self.prefetch + 1 - len(ahead)):
                        ahead.append((n, reader.submit(self.__getitem__, n)))
                    if not ahead:
                        return
                    n, batch = ahead.popleft()
                    x = batch.result()
                    self.position = n + 1
                    yield n, x
            finally:
                for _, batch in ahead:
                    batch.cancel()

    # -- position

    def position_facts(self, position: int) -> dict[str, Any]:
        """The position for a checkpoint: the number of the next batch, the options that determine its rows, and the digest of
        sample rows."""
        return {"position": position, **self._order(), "sample": self._sample}

    def _order(self) -> dict[str, Any]:
        order = ORDER if self.shuffle else "as it is"
        return {"seed": self.seed, "batch": self.batch, "rows": self.rows, "last": self.last, "order": order}

    def go_to(self, facts: Mapping[str, Any]) -> None:
        """Set :attr:`position` to the position that a checkpoint's metadata (``position_facts``) has.

        Raises:
          DataPositionError: the order was another one (seed, batch size, or number of rows), or sample rows differ.
        """
        mine = self._order()
        text = fix = ""
        differing = next((name for name in mine if facts.get(name) != mine[name]), None)
        if differing is not None:
            said = f"{differing}={facts.get(differing)!r}"
            text, fix = f"data with {said}, and this has {differing}={mine[differing]!r}", f"make them with {said}"
        elif facts["sample"] and self._sample and facts["sample"] != self._sample:
            text = f"other data: it has as many rows, but {SAMPLE_ROWS} sample rows differ"
            fix = "give it the data of this run"
        if text:
            otherwise = "or restore without data=, and begin where you like: data.from_(n)"
            raise DataPositionError(f"the checkpoint's position is in {text}", fixes=[fix, otherwise])
        self.position = int(facts["position"])


def batches(
    source: Source, *, batch: int, mesh: Mesh, layout: Any, seed: int = 0, dims: Any = None, prefetch: int = 2,
    last: Literal["drop", "pad"] = "drop", shuffle: bool = True, epochs: int | None = None,
) -> Batches:  # fmt: skip
    """Batches over the mesh, in an order that depends on nothing but the seed, without end or for some epochs.

    Args:
      source: rows by number: anything with ``len`` and ``[]``. A row is an array or a tree of them; rows have one shape.
      batch: rows of a batch, over all processes.
      mesh, layout: as in :func:`meshpar.jit`; the dim of rows is ``batch``.
      seed: of the order; every epoch has another one.
      dims: as in :func:`put`.
      prefetch: batches that are read ahead, in a thread, and lie on the devices already.
      last: of an epoch, where rows are left: ``"drop"``, or ``"pad"``: then every batch is a pair of it and a mask, bool [batch].
      shuffle: False: rows in their own order.
      epochs: None: without end.

    Returns:
      :class:`Batches`: ``for n, x in data.from_(at)``. Give it to :meth:`Checkpoints.save` and ``restore``.

    Raises:
      DataPositionError: fewer rows than a batch.
      DivisibilityError: a batch that does not divide over the mesh.

    Example:
      >>> data = mp.data.batches(np.ones((256, 16)), batch=32, mesh=mesh, layout="batch: data", epochs=1)
      >>> [batch.shape for n, batch in data.from_(6)]
      [(32, 16), (32, 16)]
    """
    if last not in ("drop", "pad"):
        fix = 'last="drop" leaves out the rows that fill no batch; last="pad" pads them'
        raise DataPositionError(f"last={last!r}: it is 'drop' or 'pad'", fixes=[fix])
    made = Batches(source, batch, seed, mesh, Layout(layout), dims, prefetch, last, shuffle, epochs)
    made.layout.spec("batch", mesh, (batch,), path="the batch")
    return made
