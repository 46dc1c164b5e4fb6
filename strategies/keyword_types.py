"""Whether a value is of the type that an annotation says, and that type in words.

Keys of the command line, keywords of ``PipelineStrategy`` and those of ``compile_program`` are
checked here, against the annotations of what they become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from strategies.costs.table import Costs
from strategies.errors import PlanError

MISMATCH: object = object()
"""What ``convert`` returns of a value of another type."""

_NOUNS: dict[object, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a text",
    NoneType: "null",
}  # fmt: skip
_IN_PYTHON = {bool: "True or False", NoneType: "None", Costs: "costs such as UniformCosts()"}
# What works, where the default does not show it.
_EXAMPLES = {
    "pp": "2", "num_microbatches": "8", "stages_per_rank": "2", "group": "4", "seed": "0",
    "memory_bytes": "4000000000", "units_per_stage": "(4, 3, 3, 4)", "buckets": "(2, 2)",
    "pipeline_layers": "'net.layers'", "costs": "UniformCosts()", "recompute": "Recompute('full')",
    "file": "read_schedule_file('my.csv')",
}  # fmt: skip


def convert(value: object, hint: Any, *, exact: bool = False) -> Any:  # noqa: ANN401
    """The value in the annotated type, or ``MISMATCH``.

    A value is never bent into another type except where nothing is lost, as files of text have it
    (4 for 4.0, a text of digits); with ``exact`` not even there.
    """
    origin = get_origin(hint)
    if isinstance(hint, UnionType) or origin is Union:
        # An exact type goes first: 1 stays a count and 1.0 a share in `int | float`.
        options = sorted(get_args(hint), key=lambda option: type(value) is not option)
        found = (convert(value, option, exact=exact) for option in options)
        return next((typed for typed in found if typed is not MISMATCH), MISMATCH)
    if origin is Literal:
        return value if isinstance(value, str) and value in get_args(hint) else MISMATCH
    if origin is tuple:
        element, second = get_args(hint)
        if not isinstance(value, list | tuple) or (second is not Ellipsis and len(value) != 2):
            return MISMATCH
        items = tuple(convert(item, element, exact=exact) for item in value)
        return MISMATCH if any(item is MISMATCH for item in items) else items
    if isinstance(value, bool):
        return value if hint is bool else MISMATCH
    if hint is float:
        try:
            number = float(value) if isinstance(value, int | float) else math.nan
        except OverflowError:
            return MISMATCH
        return number if math.isfinite(number) else MISMATCH
    if hint is int and isinstance(value, float) and not exact:
        # 1e6 is how people write a million.
        return int(value) if value.is_integer() and abs(value) < 2**53 else MISMATCH
    if hint is str and isinstance(value, int) and not exact:
        return str(value)  # experiment_name=2024
    return value if isinstance(value, hint) else MISMATCH


def describe(hint: Any, nouns: Mapping[object, str] = _NOUNS) -> str:  # noqa: ANN401
    """A type in words: ``a whole number or auto``."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return " or ".join(describe(option, nouns) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(str(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        element, second = get_args(hint)
        if get_origin(element) is Literal:
            return f"a list of {describe(element)}"
        noun = {int: "whole numbers", float: "numbers", str: "texts"}[element]
        return f"a list of {noun}" if second is Ellipsis else f"a list of two {noun}"
    return nouns.get(hint) or f"a {hint.__name__}"


def example(name: str, default: object) -> str:
    """What works for a keyword, as Python spells it."""
    return _EXAMPLES.get(name, repr(default))


def check_keyword(name: str, value: object, hint: Any, default: object, shown: str) -> None:  # noqa: ANN401
    """Refuses what a script gives for a keyword of another type.

    Raises:
        PlanError: It is of another type.
    """
    if convert(value, hint, exact=True) is MISMATCH:
        words = describe(hint, _NOUNS | _IN_PYTHON)
        raise PlanError(f"{shown}: expected {words}. Try {name}={example(name, default)}.")


def check_keywords(function: Callable[..., object], given: Mapping[str, object]) -> None:
    """The same of all keywords of a function, whose annotations say the types.

    Raises:
        PlanError: One is of another type.
    """
    hints, defaults = _signature(function)
    for name, value in given.items():
        check_keyword(name, value, hints[name], defaults[name], f"{name}={value!r:.60}")


@cache
def _signature(function: Callable[..., object]) -> tuple[dict[str, Any], dict[str, object]]:
    return get_type_hints(function), function.__kwdefaults__ or {}
