"""The largest whole number that still fits, where each trial is expensive."""

from __future__ import annotations

from collections.abc import Callable


def longest(
    fits: Callable[[int], bool], *, start: int, step: int, least: int, most: int
) -> int | None:
    """The largest of ``start + k * step`` that fits; None if none does.

    Strides double from the start until they leave what fits, then halve: as many trials as the
    logarithm of the distance, so a good guess costs two.

    Args:
        fits: True up to some number, False beyond it.
        start: A guess, between ``least`` and ``most``.
        step: Of the numbers that are tried.
        least: No smaller one is tried.
        most: No larger one is tried.

    >>> longest(lambda n: n <= 1000, start=64, step=8, least=1, most=4096)
    1000
    >>> longest(lambda n: n <= 10, start=64, step=8, least=1, most=4096)
    8
    """
    low, high = -((start - least) // step), (most - start) // step

    def at(place: int) -> bool:
        return fits(start + place * step)

    good, bad = (0, None) if at(0) else (None, 0)
    stride = 1
    while good is None or bad is None:
        if good is not None:
            place = min(good + stride, high)
            if place == good:
                return start + good * step
            good, bad = (place, None) if at(place) else (good, place)
        else:
            assert bad is not None
            place = max(bad - stride, low)
            if place == bad:
                return None
            good, bad = (place, bad) if at(place) else (None, place)
        stride *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if at(middle) else (good, middle)
    return start + good * step
