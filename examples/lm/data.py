"""Real text that every machine has: the source of the Python standard library, as bytes.

Whole files are held out, by a hash of their name: so the held-out text is source of which the
model has seen no part, and the division is the same on every machine.
"""

import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT_ONE_IN = 20
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Corpus:
    train: np.ndarray  # uint8 [bytes]
    held_out: np.ndarray  # uint8 [bytes]
    files: int


def read_stdlib(root: Path | None = None) -> Corpus:
    """Read every `.py` file below `root` (the standard library), in the order of its path."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    )
    train, held_out = bytearray(), bytearray()
    for name in names:
        half = held_out if zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0 else train
        half += (root / name).read_bytes() + END_OF_FILE
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), len(names))


class Windows:
    """All windows of a text by their place, for `mp.data.batches`: (inputs, targets), each int32 [seq]."""

    def __init__(self, text: np.ndarray, seq: int):
        self.text, self.seq = text, seq

    def __len__(self) -> int:
        return len(self.text) - self.seq

    def __getitem__(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        window = self.text[start : start + self.seq + 1].astype(np.int32)
        return window[:-1], window[1:]


def training_batches(text: np.ndarray, batch: int, seq: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Windows at random places, without end: (inputs, targets), each int32 [batch, seq]."""
    rng = np.random.default_rng(seed)
    while True:
        yield _windows(text, rng.integers(0, len(text) - seq, batch), seq)


def held_out_batches(text: np.ndarray, batch: int, seq: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same `count` batches of windows each time, spread evenly over the text."""
    starts = np.linspace(0, len(text) - seq - 1, count * batch).astype(int)
    return [_windows(text, some, seq) for some in np.split(starts, count)]


def _windows(text: np.ndarray, starts: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    window = text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    return window[:, :-1], window[:, 1:]
