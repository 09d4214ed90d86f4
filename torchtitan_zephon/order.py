"""Keyed hashing and permutations, written out so that no library release can change them.

Everything random in a stream comes from here. The mixing function is the finalizer of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014); the
permutation of a range is a balanced Feistel network with cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from collections.abc import Iterator

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, SplitMix64's increment
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
_ROUNDS = 6


def mix64(x: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit integers, every bit affecting every bit."""
    x = ((x ^ (x >> 30)) * _MUL1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL2) & _MASK
    return x ^ (x >> 31)


def derive_key(*parts: int | str, key: int = 0) -> int:
    """A 64-bit key from integers (0 to 2**64-1) and strings; every part and its place counts.

    Given the ``key`` of some parts, it is the key of those and the new ones behind them.
    """
    for part in parts:
        for word in _words(part):
            key = mix64(((key ^ word) + _GOLDEN) & _MASK)
    return key


def _words(part: int | str) -> Iterator[int]:
    # The length goes first, so that ("ab", "c") and ("a", "bc") give different words.
    if isinstance(part, str):
        data = part.encode("utf-8")
        yield len(data)
        for i in range(0, len(data), 8):
            yield int.from_bytes(data[i : i + 8], "little")
    else:
        if not 0 <= part <= _MASK:
            raise ValueError(f"a key part must be an integer from 0 to 2**64-1, got {part}")
        yield _MASK
        yield part


def permute(index: int, size: int, key: int) -> int:
    """Where a keyed permutation of ``range(size)`` sends ``index``, in O(1) time and memory."""
    if not 0 <= index < size:
        raise ValueError(f"index must be in [0, {size}), got {index}")
    # The network permutes 2**(2*half) >= size values, fewer than 4 * size, so walking the cycle
    # until it comes back into the range takes under four steps on average.
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for r in range(_ROUNDS):
            round_key = (key + r * _GOLDEN) & _MASK
            left, right = right, left ^ (mix64(round_key ^ mix64(right)) >> (64 - half))
        index = (left << half) | right
        if index < size:
            return index


def shuffled(size: int, key: int) -> np.ndarray:
    """A keyed permutation of ``range(size)``, int64 [size], for ranges held in memory."""
    x = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MUL1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MUL2)
    x = x ^ (x >> np.uint64(31))
    # Equal hashes (never seen, but possible) keep their order: a stable sort has one result.
    return np.argsort(x, kind="stable")
