"""Which implementation None is: the rule, the variable that changes it, and machines whose GPUs a kernel cannot join."""

import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar_kernels import _choose, _compat, combine, grouped_matmul, permute, route
from meshpar_kernels._nvlink import machine_reasons

BF16 = jnp.bfloat16


def lowered(function, *shapes) -> str:
    """The program for a GPU."""
    structs = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")  # newer versions want to know
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(lambda *args: function(*args)).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


def matmuls(lhs, rhs, sizes):
    return grouped_matmul(lhs, rhs, sizes)


def routing(logits, x):
    plan = route(logits, 2)
    return combine(permute(x, plan), plan, weight=plan.weight)


MATMUL_CASE = matmuls, ((128, 64), BF16), ((2, 64, 64), BF16), ((2,), jnp.int32)
ROUTING = routing, ((16, 4), jnp.float32), ((16, 128), BF16)


@pytest.mark.parametrize(
    ("value", "product_kernels", "routing_kernels"),
    [(None, True, False), ("pallas", True, True), ("reference", False, False)],
)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_kernel_is_a_default_only_where_the_rule_says_so(value, product_kernels, routing_kernels, monkeypatch):
    if value is None:
        monkeypatch.delenv(_choose.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(_choose.VARIABLE, value)
    jax.clear_caches()
    assert ("mosaic_gpu" in lowered(*MATMUL_CASE)) == product_kernels
    assert ("triton" in lowered(*ROUTING)) == routing_kernels
    jax.clear_caches()


def test_by_name_the_variable_does_not_matter(monkeypatch):
    monkeypatch.setenv(_choose.VARIABLE, "reference")
    _, *shapes = MATMUL_CASE
    assert "mosaic_gpu" in lowered(lambda *a: grouped_matmul(*a, implementation="pallas"), *shapes)


def test_another_value_is_an_error(monkeypatch):
    monkeypatch.setenv(_choose.VARIABLE, "mosaic")
    with pytest.raises(ValueError, match="MESHPAR_KERNELS='mosaic': it may be 'pallas' or 'reference'"):
        grouped_matmul(jnp.zeros((8, 64)), jnp.zeros((2, 64, 64)), jnp.asarray([3, 5]))


def test_on_a_device_with_kernels_it_is_said_once(monkeypatch, caplog):
    monkeypatch.delenv(_choose.VARIABLE, raising=False)
    monkeypatch.setattr(_compat, "backend_platform", lambda: "cuda")
    _choose._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.eval_shape(matmuls, *(jax.ShapeDtypeStruct(s, d) for s, d in MATMUL_CASE[1:]))
    (record,) = caplog.records
    assert record.getMessage().startswith("grouped_matmul: the Pallas kernel is the default, since lax.ragged_dot")


def test_how_many_multiprocessors():
    assert _compat.multiprocessors() == 132  # no GPU here: an H100 or H200
    for kind, count in (("NVIDIA H20", 78), ("NVIDIA H100 PCIe", 114), ("NVIDIA B200", 148), ("NVIDIA H200", 132)):
        device = jax.sharding.AbstractDevice(kind, 1, "gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            assert _compat.multiprocessors() == count


def mesh_of(*places):
    """Of GPUs with these ids and processes, [2, 2]."""
    devices = np.array([types.SimpleNamespace(id=i, process_index=p) for i, p in places]).reshape(2, 2)
    return types.SimpleNamespace(empty=False, axis_names=("host", "gpu"), devices=devices, shape={"host": 2, "gpu": 2})


def test_axes_that_cross_hosts_are_refused(monkeypatch):
    monkeypatch.setattr(_compat, "backend_platform", lambda: "cuda")
    two_hosts = mesh_of((0, 0), (1, 0), (2, 1), (3, 1))
    monkeypatch.setattr(_compat._mesh, "get_concrete_mesh", lambda: two_hosts)
    assert machine_reasons(2, ("gpu",)) == []
    (reason,) = machine_reasons(2, ("host",))
    assert reason == "'host' joins devices of the processes [0, 1]; NVLink joins the devices of one"
    monkeypatch.setattr(_compat._mesh, "get_concrete_mesh", lambda: mesh_of((0, 0), (2, 0), (1, 0), (3, 0)))
    (reason,) = machine_reasons(2, ("gpu",))
    assert "in the order [0, 2, 1, 3]; the kernel needs the order of their ids" in reason
    monkeypatch.setattr(_compat._mesh, "get_concrete_mesh", lambda: types.SimpleNamespace(empty=True))
    assert machine_reasons(2, ("gpu",)) == []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    (reason,) = machine_reasons(2, ("gpu",))
    assert "2 processes, and no jax.set_mesh(mesh) says which devices" in reason
