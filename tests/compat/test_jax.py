"""Pauses of the garbage collector, and the modules of equations."""

import gc
import types
import weakref

import pytest

from meshpar._src.compat import jax as compat
from meshpar._src.compat.jax import without_gc


class Node:
    """An object that refers to itself, so that only the collector frees it."""

    def __init__(self):
        self.itself = self


def in_oldest(x):
    return any(y is x for y in gc.get_objects(generation=2))


@pytest.fixture(autouse=True)
def collected():
    gc.collect()
    yield
    gc.unfreeze()


def test_the_collector_is_paused_and_runs_again_afterwards():
    with without_gc():
        assert not gc.isenabled()
        with without_gc(cached=True):
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_objects_of_a_cached_result_are_in_the_oldest_generation():
    """Where a full collection frees what is garbage."""
    with without_gc(cached=True):
        lasting, garbage = Node(), weakref.ref(Node())
    assert in_oldest(lasting)
    gc.collect(1)
    assert garbage() is not None
    gc.collect()
    assert garbage() is None


def test_too_many_objects_since_the_last_full_collection_are_collected(monkeypatch):
    monkeypatch.setattr(compat, "MAX_UNVISITED_OBJECTS", 5000)
    with without_gc(cached=True):
        garbage, lasting = weakref.ref(Node()), [[] for _ in range(3000)]
    assert garbage() is not None
    with without_gc(cached=True):
        more = [[] for _ in range(3000)]
    assert garbage() is None
    assert len(lasting) == len(more)


def test_objects_that_the_caller_froze_stay_frozen():
    frozen = Node()
    many = [[] for _ in range(2000)]
    gc.freeze()
    count = gc.get_freeze_count()
    with without_gc(cached=True):
        young = Node()
    assert gc.get_freeze_count() == count
    assert not in_oldest(young)
    assert frozen.itself is frozen
    assert len(many) == 2000


def test_the_module_of_an_equation():
    """A rematerialized module of Flax repeats the path of the module that calls it."""
    paths = {
        "jvp(T5)/decoder/block/checkpoint/T5/decoder/block/0/layer": "T5/decoder/block/0/layer",
        "transpose(jvp(ViT))/encoder/layer_0/attention": "ViT/encoder/layer_0/attention",
        "A/b/b/c": "A/b/b/c",
        "": "",
    }
    for stack, path in paths.items():
        equation = types.SimpleNamespace(source_info=types.SimpleNamespace(name_stack=stack))
        assert compat.module_of(equation) == path
