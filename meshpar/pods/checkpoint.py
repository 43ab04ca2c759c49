"""Checkpoints by name: written by orbax, restored under any layout, mesh and number of processes, and verified.

A checkpoint is a folder ``PATH/STEP`` with two items: ``state``, nested dicts by tree paths, which plain orbax reads as well, and
``meshpar``, a JSON of facts: the shape, dtype, dims, spec and digest of every leaf, the layout, mesh and versions, where the data
stands, and a checksum of all that. A folder of this name is there only when all is written.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import json
import math
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..compat.processes import connected, preemption_sync_point, process_count
from ..dims import did_you_mean, format_dims
from ..errors import CheckpointError, CheckpointWarning, DigestError, MeshparError
from ..global_arrays import is_global, is_key, of_parts
from .agree import agree, gather, versions
from .digest import Digests
from .names import by_name, flat, nested

FORMAT = 1
STATE, FACTS = "state", "meshpar"
DAMAGED = ".damaged"
SLICED = 1 << 26
"""Bytes of an array from which on its replicas share the writing."""


def orbax() -> Any:
    """The package, imported when it is needed.

    Raises:
      CheckpointError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise CheckpointError(
            f"checkpoints need orbax-checkpoint, which is not installed ({error})",
            fixes=['pip install "meshpar[checkpoint]"'],
        ) from None
    return orbax.checkpoint


class Checkpoints:
    """The checkpoints of one run.

    Args:
      path: a folder that all processes can access, or ``gs://…``; it is created by the first save.
      keep: number of checkpoints to keep, the newest; None: all.
      every: :meth:`save` writes after every ``every``-th batch.
      data: the data (:func:`meshpar.batches`) whose position is saved, unless it is given with each call.

    Saving copies the arrays to the host and returns. Files are written in the background and renamed at the end, so that a
    checkpoint is complete or absent. After SIGTERM, the next :meth:`save` writes a checkpoint, at the same batch in all processes.

    Example:
      >>> init = mp.init(create, mesh=mesh, layout="embed: data", dims=weights)
      >>> with mp.Checkpoints("runs/a", every=2) as checkpoints:
      ...     state, first = checkpoints.restore_or(init, jax.random.key(0))
      ...     for n in range(first, 4):
      ...         if checkpoints.save(n, state):  # True after SIGTERM
      ...             break
      ...     checkpoints.steps()
      [1]
    """

    def __init__(self, path: str | Path, *, keep: int | None = 3, every: int = 1, data: Any = None):
        """Check the arguments and register :meth:`close` at exit; nothing is read, written or created yet."""
        if every < 1 or (keep is not None and keep < 1):
            raise CheckpointError(f"keep={keep}, every={every}: both must be at least 1", fixes=["keep=2, every=1"])
        self.path = str(path) if "://" in str(path) else str(Path(path).expanduser().resolve())
        self.keep, self.every, self.data = keep, every, data
        self._manager: Any = None
        self._facts: dict[str, Any] = {}
        self._stop = _StopRequest()
        atexit.register(self.close)

    # -- save

    def save(
        self, n: int, state: Any, *, data: Any = None, force: bool = False, extra: Mapping[str, Any] | None = None
    ) -> bool:
        """Save the state after batch ``n`` if a checkpoint is due; all processes must call it after every batch.

        Args:
          n: the number of the last batch, from 0.
          state: trees of arrays, nnx modules and optimizers.
          data: the data whose position is saved.
          force: save even if no checkpoint is due.
          extra: JSON values to save with it: seeds, the command line.

        Returns:
          True: the job has received SIGTERM, and the checkpoint is complete; end the script.

        Raises:
          CheckpointError: orbax is not installed, or cannot write.
        """
        stop = self._stop.at(n)
        if not (stop or force or (n + 1) % self.every == 0):
            return False
        leaves, _ = by_name(state)
        self._write(n, leaves, data if data is not None else self.data, extra)
        if stop:
            self.wait()
        return stop

    def _write(self, n: int, leaves: Mapping[str, Any], data: Any, extra: Mapping[str, Any] | None) -> None:
        """Save ``leaves`` (path → array) and the metadata of step ``n``; the files are written in the background.

        The metadata is a JSON object with the shape, dtype, spec and digest of every leaf, the position of ``data``,
        and ``extra``.

        Raises:
          AgreementError: the digests of a replicated array differ between processes.
          DigestError: the replicas of an array on the devices of this process differ.
        """
        ocp = orbax()
        plain = _plain(leaves)
        digests = dict(zip(plain, Digests(list(plain.values())).texts(), strict=True))
        if process_count() > 1:  # copies of one array in several processes
            agree("checkpoint", {"digests": lambda: [f"{path}: {digest}" for path, digest in digests.items()]})
        differing = [path for path, digest in digests.items() if not digest]
        if differing:
            raise DigestError(
                f"the copies of `{differing[0]}` on the devices differ: it is not saved",
                path=differing[0],
                fixes=["mp.check finds a step that computes replicas differently; restart from the checkpoint before"],
            )
        facts = {
            **self._facts,
            "format": FORMAT,
            "step": n,
            "next": n + 1,
            "processes": process_count(),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "data": None if data is None else data.position_facts(n + 1),
            "extra": dict(extra or {}),
            "leaves": {
                path: {**_leaf_facts(leaves[path]), "digest": digest, **self._dims_of(path)}
                for path, digest in digests.items()
            },
        }
        manager = self._open()
        manager.save(
            n, args=ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(nested(plain)), FACTS: ocp.args.JsonSave(sealed(facts))}),
            force=True,
        )  # fmt: skip

    def _dims_of(self, path: str) -> dict[str, Any]:
        dims = self._dims.get(path) if self._dims else None
        return {"dims": dims} if dims else {}

    _dims: Mapping[str, str] | None = None

    def describe(self, init: Any, *args: Any) -> None:
        """Record metadata that every later :meth:`save` writes: layout, mesh, hash of the plan, and the dims of the
        state's arrays.

        Args:
          init: a result of ``mp.init(…)``; it is planned and not run.
          args: the arguments of ``init``, such as a random key.
        """
        plan = init.plan(*args)
        self._facts = {
            "layout": str(init.layout),
            "mesh": dict(init.mesh.shape),
            "plan": hashlib.sha256(str(plan.to_json()).encode()).hexdigest()[:16],
        }
        self._dims = {h.path: format_dims(h.dims) for h in plan.outputs}

    # -- restore

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints that are on disk now, oldest first; the same in all processes."""
        return [int(n) for n in json.loads(gather(json.dumps(steps_of(self.path)))[0])]

    def restore(
        self, like: Any, *, step: int | None = None, data: Any = None, partial: bool = False
    ) -> tuple[Any, int]:
        """The saved state, in the shardings of ``like``; every array is compared with its saved digest.

        Args:
          like: the result of ``mp.init(…).abstract(key)``, or arrays: they determine trees, shapes, dtypes and shardings.
          step: number of the checkpoint; None: the newest undamaged one. A damaged one is renamed, with a
            :class:`CheckpointWarning`.
          data: the data whose position is set.
          partial: the checkpoint may have more arrays than ``like``.

        Returns:
          The state, and the number of the next batch.

        Raises:
          CheckpointError: no checkpoint, or an array of ``like`` that it lacks or has with another shape: the path, and both
            shapes.
          DigestError: an array differs from its saved digest.
          DataPositionError: the data has another order than when it was saved.
        """
        steps = self.steps()
        if step is not None:
            if step not in steps:
                raise CheckpointError(
                    f"{self.path} has no checkpoint {step}", fixes=[f"it has {', '.join(map(str, steps)) or 'none'}"]
                )
            steps = [step]
        if not steps:
            raise CheckpointError(
                f"there is no checkpoint in {self.path}", fixes=["restore_or(init, …) creates a new state in this case"]
            )
        damage: CheckpointError | None = None
        for number in reversed(steps):
            try:
                state, facts = _read(self.path, number, like, partial)
            except _Damaged as error:
                damage = error.as_error
                if step is not None:
                    raise damage from None
                warnings.warn(f"{damage.headline}; it is renamed", CheckpointWarning, stacklevel=2)
                self._rename_damaged(number)
                continue
            source = data if data is not None else self.data
            if source is not None and facts.get("data") is not None:
                source.go_to(facts["data"])
            return state, int(facts["next"])
        assert damage is not None
        raise damage

    def restore_or(self, init: Any, *args: Any, data: Any = None) -> tuple[Any, int]:
        """The newest saved state; if there are no checkpoints, a new one: ``init(*args)``.

        Args:
          init: the result of :func:`meshpar.init`; its layout, mesh and dims are saved with the checkpoints.
          *args: its arguments.
          data: the data whose position is set.

        Returns:
          The state, and the number of the next batch.

        Raises:
          CheckpointError: all checkpoints are damaged.
          MeshparError: as :meth:`restore`.
        """
        self.describe(init, *args)
        if not self.steps():
            state = init(*args)
            self._open()
            Digests(
                list(_plain(by_name(state)[0]).values())
            )  # compiled now, and not while the first save holds up a step
            return state, 0
        return self.restore(init.abstract(*args), data=data)

    def _rename_damaged(self, number: int) -> None:
        """Rename the folder of a step by appending ``DAMAGED``; process 0 renames, and all processes return when it
        has."""
        if not connected() or jax.process_index() == 0:
            folder = _folder(self.path) / str(number)
            folder.rename(folder.parent / f"{number}{DAMAGED}")
        gather("")  # all processes wait for the rename
        if self._manager is not None:
            self._manager.reload()

    # -- the manager

    def _open(self) -> Any:
        """The orbax ``CheckpointManager`` of the folder, created by the first call."""
        if self._manager is None:
            ocp = orbax()
            options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, cleanup_tmp_directories=True, create=True)
            # orbax has every replica write a part of an array, for which it compiles a slice of each shape while the step
            # waits: worth it for large ones
            arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SLICED)
            kinds = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
            handlers = {
                STATE: ocp.PyTreeCheckpointHandler(type_handler_registry=kinds),
                FACTS: ocp.JsonCheckpointHandler(),
            }
            self._manager = ocp.CheckpointManager(self.path, options=options, item_handlers=handlers)
        return self._manager

    def wait(self) -> None:
        """Until all that was saved is complete on disk."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the files that are being written, and release the orbax manager and the signal handler."""
        manager, self._manager = self._manager, None
        self._stop.close()
        atexit.unregister(self.close)
        if manager is not None:
            manager.wait_until_finished()
            manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()


class _StopRequest:
    """SIGTERM: of a group of processes JAX hears it and finds the batch at which all stop; of one alone this does."""

    def __init__(self) -> None:
        self.asked = False
        self.before: Any = None
        if not connected() and threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # the second time: no more patience
            sys.exit(128 + number)
        self.asked = True

    def at(self, n: int) -> bool:
        return preemption_sync_point(n) if connected() else self.asked

    def close(self) -> None:
        if self.before is not None and threading.current_thread() is threading.main_thread():
            with contextlib.suppress(TypeError, ValueError):
                signal.signal(signal.SIGTERM, self.before)
            self.before = None


# -- facts


def sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts with a checksum of them."""
    return {**facts, "check": _check(facts)}


def _check(facts: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in facts.items() if k != "check"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _folder(path: str) -> Any:
    orbax()
    from etils import epath

    return epath.Path(path if "://" in path else Path(path).expanduser().resolve())  # orbax reads absolute paths only


def steps_of(path: str) -> list[int]:
    """The complete checkpoints in a folder, as they are on disk now, oldest first."""
    return sorted(orbax().path.step.checkpoint_steps(path))


def facts_of(path: str, step: int) -> dict[str, Any]:
    """The metadata of a checkpoint, as :meth:`Checkpoints.save` wrote it: a dictionary of JSON values.

    Raises:
      CheckpointError: it cannot be read, or was changed.
    """
    folder = _folder(path) / str(step) / FACTS
    if not folder.exists():
        raise CheckpointError(
            f"{path}/{step} has no {FACTS!r} next to its arrays: mp.Checkpoints did not write it, or the file was deleted",
            fixes=["move it elsewhere; orbax reads its arrays"],
        )
    try:
        (file,) = [p for p in folder.iterdir() if p.name in ("metadata", "data") or p.suffix == ".json"]
        facts = json.loads(file.read_text())
        if not isinstance(facts, dict) or facts.get("check") != _check(facts):
            raise ValueError("its checksum differs")
    except (ValueError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the facts of checkpoint {step} in {path} are damaged: {error}",
            fixes=[
                "`meshpar checkpoint verify PATH` says which checkpoints are complete; restore an older one: step=…"
            ],
        ) from None
    if facts.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {step} in {path} is of format {facts.get('format')}, and this reads {FORMAT}",
            fixes=["restore it with the version of meshpar that saved it"],
        )
    return facts


def _plain(leaves: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Path → array that orbax writes: random keys as their data, numbers as arrays, all over the devices of all
    processes."""
    mesh: Mesh | None = None
    if process_count() > 1:
        meshes = (getattr(getattr(x, "sharding", None), "mesh", None) for x in leaves.values() if is_global(x))
        mesh = next((m for m in meshes if isinstance(m, Mesh)), None) or Mesh(np.array(jax.devices()), ("devices",))

    def plain(x: Any) -> jax.Array:
        """A leaf as a ``jax.Array`` that orbax can save: a random key as its data; over ``mesh``, a local value becomes
        replicated."""
        x = jax.random.key_data(x) if is_key(x) else x if isinstance(x, jax.Array) else jnp.asarray(x)
        if mesh is None or is_global(x):
            return x
        value = np.asarray(x)
        return of_parts(value.shape, NamedSharding(mesh, PartitionSpec()), lambda index: value[index])

    return {path: plain(x) for path, x in leaves.items()}


def _leaf_facts(x: Any) -> dict[str, Any]:
    """The metadata of a leaf: ``shape``, ``dtype``, and where it has them ``spec`` (list of axes per dim) and ``key``
    (its PRNG)."""
    out: dict[str, Any] = {
        "shape": list(np.shape(x)),
        "dtype": str(x.dtype if hasattr(x, "dtype") else jnp.result_type(x)),
    }
    spec = getattr(getattr(x, "sharding", None), "spec", None)
    if spec is not None:
        out["spec"] = [list(e) if isinstance(e, tuple) else e for e in spec]
    if is_key(x):
        out["key"] = str(jax.random.key_impl(x))
    return out


# -- reading


class _Damaged(Exception):
    """A checkpoint that is not as it was written; others may be."""

    def __init__(self, error: CheckpointError):
        super().__init__(str(error))
        self.as_error = error


def _read(path: str, step: int, like: Any, partial: bool) -> tuple[Any, dict[str, Any]]:
    """(state, metadata) of the checkpoint of ``step``; if one process fails, all raise.

    Args:
      like: the tree whose shapes, dtypes and shardings the state gets.
      partial: the checkpoint may have leaves that ``like`` lacks.

    Raises:
      CheckpointError: it lacks an array of ``like``.
      _Damaged: it cannot be read, or an array differs from its digest.
    """
    wanted, back = by_name(like)
    problem, facts = "", {}
    try:
        facts = facts_of(path, step)
    except CheckpointError as error:
        if not (_folder(path) / str(step) / FACTS).exists():
            raise  # not written by mp.Checkpoints: not renamed
        problem = error.headline
    _all_well(path, step, gather(problem))
    _compare(path, step, wanted, facts["leaves"], partial)
    problem, arrays = "", {}
    try:
        arrays = read_leaves(path, step, {p: _target(x) for p, x in wanted.items()})
    except Exception as error:  # orbax and tensorstore raise many kinds
        problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    _all_well(path, step, gather(problem))
    wrong = [p for p, digest in zip(arrays, Digests(list(arrays.values())).texts(), strict=True)
             if digest != facts["leaves"][p]["digest"]]  # fmt: skip
    for others in gather(json.dumps(wrong)):
        for p in json.loads(others)[:1]:
            error = DigestError(
                f"checkpoint {step} in {path} is damaged: `{p}` differs from its saved digest",
                path=p, shape=facts["leaves"][p]["shape"],
                fixes=["restore an older one: restore(…, step=…)", f"meshpar checkpoint verify {path}"],
            )  # fmt: skip
            raise _Damaged(error)
    return back({p: _restored(arrays[p], wanted[p], facts["leaves"][p]) for p in wanted}), facts


def _all_well(path: str, step: int, said: list[str]) -> None:
    """Raise ``_Damaged`` if a process reported an error; ``said[p]`` is the error text of process p, ``""`` if it had
    none."""
    for p, text in enumerate(said):
        if text:
            who = f" (seen by process {p})" if len(said) > 1 else ""
            error = CheckpointError(f"checkpoint {step} in {path} is damaged{who}: {text}",
                                    fixes=[f"meshpar checkpoint verify {path}"])  # fmt: skip
            raise _Damaged(error)


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
        raise CheckpointError(
            f"checkpoint {step} in {path} has no `{p}`{others}", path=p, shape=np.shape(wanted[p]),
            fixes=did_you_mean(p, saved, "paths"),
        )  # fmt: skip
    for p, x in wanted.items():
        shape, dtype = saved[p]["shape"], saved[p]["dtype"]
        mine = str(x.dtype if hasattr(x, "dtype") else jnp.result_type(x))
        if list(np.shape(x)) != shape or mine != dtype:
            dims = saved[p].get("dims")
            raise CheckpointError(
                f"`{p}` was saved as {dtype}{shape}{f' ({dims})' if dims else ''}, and is wanted as {mine}{list(np.shape(x))}",
                path=p, fixes=["make the model as it was when it was saved", "meshpar checkpoint show prints what there is"],
            )  # fmt: skip
    more = sorted(saved.keys() - wanted.keys())
    if more and not partial:
        others = f" and {len(more) - 1} more" if len(more) > 1 else ""
        raise CheckpointError(
            f"checkpoint {step} in {path} has `{more[0]}`{others}, which is not wanted",
            path=more[0], fixes=["restore(…, partial=True) leaves it aside"],
        )  # fmt: skip


def _target(x: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding in which orbax reads a leaf; a random key is read as its data."""
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    if is_key(x):
        data = jax.eval_shape(lambda: jax.random.key_data(jnp.zeros(x.shape, x.dtype)))
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec))
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x), sharding=sharding)


def _restored(x: jax.Array, wanted: Any, facts: Mapping[str, Any]) -> Any:
    """A restored array as the type of the requested leaf: a random key, a ``jax.Array``, or a Python number."""
    if "key" in facts:
        return jax.random.wrap_key_data(x, impl=facts["key"])
    return x if hasattr(wanted, "dtype") else type(wanted)(np.asarray(x).item())


def read_leaves(path: str, step: int, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """path → array of the checkpoint of ``step``, in the shapes, dtypes and shardings of ``targets`` (by path).

    Each process reads the shards of its own devices.
    """
    ocp = orbax()
    tree = nested(targets)
    handler = ocp.PyTreeCheckpointHandler()
    args = ocp.args.PyTreeRestore(
        item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    found = flat(handler.restore(_folder(path) / str(step) / STATE, args=args))
    return {p: found[p] for p in targets}


TOGETHER = 1 << 28
"""Bytes of arrays that are read and digested at a time, when a checkpoint is verified on one device."""


def verify(path: str, step: int) -> list[str]:
    """The errors of a checkpoint, read on one device, some leaves at a time; empty if it is undamaged."""
    try:
        facts = facts_of(path, step)
    except MeshparError as error:
        return [str(error)]
    groups: list[list[str]] = [[]]
    size = 0
    for p, leaf in facts["leaves"].items():
        target = _stored(leaf)
        nbytes = math.prod(target.shape) * target.dtype.itemsize
        if groups[-1] and size + nbytes > TOGETHER:
            groups.append([])
            size = 0
        size += nbytes
        groups[-1].append(p)
    return [text for group in groups for text in _verified(path, step, {p: facts["leaves"][p] for p in group})]


def _stored(leaf: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """The shape and dtype in which a leaf is stored; random keys are stored as their data."""
    shape, dtype = tuple(leaf["shape"]), leaf["dtype"]
    if "key" in leaf:
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf["key"])))
        shape, dtype = (*shape, *data.shape), data.dtype
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(jax.local_devices()[0]))


def _verified(path: str, step: int, leaves: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line of text for each leaf that is damaged, or that cannot be read; ``leaves``: path → metadata of the leaf.

    If reading fails, the leaves are read one at a time, so that only the damaged ones are listed.
    """
    try:
        arrays = read_leaves(path, step, {p: _stored(leaf) for p, leaf in leaves.items()})
        digests = Digests(list(arrays.values())).texts()
    except Exception as error:  # orbax and tensorstore raise many kinds
        if len(leaves) > 1:  # which of them is it?
            return [text for p, leaf in leaves.items() for text in _verified(path, step, {p: leaf})]
        return [f"{p}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}" for p in leaves]
    return [
        f"{p}: it differs from its saved digest"
        for p, digest in zip(arrays, digests, strict=True)
        if digest != leaves[p]["digest"]
    ]
