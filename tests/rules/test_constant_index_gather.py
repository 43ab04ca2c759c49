"""Selecting elements by a table: equal to NumPy, on one device and on several, with derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.rules import primitive
from meshpar._src.rules.constant_index_gather import rearrange
from meshpar._src.rules.exchange_along_dim import ANY, ZERO, exchange, runs_of
from meshpar._src.rules.local_forms import LocalOp

SIZE = 16
RNG = np.random.default_rng(0)
TABLES = {
    "roll": np.roll(np.arange(SIZE), 1), "roll far": np.roll(np.arange(SIZE), -7), "reversed": np.arange(SIZE)[::-1],
    "shifted in zeros": [ZERO, *range(SIZE - 1)], "longer": [*range(1, SIZE), ANY, ANY, ANY, ANY, ANY],
    "strided": [1, 4, 7, 10, 13, ANY, ANY, ANY], "repeated": [3, 3, 3, 3, 9, 0, 0, 15], "random": RNG.permutation(SIZE),
    "some": [3, 1, 2, 9], "zeros": [ZERO] * 8, "anything": RNG.integers(-2, SIZE, 24), "its own": np.arange(SIZE),
    "many": RNG.integers(0, SIZE, 40),
}  # fmt: skip
X = RNG.normal(size=(3, SIZE)).astype(np.float32)


def expected(table):
    table = np.asarray(table)
    return np.where(table == ZERO, 0, X[:, np.maximum(table, 0)]), table != ANY


def test_rearrange_is_numpy_indexing():
    """All tables in one program: the selection, its gradient, and the selection of each row."""

    def forms(x, table):
        weight = np.arange(1.0, len(table) + 1, dtype=np.float32) * (np.asarray(table) != ANY)
        gradient = jax.grad(lambda x: jnp.sum(rearrange(x, 1, table) * weight))(x)
        each = jax.vmap(lambda x: rearrange(x, 0, table), in_axes=1, out_axes=1)(x.T)
        return rearrange(x, 1, table), gradient, each

    found = jax.jit(lambda x: {name: forms(x, table) for name, table in TABLES.items()})(X)
    for name, (selected, gradient, each) in found.items():
        want, known = expected(TABLES[name])
        assert np.array_equal(np.asarray(selected)[:, known], want[:, known]), name
        back = np.zeros(X.shape)
        for place, element in enumerate(TABLES[name]):
            if element >= 0:
                back[:, element] += place + 1
        assert np.array_equal(gradient, back), name
        assert np.array_equal(np.asarray(each)[known], want[:, known].T), name


def test_devices_exchange_missing_elements():
    """Every device computes its shard of the result from its own shard and the received arrays."""

    def local(x):
        found = {}
        for name, table in TABLES.items():
            eqn = jax.make_jaxpr(lambda x, table=table: rearrange(x, 1, table))(X).eqns[0]
            rule = primitive("rearrange").rule(eqn, [X.shape], [expected(table)[0].shape])
            op = type("Op", (), {"eqn": eqn, "rule": rule, "name": "rearrange", "ins": []})()
            (found[name],) = primitive("rearrange").local(LocalOp(op, [(), ("d",), ("d",)], {"d": 4}), x)
        return found

    run = jax.shard_map(local, mesh=mp.mesh("d=4, e=2"), in_specs=P(None, "d"), out_specs=P(None, "d"), check_vma=False)
    for name, x in jax.jit(run)(X).items():
        want, known = expected(TABLES[name])
        assert np.array_equal(np.asarray(x)[:, known], want[:, known]), name


@pytest.mark.parametrize(
    ("name", "lengths"), [("roll", [1]), ("its own", []), ("zeros", []), ("shifted in zeros", [1]), ("reversed", [4])]
)
def test_fewest_permutes(name, lengths):
    found = exchange(SIZE, 4, runs_of(TABLES[name]))
    assert [r.length for r in found.rounds] == lengths
    assert not found.gather
    assert len(set(found.tables)) == 1 or name == "reversed"


def test_elements_that_all_devices_need_are_all_gathered():
    assert exchange(SIZE, 4, runs_of([*range(SIZE)] * 4)).gather
