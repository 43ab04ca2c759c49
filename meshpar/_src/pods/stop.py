"""The request to stop: SIGTERM, by the user or the scheduler."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from ..compat.coordination import CAUSES, connected, listen_for_preemption, preemption_sync_point, process_index


def listening_file(folder: Path, process: int) -> Path:
    """A file that exists in the folder of ``meshpar launch`` while a process saves its state after SIGTERM."""
    return folder / f"listening-{process}"


class StopRequest:
    """Whether this job has received SIGTERM since the object was made.

    In a group of processes JAX receives the signal, and finds the batch at which all stop. In a process alone one handler
    reports it to all objects. It also calls the handler that was installed before, and the first :meth:`close` after which no
    object is open restores that one.
    """

    _open: ClassVar[weakref.WeakSet[StopRequest]] = weakref.WeakSet()
    _before: ClassVar[Any] = None
    _running: ClassVar[bool] = False

    def __init__(self) -> None:
        self.asked = False
        self._open.add(self)
        if connected():
            listen_for_preemption()
        else:
            self._install()
        if CAUSES in os.environ:
            listening_file(Path(os.environ[CAUSES]), process_index()).touch()

    @classmethod
    def _install(cls) -> None:
        """Make :meth:`_hear` the handler, unless it is; handlers can be set by the main thread only."""
        handler = signal.getsignal(signal.SIGTERM)
        if handler != cls._hear and threading.current_thread() is threading.main_thread():
            cls._before = handler
            signal.signal(signal.SIGTERM, cls._hear)

    @classmethod
    def _hear(cls, number: int, frame: FrameType | None) -> None:
        if cls._running:  # the script's handler calls the one from before it, which is this
            return
        again = all(stop.asked for stop in cls._open)
        for stop in cls._open:
            stop.asked = True
        if callable(cls._before):
            cls._running = True
            try:
                cls._before(number, frame)
            finally:
                cls._running = False
        if again:  # the second time: no more patience
            sys.exit(128 + number)

    def at(self, n: int) -> bool:
        """Whether to save after batch ``n`` and stop; equal in all processes."""
        if connected():
            return preemption_sync_point(n)
        if self in self._open:
            self._install()  # the script may have set its own handler since
        return self.asked

    def close(self) -> None:
        """Stop listening."""
        cls = type(self)
        cls._open.discard(self)
        if CAUSES in os.environ and not cls._open:
            listening_file(Path(os.environ[CAUSES]), process_index()).unlink(missing_ok=True)
        if cls._open or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == cls._hear:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if cls._before is None else cls._before)
        cls._before = None
