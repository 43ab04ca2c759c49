"""JAX's coordination service: the one place that uses ``jax._src.distributed`` (jax 0.10.2 to 0.12)."""

from __future__ import annotations

import time
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge

PROCESS, COUNT, ADDRESS, DEVICES, TIMEOUT, STUCK = (
    f"MESHPAR_{x}" for x in ("PROCESS", "PROCESSES", "COORDINATOR", "DEVICES", "TIMEOUT", "STUCK")
)
"""What ``meshpar launch`` tells its processes; DEVICES are those of one process."""


def connected() -> bool:
    """Whether this process belongs to a group that has a coordinator."""
    return distributed.global_state.client is not None


def backends_are_open() -> bool:
    """Whether JAX has made its devices already."""
    return xla_bridge.backends_are_initialized()


def process_count() -> int:
    """Processes of the group; 1 where there is none. It opens no backend, as ``jax.process_count`` does."""
    return distributed.global_state.num_processes if connected() else 1


def process_index() -> int:
    return distributed.global_state.process_id if connected() else 0


def coordinator() -> str:
    """``host:port`` of process 0's service."""
    return distributed.global_state.coordinator_address or "?"


def cluster() -> str | None:
    """The name of the cluster that JAX finds this process in: TPU, GKE, Slurm, Open MPI; None where it finds none."""
    for kind in clusters.ClusterEnv._cluster_types:
        if not kind.opt_in_only_method and kind.is_env_present():
            return kind.name
    return None


def connect(*, heartbeat: int, wait: int, **where: Any) -> None:
    """``jax.distributed.initialize``; ``heartbeat`` and ``wait`` (for all processes to come) in seconds."""
    jax.distributed.initialize(
        initialization_timeout=wait, heartbeat_timeout_seconds=heartbeat, shutdown_timeout_seconds=heartbeat, **where
    )


class Store:
    """The coordinator's table of texts, which all processes write and read.

    Every call is a request to process 0, and blocks while that does not answer.
    """

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client

    def put(self, key: str, text: str) -> None:
        self._client.key_value_set(key, text, allow_overwrite=True)

    def put_first(self, key: str, text: str) -> bool:
        """Write where nothing is yet; False where something is."""
        try:
            self._client.key_value_set(key, text)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def peek(self, key: str) -> str | None:
        """The text now; None where there is none."""
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def get(self, key: str, seconds: float) -> str | None:
        """The text, as soon as there is one; None after so many seconds."""
        try:
            return self._client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def folder(self, prefix: str) -> dict[str, str]:
        """All texts whose keys begin with ``prefix/``, by what follows it."""
        found = self._client.key_value_dir_get(prefix)
        return {key.removeprefix(prefix).lstrip("/"): text for key, text in found}

    def drop(self, prefix: str) -> None:
        """Forget all below a prefix."""
        self._client.key_value_delete(prefix + "/")

    def barrier(self, name: str, seconds: float) -> bool:
        """Wait until every process comes here; False after so many seconds."""
        began = time.monotonic()
        try:
            self._client.wait_at_barrier(name, max(1, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError:
            if time.monotonic() - began < seconds - 0.5:
                raise
            return False
        return True


def preemption_sync_point(step: int) -> bool:
    """Whether this is the step at which all processes save because one was told to stop (SIGTERM)."""
    manager = distributed.global_state.preemption_sync_manager
    return manager is not None and manager.reached_sync_point(step)
