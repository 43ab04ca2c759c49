import threading

from meshpar._src.lru_cache import LRUCache


def test_the_least_recently_used_entry_is_evicted():
    cache = LRUCache(3)
    for k in "abc":
        assert cache.put(k, k.upper()) == k.upper()
    assert cache.get("a") == "A"
    cache.put("d", "D")
    assert (cache.get("b"), len(cache)) == (None, 3)
    assert [cache.get(k) for k in "acd"] == ["A", "C", "D"]
    cache.put("a", "other")  # another value of a key is no other entry
    assert (len(cache), cache.latest()) == (3, "other")


def test_latest_is_the_most_recently_used():
    cache = LRUCache(2)
    assert cache.latest() is None
    assert not cache
    cache.put(1, "one")
    cache.put(2, "two")
    assert cache.latest() == "two"
    cache.get(1)
    assert cache.latest() == "one"
    cache.clear()
    assert (len(cache), cache.get(1)) == (0, None)


def test_threads_may_share_a_cache():
    cache, errors = LRUCache(8), []

    def use(seed):
        try:
            for i in range(2000):
                key = (seed * i) % 31
                found = cache.get(key)
                assert found is None or found == str(key)
                cache.put(key, str(key))
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in (3, 5, 7, 11)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(cache) <= 8


def test_setdefault_makes_a_value_once():
    cache, made = LRUCache(2), []
    for k in "aabab":
        assert cache.setdefault(k, lambda k=k: made.append(k) or k.upper()) == k.upper()
    assert made == ["a", "b"]
    cache.setdefault("c", str)
    cache.setdefault("a", lambda: made.append("again") or "A")
    assert made == ["a", "b", "again"]
