"""``meshpar doctor``: the findings about an environment."""

import json

import jax
import pytest

from meshpar._src.entry import doctor
from meshpar._src.entry.cli import main


def finding(findings, name):
    return next(f for f in findings if f.name == name)


def test_the_installed_requirements_are_met():
    findings = doctor.diagnose()
    names = {"python", "jax", "flax", "optax", "numpy", "rich", "devices", *doctor.FEATURES}
    assert names <= {f.name for f in findings}
    assert finding(findings, "jax").detail == jax.__version__
    assert not [f for f in findings if f.status == "problem"]


@pytest.mark.parametrize(
    ("requirement", "status"),
    [
        ("jax>=0.1", "ok"),
        ("jax<0.13,>=99.0", "problem"),
        ("jax<0.1", "problem"),
        ("no-such-package>=1", "problem"),
        ("jax", "ok"),
    ],
)
def test_a_requirement(requirement, status):
    found = doctor.diagnose([requirement, 'pytest>=8; extra == "test"'])
    name = requirement.split(">")[0].split("<")[0]
    assert finding(found, name).status == status
    assert "pytest" not in {f.name for f in found}


def test_a_missing_optional_package_is_no_problem(monkeypatch):
    monkeypatch.setattr(doctor, "FEATURES", {"teleport": ("aot", ("no-such-package",))})
    found = finding(doctor.diagnose([]), "teleport")
    assert (found.status, found.detail) == ("missing", "needs no-such-package: the extra meshpar[aot]")


def test_devices_and_a_backend_that_fails(monkeypatch):
    assert finding(doctor.diagnose([]), "devices").detail.startswith("8 × cpu")

    def fail():
        raise RuntimeError("the TPU is in use\nby process 7")

    monkeypatch.setattr(jax, "devices", fail)
    assert finding(doctor.diagnose([]), "devices") == doctor.Finding("devices", "problem", "the TPU is in use")


def test_the_command(capsys, monkeypatch):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert jax.__version__ in out
    assert out == "".join(f"{line.rstrip()}\n" for line in out.splitlines())
    assert main(["doctor", "--json"]) == 0
    assert {f["name"] for f in json.loads(capsys.readouterr().out)} >= {"jax", "devices"}
    for status, code in (("problem", 1), ("missing", 0)):
        monkeypatch.setattr(
            doctor, "diagnose", lambda status=status: [doctor.Finding("jax", status, "the extra meshpar[aot]")]
        )
        assert main(["doctor"]) == code
        assert "meshpar[aot]" in capsys.readouterr().out


def test_a_package_that_is_importable_but_not_installed(monkeypatch):
    def missing(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", missing)
    found = doctor.diagnose()
    assert "pip install -e ." in finding(found, "meshpar").detail
    assert finding(found, "devices").status == "ok"
