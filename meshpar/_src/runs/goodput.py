"""How a run spends its time, over all its starts: productive seconds, restarts, compilations and repeated steps."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import UnsupportedError


@dataclass
class Goodput:
    """The time of a run since its first start.

    Attributes:
      begin: the first start, in seconds of ``time.time()``.
      starts: number of starts; all but the first are restarts.
      steps: number of steps that have ended, each counted once.
      productive_seconds: of steps that ran for the first time.
      repeated_steps, repeated_seconds: of steps that ran again after a restart from an older checkpoint.
      compile_seconds: of the compiler, in all starts.
    """

    begin: float
    starts: int = 1
    steps: int = 0
    productive_seconds: float = 0.0
    repeated_steps: int = 0
    repeated_seconds: float = 0.0
    compile_seconds: float = 0.0

    @classmethod
    def start(cls, path: Path | None, first: int) -> Goodput:
        """One more start of the run whose record is in a file; without such a file the first start of a run.

        Args:
          path: of the file; None: the record is not stored.
          first: number of the first step of this start.

        Raises:
          UnsupportedError: the file is no record of a run.
        """
        if path is None or not path.exists():
            return cls(time.time(), steps=first)
        try:
            out = cls(**json.loads(path.read_text("utf8")))
        except (OSError, ValueError, TypeError) as error:
            text = f"path={str(path)!r} is no record of a Meter: {error}"
            raise UnsupportedError(text, fixes=["another path"]) from None
        out.starts += 1
        return out

    @property
    def fraction(self) -> float:
        """Productive seconds over all seconds since the first start."""
        return self.productive_seconds / max(time.time() - self.begin, 1e-9)

    def add(self, first: int, last: int, seconds: float) -> None:
        """Count the steps ``first`` to ``last``, of which each took this time; those that ended before are repeated."""
        repeated = max(0, min(self.steps, last + 1) - first)
        self.repeated_steps += repeated
        self.repeated_seconds += repeated * seconds
        self.productive_seconds += (last + 1 - first - repeated) * seconds
        self.steps = max(self.steps, last + 1)

    def save(self, path: Path) -> None:
        """Replace the file by this record, at once."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self)), "utf8")
        os.replace(part, path)
