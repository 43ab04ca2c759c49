"""Agreement: before the first run of a compiled function, all processes compare their programs, plans, settings and arguments.

Every process writes a sheet of facts to the coordinator's key-value store, long facts as hashes. Process 0
compares the sheets and writes one verdict, which the others read, so that only its work grows with the number of
processes. If a long fact differs, two processes also write its lines, and the error shows the first line that differs.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...errors import AgreementError
from ..compat.coordination import BEFORE_CALL, LOSE, Store, connected, process_count, process_index, variable_number
from ..compat.installed_versions import installed_version
from ..dims import PathDims
from ..global_arrays import data_of, is_global
from ..plan.plan import Plan
from ..units import mesh_text
from .data import SAMPLES
from .digest import digests_of_parts, starts_of
from .watch import CALLS

SECONDS = 600.0
"""Timeout of a process for the others, if no watch reports that they have ended."""

_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")
_SETTINGS = """jax_enable_x64 jax_default_matmul_precision jax_default_prng_impl jax_threefry_partitionable
    jax_numpy_dtype_promotion jax_use_shardy_partitioner jax_debug_nans""".split()
_FIXES = {
    "values": [
        "host arrays are global values, which must be equal in every process",
        'mp.data.put(batch, rows="mine") takes each process\'s own rows',
        "use one seed, and read the same data, everywhere",
    ],
    "data": ["give mp.data.batches the same source in every process: it reads the rows of its own devices"],
    "replicas": ["make the state by mp.init, from one seed everywhere, or restore it from one checkpoint"],
    "versions": ["install the same versions everywhere"],
    "settings": ["start all processes with the same environment and flags"],
    "devices": ["make the mesh from all devices, in the order of jax.devices(): mp.mesh(…)"],
}
_ANY_FIX = ["run one script, with the same arguments, in every process"]


@dataclass(eq=False, slots=True)
class Sheet:
    """The facts of one compiled function that all processes must agree on before its first call.

    Attributes:
      fn: the user's function.
      plan: has its program, mesh, layout and options.
      dims: as in :func:`meshpar.jit`.
      statics: the static arguments.
      agreed: it has been compared.
    """

    fn: Callable[..., Any]
    plan: Plan
    dims: PathDims
    statics: Sequence[Any]
    agreed: bool = False


def before_call(sheet: Sheet, leaves: Sequence[Any]) -> None:
    """Note a call of a function over several processes; before the first one of its kind, agree with the others.

    Args:
      leaves: the flat arguments, as ``sheet.plan.inputs`` has them.

    Raises:
      AgreementError: another process is about to run something else.
    """
    name = getattr(sheet.fn, "__name__", "step")
    CALLS.note(name, _host_values(sheet.plan, leaves))
    at = variable_number(LOSE, 0)
    if at and CALLS.each[name] >= at:  # ``meshpar launch --lose``: the end of a slice, rehearsed
        os.kill(os.getpid(), signal.SIGKILL)
    if sheet.agreed or not connected():
        return
    agree(name, facts_of(sheet, leaves))
    sheet.agreed = True


BEFORE_CALL.append(lambda *step: functools.partial(before_call, Sheet(*step)))


def _host_values(plan: Plan, leaves: Sequence[Any]) -> dict[str, int]:
    """Path → checksum of every argument that is on the host: of its bytes, or of 1,024 blocks of a large array."""
    return {
        held.path: zlib.crc32(_bytes(np.asarray(x)))
        for held, x in zip(plan.inputs, leaves, strict=True)
        if isinstance(x, np.ndarray | np.generic | bool | int | float | complex)
    }


def _bytes(x: np.ndarray, most: int = 1 << 22) -> bytes:
    """The bytes of an array for a hash: of all elements, or of 1,024 evenly spaced blocks if it has more than ``most``
    bytes."""
    if x.nbytes > most:
        flat = x.reshape(-1)
        block = max(1, most // 1024 // x.itemsize)
        starts = np.linspace(0, flat.size - block, 1024).astype(np.int64)
        x = np.concatenate([flat[s : s + block] for s in starts])
    return np.ascontiguousarray(x).tobytes()


# -- the facts


def facts_of(sheet: Sheet, leaves: Sequence[Any]) -> dict[str, Sequence[str]]:
    """Field → its lines, which must be equal in all processes; of ``replicas of 0,1,3`` in these processes, which alone have it."""
    plan, code = sheet.plan, sheet.fn
    assert isinstance(plan.mesh, Mesh)
    inputs = [h.path or str(k) for k, h in enumerate(plan.inputs)]
    closed = plan.program.closed
    devices = list(plan.mesh.devices.flat)
    host, shared = _values(inputs, leaves)
    return {
        "versions": [versions()],
        "settings": settings(),
        "function": [f"{getattr(code, '__module__', '?')}.{getattr(code, '__qualname__', code)}"],
        "lowering": [f"{plan.lowering}, overlap {plan.overlap}, strict {plan.request.strict}"],
        "mesh": [mesh_text(plan.sizes)],
        "devices": [f"{devices[0].device_kind}: {', '.join(str(d.id) for d in devices)}"],
        "layout": [_layout_text(plan.requested_layout)],
        "dims": [f"{p}: {' '.join(map(str, d))}" for p, d in sheet.dims.items],
        "donated": [", ".join(inputs[i] for i in sorted(plan.donated))],
        "static arguments": [_ADDRESS.sub("0x", repr(s)) for s in sheet.statics],
        "compiler options": [json.dumps(dict(plan.options.values), sort_keys=True, default=str)],
        "shapes": [f"{p}: {_shape_text(v.aval)}" for p, v in zip(inputs, plan.program.inputs, strict=True)],
        "program": _ADDRESS.sub("0x", str(closed.jaxpr)).splitlines(),  # without the addresses of functions
        "constants": [f"constant {k}: {_value_text(c)}" for k, c in enumerate(closed.consts) if not is_global(c)],
        "data": list(SAMPLES),
        "values": host,
        **{f"replicas of {','.join(map(str, group))}": lines for group, lines in shared.items()},
    }


def versions() -> str:
    packages = ("meshpar", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")
    python = ".".join(map(str, sys.version_info[:2]))
    found = [f"{name} {installed_version(name) or '(not installed)'}" for name in packages]
    return ", ".join([f"python {python}", *found])


def settings() -> list[str]:
    flags = " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith("--xla_dump"))
    said = [f"{name}={getattr(jax.config, name, None)}" for name in _SETTINGS]
    return [*said, f"XLA_FLAGS={flags}", f"LIBTPU_INIT_ARGS={os.environ.get('LIBTPU_INIT_ARGS', '')}"]


def _layout_text(layout: Any) -> str:
    optional = f"  (optional: {', '.join(sorted(layout.optional))})" if layout.optional else ""
    return f"{layout}{layout.by_cost}{optional}"


def _shape_text(aval: Any) -> str:
    return f"{aval.dtype}[{', '.join(map(str, aval.shape))}]{' weak' if getattr(aval, 'weak_type', False) else ''}"


def _value_text(x: Any) -> str:
    """A value on this host: its numbers where they are few, else a hash and the first ones."""
    x = np.asarray(data_of(x))
    some = _numbers(x.reshape(-1)[:4])
    if x.size <= 4:
        return f"{x.dtype}[{some}]"
    return f"{x.dtype}{list(x.shape)} {hashlib.sha256(_bytes(x, 1 << 26)).hexdigest()[:16]} [{some}, …]"


def _values(paths: Sequence[str], leaves: Sequence[Any]) -> tuple[list[str], dict[tuple[int, ...], list[str]]]:
    """(lines of the values of host arguments; group of processes → lines with digests of the shards that all of them have).

    A line of a shard is ``path[starts]: digest``, without starts that are all 0.
    """
    host: list[str] = []
    shared: dict[tuple[int, ...], list[tuple[str, tuple[int, ...], Any]]] = {}
    for path, x in zip(paths, leaves, strict=True):
        if not is_global(x):
            host.append(f"{path}: {_value_text(x)}")
            continue
        owners: dict[Any, set[int]] = {}
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            owners.setdefault(starts_of(index), set()).add(device.process_index)
        for starts, data in {starts_of(shard.index): shard.data for shard in x.addressable_shards}.items():
            if len(owners[starts]) > 1:
                shared.setdefault(tuple(sorted(owners[starts])), []).append((path, starts, data))
    lines = {}
    for group, shards in shared.items():
        shards.sort(key=lambda shard: shard[:2])
        digests = digests_of_parts([data for *_, data in shards])
        lines[group] = [
            f"{path}{list(starts) if any(starts) else ''}: {digest}"
            for (path, starts, _), digest in zip(shards, digests, strict=True)
        ]
    return host, lines


def _numbers(x: np.ndarray) -> str:
    return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in x.tolist())


# -- the exchange

_rounds: collections.Counter[str] = collections.Counter()
"""Stream → the number of exchanges in it."""


def exchange(name: str, value: Any, combine: Callable[[list[Any]], Any] = list, stream: str = "main") -> Any:
    """``combine`` of one JSON value of every process, computed by process 0; without it, the list. All must call it.

    Args:
      name: of the exchanged value, for the error.
      stream: exchanges in other threads have streams of their own; within one, all processes make them in the same order.

    Raises:
      AgreementError: a process did not come to it.
    """
    if process_count() == 1:
        return combine([value])
    _rounds[stream] += 1
    store, me, root = Store(), process_index(), f"meshpar/exchange/{stream}"
    now = f"{root}/{_rounds[stream]}"
    store.put(f"{now}/{me}", json.dumps(value))
    if me == 0:
        values = [json.loads(_wait(store, f"{now}/{p}", name, p)) for p in range(process_count())]
        store.put(f"{now}/result", json.dumps(combine(values)))
        store.drop(f"{root}/{_rounds[stream] - 1}")  # all have read it, or they would not have come to this one
    return json.loads(_wait(store, f"{now}/result", name, 0))


def agree(name: str, facts: Mapping[str, Sequence[str]]) -> None:
    """Compare facts with all other processes; all must call it.

    Args:
      name: of the function, for the error.
      facts: field → its lines, in the order in which a difference is looked for. Processes that lack a field are not compared.

    Raises:
      AgreementError: with the process, the field, and both values. Every process raises it.
    """
    made = {f: "\n".join(lines) for f, lines in facts.items()}
    said = {f: hashlib.sha256(x.encode()).hexdigest() for f, x in made.items()}
    verdict = exchange(f"agree on `{name}`", said, _difference)
    if not verdict:
        return
    field, asked = verdict
    texts = exchange(f"say its {field}", made.get(field, "") if process_index() in asked else "")
    values = dict(zip(asked, _first_difference(*(texts[p].split("\n") for p in asked)), strict=True))
    Store().barrier(f"meshpar/read/{_rounds['main']}", 5.0)  # the texts go with process 0, which must not leave first
    head = f"the processes disagree about the {field} of `{name}`"
    field, _, group = field.partition(" of ")
    if group:
        head = f"arguments of `{name}` that processes {group} hold copies of are not the same in them"
    rows = [f"  process {p}  {text}" for p, text in values.items()]
    error = AgreementError("\n".join([head, *rows]), fixes=[*_FIXES.get(field, _ANY_FIX)])
    error.process, error.field, error.values = asked[1], field, values
    raise error


def _difference(sheets: list[dict[str, str]]) -> tuple[str, list[int]] | None:
    """(field, two processes that differ in it) of the first difference between processes that have the field; None: none."""
    for field in dict.fromkeys(f for s in sheets for f in s):
        first, *others = (p for p, s in enumerate(sheets) if field in s)
        for p in others:
            if sheets[p][field] != sheets[first][field]:
                return field, [first, p]
    return None


def _wait(store: Store, key: str, name: str, process: int) -> str:
    """The text that ``process`` writes under ``key`` in the exchange ``name``, polled until it is present.

    Raises:
      AgreementError: it is absent after ``SECONDS``.
    """
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        text = store.get(key, 1.0)
        if text is not None:
            return text
    error = AgreementError(f"process {process} did not come to {name} within {SECONDS:.0f} s", fixes=_ANY_FIX)
    error.process, error.field = process, "presence"
    raise error


def _first_difference(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    """The first lines that differ; ``(nothing)`` where one ends."""
    for k in range(max(len(a), len(b))):
        left, right = (x[k].strip() if k < len(x) else "(nothing)" for x in (a, b))
        if left != right:
            return left, right
    return "(equal)", "(equal)"
