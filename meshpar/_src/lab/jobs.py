"""Background jobs of a lab (searches, compilations), which pages poll and which let edits of pages plan first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...errors import MeshparError

log = logging.getLogger(__name__)


class Turns:
    """A lock for planning that prefers pages to jobs: an edit waits for at most one plan of a job."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._pages = 0

    @contextmanager
    def turn(self, page: bool = True) -> Iterator[None]:
        """Holds the lock; ``page``: for a page."""
        with self._changed:
            self._pages += page
            self._changed.wait_for(lambda: not self._taken and (page or not self._pages))
            self._pages -= page
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()


class Stopped(KeyboardInterrupt):
    """The page stopped the job. A search handles it as an interrupt, and returns its best candidate so far."""


class Job:
    """A background thread with a progress text and a result.

    Attributes:
      text: its progress.
      result: the result so far as JSON data; complete if it is not ``running``.
      failed: the error as JSON data; None: no error so far.
    """

    def __init__(self, turns: Turns, run: Callable[[Job], Any]):
        """Start the thread, which takes the lock ``turns`` and runs ``run(job)``; its result becomes :attr:`result`."""
        self.text = ""
        self._began = time.monotonic()
        self.result: Any = None
        self.failed: dict[str, Any] | None = None
        self.running = True
        self._turns, self._run = turns, run
        self._stop, self._plans, self._turn = False, True, ExitStack()
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def _go(self) -> None:
        """Run the job in its thread; store its result or error."""
        try:
            with self._turn:
                self._turn.enter_context(self._turns.turn(page=False))
                self.result = self._run(self)
        except Stopped:
            self.failed = {"headline": "stopped"}
        except MeshparError as e:
            self.failed = as_json(e)
        except Exception as e:
            log.exception("a job of the lab fails")
            self.failed = {"headline": f"{type(e).__name__}: {e}"}
        finally:
            self._plans = self.running = False

    def leave(self) -> None:
        """Release the lock for planning for good: the job plans no more."""
        self._plans = False
        self._turn.close()

    def tell(self, text: str) -> None:
        """Set the progress text, and release the lock for a moment, so that waiting pages can plan.

        Raises:
          Stopped: the page stopped the job.
        """
        self.text = text
        if self._plans:
            self._turn.close()
            self._turn.enter_context(self._turns.turn(page=False))
        if self._stop:
            raise Stopped

    def stop(self) -> dict[str, Any]:
        """Request that it ends at its next progress report; returns an empty reply."""
        self._stop = True
        return {}

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, at most for some seconds."""
        self._thread.join(seconds)

    def view(self) -> dict[str, Any]:
        """Its state as JSON data."""
        running = self.running  # read before the result, which is complete if this is False
        seconds = time.monotonic() - self._began
        return {"running": running, "seconds": seconds, "text": self.text, "result": self.result, "failed": self.failed}


def as_json(e: MeshparError) -> dict[str, Any]:
    """An error with its facts and fixes as JSON data."""
    facts = {"tensor": e.path, "dims": e.dims, "at": e.source}
    return {"headline": e.headline, "facts": {k: v for k, v in facts.items() if v}, "fixes": list(e.fixes)}
