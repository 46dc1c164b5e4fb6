"""The table of the fault runs."""

from __future__ import annotations

from tests.faults import neighbours, results


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


PAGE = r"""
## Neighbours, disks and tired users

| what happens | what the run does | seen | test |
|---|---|---|---|
| a \| b | ends | test | `tests/a.py::test_a` `tests/b.py::test_b` |
| c | ends | 4/4 of 14 s | the same |
| d | ends | 3/3 cases, 9.0 s | `tests/b.py::test_b` |

## Fuzz
"""
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_a[1]" time="0.5"/>
<testcase classname="tests.a" name="test_a[2]" time="2.25"><failure/></testcase>
<testcase classname="tests.b" name="test_b" time="1.0"/>
<testcase classname="tests.b" name="test_b" time="1.0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_rows_of_the_second_table_get_what_their_tests_come_to(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    cases = neighbours.cases_of(tmp_path / "report.xml")
    rows = neighbours.rows(PAGE)
    assert [row.tests for row in rows][:2] == [("tests/a.py::test_a", "tests/b.py::test_b")] * 2
    counts = {row.fault: neighbours.counted(row, cases) for row in rows}
    written = neighbours.with_figures(PAGE, counts)
    assert [row.seen for row in neighbours.rows(written)] == [
        "2/3 cases, 2.2 s",
        "4/4 of 14 s",  # somebody's own words
        "1/1 cases, 1.0 s",
    ]
    assert len(neighbours.rows(neighbours.PAGE.read_text())) > 50
