"""Tables of compiler constants: complete for every chip, chosen by version, and named in plans for another version."""

import dataclasses
import tomllib

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.compat.quirks import QUIRKS
from meshpar._src.hardware import compiler_constants as compiler
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.hardware.compiler_constants import TABLES, CompilerModel, compiler_model
from meshpar._src.hardware.compiler_options import GROUPS

FILES = {path.stem: tomllib.loads(path.read_text()) for path in TABLES.glob("*.toml")}
PER_CHIP = {
    "libtpu": {
        "matmul_efficiency", "hbm_efficiency", "link_efficiency", "clock_hz", "vector_elements_per_cycle",
        "matmul_result_fraction", "sync_collectives", "line_permutes_are_sync", "partitioner_prefers_all_reduce", "option_groups",
    },
    "jaxlib": {"matmul_efficiency", "hbm_efficiency", "link_efficiency"},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_table_has_every_chip(name):
    """A chip is one entry of the chip table and one section of its compiler's tables, with the command that fitted it."""
    table, package = FILES[name], name.rpartition("-")[0]
    chips = {c.name for c in CHIPS.values() if bool(c.switch) == (package == "jaxlib")}
    assert table.keys() - {"all", "inherits"} == chips
    fields = {f.name for f in dataclasses.fields(CompilerModel)} | {"fit"}
    for chip in chips:
        section = table[chip].keys()
        assert PER_CHIP[package] <= section
        assert section <= fields
        assert table[chip]["fit"]
    assert all(group["fit"] for group in table.get("all", {}).values())


def test_tables_name_quirks_and_groups_of_options_that_exist():
    models = [chip.compiler for chip in CHIPS.values()]
    assert {q for m in models for q in m.quirks} <= QUIRKS.keys()
    assert {g for m in models for g in m.option_groups} == {g.name for g in GROUPS}


@pytest.mark.parametrize(
    ("version", "chosen", "noted"),
    [("0.0.42", "a", False), ("0.0.42.1", "a", False), ("0.0.43", "a", True), ("0.0.50", "b", False), ("0.1", "b", True),
     ("0.0.41", "a", True), (None, "b", False)],
)  # fmt: skip
def test_the_nearest_older_version_is_used(version, chosen, noted, monkeypatch):
    old = FILES["libtpu-0.0.42"]
    new = {**old, "v5p": {**old["v5p"], "clock_hz": 3e9}}
    monkeypatch.setattr(compiler, "_tables", lambda: {("libtpu", "0.0.42"): old, ("libtpu", "0.0.50"): new})
    monkeypatch.setattr(compiler, "installed_version", lambda package: None)
    compiler_model.cache_clear()
    try:
        model = compiler_model("v5p", version=version)
    finally:
        compiler_model.cache_clear()
    assert model.clock_hz == {"a": 1.75e9, "b": 3e9}[chosen]
    assert (model.note is not None) == noted
    if noted:
        assert version in model.note


def test_a_plan_for_another_compiler_version_says_so(monkeypatch):
    x = jax.ShapeDtypeStruct((64, 4), jnp.float32)

    def planned():
        return mp.plan(lambda x: x * 2, x, mesh="data=4", topology="v5e:2x2", layout="b: data", dims={"x": "b _"})

    newer = dataclasses.replace(CHIPS["v5e"], compiler=compiler_model("v5e", version="9.9"))
    monkeypatch.setitem(CHIPS, "v5e", newer)
    (note,) = [n for n in planned().notes if "9.9" in n]
    assert "libtpu 0.0.42" in note
    assert note in str(planned())
    monkeypatch.setitem(CHIPS, "v5e", dataclasses.replace(newer, compiler=compiler_model("v5e", version="0.0.42.1")))
    assert not any("libtpu" in n for n in planned().notes)
