"""Batches: an order from a seed and a number alone, rows on their devices, and where they stand."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.pods.data import permuted

LAYOUT = "batch: data; seq: model"
TOKENS = {"tokens": "batch seq"}


@given(rows=st.integers(1, 500), seed=st.integers(0, 2**40), epoch=st.integers(0, 100))
@settings(max_examples=60)
def test_an_order_has_every_row_once(rows, seed, epoch):
    order = permuted(np.arange(rows), rows, seed, epoch)
    assert sorted(order) == list(range(rows))
    some = np.arange(rows)[::3]
    assert (permuted(some, rows, seed, epoch) == order[::3]).all()


def test_orders_differ_and_are_mixed():
    a, b, c = (permuted(np.arange(1000), 1000, *x) for x in ((0, 0), (0, 1), (1, 0)))
    assert (a == b).mean() < 0.02
    assert (a == c).mean() < 0.02
    assert abs(np.corrcoef(np.arange(1000), a)[0, 1]) < 0.1


@pytest.fixture
def batches(mesh):
    """Makes batches of four rows under ``batch: data``, unless other options say otherwise."""
    return lambda source, **options: mp.data.batches(
        source, **{"batch": 4, "mesh": mesh, "layout": "batch: data", **options}
    )


class Rows:
    """What counts how it is read."""

    def __init__(self, n: int):
        self.n, self.read = n, []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict:
        self.read.append(i)
        return {"tokens": np.arange(6, dtype=np.int64) + 10 * i, "row": i}


def test_batches_lie_as_the_layout_says(batches):
    data = batches(Rows(21), batch=8, layout=LAYOUT, dims=TOKENS, epochs=2)
    seen = list(data.from_(0))
    assert [n for n, _ in seen] == [0, 1, 2, 3]
    assert data.per_epoch == 2
    assert data.position == 4
    for _, x in seen:
        assert x["tokens"].sharding.spec == P("data", "model")
        assert x["tokens"].dtype == np.int32
        assert (np.asarray(x["tokens"])[:, 0] == 10 * np.asarray(x["row"])).all()
    first = [int(r) for _, x in seen[:2] for r in x["row"]]
    assert len(set(first)) == 16


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_it_resumes_at_any_position(batches, prefetch):
    make = functools.partial(batches, np.arange(40), seed=3, prefetch=prefetch)
    data = make()
    want = [np.asarray(x).tolist() for _, (_, x) in zip(range(25), data.from_(0), strict=False)]
    assert data.position == 25  # what was read ahead does not count
    again = make()
    again.go_to(data.position_facts(13))
    assert [np.asarray(x).tolist() for _, x in zip(range(12), again, strict=False)] == want[13:]
    assert np.asarray(make()[17]).tolist() == want[17]


def test_the_last_batch_padded(batches):
    got = list(batches(Rows(21), batch=8, layout=LAYOUT, dims=TOKENS, last="pad", epochs=1))
    assert len(got) == 3
    x, mask = got[-1]
    assert np.asarray(mask).tolist() == [True] * 5 + [False] * 3
    assert x["tokens"].sharding.spec == P("data", "model")
    assert mask.sharding.spec == P("data")
    rows = [int(r) for y, m in got for r, keep in zip(y["row"], m, strict=True) if keep]
    assert sorted(rows) == list(range(21))


def test_in_their_own_order(batches):
    data = batches(np.arange(12), shuffle=False, epochs=1)
    assert np.concatenate([np.asarray(x) for x in data]).tolist() == list(range(12))


def test_an_error_of_the_source_comes_where_the_batch_is_asked_for(batches):
    class Bad(Rows):
        def __getitem__(self, i):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(batches(Bad(20))))


def test_positions_of_other_data(batches):
    make = lambda **other: batches(np.arange(40), **{"seed": 3, **other})  # noqa: E731
    facts = make().position_facts(5)
    make().go_to(facts)
    for other, says in [
        ({"seed": 4}, "seed=3, and this has seed=4"),
        ({"batch": 8}, "batch=4"),
        ({"shuffle": False}, "order="),
    ]:
        with pytest.raises(mp.errors.DataPositionError, match=says):
            make(**other).go_to(facts)


def test_positions_of_other_data_of_equal_length(batches):
    class Random(Rows):
        """Changes rows at random."""

        def __getitem__(self, i):
            return {"x": np.random.default_rng().normal(size=3)}

    rows = np.arange(40.0)
    facts = batches(rows).position_facts(5)
    batches(list(rows)).go_to(facts)
    for other in (rows + 1, rows.astype(np.float32), [{"x": x} for x in rows]):
        with pytest.raises(mp.errors.DataPositionError, match="16 sample rows differ"):
            batches(other).go_to(facts)
    facts = batches(Random(40)).position_facts(5)
    assert facts["sample"] == ""
    batches(Random(40)).go_to(facts)
    reader = batches(Rows(40))
    assert reader[0]["row"].shape == (4,)
    assert reader.rows_read == 4  # without the sample


def test_bad_input(batches):
    with pytest.raises(mp.errors.DataPositionError, match="the source has 3 rows"):
        batches(np.arange(3))
    with pytest.raises(mp.errors.DivisibilityError, match="`batch` of size 6"):
        batches(np.arange(30), batch=6)
    with pytest.raises(mp.errors.PatternError, match="'tokns' matches no leaf"):
        batches(Rows(20), layout=LAYOUT, dims={"tokns": "batch seq"})[0]
    with pytest.raises(mp.errors.DataPositionError, match="'drop' or 'pad'"):
        batches(np.arange(30), last="keep")


def test_put(mesh):
    batch = {"tokens": np.arange(32, dtype=np.float64).reshape(8, 4), "weight": np.ones(8), "step": np.int64(3)}
    got = mp.data.put(batch, mesh=mesh, layout=LAYOUT, dims={"tokens": "batch seq", "step": ""})
    assert got["tokens"].sharding.spec == P("data", "model")
    assert got["weight"].sharding.spec == P("data")
    assert got["step"].shape == ()
    np.testing.assert_array_equal(got["tokens"], batch["tokens"])
    # the rows of one process: all of them
    mine = mp.data.put(batch["tokens"], mesh=mesh, layout=LAYOUT, dims="batch seq", rows="mine")
    np.testing.assert_array_equal(mine, batch["tokens"])
    with pytest.raises(mp.errors.DivisibilityError):
        mp.data.put(np.ones((6, 4)), mesh=mesh, layout=LAYOUT)
    with pytest.raises(mp.errors.MeshError, match="6 rows in this process"):
        mp.data.put(np.ones((6, 4)), mesh=mesh, layout=LAYOUT, rows="mine")
    assert isinstance(mp.data.fetch(jax.numpy.ones(3)), np.ndarray)
