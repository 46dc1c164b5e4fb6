import pytest

from launcher.report.sweep_cells import write_column

COLUMNS = {
    "F": ([33.0, 28.5, None], "time", "F", ("F", ["33.0", "28.5", ""])),
    "seconds share a unit": ([1.25, 0.0125], "time", "s", ("s", ["1.250", "0.013"])),
    "zero": ([0.0, None], "seconds", None, ("s", ["0", ""])),
    "percent": ([0.375, 1.0], "percent", None, ("%", ["37.5", "100.0"])),
    "memory": ([3 * 2**30, 2**29], "bytes", None, ("GiB", ["3.0", "0.5"])),
    "little memory": ([2048], "bytes", None, ("KiB", ["2"])),
    "counts": ([12345.6, 1], "count", None, ("", ["12,346", "1"])),
    "losses": ([4.16354], "loss", None, ("", ["4.1635"])),
    "huge": ([1e9, 1.0], "number", None, ("", ["1,000,000,000.000", "1.000"])),
    "nothing": ([None, None], "time", "s", ("s", ["", ""])),
}


@pytest.mark.parametrize(("values", "quantity", "unit", "expected"), COLUMNS.values(), ids=COLUMNS)
def test_a_column_has_one_unit_and_aligned_decimals(values, quantity, unit, expected):
    assert write_column(values, quantity, unit) == expected
