"""The rendezvous: all processes of a job connect to process 0 over TCP before JAX's distributed runtime starts.

JAX ends a process by SIGABRT if another one does not connect in time, and process 0 by SIGSEGV if its port is taken. Therefore
process 0 first listens at the port itself. Every other process sends its number and the number of processes, as a line of JSON,
and waits for a reply: an empty object once all have connected, else the failure, which all processes raise. Then process 0 closes
the port, and JAX's service opens it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from ..compat.coordination import CAUSES
from .watch import PROGRAM, RESTARTABLE, Cause

RETRY_SECONDS = 0.1
REPLY_SECONDS = 3.0
"""Process 0 may have started later than the others, so that its wait ends later; its failure names the missing process."""
_MAX_LINE = 4096


def meet(address: str, count: int, index: int, wait: float) -> Cause | None:
    """Connect this process to the others; returns None once all have connected, else the failure.

    Args:
      address: ``host:port`` of process 0.
      count, index: number of processes, and of this one.
      wait: seconds to wait for the others.
    """
    host, _, port = address.rpartition(":")
    if index:
        return _join((host.strip("[]"), int(port)), count, index, wait)
    try:
        listener = _listen(int(port), count)
    except OSError as error:
        return Cause(0, "port", f"process 0 cannot listen at {address}: {error.strerror or error}", RESTARTABLE)
    joined: dict[socket.socket, int] = {}
    with contextlib.ExitStack() as opened:
        with listener:
            failure = _accept(listener, joined, opened, count, wait)
        for connection in joined:
            with contextlib.suppress(OSError):
                connection.sendall(f"{failure.as_json() if failure else '{}'}\n".encode())
    return failure


def _listen(port: int, count: int) -> socket.socket:
    """A socket that listens at the port on all interfaces, as JAX's service will; unlike that, it never shares the port with
    another program."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=max(128, count), dualstack_ipv6=dual)


def _accept(
    listener: socket.socket, joined: dict[socket.socket, int], opened: contextlib.ExitStack, count: int, wait: float
) -> Cause | None:
    """Process 0: fill ``joined`` (connection → its process) until all have connected, or something fails."""
    until = time.monotonic() + wait
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        while missing := sorted({*range(1, count)} - {*joined.values()}):
            failure = _ended(missing)
            if failure is None and time.monotonic() > until:
                text = f"{_listed(missing)} of {count} did not connect to process 0 within {wait:.0f} s"
                failure = Cause(missing[0], "absent", text, RESTARTABLE)
            for key, _ in () if failure else ready.select(RETRY_SECONDS):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):
                        connection = opened.enter_context(listener.accept()[0])
                        connection.setblocking(False)
                        ready.register(connection, selectors.EVENT_READ, bytearray())
                else:
                    failure = failure or _hear(key, ready, joined, count)
            if failure is not None:
                return failure
    return None


def _hear(
    key: selectors.SelectorKey, ready: selectors.BaseSelector, joined: dict[socket.socket, int], count: int
) -> Cause | None:
    """Process 0: read from a connection which process it is, into ``joined``, or that it has been closed.

    A connection that sends anything else, of a port scanner for example, is closed.
    """
    connection, line = key.fileobj, key.data
    assert isinstance(connection, socket.socket)
    try:
        new = connection.recv(_MAX_LINE)
        line.extend(new)
        if not new or len(line) > _MAX_LINE:
            raise ValueError
        if not line.endswith(b"\n"):
            return None
        said = json.loads(line)
        process, processes = int(said["process"]), int(said["processes"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        ready.unregister(connection)
        connection.close()
        joined.pop(connection, None)
        return None
    line.clear()
    text = ""
    if processes != count or not 0 < process < count:
        text = f"process {process} was started as one of {processes} processes, and process 0 as one of {count}"
    elif process in joined.values():
        text = f"two processes were started as process {process} of {count}"
    joined[connection] = process
    return Cause(process, "disagreed", text, PROGRAM) if text else None


def _join(where: tuple[str, int], count: int, index: int, wait: float) -> Cause | None:
    """Every other process: connect to process 0, send the number of this process, and read the reply."""
    until = time.monotonic() + wait
    last = "no connection"
    while (left := until - time.monotonic()) > 0:
        reply = b""
        try:
            with socket.create_connection(where, timeout=left) as connection:
                last = "it does not report that all processes have connected"
                connection.sendall(json.dumps({"process": index, "processes": count}).encode() + b"\n")
                connection.settimeout(left + REPLY_SECONDS)
                reply = connection.makefile("rb").readline(_MAX_LINE)
            return Cause.of_json(reply) if json.loads(reply) else _wait_for_service(where, wait)
        except TimeoutError:
            pass
        except OSError as error:
            last = error.strerror or str(error)
        except (ValueError, TypeError, RecursionError):
            last = f"it replies {reply[:60]!r}" if reply else "it closes the connection"
        if (failure := _ended([0])) is not None:
            return failure
        time.sleep(RETRY_SECONDS)
    text = f"process {index} of {count} has waited {wait:.0f} s for process 0 at {where[0]}:{where[1]}: {last}"
    return Cause(0, "absent", text, RESTARTABLE)


def _wait_for_service(where: tuple[str, int], wait: float) -> Cause | None:
    """Wait until JAX's service listens at the port: a client that is refused once tries again only after a second."""
    until = time.monotonic() + wait
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(where, timeout=wait):
            return None
        time.sleep(RETRY_SECONDS / 10)
    return Cause(0, "absent", f"process 0 did not start JAX's service within {wait:.0f} s", RESTARTABLE)


def _ended(processes: Iterable[int]) -> Cause | None:
    """The first of these processes that has ended with status 0, by the note of ``meshpar launch``, as a failure."""
    folder = os.environ.get(CAUSES)
    for p in processes:
        if folder and ended_file(Path(folder), p).exists():
            text = f"process {p} ended, with exit status 0, before it called mp.distributed()"
            return Cause(p, "ended", text, PROGRAM)
    return None


def ended_file(folder: Path, process: int) -> Path:
    """The file that ``meshpar launch`` makes when a process has ended with status 0."""
    return folder / f"ended-{process}"


def _listed(processes: list[int]) -> str:
    more = f" and {len(processes) - 8} more" if len(processes) > 8 else ""
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes[:8]))}{more}"
