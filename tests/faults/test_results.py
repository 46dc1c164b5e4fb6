"""The table of the fault runs."""

from __future__ import annotations

from tests.faults import results


def test_the_newest_line_of_a_row_counts_and_rows_are_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FILE", tmp_path / "build" / "faults.jsonl")
    assert results.recorded() == []
    results.record(13, "link down", 1, 2, 10.04)
    results.record(9, "mutated configurations", 1000, 1000, None)
    results.record(13, "link down", 2, 2, 9.96)
    assert results.table(results.recorded()) == (
        "row | fault                  | passed    | worst\n"
        "9   | mutated configurations | 1000/1000 |\n"
        "13  | link down              | 2/2       | 10.0 s"
    )
    assert results.table(results.recorded(), markdown=True).splitlines()[:3] == [
        "| row | fault | passed | worst |",
        "| --- | --- | --- | --- |",
        "| 9 | mutated configurations | 1000/1000 |  |",
    ]
    assert results.recorded(since=4e9) == []
