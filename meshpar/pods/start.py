"""``mp.distributed()``: one process of many, wherever it was started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass

import jax

from ..compat import processes as jax_pods
from ..compat.processes import ADDRESS, COUNT, DEVICES, PROCESS, STUCK, TIMEOUT
from ..errors import LostProcessError, MeshError
from .watch import Watch


@dataclass
class _State:
    watch: Watch | None = None
    single: bool = False


STATE = _State()


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
      MeshError: JAX has already initialized its devices, or only some of the three are given.
      LostProcessError: not all processes connected in time.

    Example:
      >>> mp.distributed()  # a single process: nothing to connect
      >>> jax.process_count()
      1
    """
    if STATE.watch is not None or STATE.single:
        return
    timeout = timeout if timeout is not None else float(os.environ.get(TIMEOUT, 30))
    stuck = stuck if stuck is not None else float(os.environ.get(STUCK, 300))
    if not jax_pods.connected():
        given = {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}
        if any(v is not None for v in given.values()) and None in given.values():
            raise MeshError(
                "mp.distributed needs coordinator=, processes= and process=, or none of them",
                fixes=["leave all three out on TPU pods, Slurm and GKE, which say them"],
            )
        if coordinator is None and PROCESS in os.environ:
            given = {
                "coordinator_address": os.environ[ADDRESS],
                "num_processes": int(os.environ[COUNT]),
                "process_id": int(os.environ[PROCESS]),
            }
            _end_with_the_launcher()
            _use_devices(int(os.environ.get(DEVICES, 0)), given["process_id"])
        found = None if given["num_processes"] is not None else jax_pods.cluster()
        if given["num_processes"] == 1 or (given["num_processes"] is None and found is None):
            STATE.single = True
            return
        if jax_pods.backends_are_open():
            raise MeshError(
                "mp.distributed() came too late: JAX has made its devices already",
                fixes=["call it first, before anything that touches a device (jax.devices(), jnp.ones, …)"],
            )
        options = {"cluster_detection_method": "deactivate"} if found is None else {}
        began = time.monotonic()
        # JAX ends a group by itself, without a cause, when a heartbeat is missing: later than the watch, which names it
        try:
            jax_pods.connect(heartbeat=int(timeout) + 10, wait=int(wait), **given, **options)
        except jax.errors.JaxRuntimeError as error:
            raise LostProcessError(
                f"process {given['process_id']} of {given['num_processes']} waited {time.monotonic() - began:.0f} s for the "
                f"others at {given['coordinator_address']}: {str(error).splitlines()[0]}",
                fixes=["start all of them; or wait longer: mp.distributed(wait=…)"],
            ) from None
    if jax_pods.process_count() == 1:
        STATE.single = True
        return
    STATE.watch = Watch(timeout, stuck)
    STATE.watch.start()


def _end_with_the_launcher() -> None:
    """Nothing stays behind a launcher that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _use_devices(count: int, process: int) -> None:
    """The devices of this process, on a machine that it shares: CPU stand-ins, or its part of the GPUs."""
    if not count:
        return
    jax.config.update("jax_num_cpu_devices", count)
    if "cpu" not in str(getattr(jax.config, "jax_platforms", None) or "").split(","):
        ids = ",".join(str(process * count + i) for i in range(count))
        os.environ.setdefault("JAX_LOCAL_DEVICE_IDS", ids)
