"""Calibrations: measured efficiencies of devices, stored in JSON files by device kind and jaxlib version."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from ...errors import MeshError, UnsupportedError
from ..compat.installed_versions import version_numbers
from ..layout import AnyMesh
from .chips import Chip, chip_of_kind

FORMAT = 1
JAXLIB = importlib.metadata.version("jaxlib")
"""The installed version."""
EFFICIENCIES = ("matmul_efficiency", "hbm_efficiency", "link_efficiency")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Efficiencies of one kind of device, fitted by :func:`meshpar.hardware.calibrate`; plans compute their seconds with them.

    Attributes:
      device_kind: ``jax.Device.device_kind``.
      jaxlib: the version that compiled the measured programs.
      matmul_efficiency, hbm_efficiency, link_efficiency: fractions of the peak rates of matmuls, memory traffic and links. The peak
        rates are from the chip table, else from :func:`nominal`, which may be exceeded.
      layouts: number of measured layouts.
      error: median relative difference between the seconds of calibrated plans and the measured seconds.
      hbm: bytes of a device, if the chip table does not have it.
      notes: efficiencies that the layouts do not determine.
    """

    device_kind: str
    jaxlib: str
    matmul_efficiency: float
    hbm_efficiency: float
    link_efficiency: float
    layouts: int = 0
    error: float = 0.0
    hbm: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its source as shown in plans: device kind and jaxlib version."""
        return f"{self.device_kind}, jaxlib {self.jaxlib}"

    def on(self, chip: Chip | None) -> Chip:
        """The chip with these efficiencies; for None, the :func:`nominal` chip of this device kind."""
        chip = chip or nominal(self.device_kind, self.hbm or math.inf)
        return replace(chip.with_efficiencies(**{k: getattr(self, k) for k in EFFICIENCIES}), calibration=self.name)

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file; an existing file keeps its entries of other device kinds and versions.

        Raises:
          UnsupportedError: the file exists and is not a calibration file.
        """
        path = Path(path)
        existing = read_calibrations(path) if path.exists() else ()
        devices: dict[str, dict[str, Any]] = {}
        for c in (*existing, self):
            row = {k: v for k, v in asdict(c).items() if k not in ("device_kind", "jaxlib")}
            devices.setdefault(c.device_kind, {})[c.jaxlib] = row
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf8") as to:
            json.dump({"format": FORMAT, "devices": devices}, to, indent=2, sort_keys=True)
            to.write("\n")
        os.replace(to.name, path)


Calibrations = tuple[Calibration, ...]
CalibrationLike = Calibration | Iterable[Calibration] | str | Path | None
"""Calibrations, or the path of a calibration file."""


def calibrations(given: CalibrationLike) -> Calibrations:
    """The calibrations of a user's ``calibration=`` as a tuple; ``()`` for None.

    Raises:
      UnsupportedError: the file does not exist or cannot be read, or the value is of another type.
    """
    if given is None:
        return ()
    if isinstance(given, Calibration):
        return (given,)
    if isinstance(given, str | Path):
        return read_calibrations(given)
    result = tuple(given) if isinstance(given, Iterable) else (given,)
    for c in result:
        if not isinstance(c, Calibration):
            fix = "the file that `mp.hardware.calibrate(…).calibration.save(file)` wrote"
            raise UnsupportedError(f"calibration={c!r} is not a calibration", fixes=[fix])
    return result


def read_calibrations(path: str | Path) -> Calibrations:
    """All calibrations of a file.

    Raises:
      UnsupportedError: the file does not exist, or is not a calibration file; the error names the entry at fault.
    """
    where = "it"
    try:
        content = json.loads(Path(path).read_text("utf8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}; this version reads {FORMAT}")
        entries = []
        for kind, versions in content["devices"].items():
            for version, row in versions.items():
                where = f"{kind} / {version}"
                entries.append(_read(kind, version, row))
        if not entries:
            raise ValueError("it has no device")
    except FileNotFoundError:
        raise UnsupportedError(
            f"there is no calibration file {path}", fixes=["meshpar calibrate TARGET --calibration FILE writes it"]
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        fix = "meshpar calibrate TARGET --calibration FILE writes one"
        raise UnsupportedError(f"{path} is not a calibration file: {where}: {reason}", fixes=[fix]) from None
    return tuple(entries)


def _read(kind: str, version: str, row: dict[str, Any]) -> Calibration:
    """The calibration of one entry of a file; ValueError for unknown fields and efficiencies that are not positive."""
    unknown = set(row) - {f.name for f in fields(Calibration)}
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
    for name in (*EFFICIENCIES, *(["hbm"] if row.get("hbm") is not None else [])):
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}, and must be above 0")
    return Calibration(kind, version, **{**row, "notes": tuple(row.get("notes", ()))})


def nominal(kind: str, hbm: float) -> Chip:
    """The chip for a device kind that is not in the chip table (CPUs): round peak rates for efficiencies to refer to.

    100 GFLOP/s, 20 GB/s of memory traffic, 5 GB/s over links. Plans use it only with a calibration: without one a step on such a
    device has no seconds.

    Args:
      hbm: bytes of a device.
    """
    rates = Chip(kind, (kind,), 1e11, None, hbm, 2e10, 5e9, 1, (), 5e9, None, lanes=1, switch=1, source="nominal")
    return rates.ideal()


def calibrated(chip: Chip | None, where: AnyMesh, given: Calibrations) -> Chip | None:
    """The chip of a plan, with the calibration of its device kind among ``given``.

    The calibration of the installed jaxlib is used, else the one of the newest version. Without calibrations, ``chip``.

    Args:
      chip: of the chip table; None: not in the table.
      where: the mesh of the plan.

    Raises:
      MeshError: all calibrations are of other device kinds.
    """
    if not given:
        return chip
    if chip is not None:
        what, matching = f"a {chip.name}", [c for c in given if _table_name(c) == chip.name]
    elif isinstance(where, Mesh):
        kind = where.devices.flat[0].device_kind
        what, matching = f"devices of kind {kind!r}", [c for c in given if c.device_kind.lower() == kind.lower()]
    else:
        what, matching = "an abstract mesh without a topology", [c for c in given if _table_name(c) is None]
    have = ", ".join(sorted({c.device_kind for c in given}))
    if not matching or (chip is None and len({c.device_kind.lower() for c in matching}) > 1):
        why = "of several kinds of devices" if matching else f"of {have}"
        raise MeshError(
            f"the calibration is {why}, and the plan is for {what}",
            fixes=["name the topology: topology=…"] if what.startswith("an abstract") else [
                "mp.hardware.calibrate (meshpar calibrate) on such devices", "or plan without a calibration, by the chip table"],
        )  # fmt: skip
    best = max(matching, key=lambda c: (c.jaxlib == JAXLIB, version_numbers(c.jaxlib)))
    return best.on(chip)


def _table_name(c: Calibration) -> str | None:
    chip = chip_of_kind(c.device_kind)
    return None if chip is None else chip.name
