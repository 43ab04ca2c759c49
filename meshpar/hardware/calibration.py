"""What was measured of devices: the parts of peak rates that programs reach, kept by kind of device and version of jaxlib."""

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

from ..errors import MeshError, UnsupportedError
from ..layout import AnyMesh
from .chips import Chip, chip_of_kind

FORMAT = 1
JAXLIB = importlib.metadata.version("jaxlib")
"""The version at hand."""
EFFICIENCIES = ("matmul_efficiency", "hbm_efficiency", "link_efficiency")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The efficiencies of one kind of device, as :func:`meshpar.calibrate` fits them; plans that are given it are priced with them.

    Attributes:
      device_kind: ``jax.Device.device_kind``.
      jaxlib: the version that compiled what was measured.
      matmul_efficiency, hbm_efficiency, link_efficiency: the part of the peak rate that products, memory traffic and links reach:
        of the chip table's, for other devices of :func:`nominal`'s, and then perhaps above 1.
      layouts: how many were measured.
      error: by which part the calibrated plans are off the measured seconds, at the median.
      hbm: bytes of a device, where the chip table does not have it.
      notes: what the layouts could not tell.
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
        """Where it is from, as plans say it."""
        return f"{self.device_kind}, jaxlib {self.jaxlib}"

    def on(self, chip: Chip | None) -> Chip:
        """A chip with these efficiencies; None: the nominal one of this kind."""
        chip = chip or nominal(self.device_kind, self.hbm or math.inf)
        return replace(chip.with_efficiencies(**{k: getattr(self, k) for k in EFFICIENCIES}), calibration=self.name)

    def save(self, path: str | Path) -> None:
        """Put it into a JSON file, beside what that has of other kinds of devices and other versions.

        Raises:
          UnsupportedError: there is such a file, and it has no calibrations.
        """
        path = Path(path)
        kept = read_calibrations(path) if path.exists() else ()
        devices: dict[str, dict[str, Any]] = {}
        for c in (*kept, self):
            row = {k: v for k, v in asdict(c).items() if k not in ("device_kind", "jaxlib")}
            devices.setdefault(c.device_kind, {})[c.jaxlib] = row
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf8") as to:
            json.dump({"format": FORMAT, "devices": devices}, to, indent=2, sort_keys=True)
            to.write("\n")
        os.replace(to.name, path)


Calibrations = tuple[Calibration, ...]
CalibrationLike = Calibration | Iterable[Calibration] | str | Path | None
"""A calibration or several, or the file that has them."""


def calibrations(given: CalibrationLike) -> Calibrations:
    """Calibrations as users give them.

    Raises:
      UnsupportedError: no such file, one that cannot be read, or something else.
    """
    if given is None:
        return ()
    if isinstance(given, Calibration):
        return (given,)
    if isinstance(given, str | Path):
        return read_calibrations(given)
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    for c in found:
        if not isinstance(c, Calibration):
            raise UnsupportedError(
                f"calibration={c!r} is none", fixes=["the file that `mp.calibrate(…).calibration.save(file)` wrote"]
            )
    return found


def read_calibrations(path: str | Path) -> Calibrations:
    """All calibrations of a file.

    Raises:
      UnsupportedError: no such file, or one that has none; it says where.
    """
    where = "it"
    try:
        content = json.loads(Path(path).read_text("utf8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and {FORMAT} is known here")
        found = []
        for kind, versions in content["devices"].items():
            for version, row in versions.items():
                where = f"{kind} / {version}"
                found.append(_read(kind, version, row))
        if not found:
            raise ValueError("it has no device")
    except FileNotFoundError:
        raise UnsupportedError(
            f"there is no calibration file {path}", fixes=["meshpar calibrate TARGET --calibration FILE writes it"]
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UnsupportedError(
            f"{path} is no calibration file: {where}: {said}",
            fixes=["meshpar calibrate TARGET --calibration FILE writes one"],
        ) from None
    return tuple(found)


def _read(kind: str, version: str, row: dict[str, Any]) -> Calibration:
    unknown = set(row) - {f.name for f in fields(Calibration)}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is not known here")
    for name in (*EFFICIENCIES, *(["hbm"] if row.get("hbm") is not None else [])):
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}, and must be above 0")
    return Calibration(kind, version, **{**row, "notes": tuple(row.get("notes", ()))})


def nominal(kind: str, hbm: float) -> Chip:
    """What a device is priced with that the chip table does not have, CPUs for one: round figures for efficiencies to refer to.

    100 GFLOP/s, 20 GB/s of memory traffic, 5 GB/s over links of which no more is known. Plans use it only with a calibration:
    without one a step on such a device has no time.
    """
    return Chip(
        kind,
        (kind,),
        1e11,
        None,
        hbm,
        2e10,
        5e9,
        1,
        (),
        5e9,
        None,
        lanes=1,
        switch=1,
        source="nominal",
    ).ideal()


def calibrated(chip: Chip | None, where: AnyMesh, given: Calibrations) -> Chip | None:
    """The chip that a plan reads: with what was measured of its kind, if there are calibrations.

    That of another version of jaxlib stands in, the newest, where this one's is not there; plans name it.

    Args:
      chip: by the chip table; None: it does not have it.
      where: the mesh of the plan.

    Raises:
      MeshError: they are all of other kinds of devices.
    """
    if not given:
        return chip
    if chip is not None:
        what, mine = f"a {chip.name}", [c for c in given if _table_name(c) == chip.name]
    elif isinstance(where, Mesh):
        kind = where.devices.flat[0].device_kind
        what, mine = f"devices of kind {kind!r}", [c for c in given if c.device_kind.lower() == kind.lower()]
    else:
        what, mine = "an abstract mesh without a topology", [c for c in given if _table_name(c) is None]
    have = ", ".join(sorted({c.device_kind for c in given}))
    if not mine or len({c.device_kind for c in mine}) > 1:
        why = "of several kinds of devices" if mine else f"of {have}"
        raise MeshError(
            f"the calibration is {why}, and the plan is for {what}",
            fixes=["say what it runs on: topology=…"] if what.startswith("an abstract") else [
                "mp.calibrate (meshpar calibrate) on such devices", "or plan without a calibration, by the chip table"],
        )  # fmt: skip
    best = max(mine, key=lambda c: (c.jaxlib == JAXLIB, _version(c.jaxlib)))
    return best.on(chip)


def _table_name(c: Calibration) -> str | None:
    chip = chip_of_kind(c.device_kind)
    return None if chip is None else chip.name


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
