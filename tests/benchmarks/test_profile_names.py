"""All collectives of a plan are found by name in the program that the TPU compiler makes of it, at the widths of Llama 3 8B."""

import importlib.util

import covering
import profile_names
import pytest

tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install 'jax[tpu]'"
)


@tpu
@pytest.mark.parametrize(("topology", "layout"), covering.each(profile_names.TOPOLOGIES, ["sequence_parallel", "fsdp"]))
def test_all_names_are_in_the_final_program(topology, layout):
    program = profile_names.compiled(topology, dict(profile_names.CASES)[layout], layout, layers=2)
    assert program.plan is not None
    found = profile_names.found(program.plan, program.as_text())
    assert set(found.collectives) == found.own | found.combined
    assert not found.unnamed
    assert len(found.combined) < len(found.own) / 4
