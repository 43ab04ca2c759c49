"""What takes longer than an edit: threads whose progress pages ask for, and whose turn to plan comes after the pages'."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import MeshparError

log = logging.getLogger(__name__)


class Turns:
    """One thread plans at a time, and pages go before jobs: an edit waits for one plan of a job at most."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._pages = 0

    def take(self, page: bool) -> None:
        """Wait for a turn."""
        with self._changed:
            self._pages += page
            self._changed.wait_for(lambda: not self._taken and (page or not self._pages))
            self._pages -= page
            self._taken = True

    def leave(self) -> None:
        """End the turn."""
        with self._changed:
            self._taken = False
            self._changed.notify_all()

    @contextmanager
    def page(self) -> Iterator[None]:
        """A turn of a page."""
        self.take(True)
        try:
            yield
        finally:
            self.leave()


class Stopped(KeyboardInterrupt):
    """The page wants no more of a job; a search takes it as Ctrl-C, and has the best so far."""


class Job:
    """A thread with something to tell.

    Attributes:
      text: how far it is.
      result: what it has so far, as JSON has it; all of it when it is not ``running``.
      failed: why it has no result; None.
    """

    def __init__(self, turns: Turns, run: Callable[[Job], Any]):
        self.text = ""
        self.result: Any = None
        self.failed: dict[str, Any] | None = None
        self.running = True
        self._turns, self._run = turns, run
        self._has_turn = self._stop = False
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def _go(self) -> None:
        self.take()
        try:
            self.result = self._run(self)
        except Stopped:
            self.failed = {"headline": "stopped"}
        except MeshparError as e:
            self.failed = as_json(e)
        except Exception as e:
            log.exception("a job of the lab fails")
            self.failed = {"headline": f"{type(e).__name__}: {e}"}
        finally:
            self.leave()
            self.running = False

    def take(self) -> None:
        """Wait for a turn to plan.

        Raises:
          Stopped: the page wants no more.
        """
        if not self._has_turn:
            self._turns.take(False)
            self._has_turn = True

    def leave(self) -> None:
        """End the turn, if it has one."""
        if self._has_turn:
            self._has_turn = False
            self._turns.leave()

    def tell(self, text: str) -> None:
        """Say how far it is, let pages go first, and end if the job was stopped.

        Raises:
          Stopped: the page wants no more.
        """
        self.text = text
        if self._has_turn:
            self.leave()
            self.take()
        if self._stop:
            raise Stopped

    def stop(self) -> None:
        """Ask for its end."""
        self._stop = True

    def wait(self, seconds: float | None = None) -> None:
        """Wait for its end."""
        self._thread.join(seconds)

    def view(self) -> dict[str, Any]:
        """As pages get it."""
        running = self.running  # before the result, which is whole when it is False
        return {"running": running, "text": self.text, "result": self.result, "failed": self.failed}


def as_json(e: MeshparError) -> dict[str, Any]:
    """An error with its facts and fixes, as pages show it."""
    facts = {"tensor": e.path, "dims": e.dims, "at": e.source}
    return {"headline": e.headline, "facts": {k: v for k, v in facts.items() if v}, "fixes": list(e.fixes)}
