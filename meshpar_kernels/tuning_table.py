"""The tuning table: tiles, stages and blocks of the measured grouped matmuls, by device kind, shape class and dtype.

`tuned.json` is the shipped table; a file of the user's own (`path`) extends it, and wins where both have an entry.
Where neither has one, a kernel takes the analytic choice. Both are read when a program is traced.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels.config import Config

VARIABLE = "MESHPAR_KERNEL_TABLE"
"""Environment variable: path of the user's table."""

SHIPPED = Path(__file__).with_name("tuned.json")
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class MatmulKey:
    """Sizes of a grouped matmul, key of the table: "grouped_matmul", [M, K] by [G, K, N], or
    "grouped_matmul_transpose", [M, K]ᵀ[M, N] by groups.

    Attributes:
      matrices: 2 with a gate, else 1.
      transposed: the weights are [G, N, K].
    """

    op: str
    rows: int
    k: int
    n: int
    groups: int
    matrices: int = 1
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(rows, K, N, groups)."""
        return self.rows, self.k, self.n, self.groups

    @property
    def transposes(self) -> bool:
        """Whether it is "grouped_matmul_transpose"."""
        return self.op == "grouped_matmul_transpose"

    @property
    def shape_class(self) -> str:
        """Key of a table entry: sizes, with rows and groups rounded to the nearest power of two."""
        rows, groups = (2 ** round(math.log2(max(n, 1))) for n in (self.rows, self.groups))
        more = f" matrices={self.matrices}" if self.matrices > 1 else ""
        return f"{self.op} rows={rows} K={self.k} N={self.n} groups={groups}{more}{' transposed' * self.transposed}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A measured choice.

    Attributes:
      config: the fastest configuration with correct values.
      seconds, analytic_seconds: median seconds of it, and of the configuration that is used without a table.
      jax: version of JAX that it was measured with.
    """

    config: Config
    seconds: float
    analytic_seconds: float
    jax: str


Table = Mapping[str, Mapping[str, Mapping[str, Entry]]]
"""Device kind → shape class → dtype → entry."""


def path() -> Path:
    """Path of the user's table: `MESHPAR_KERNEL_TABLE` if it is set, else meshpar/kernels.json in the user's cache
    folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshpar" / "kernels.json"


def read(file: Path) -> Table:
    """The table of a file; an empty one if there is no such file.

    Raises:
      ValueError: the file is no table, or has an unknown format; the message has the entry.
    """
    try:
        stamp = file.stat().st_mtime_ns
    except OSError:
        return {}
    return _read(file, stamp)


@functools.lru_cache(maxsize=8)
def _read(file: Path, _: int) -> Table:
    """As `read`; cached by path and modification time in nanoseconds."""
    where = "it"
    try:
        content = json.loads(file.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and {FORMAT} is known here")
        found: dict[str, dict[str, dict[str, Entry]]] = {}
        for kind, classes in content["devices"].items():
            for shape, dtypes in classes.items():
                for dtype, fields in dtypes.items():
                    where = f"{kind} / {shape} / {dtype}"
                    found.setdefault(kind, {}).setdefault(shape, {})[dtype] = _entry(fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is no tuning table of kernels ({where}: {type(error).__name__}: {error}); remove it, or point {VARIABLE} "
            "elsewhere"
        ) from None
    return found


def _entry(fields: Mapping[str, Any]) -> Entry:
    """A table entry from its JSON fields.

    Raises:
      KeyError, TypeError, ValueError: a field is missing or has a wrong value.
    """
    config = Config(tuple(fields["tile"]), **{x: fields.get(x) for x in ("stages", "num_sms", "cluster", "pingpong")})
    seconds, analytic = float(fields["seconds"]), float(fields["analytic_seconds"])
    if not (0 < seconds < math.inf and 0 < analytic < math.inf):
        raise ValueError(f"seconds must be above 0, got {seconds} and {analytic}")
    return Entry(config, seconds, analytic, str(fields["jax"]))


def merge(*tables: Table) -> Table:
    """All entries of the tables; if several tables have an entry, the last one is used."""
    out: dict[str, dict[str, dict[str, Entry]]] = {}
    for table in tables:
        for kind, classes in table.items():
            for shape, dtypes in classes.items():
                out.setdefault(kind, {}).setdefault(shape, {}).update(dtypes)
    return out


def write(file: Path, table: Table) -> None:
    """Replace the file atomically, so that no reader sees half of it."""
    devices = {
        kind: {
            shape: {
                dtype: {**vars(e.config), "seconds": e.seconds, "analytic_seconds": e.analytic_seconds, "jax": e.jax}
                for dtype, e in dtypes.items()
            }
            for shape, dtypes in classes.items()
        }
        for kind, classes in table.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as to:
        json.dump({"format": FORMAT, "devices": devices}, to, indent=2, sort_keys=True)
        to.write("\n")
    os.replace(to.name, file)


def lookup(platform: str, matmul: MatmulKey, dtype: Any) -> Config | None:
    """The measured configuration of this matmul on the device that kernels traced now are for; None without an entry.

    Args:
      platform: "tpu" or "cuda", the platform of the kernel; None is returned for devices of the other one.

    Raises:
      ValueError: the user's table cannot be read.
    """
    kind = _compat.device_kind()
    if not kind or kind.startswith("TPU") != (platform == "tpu"):
        return None
    for table in (read(path()), read(SHIPPED)):
        entry = table.get(kind, {}).get(matmul.shape_class, {}).get(jnp.dtype(dtype).name)
        if entry is not None:
            return entry.config
    return None
