"""JAX's coordination service, through ``jax._src.distributed`` (JAX 0.10.2 to 0.12)."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge

from ...errors import MeshError

PROCESS, COUNT, ADDRESS, DEVICES, TIMEOUT, STUCK, CAUSES, LOSE, MEMORY, ELASTIC = (
    "MESHPAR_PROCESS MESHPAR_PROCESSES MESHPAR_COORDINATOR MESHPAR_DEVICES "
    "MESHPAR_TIMEOUT MESHPAR_STUCK MESHPAR_CAUSES MESHPAR_LOSE MESHPAR_MEMORY MESHPAR_ELASTIC"
).split()
"""Environment variables that ``meshpar launch`` sets for its processes; DEVICES: devices per process; MEMORY: the folder of
copies of states in the memory of the host; ELASTIC: ``AXIS=SIZE``, the mesh axis over the slices, and how many are left."""

BEFORE_CALL: list[Callable[..., Callable[[Sequence[Any]], None]]] = []
"""Checks of steps of several processes: from (function, plan, dims, static arguments) of a compiled step to a function of its
arrays, which runs before each call. :mod:`pods.process_agreement` adds the one that compares programs and plans."""


def variable_number(name: str, default: float, least: float = 0) -> float:
    """The number in an environment variable; ``default`` if it is not set or empty.

    Raises:
      MeshError: it has another text, or a number below ``least``.
    """
    text = os.environ.get(name, "").strip()
    with contextlib.suppress(ValueError):
        value = float(text) if text else default
        if math.isfinite(value) and value >= least and (value == int(value) or isinstance(default, float)):
            return value
    what = "a number" if isinstance(default, float) else "an integer"
    raise MeshError(
        f"the environment variable {name} is {text!r}: {what}, at least {least:g}",
        fixes=[f"unset it, or set it as in {name}={max(default, least):g}"],
    )


def connected() -> bool:
    """Whether this process belongs to a group that has a coordinator."""
    return distributed.global_state.client is not None


def backends_are_open() -> bool:
    """Whether JAX has initialized its backends."""
    return xla_bridge.backends_are_initialized()


def process_count() -> int:
    """The number of processes of the group, 1 without a group; initializes no backend, unlike ``jax.process_count``."""
    return distributed.global_state.num_processes if connected() else 1


def process_index() -> int:
    """The index of this process in its group; 0 without a group."""
    return distributed.global_state.process_id if connected() else 0


def coordinator() -> str:
    """``host:port`` of process 0's service."""
    return distributed.global_state.coordinator_address or "?"


@dataclass(frozen=True)
class Group:
    """Where the processes of a job connect.

    Attributes:
      address: ``host:port`` of process 0.
      processes: their number.
      process: the number of this one.
      devices: local device ids of this process; None: all of this machine.
    """

    address: str
    processes: int
    process: int
    devices: Sequence[int] | None = None


def detected_group(wait: float) -> Group | None:
    """The group that JAX detects on a cluster (TPU, GKE, Slurm, Open MPI); None: no cluster.

    Args:
      wait: seconds for the name of process 0's host to be resolved.
    """
    kinds = clusters.ClusterEnv._cluster_types
    if not any(kind.is_env_present() for kind in kinds if not kind.opt_in_only_method):
        return None
    address, processes, process, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, max(1, int(wait))
    )
    given = "JAX_LOCAL_DEVICE_IDS" in os.environ  # which JAX reads itself
    return Group(str(address), int(processes), int(process), None if given else devices)  # type: ignore[arg-type]


def connect(group: Group, *, heartbeat: int, wait: float) -> None:
    """``jax.distributed.initialize`` with ``heartbeat`` and ``wait`` (for all processes to connect) timeouts in seconds.

    SIGTERM ends the process until :func:`listen_for_preemption`, or the first ``multihost_utils.reached_preemption_sync_point``.
    """
    enabled = jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=group.address, num_processes=group.processes, process_id=group.process,
        local_device_ids=group.devices, cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(wait)), heartbeat_timeout_seconds=heartbeat, shutdown_timeout_seconds=heartbeat,
    )  # fmt: skip
    jax.config.update("jax_enable_preemption_service", enabled)
    if enabled:
        distributed.global_state.preemption_sync_manager = _Preemption()


class _Preemption:
    """JAX's preemption manager, made at the first use: it takes SIGTERM, which then does not end a script that never asks."""

    def reached_sync_point(self, step: int) -> bool:
        listen_for_preemption()
        return preemption_sync_point(step)

    def shutdown(self) -> None:
        """Do nothing: JAX calls it at the end of a process that never asked, where its own manager has not been made."""


def listen_for_preemption() -> None:
    """From now on SIGTERM does not end this process, but is what :func:`preemption_sync_point` reports."""
    state = distributed.global_state
    if isinstance(state.preemption_sync_manager, _Preemption):
        state.preemption_sync_manager = None
        state.initialize_preemption_sync_manager()


@contextlib.contextmanager
def _unless(status: str) -> Iterator[None]:
    """Ignore an error of the service that has this status."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if status not in str(error):
            raise


class Store:
    """The coordinator's key-value store, shared by all processes.

    Every call is a blocking request to process 0.
    """

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client

    def put(self, key: str, text: str) -> None:
        """Set the text of a key."""
        self._client.key_value_set(key, text, allow_overwrite=True)

    def put_first(self, key: str, text: str) -> bool:
        """Set the text of a key that has none; False if it has one."""
        with _unless("ALREADY_EXISTS"):
            self._client.key_value_set(key, text)
            return True
        return False

    def peek(self, key: str) -> str | None:
        """The text of a key; None if it has none."""
        with _unless("NOT_FOUND"):
            return self._client.key_value_try_get(key)

    def get(self, key: str, seconds: float) -> str | None:
        """The text of a key, once it has one; None after ``seconds``."""
        with _unless("DEADLINE_EXCEEDED"):
            return self._client.blocking_key_value_get(key, max(1, int(seconds * 1000)))

    def folder(self, prefix: str) -> dict[str, str]:
        """Key without its prefix → text, for all keys that begin with ``prefix/``."""
        entries = self._client.key_value_dir_get(prefix)
        return {key.removeprefix(prefix).lstrip("/"): text for key, text in entries}

    def drop(self, prefix: str) -> None:
        """Delete all keys that begin with ``prefix/``."""
        self._client.key_value_delete(prefix + "/")

    def barrier(self, name: str, seconds: float) -> bool:
        """Wait until every process has called it with this name; False after ``seconds``."""
        start = time.monotonic()
        try:
            self._client.wait_at_barrier(name, max(1, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError:
            if time.monotonic() - start < seconds - 0.5:
                raise
            return False
        return True


def preemption_sync_point(step: int) -> bool:
    """Whether all processes save at this step because one of them received SIGTERM."""
    manager = distributed.global_state.preemption_sync_manager
    return manager is not None and manager.reached_sync_point(step)
