"""``meshpar doctor``: versions, devices and optional packages of this environment, and which features they allow."""

from __future__ import annotations

import argparse
import json
import operator
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

import jax
from rich.markup import escape
from rich.table import Table

from ..compat.installed_versions import installed_version, version_numbers
from ..report.document import shown_text

Status = Literal["ok", "missing", "problem"]

FEATURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "compile for TPUs": ("aot", ("libtpu",)),
    "compile for GPUs": ("aot", ("jax-cuda12-pjrt", "jax-cuda13-pjrt")),
    "checkpoints": ("checkpoint", ("orbax-checkpoint",)),
    "safetensors files": ("checkpoint", ("safetensors",)),
    "lab in notebooks": ("lab", ("anywidget",)),
    "Grain data sources": ("data", ("grain",)),
}
"""Feature → (extra of meshpar that installs it, the distributions of which it needs one)."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      name: a package, ``python``, ``devices`` or a feature.
      status: ``"ok"``, ``"missing"`` (an optional feature that needs a package) or ``"problem"``.
      detail: a version, the devices, or what to install.
    """

    name: str
    status: Status
    detail: str


def diagnose(requirements: Iterable[str] | None = None) -> list[Finding]:
    """Findings about this environment. Initializes JAX's default backend, if it is not initialized yet.

    Args:
      requirements: of meshpar, as ``importlib.metadata.requires`` returns them (None: of the installed distribution).
    """
    findings = [Finding("python", "ok", platform.python_version())]
    try:
        needed = list(metadata.requires("meshpar") or []) if requirements is None else list(requirements)
    except metadata.PackageNotFoundError:
        needed = []
        unknown = "importable, not installed: requirements unknown; pip install -e ."
        findings.append(Finding("meshpar", "missing", unknown))
    findings += [_package(text) for text in needed if "extra ==" not in text]
    findings.append(_devices())
    for feature, (extra, packages) in FEATURES.items():
        versions = [f"{name} {version}" for name in packages if (version := installed_version(name)) is not None]
        detail = ", ".join(versions) if versions else f"needs {' or '.join(packages)}: the extra meshpar[{extra}]"
        findings.append(Finding(feature, "ok" if versions else "missing", detail))
    return findings


_COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge, ">": operator.gt}


def _package(requirement: str) -> Finding:
    """Whether a required package is installed in a version within the bounds: of ``"jax<0.13,>=0.10.2"``, two."""
    name, bounds = re.match(r"([\w.\-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
    limits = re.findall(r"(<=|>=|==|<|>)\s*([\w.]+)", bounds)
    version = installed_version(name)
    wanted = f"{name} {', '.join(op + bound for op, bound in limits)}".strip()
    if version is None:
        return Finding(name, "problem", f"not installed; meshpar needs {wanted}")
    if all(_COMPARE[op](version_numbers(version), version_numbers(bound)) for op, bound in limits):
        return Finding(name, "ok", version)
    return Finding(name, "problem", f"{version}; meshpar needs {wanted}")


def _devices() -> Finding:
    """The devices that JAX finds, or the error of its backend."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return Finding("devices", "problem", str(error).splitlines()[0])
    kinds = [device.device_kind for device in devices]
    text = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    if devices[0].platform == "cpu":
        text += "; plans need no others, and mp.virtual_devices(8) gives eight"
    return Finding("devices", "ok", text)


def add_command(commands: Any) -> None:
    """Add the parser of ``meshpar doctor``."""
    about = "versions, devices and optional packages of this environment, and the features that they allow"
    sub = commands.add_parser("doctor", help=about, description=f"{about[0].upper()}{about[1:]}.")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(run=_doctor, debug=False, accelerator=True)


def _doctor(args: argparse.Namespace) -> int:
    """Print the findings; 1 if there is a problem, else 0."""
    findings = diagnose()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        style = {"ok": "green", "missing": "yellow", "problem": "red"}
        for finding in findings:
            table.add_row(finding.name, f"[{style[finding.status]}]{finding.status}[/]", escape(finding.detail))
        print(shown_text(table))
    return int(any(finding.status == "problem" for finding in findings))
