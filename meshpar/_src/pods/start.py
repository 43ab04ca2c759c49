"""``mp.distributed()``: one process of many, wherever it was started."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import replace
from types import TracebackType

import jax

from ...errors import AgreementError, LostProcessError, MeshError, MeshparError
from ..compat import coordination as jax_pods
from ..compat.coordination import ADDRESS, COUNT, DEVICES, PROCESS, STUCK, TIMEOUT, Group, variable_number
from .rendezvous import meet
from .watch import RESTARTABLE, Watch, note_cause, status_of

_FIXES = {
    "absent": ["start all processes within this time, at one address; or wait longer: mp.distributed(wait=…)"],
    "port": ["end the program that uses this port, or give another one: mp.distributed(coordinator=…)"],
    "ended": ["every process calls mp.distributed(), before it returns or calls sys.exit"],
    "disagreed": ["start every process once, with one number of processes"],
}
"""Kind of a failed rendezvous → fixes of its error."""


_started: list[Watch | None] = []
"""After the first call the watch of this process; None: it is the only one."""


def distributed(
    *,
    timeout: float | None = None,
    stuck: float | None = None,
    wait: float = 300.0,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> None:
    """Connect the processes of a run; call it at the beginning of a script, before the first use of a device.

    The same script runs as one process (then this does nothing), under ``meshpar launch``, and on clusters that JAX
    detects: TPU pods, GKE, Slurm, Open MPI. Afterwards ``jax.devices()`` has the devices of all processes. The
    processes compare every compiled function before its first run (:class:`meshpar.errors.AgreementError`), and
    monitor each other: if one dies, hangs or raises, all end, with the cause on stderr. Exit status 75: a restart may succeed;
    1: the program failed; 2: an invalid mesh or layout.

    Args:
      timeout: seconds without a sign of life after which a process counts as lost (default 30, or the launcher's).
      stuck: seconds that a live process may lag behind the calls of the others (default 300, or the launcher's).
      wait: seconds to wait for all processes at the start.
      coordinator, processes, process: address of process 0 (``"10.0.0.1:1234"``), number of processes, and number of this one, if
        neither the launcher nor JAX provides them.

    Raises:
      MeshError: JAX has already initialized its devices, only some of the three are given, or one is out of range.
      LostProcessError: not all processes connected in time, or the port of process 0 is taken; in every process.
      AgreementError: the numbers of the processes contradict each other, or one ended before it called this.

    Example:
      >>> mp.distributed()  # a single process: nothing to connect
      >>> jax.process_count()
      1
    """
    if _started:
        return
    try:
        timeout = timeout if timeout is not None else variable_number(TIMEOUT, 30.0, 0.1)
        stuck = stuck if stuck is not None else variable_number(STUCK, 300.0, 0.1)
        if not jax_pods.connected():
            group = _group(coordinator, processes, process, wait)
            if group is not None and group.processes > 1:
                _connect(group, timeout, wait)
    except MeshparError as error:
        _set_exit_status(error)
        raise
    watch = Watch(timeout, stuck) if jax_pods.process_count() > 1 else None
    _started.append(watch)
    if watch is not None:
        watch.start()


def _connect(group: Group, timeout: float, wait: float) -> None:
    """Connect to the other processes, and start JAX's distributed runtime."""
    if jax_pods.backends_are_open():
        fix = "call it first, before anything that touches a device (jax.devices(), jnp.ones, …)"
        raise MeshError("mp.distributed() came too late: JAX has made its devices already", fixes=[fix])
    began = time.monotonic()
    cause = meet(group.address, group.processes, group.process, wait)
    if cause is not None:
        kind = LostProcessError if cause.status == RESTARTABLE else AgreementError
        error = kind(cause.text, fixes=_FIXES.get(cause.kind, ()))
        note_cause(replace(cause, text=f"{kind.__name__}: {cause.text}"), group.process)
        raise error
    # JAX ends a group by itself, without a cause, when a heartbeat is missing: later than the watch, which names it
    left = wait + began - time.monotonic()
    jax_pods.connect(group, heartbeat=int(timeout) + 10, wait=max(30.0, left))  # the last may have arrived late


def _set_exit_status(error: MeshparError) -> None:
    """Set the exit status that a script has if it ends by this error: 75, 1 or 2, as later from the watch."""
    show = sys.excepthook

    def end(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        """``sys.excepthook``: show the exception; for this error, also set the exit status."""
        show(kind, raised, trace)
        if raised is error:
            raise SystemExit(status_of(error))

    sys.excepthook = end


def _group(coordinator: str | None, processes: int | None, process: int | None, wait: float) -> Group | None:
    """The group of this process: as given, else by the launcher's variables, else as JAX detects it; None: no group.

    Raises:
      MeshError: some values are missing or out of range.
    """
    if (coordinator, processes, process) == (None, None, None):
        if PROCESS not in os.environ:
            return jax_pods.detected_group(wait)
        missing = [name for name in (ADDRESS, COUNT) if name not in os.environ]
        if missing:
            fix = "`meshpar launch` sets both; unset both for a single process"
            raise MeshError(f"the environment variable {PROCESS} is set, but {missing[0]} is not", fixes=[fix])
        coordinator, processes = os.environ[ADDRESS], int(variable_number(COUNT, 1, 1))
        process, names = int(variable_number(PROCESS, 0)), (ADDRESS, COUNT, PROCESS)
        _use_devices(int(variable_number(DEVICES, 0)), process)
    elif coordinator is None or processes is None or process is None:
        fix = "leave all three out on TPU pods, Slurm and GKE, which provide them"
        raise MeshError("mp.distributed needs coordinator=, processes= and process=, or none of them", fixes=[fix])
    else:
        names = ("coordinator", "processes", "process")
    port = re.fullmatch(r".+:(\d{1,5})", coordinator)
    if port is None or not 0 < int(port[1]) < 2**16:
        raise MeshError(f"{names[0]}={coordinator!r} is not host:port", fixes=[f"{names[0]}=10.0.0.1:1234"])
    if not 0 <= process < processes:
        text = f"{names[2]}={process} with {names[1]}={processes}: processes are numbered from 0 to {processes - 1}"
        raise MeshError(text, fixes=[f"{names[2]}={processes - 1} in the last one"])
    return Group(coordinator, processes, process)


def _use_devices(count: int, process: int) -> None:
    """The devices of this process, on a machine that it shares: CPU stand-ins, or its part of the GPUs."""
    if not count:
        return
    jax.config.update("jax_num_cpu_devices", count)
    if "cpu" not in str(getattr(jax.config, "jax_platforms", None) or "").split(","):
        ids = ",".join(str(process * count + i) for i in range(count))
        os.environ.setdefault("JAX_LOCAL_DEVICE_IDS", ids)
