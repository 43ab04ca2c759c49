"""Checkpoints by name: written by orbax, restored under any layout, mesh and number of processes, and verified.

A checkpoint is a folder ``PATH/STEP`` with two items: ``state``, nested dicts by tree paths, which plain orbax reads as well, and
``meshpar``, a JSON of facts: the shape, dtype, dims, spec and digest of every leaf, the values of Python numbers, the layout, mesh
and versions, where the data stands, and a checksum of all that. A folder of this name is there only when all is written.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import sys
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding

from ...errors import CheckpointError, CheckpointWarning, DigestError, MeshparError
from ..compat.coordination import process_count, process_index
from ..compat.jax import is_tracer
from ..compat.orbax import at_end_of_script, can_store, late_json_handler, literal_folders
from ..dims import did_you_mean, format_dims
from ..global_arrays import data_of, is_global, is_key, of_parts
from .copies_in_memory import Copy, CopyError, Memory, MemoryPlan, memory_plan
from .digest import Digests, on_device
from .lock import Lock
from .process_agreement import exchange, versions
from .state_by_name import by_name, stored_names
from .stop import StopRequest

FORMAT = 2
STATE, FACTS, RUN = "state", "meshpar", "meshpar.run"
DAMAGED, REASON = ".damaged", "meshpar-damage.txt"
SLICED = 1 << 26
"""Bytes of an array from which on its replicas share the writing."""
PYTHON = {kind.__name__: kind for kind in (bool, int, float, complex, str)}
"""Types of leaves whose values are in the metadata."""
_NOTHING = "%"
"""Name of the array of a state that has no other; :func:`stored_names` makes no such name."""
_streams = itertools.count()
_Result = TypeVar("_Result")


def needed(module: str) -> Any:
    """A module of a package of the extra ``checkpoint``, imported when it is needed.

    Raises:
      CheckpointError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        text = f"this needs {module.partition('.')[0]}, which is not installed ({error})"
        raise CheckpointError(text, fixes=['pip install "meshpar[checkpoint]"']) from None


orbax = functools.partial(needed, "orbax.checkpoint")


class Checkpoints:
    """The checkpoints of one run.

    Args:
      path: a folder that all processes can access, or ``gs://…``; it is created by the first save.
      keep: number of checkpoints to keep, the newest; None: all.
      every: :meth:`save` writes after every ``every``-th batch.
      data: the data (:func:`meshpar.data.batches`) whose position is saved, unless it is given with each call.
      memory: a mesh axis, such as ``"slice"``, over whose indices hosts are lost together: after every ``memory_every``-th batch
        the state is also copied to the memory of the hosts, so that each index of the axis has all of it, or its neighbour a
        copy of its part. :meth:`restore` takes the newest state, in memory or on disk. :meth:`memory_plan` returns the cost.
      memory_every: see ``memory``.

    Saving copies the arrays to the host and returns. Digests are computed and files are written in the background, and one
    rename commits them, so that a checkpoint is complete or absent. If that fails, the next :meth:`save`, :meth:`wait` or
    :meth:`close` raises; a script that calls none of them ends with exit status 1. One run writes to a folder at a time: the
    first save or :meth:`restore_or` creates the file ``meshpar.lock`` in it.

    After SIGTERM, the next :meth:`save` writes a checkpoint, at the same batch in all processes. Handlers of the script for this
    signal are called as well.

    Example:
      >>> init = mp.init(create, mesh=mesh, layout="embed: data", dims=weights)
      >>> with mp.Checkpoints("runs/a", every=2) as checkpoints:
      ...     state, first = checkpoints.restore_or(init, jax.random.key(0))
      ...     for n in range(first, 4):
      ...         if checkpoints.save(n, state):  # True after SIGTERM: saved
      ...             sys.exit(75)  # the status with which schedulers start a job again
      ...     checkpoints.steps()
      [1]
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep: int | None = 3,
        every: int = 1,
        data: Any = None,
        memory: str | None = None,
        memory_every: int = 1,
    ):
        """Check the arguments, and listen for SIGTERM; nothing is read, written or created yet."""
        if every < 1 or (keep is not None and keep < 1) or memory_every < 1:
            text = f"keep={keep}, every={every}, memory_every={memory_every}: all must be at least 1"
            raise CheckpointError(text, fixes=["keep=2, every=1"])
        self.path = str(path) if "://" in str(path) else str(Path(path).expanduser().resolve())
        self.keep, self.every, self.data, self.memory_every = keep, every, data, memory_every
        self._memory = None if memory is None else Memory(self.path, memory)
        self._manager: Any = None
        self._lock: Lock | None = None
        self._facts: dict[str, Any] = {}
        self._dims: dict[str, dict[str, str]] = {}
        self._stop = StopRequest()

    # -- save

    def save(
        self, n: int, state: Any, *, data: Any = None, force: bool = False, extra: Mapping[str, Any] | None = None
    ) -> bool:
        """Save the state after batch ``n`` if a checkpoint or a copy in memory is due; all processes call it after every batch.

        Args:
          n: the number of the last batch, from 0.
          state: trees of arrays (of JAX or NumPy), Python numbers and texts, nnx modules and optimizers.
          data: the data whose position is saved.
          force: save even if no checkpoint is due.
          extra: JSON values to save with it: seeds, the command line.

        Returns:
          True: the job has received SIGTERM, and the checkpoint is complete; end the script with ``sys.exit(75)``.

        Raises:
          CheckpointError: a leaf or a value of ``extra`` cannot be saved as it is; a checkpoint ``n`` exists; another run
            writes to the folder; or this checkpoint or the one before cannot be written, for example to a full disk.
          DigestError: the copies of an array on the devices differ; it is raised by the next call.
        """
        stop = self._stop.at(n)
        on_disk = stop or force or (n + 1) % self.every == 0
        in_memory = self._memory is not None and (stop or (n + 1) % self.memory_every == 0)
        if not (on_disk or in_memory):
            return False
        saved = {path: _saved(path, x) for path, x in by_name(state)[0].items()}
        arrays = {path: x for path, (x, _) in saved.items() if x is not None}
        facts = self._facts_of(n, data if data is not None else self.data, extra)
        facts["leaves"] = {path: {**about, **self._dims.get(path, {})} for path, (_, about) in saved.items()}
        if in_memory and self._memory is not None:
            self._open()
            self._memory.save(self._run, self._start, n, arrays, facts)
        if on_disk:
            self._write(n, arrays, facts)
        if stop:
            self.wait()
        return stop

    def memory_plan(self, like: Any) -> MemoryPlan:
        """The cost of a copy in memory: bytes that a device sends and a process stores. Nothing is copied.

        Args:
          like: the result of ``mp.init(…).abstract(key)``, or the state.

        Raises:
          CheckpointError: ``memory`` is not set.

        Example:
          >>> state = mp.init(create, mesh=mesh, layout="embed: data", dims=weights).abstract(jax.random.key(0))
          >>> print(mp.Checkpoints("runs/a", memory="slice").memory_plan(state))
          a copy in memory, on this host alone: a device sends 0 B, a process stores 24.0 KiB a copy, at most 72.0 KiB
        """
        if self._memory is None:
            raise CheckpointError("these checkpoints have no copies in memory", fixes=['memory="slice"'])
        return memory_plan(by_name(like)[0], self._memory.axis)

    def _facts_of(self, n: int, data: Any, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """The metadata of step ``n`` without its leaves: JSON values with the position of ``data``, and ``extra``."""
        return {
            **self._facts,
            "format": FORMAT,
            "step": n,
            "next": n + 1,
            "processes": process_count(),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "data": None if data is None else data.position_facts(n + 1),
            "extra": _json(dict(extra or {}), "extra"),
        }

    def _write(self, n: int, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Copy arrays to the host, and start to write them and the metadata of step ``n``.

        The metadata is a JSON object: ``facts``, with the digest of every array. It is completed in the background: all processes
        add up the digests, and an array with different copies ends the save.
        """
        manager = self._open()
        digests = Digests(arrays, copied=True)

        def completed() -> dict[str, Any]:
            """The metadata, in process 0; in a thread of orbax."""
            found = exchange(f"the digests of checkpoint {n}", digests.totals(), digests.texts, self._stream)
            differing = [path for path in arrays if not found[path]]
            if differing:
                head = f"the copies of `{differing[0]}` on the devices differ: it is not saved"
                fix = "mp.check finds a step that computes replicas differently; restart from the checkpoint before"
                raise DigestError(head, path=differing[0], fixes=[fix])
            leaves = facts["leaves"] | {path: {**facts["leaves"][path], "digest": found[path]} for path in arrays}
            made = {**facts, "leaves": leaves}
            return {**made, "check": _check(made)}

        names = stored_names(facts["leaves"])
        tree = unflatten_dict({names[path]: x for path, x in arrays.items()}) or {_NOTHING: np.zeros(1, np.uint8)}
        ocp = orbax()
        items = {STATE: ocp.args.PyTreeSave(tree), FACTS: ocp.args.JsonSave(completed)}
        self._do(lambda: manager.save(n, args=ocp.args.Composite(**items), force=True))

    def _do(self, write: Callable[[], Any]) -> None:
        """Call ``write``; errors of orbax become a ``CheckpointError``."""
        try:
            write()
        except MeshparError:
            raise
        except Exception as error:  # orbax, tensorstore and the operating system raise many kinds
            text, fixes = _first_line(error), ["older checkpoints are complete; the cause is above"]
            if "already exists" in text and type(error).__name__ == "StepAlreadyExistsError":
                fixes = ["save later steps, or continue in another folder", "or move that checkpoint elsewhere"]
            elif "new thread at interpreter shutdown" in str(error):  # Python 3.12.0 and 3.12.1, at the end of a script
                closing = "end the script with close(), or use `with mp.Checkpoints(…)`"
                fixes = [closing, "or use Python 3.12.2 or later"]
            elif re.search("RESOURCE_EXHAUSTED|OUT_OF_RANGE|No space left|File too large", str(error)):
                fixes = ["free space on the disk, or lower keep=; older checkpoints are complete"]
            raise CheckpointError(f"a checkpoint cannot be written to {self.path}: {text}", fixes=fixes) from error

    def describe(self, init: Any, *args: Any) -> None:
        """Record metadata that every later :meth:`save` writes: layout, mesh, hash of the plan, and the dims of the
        state's arrays.

        Args:
          init: a result of ``mp.init(…)``; it is planned and not run.
          args: the arguments of ``init``, such as a random key.
        """
        plan = init.plan(*args)
        digest = hashlib.sha256(str(plan.to_json()).encode()).hexdigest()[:16]
        self._facts = {"layout": str(init.layout), "mesh": dict(init.mesh.shape), "plan": digest}
        self._dims = {h.path: {"dims": format_dims(h.dims)} for h in plan.outputs if h.dims}

    # -- restore

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints that are on disk now, oldest first; the same in all processes."""
        return exchange("list the checkpoints", steps_of(self.path))[0]

    def restore(
        self, like: Any, *, step: int | None = None, data: Any = None, partial: bool = False
    ) -> tuple[Any, int]:
        """The saved state, in the shardings of ``like``; every array is compared with its saved digest. With ``memory``, the
        newest copy in memory if it is not older than the newest checkpoint.

        Args:
          like: the result of ``mp.init(…).abstract(key)``, or arrays: they determine trees, shapes, dtypes and shardings.
          step: number of the checkpoint; None: the newest undamaged one. A damaged one is renamed, with a
            :class:`CheckpointWarning`. Damaged means that a digest or checksum differs, or a file is missing or cut; after any
            other error of reading nothing is renamed, and no older one is taken.
          data: the data whose position is set.
          partial: the checkpoint may have more arrays than ``like``.

        Returns:
          The state, and the number of the next batch.

        Raises:
          CheckpointError: no checkpoint; it cannot be read now (permission, I/O, memory); or an array of ``like`` that it lacks
            or has with another shape: the path, and both shapes.
          DigestError: an array differs from its saved digest.
          DataPositionError: the data has another order than when it was saved.
        """
        steps = self.steps()
        if step is not None and step not in steps:
            fixes = [f"it has {', '.join(map(str, steps)) or 'none'}"]
            raise CheckpointError(f"{self.path} has no checkpoint {step}", fixes=fixes)
        for source in [step] if step is not None else [*self._copies(steps), *reversed(steps)]:
            try:
                state, facts = _read(self.path, source, like, partial)
            except CopyError as error:
                warnings.warn(error.headline, CheckpointWarning, stacklevel=2)
            except (_DamagedError, DigestError) as error:
                if step is not None:
                    raise
                what = self._rename_damaged(source, error.headline)
                warnings.warn(f"{error.headline}; {what}", CheckpointWarning, stacklevel=2)
            else:
                self._go_to(facts, data)
                return state, int(facts["next"])
        raise self._nothing_to_restore()

    def _go_to(self, facts: Mapping[str, Any], data: Any) -> None:
        """Set the position of ``data``, or of the data of all saves, to the one in the metadata."""
        source = data if data is not None else self.data
        if source is not None and facts.get("data") is not None:
            source.go_to(facts["data"])

    def _copies(self, steps: Sequence[int]) -> list[Copy]:
        """The newest copy in memory, if it is not older than the newest of ``steps``, which are on disk. All processes call it."""
        run = None if self._memory is None else exchange("the run of the checkpoints", _run_of(self.path))[0]
        copy = None if self._memory is None or run is None else self._memory.newest(run)
        return [] if copy is None or copy.step < max(steps, default=0) else [copy]

    def _nothing_to_restore(self) -> CheckpointError:
        """The error of a folder in which no checkpoint can be restored, with the reason for each that is damaged."""
        text, fixes = f"there is no checkpoint in {self.path}", ["restore_or(init, …) creates a new state in this case"]
        if damaged := damaged_of(self.path):
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in damaged)
            text = f"no checkpoint in {self.path} can be restored, and there are damaged ones:{reasons}"
            another = "to start a new run on purpose: another folder, or move the damaged ones elsewhere"
            fixes = ["repair them, and rename them back to their numbers", another]
        return CheckpointError(text, fixes=fixes)

    def restore_or(self, init: Any, *args: Any, data: Any = None) -> tuple[Any, int]:
        """The newest saved state; in a folder without checkpoints, also damaged ones, a new one: ``init(*args)``.

        Args:
          init: the result of :func:`meshpar.init`; its layout, mesh and dims are saved with the checkpoints.
          *args: its arguments.
          data: the data whose position is set.

        Returns:
          The state, and the number of the next batch.

        Raises:
          CheckpointError: all checkpoints are damaged, or were when they were read before; each is listed with the reason.
          MeshparError: as :meth:`restore`.
        """
        self.describe(init, *args)
        steps = self.steps()
        if steps or self._copies(steps):
            return self.restore(init.abstract(*args), data=data)
        if exchange("list the damaged checkpoints", damaged_of(self.path))[0]:
            raise self._nothing_to_restore()
        state = init(*args)
        self._open()
        for x in by_name(state)[0].values():  # compiled now, and not while the first save holds up a step
            on_device(data_of(x), copied=True)
        return state, 0

    def _rename_damaged(self, number: int, reason: str) -> str:
        """Append ``DAMAGED`` to the name of a step's folder, with a number if there is one of this name, and write the reason
        to a file in it. Process 0 renames, and all return when it has; the result is a sentence about the new name."""
        what = ""
        if process_index() == 0:
            folder = _folder(self.path) / str(number)
            names = (f"{number}{DAMAGED}{f'-{k}' * (k > 1)}" for k in itertools.count(1))
            free = next(name for name in names if not (folder.parent / name).exists())
            try:
                folder.rename(folder.parent / free)
                (folder.parent / free / REASON).write_text(reason)
                what = f"it is renamed to {free}"
            except OSError as error:
                what = f"it cannot be renamed ({_first_line(error)})"
        (what, *_) = exchange("rename a damaged checkpoint", what)  # all processes wait for the rename
        if self._manager is not None:
            self._manager.reload()
        return what

    # -- the manager

    def _open(self) -> Any:
        """The orbax ``CheckpointManager`` of the folder, created by the first call.

        Raises:
          CheckpointError: another run writes to the folder, or the folder cannot be created.
        """
        if self._manager is None:
            self._do(self._lock_folder)
            mine = [self._memory and _run_of(self.path), uuid.uuid4().hex[:8]]
            self._run, self._start = map(str, exchange("the run of the checkpoints", mine)[0])
            self._stream = f"checkpoints-{next(_streams)}"
            self._do(self._create_manager)
            _open.append(self)
        return self._manager

    def _lock_folder(self) -> None:
        """Create the folder, and the lock in process 0; all processes raise its error."""

        def lock() -> None:
            if process_index() == 0:
                folder = _folder(self.path)
                folder.mkdir(parents=True, exist_ok=True)
                self._lock = self._lock or Lock(folder)
                if self._memory is not None and _run_of(self.path) is None:
                    (folder / RUN).write_text(uuid.uuid4().hex)

        _, mine, errors = _attempt(f"open {self.path}", lock)
        if mine is not None:
            raise mine
        if errors:
            fix = "the error of process 0 has the fix; then start all again"
            raise CheckpointError(f"process 0 cannot open {self.path}: {errors[0][2]}", fixes=[fix])

    def _create_manager(self) -> None:
        ocp = orbax()
        if "[" in self.path:
            literal_folders()
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, cleanup_tmp_directories=True, create=True)
        # orbax has every replica write a part of an array, for which it compiles a slice of each shape while the step
        # waits: worth it for large ones
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SLICED)
        numpy = ocp.type_handlers.NumpyHandler()
        kinds = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays), (np.ndarray, numpy))
        handlers = {STATE: ocp.PyTreeCheckpointHandler(type_handler_registry=kinds), FACTS: late_json_handler()}
        self._manager = ocp.CheckpointManager(self.path, options=options, item_handlers=handlers)

    def wait(self) -> None:
        """Until all that was saved is complete, on disk and in memory.

        Raises:
          CheckpointError: it cannot be written.
        """
        if self._manager is not None:
            self._do(self._manager.wait_until_finished)
        if self._memory is not None:
            self._memory.wait()

    def close(self) -> None:
        """Wait for the files that are being written, and release the orbax manager, the lock and the signal handler; copies in
        memory are deleted, since the run has ended.

        Raises:
          CheckpointError: the last checkpoint cannot be written.
        """
        self._close(delete=True)

    def _close(self, delete: bool) -> None:
        """:meth:`close`; copies in memory remain unless ``delete`` is set."""
        self._stop.close()
        if self in _open:
            _open.remove(self)
        (manager, self._manager), (lock, self._lock) = (self._manager, None), (self._lock, None)
        try:
            if manager is not None:
                self._do(manager.close)
            if self._memory is not None:
                self._memory.close(delete and manager is not None)  # a reader deletes nothing
        finally:
            if lock is not None:
                lock.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
        elif process_count() > 1:
            self._stop.close()  # to wait for processes that may have ended would hide the error
        else:
            try:
                self._close(delete=False)
            except CheckpointError as other:
                error.add_note(str(other))


_open: list[Checkpoints] = []


def _close_all() -> None:
    """Close the objects that the script left open; an error sets the exit status."""
    for run in list(_open):
        try:
            run._close(delete=False)
        except Exception:
            traceback.print_exc()
            atexit.register(_exit_with_error)


at_end_of_script(_close_all)


def _exit_with_error() -> None:
    """End with status 1 where Python would end with 0, which it does after errors at this time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


# -- facts


def _run_of(path: str) -> str | None:
    """The name of the run that writes to a folder, which copies in memory have as well: copies of another run, whose folder
    was deleted or moved, are not restored."""
    file = _folder(path) / RUN
    return file.read_text() if file.exists() else None


def _check(facts: Mapping[str, Any]) -> str:
    """The checksum of the metadata, which is stored with it as ``check``."""
    text = json.dumps({k: v for k, v in facts.items() if k != "check"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _folder(path: str) -> Any:
    orbax()
    from etils import epath

    return epath.Path(path if "://" in path else Path(path).expanduser().resolve())  # orbax reads absolute paths only


def steps_of(path: str) -> list[int]:
    """The complete checkpoints in a folder, as they are on disk now, oldest first; empty if there is no such folder.

    Raises:
      CheckpointError: the folder cannot be read, or it is a file.
    """
    return sorted(int(p.name) for p in _entries(path) if re.fullmatch("0|[1-9][0-9]*", p.name) and _has_items(p))


def _entries(path: str) -> list[Any]:
    """The names of the entries of a folder."""
    folder = _folder(path)
    try:
        return list(folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}", fixes=["the path of a folder"]) from error


def _has_items(folder: Any) -> bool:
    """Whether a folder is not empty; a folder that cannot be read may be a checkpoint."""
    try:
        return folder.is_dir() and any(True for _ in folder.iterdir())
    except OSError:
        return True


def damaged_of(path: str) -> list[tuple[str, str]]:
    """(folder, reason) of the checkpoints that were renamed because they are damaged."""
    out = []
    for folder in sorted(_entries(path), key=lambda p: p.name):
        if re.fullmatch(rf"\d+{re.escape(DAMAGED)}(-\d+)?", folder.name):
            reason = folder / REASON
            out.append((folder.name, reason.read_text() if reason.exists() else "the reason was not noted"))
    return out


def facts_of(path: str, step: int) -> dict[str, Any]:
    """The metadata of a checkpoint, as :meth:`Checkpoints.save` wrote it: a dictionary of JSON values.

    Raises:
      CheckpointError: it cannot be read, or was changed.
    """
    folder = _folder(path) / str(step) / FACTS
    fixes = ["`meshpar checkpoint verify PATH` says which checkpoints are complete; restore an older one: step=…"]
    try:
        if not folder.exists():
            raise CheckpointError(
                f"{path}/{step} has no {FACTS!r} next to its arrays: mp.Checkpoints did not write it, or the file was deleted",
                fixes=["move it elsewhere; orbax reads its arrays"],
            )
        files = [p for p in folder.iterdir() if p.name in ("metadata", "data") or p.suffix == ".json"]
        text = files[0].read_bytes() if len(files) == 1 else b""
    except OSError as error:
        text = f"the facts of checkpoint {step} in {path} cannot be read now: {_first_line(error)}"
        raise CheckpointError(text, fixes=["nothing is renamed: make the folder readable, and start again"]) from error
    try:
        facts = json.loads(text)
        if not isinstance(facts, dict) or facts.get("check") != _check(facts):
            raise ValueError("its checksum differs")
    except ValueError as error:
        raise _DamagedError(f"the facts of checkpoint {step} in {path} are damaged: {error}", fixes=fixes) from None
    if facts.get("format") != FORMAT:
        text = f"checkpoint {step} in {path} is of format {facts.get('format')}, and this reads {FORMAT}"
        raise CheckpointError(text, fixes=["restore it with the version of meshpar that saved it"])
    return facts


def _first_line(error: BaseException) -> str:
    text = error.headline if isinstance(error, MeshparError) else (str(error).splitlines() or [""])[0][:300]
    return text if isinstance(error, MeshparError) else f"{type(error).__name__}: {text}"


# -- leaves


def _saved(path: str, x: Any) -> tuple[Any, dict[str, Any]]:
    """(the array that orbax writes, the metadata) of a leaf: the array is None if the metadata has the value.

    Random keys are written as their data, and arrays of one process of several as values that every process has. Python
    numbers, texts and empty arrays are in the metadata.

    Raises:
      CheckpointError: it could not be restored as it is.
    """
    if type(x) in PYTHON.values():
        value = [x.real, x.imag] if isinstance(x, complex) else _json(x, f"`{path}`")
        return None, {"shape": [], "dtype": type(x).__name__, "value": value}
    array: Any = None
    if is_key(x) and isinstance(x, jax.Array):
        array = x if x.is_deleted() else jax.random.key_data(x)
    elif isinstance(x, jax.Array) and not is_tracer(x):
        array = x
    elif type(x) in (np.ndarray, np.memmap) or isinstance(x, np.generic):
        array = np.array(x, dtype=np.asarray(x).dtype.newbyteorder("="))  # a copy: the script may write to its own
    if array is None or not can_store(array.dtype.name):
        what = f"{x.dtype}{list(np.shape(x))}" if hasattr(x, "dtype") else f"{type(x).__name__}"
        fix = "save arrays of numbers, random keys, Python numbers and texts; or convert it before"
        raise CheckpointError(f"`{path}` cannot be saved: checkpoints do not hold {what}", path=path, fixes=[fix])
    if isinstance(array, jax.Array) and array.is_deleted():
        text = f"`{path}` cannot be saved: the array was deleted, or donated to a call"
        raise CheckpointError(text, path=path, fixes=["save the state that the step returned"])
    facts: dict[str, Any] = {"shape": list(np.shape(x)), "dtype": str(x.dtype)}
    spec = getattr(getattr(x, "sharding", None), "spec", None)
    if spec is not None:
        facts["spec"] = [list(e) if isinstance(e, tuple) else e for e in spec]
    if is_key(x):
        facts["key"] = str(jax.random.key_impl(x))  # pyright: ignore[reportArgumentType]
    if array.size == 0:
        return None, facts
    if isinstance(array, jax.Array) and not is_global(array) and process_count() > 1:
        array = np.asarray(array)
    return array, facts


def _json(x: Any, where: str) -> Any:
    """``x``, if it is a JSON value that comes back as it is.

    Raises:
      CheckpointError: it does not: keys that are no texts, tuples, other types.
    """
    if type(x) in (dict, list):
        for k, v in x.items() if type(x) is dict else enumerate(x):
            if type(x) is dict and type(k) is not str:
                text = f"{where} has the key {k!r}, which JSON would change to a text"
                raise CheckpointError(text, fixes=[f"use the key {str(k)!r}"])
            _json(v, f"{where}[{k!r}]")
        return x
    try:
        exact = type(x) in (str, int, float, bool, type(None)) and (x != x or json.loads(json.dumps(x)) == x)
        said = "" if exact else f"{type(x).__name__} {str(x)[:40]}"
    except ValueError:
        exact, said = False, "an integer of more than 4,300 digits"
    if not exact:
        fix = "texts, numbers, booleans, None, lists, and dictionaries with texts as keys"
        raise CheckpointError(f"{where} is {said}, which JSON does not hold", fixes=[fix])
    return x


def _array_dtype(dtype: str) -> str:
    """The dtype of an array of this dtype or Python type."""
    return str(jnp.result_type(PYTHON[dtype])) if dtype in PYTHON and dtype not in ("str", "bool") else dtype


# -- reading


class _DamagedError(CheckpointError):
    """A checkpoint that is not as it was written; others may be."""


_NO_PROOF = "PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAVAILABLE|UNAUTHENTICATED|DEADLINE_EXCEEDED|CANCELLED|ABORTED"
_NO_PROOF += "|INTERNAL|UNKNOWN|UNIMPLEMENTED"
_PROOF = "DATA_LOSS|NOT_FOUND|OUT_OF_RANGE|FAILED_PRECONDITION|INVALID_ARGUMENT|Error decoding|Error parsing"
"""Status codes of tensorstore, and its texts for bytes that are not of its format. The metadata was read before: the folder is
present, and a missing file is damage."""


def _is_proof(error: Exception) -> bool:
    """Whether an error of reading proves that files are damaged: missing, cut, or not what orbax and tensorstore write."""
    if isinstance(error, CheckpointError):
        return isinstance(error, _DamagedError)
    if re.search(rf"\b({_NO_PROOF})\b", str(error)) or isinstance(error, MemoryError):
        return False
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError)
    proof = re.search(rf"\b({_PROOF})\b", str(error))
    return isinstance(error, UnicodeDecodeError | json.JSONDecodeError) or proof is not None


def _read_copy(copy: Copy, like: Any, partial: bool) -> tuple[Any, dict[str, Any]]:
    """(state, metadata) of a copy in memory; arguments and errors as of :func:`_read`."""
    wanted, back = by_name(like)
    saved = copy.facts["leaves"]
    _compare("memory", copy.step, wanted, saved, partial)
    arrays = copy.read({p: _target(x, p) for p, x in wanted.items() if p in copy.facts["stored"]})
    return back({p: _restored(p, arrays.get(p), x, saved[p]) for p, x in wanted.items()}), copy.facts


def _read(path: str, step: int | Copy, like: Any, partial: bool) -> tuple[Any, dict[str, Any]]:
    """(state, metadata) of the checkpoint of ``step``, or of a copy in memory; if one process fails, all raise.

    Args:
      like: the tree whose shapes, dtypes and shardings the state gets.
      partial: the checkpoint may have leaves that ``like`` lacks.

    Raises:
      CheckpointError: it lacks an array of ``like``, or cannot be read now.
      _DamagedError: it is damaged.
      DigestError: an array differs from its digest.
    """
    if isinstance(step, Copy):
        return _read_copy(step, like, partial)
    wanted, back = by_name(like)
    facts = _read_by_all(path, step, lambda: facts_of(path, step))
    saved = facts["leaves"]
    _compare(path, step, wanted, saved, partial)

    def read() -> dict[str, Any]:
        return read_leaves(path, step, facts, {p: _target(x, p) for p, x in wanted.items() if "digest" in saved[p]})

    arrays = _read_by_all(path, step, read)
    digests = Digests(arrays, copied=False)
    found = exchange("the digests of a restored checkpoint", digests.totals(), digests.texts)
    for p in arrays:
        if found[p] != saved[p]["digest"]:
            text = f"checkpoint {step} in {path} is damaged: `{p}` differs from its saved digest"
            fixes = ["restore an older one: restore(…, step=…)", f"meshpar checkpoint verify {path}"]
            raise DigestError(text, path=p, shape=saved[p]["shape"], fixes=fixes)
    return back({p: _restored(p, arrays.get(p), x, saved[p]) for p, x in wanted.items()}), facts


def _attempt(
    what: str, action: Callable[[], _Result]
) -> tuple[_Result | None, Exception | None, list[tuple[int, bool, str]]]:
    """Call ``action`` in all processes.

    Returns:
      The result, or None; this process's error, or None; and for each process that failed its number, whether its error proves
      that files are damaged, and the first line of the error.
    """
    result, mine = None, None
    try:
        result = action()
    except Exception as error:  # orbax, tensorstore and the operating system raise many kinds
        mine = error
    said = exchange(what, None if mine is None else [_is_proof(mine), _first_line(mine)])
    return result, mine, [(p, *entry) for p, entry in enumerate(said) if entry is not None]


def _read_by_all(path: str, step: int, read: Callable[[], _Result]) -> _Result:
    """The result of ``read``, called in all processes; if it fails in one, all raise.

    Raises:
      _DamagedError: a process has proof that files are damaged, and no process failed without.
      CheckpointError: a process cannot read the checkpoint, which may be undamaged.
    """
    result, mine, failed = _attempt(f"read checkpoint {step}", read)
    if isinstance(mine, CheckpointError) and not _is_proof(mine):
        raise mine
    if failed:
        p, damage, text = min(failed, key=lambda entry: entry[1])
        who = f" (seen by process {p})" if process_count() > 1 else ""
        verify = f"meshpar checkpoint verify {path}"
        if damage:
            raise _DamagedError(f"checkpoint {step} in {path} is damaged{who}: {text}", fixes=[verify]) from mine
        fixes = ["nothing proves damage, and nothing is renamed: remove the cause, and start again", verify]
        raise CheckpointError(f"checkpoint {step} in {path} cannot be read now{who}: {text}", fixes=fixes) from mine
    return result  # pyright: ignore[reportReturnType]


def _compare(path: str, step: int, wanted: Mapping[str, Any], saved: Mapping[str, Any], partial: bool) -> None:
    """Check that a checkpoint has all requested arrays, by name, shape and dtype.

    ``wanted``: path → requested leaf; ``saved``: path → metadata; ``partial``: the checkpoint may have further leaves.

    Raises:
      CheckpointError: one is missing or differs.
    """
    missing = [p for p in wanted if p not in saved]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        p = missing[0]
        text = f"checkpoint {step} in {path} has no `{p}`{others}"
        raise CheckpointError(text, path=p, shape=np.shape(wanted[p]), fixes=did_you_mean(p, saved, "paths"))
    for p, x in wanted.items():
        shape, dtype = saved[p]["shape"], saved[p]["dtype"]
        mine = str(x.dtype) if hasattr(x, "dtype") else type(x).__name__
        if list(np.shape(x)) != shape or (mine != dtype and _array_dtype(mine) != _array_dtype(dtype)):
            dims = f" ({saved[p]['dims']})" if saved[p].get("dims") else ""
            text = f"`{p}` was saved as {dtype}{shape}{dims}, and is wanted as {mine}{list(np.shape(x))}"
            fixes = ["make the model as it was when it was saved", "meshpar checkpoint show prints what there is"]
            raise CheckpointError(text, path=p, fixes=fixes)
    more = sorted(saved.keys() - wanted.keys())
    if more and not partial:
        others = f" and {len(more) - 1} more" if len(more) > 1 else ""
        text = f"checkpoint {step} in {path} has `{more[0]}`{others}, which is not wanted"
        raise CheckpointError(text, path=more[0], fixes=["restore(…, partial=True) leaves it aside"])


def _target(x: Any, path: str) -> jax.ShapeDtypeStruct | None:
    """The shape, dtype and sharding in which orbax reads a leaf, a random key as its data; None: as a NumPy array.

    Raises:
      CheckpointError: the sharding does not divide the shape.
    """
    if isinstance(x, np.ndarray | np.generic) or not hasattr(x, "dtype"):
        return None
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    try:
        sharding.shard_shape(tuple(x.shape))
    except ValueError as error:
        text = f"`{path}` cannot be restored with the sharding of like: {str(error).splitlines()[0]}"
        fix = "shard another dim of it: mp.init(…).abstract(…) gives shardings that divide"
        raise CheckpointError(text, path=path, shape=x.shape, fixes=[fix]) from None
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype)) if is_key(x) else x
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _restored(path: str, x: Any, wanted: Any, facts: Mapping[str, Any]) -> Any:
    """A restored leaf as the type of the requested one: a random key, an array of JAX or NumPy, a Python number.

    Args:
      x: the array that was read; None: the value is in the metadata, or the array is empty.
    """
    target = _target(wanted, path)
    if x is None:
        value = facts.get("value", 0)
        x = complex(*value) if facts["dtype"] == "complex" else value
        if target is not None:
            full = np.broadcast_to(np.asarray(x, target.dtype), target.shape)
            x = of_parts(target.shape, target.sharding, lambda index: full[index])
    if "key" in facts:
        return jax.random.wrap_key_data(x, impl=facts["key"])
    if target is not None:
        return x
    if hasattr(wanted, "dtype"):
        x = np.array(np.broadcast_to(x, facts["shape"]), wanted.dtype)  # writable, in the requested order of bytes
        return x[()] if isinstance(wanted, np.generic) else x
    return type(wanted)(x.item() if isinstance(x, np.ndarray | np.generic) else x)


def read_leaves(
    path: str, step: int, facts: Mapping[str, Any], targets: Mapping[str, jax.ShapeDtypeStruct | None]
) -> dict[str, Any]:
    """path → array of the checkpoint of ``step`` with metadata ``facts``, in the shapes, dtypes and shardings of ``targets``
    (by path); None: a NumPy array of the stored dtype.

    Each process reads the shards of its own devices.
    """
    if not targets:
        return {}
    ocp = orbax()
    if "[" in path:
        literal_folders()
    names = stored_names(facts["leaves"])
    on_host = ocp.RestoreArgs(restore_type=np.ndarray)
    of = ocp.checkpoint_utils.construct_restore_args
    kinds = {names[p]: on_host if x is None else of(x) for p, x in targets.items()}
    tree = unflatten_dict({names[p]: 0 if x is None else x for p, x in targets.items()})
    args = ocp.args.PyTreeRestore(item=tree, restore_args=unflatten_dict(kinds), partial_restore=True)
    found = flatten_dict(ocp.PyTreeCheckpointHandler().restore(_folder(path) / str(step) / STATE, args=args))
    return {p: found[names[p]] for p in targets}


TOGETHER = 1 << 28
"""Bytes of arrays that are read and digested at a time, when a checkpoint is verified."""


def verify(path: str, step: int) -> list[str]:
    """The errors of a checkpoint, read to the host, some leaves at a time; empty if it is undamaged."""
    try:
        facts = facts_of(path, step)
    except MeshparError as error:
        return [str(error)]
    arrays = [p for p, leaf in facts["leaves"].items() if "digest" in leaf]
    ends = itertools.accumulate(bytes_of(facts["leaves"][p]) for p in arrays)
    groups = itertools.groupby(zip(arrays, ends, strict=True), lambda entry: entry[1] // TOGETHER)
    return [text for _, group in groups for text in _verified(path, step, facts, [p for p, _ in group])]


def bytes_of(leaf: Mapping[str, Any]) -> int:
    """The size of the array of a leaf with this metadata; of a random key, of its data."""
    dtype = jax.random.key(0, impl=leaf["key"]).dtype if "key" in leaf else jnp.dtype(leaf["dtype"])
    return math.prod(leaf["shape"]) * dtype.itemsize if "digest" in leaf else 0


def _verified(path: str, step: int, facts: Mapping[str, Any], paths: Iterable[str]) -> list[str]:
    """One line of text for each leaf of ``paths`` that is damaged, or that cannot be read.

    If reading fails, the leaves are read one at a time, so that only the damaged ones are listed.
    """
    leaves = {p: facts["leaves"][p] for p in paths}
    try:
        arrays = read_leaves(path, step, facts, dict.fromkeys(leaves))
    except Exception as error:  # orbax and tensorstore raise many kinds
        if len(leaves) > 1:  # which of them is it?
            return [text for p in leaves for text in _verified(path, step, facts, [p])]
        return [f"{p}: {_first_line(error)}" for p in leaves]
    digests = Digests(arrays, copied=False)
    found = digests.texts([digests.totals()])
    return [f"{p}: it differs from its saved digest" for p in leaves if found[p] != leaves[p]["digest"]]
