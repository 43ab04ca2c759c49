"""Workarounds for compilers: what was seen, where, what goes wrong, which test shows it, and when it can go."""

LARGE = 2**24
"""Bytes of operands or results on a device from which on it matters how long they are held.

Seen: libtpu 0.0.42, default effort: all gradients of a network were made last, with all that was gathered for them in memory; in a
loop gathered weights were held until the gradients were on their way; and nothing is gathered into the memory of an argument.
Tests: tests/passes/test_schedule.py, tests/lower/test_shard_map.py. Remove when the scheduler bounds live memory by itself.
"""

LARGE_SUM = 2**26
"""Bytes of a reduce-scattered sum on a device for which the next loop waits.

Seen: libtpu 0.0.42, default effort: whole gradients were kept while independent loops ran first.
Test: tests/passes/test_schedule.py. Remove with :data:`LARGE`.
"""

CUT_HERE = LARGE_SUM // 4
"""Bytes of a sum on a device from which on its scattered part is cut out behind a barrier.

Seen: libtpu 0.0.42: a reduce-scatter that is compiled to an all-reduce was cut where its result is read, the whole sum held until
then. Test: tests/passes/test_schedule.py. Remove when reduce-scatters stay what they are.
"""
