from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from launcher.report.html import (
    Panel,
    memory_html,
    memory_line,
    memory_mapping,
    timeline_html,
    write_timeline_html,
)
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import RankMemory, peak_activations
from strategies.analysis.metrics import measure
from strategies.ir.kinds import COMPUTE_KINDS, Kind

COSTS = UniformCosts(grad_reduce=4, p2p=0.1)
HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>&amp;'


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, and each one's text."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])
        if tag not in ("meta", "link", "img"):
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    def all(self, tag):
        return [element for element in self.elements if element[0] == tag]


def predicted(schedule="foldx_fifo", pp=2, num_microbatches=4):
    program = compile_program(schedule=schedule, pp=pp, num_microbatches=num_microbatches)
    return simulate(program, COSTS)


def page(*panels, title="a step"):
    parsed = Page(timeline_html(panels, title=title))
    data = [e for e in parsed.all("script") if e[1].get("type") == "application/json"]
    assert len(data) == 1
    return parsed, json.loads(data[0][2])


def bars(row):
    return [bar for name in ("compute", "channel") for lane in row[name] for bar in lane]


def test_the_payload_holds_every_instruction_that_takes_time():
    timeline = predicted()
    _, data = page(Panel("predicted", timeline))
    (panel,) = data["panels"]
    assert (panel["unit"], panel["stages"], panel["channel"]) == ("F", 4, True)
    assert panel["makespan"] == pytest.approx(timeline.makespan)
    drawn = COMPUTE_KINDS | {Kind.REDUCE}
    for rank, row in enumerate(panel["rows"]):
        expected = [
            (e.instruction.kind.value, e.instruction.stage, e.start, e.end)
            for e in timeline.events(rank)
            if e.instruction.kind in drawn and e.end > e.start
        ]
        found = [(data["kinds"][bar[0]], bar[1], bar[3], bar[4]) for bar in bars(row)]
        assert sorted(found) == [pytest.approx(item) for item in sorted(expected)]


def test_the_payload_says_what_an_instruction_waited_for():
    _, data = page(Panel("predicted", predicted("1f1b", num_microbatches=2)))
    rows = data["panels"][0]["rows"]
    waited = {(data["kinds"][b[0]], b[1], b[2]): b[5:9] for row in rows for b in bars(row)}
    assert waited["F", 0, 0] == ["", -1, "", 0.0]
    assert waited["F", 0, 1] == ["0F0", 0, "rank", 1.0]
    assert waited["F", 1, 0] == ["0F0", 0, "message", 1.1]
    assert waited["B", 1, 0] == ["1F0", 1, "rank", 2.1]
    assert waited["REDUCE", 1, 0][:3] == ["1B1", 1, "release"]


def test_a_fused_pair_is_one_bar_with_two_names():
    costs = UniformCosts(fused=2.5)
    program = compile_program(schedule="dualpipe", pp=2, num_microbatches=4, costs=costs)
    _, data = page(Panel("predicted", simulate(program, costs)))
    fused = data["kinds"].index("OVERLAP_F_B")
    found = [bar for bar in bars(data["panels"][0]["rows"][0]) if bar[0] == fused]
    assert [bar[:5] + bar[9:] for bar in found] == [
        [fused, 1, 3, 5.0, 7.5, [data["kinds"].index("B"), 0, 0]]
    ]


def test_the_payload_has_activations_over_time():
    timeline = predicted()
    _, data = page(Panel("predicted", timeline))
    for row, peak in zip(
        data["panels"][0]["rows"], peak_activations(timeline.program), strict=True
    ):
        assert max(value for _, value in row["held"]) == peak
        assert row["held"][-1][1] == 0.0


def test_a_measured_timeline_starts_at_zero_in_its_own_unit():
    timeline = predicted()
    late = replace(
        timeline,
        start=tuple(tuple(7.0 + 0.01 * t for t in row) for row in timeline.start),
        end=tuple(tuple(7.0 + 0.01 * t for t in row) for row in timeline.end),
        time_unit="s",
        origin="measured",
    )
    _, data = page(Panel("predicted", timeline), Panel("measured", late))
    assert [panel["unit"] for panel in data["panels"]] == ["F", "s"]
    assert min(bar[3] for bar in bars(data["panels"][1]["rows"][0])) == 0.0
    assert data["panels"][1]["makespan"] == pytest.approx(0.01 * timeline.makespan)


def test_the_header_shows_the_figures():
    timeline = predicted()
    metrics = measure(timeline, COSTS)
    parsed, _ = page(Panel("predicted", timeline, metrics))
    names = [element[2] for element in parsed.all("dt")]
    figures = dict(zip(names, [element[2] for element in parsed.all("dd")], strict=True))
    assert figures["makespan"] == f"{metrics.makespan:.4g} F"
    assert figures["bubble ratio"] == f"{100 * metrics.bubble_ratio:.1f} %"
    assert figures["lower bound"] == f"{metrics.lower_bound:.4g} F ({metrics.binding_bound})"
    assert figures["above the bound"] == f"{100 * metrics.bound_gap:.1f} %"
    assert figures["exposed reduction"] == f"{metrics.exposed_grad_reduce:.4g} F"
    assert figures["peak activations"].startswith(f"{max(metrics.peak_activations):g} ")


def test_the_page_loads_nothing_from_anywhere():
    text = timeline_html([Panel("predicted", predicted())], title="a step")
    assert re.findall(r"https?:|//[a-z]|@import|url\(|\bfetch\(|XMLHttp|import\(", text) == []
    for _, attributes, _ in Page(text).elements:
        assert not {"src", "href", "srcset", "data"} & set(attributes)


def test_hostile_titles_and_names_stay_text():
    timeline = predicted()
    hostile = replace(timeline, program=replace(timeline.program, schedule=HOSTILE))
    parsed, _ = page(Panel(HOSTILE, hostile), title=HOSTILE)
    assert len(parsed.all("script")) == 2
    assert parsed.all("img") == []
    assert [parsed.all(tag)[0][2] for tag in ("title", "h1", "h2")] == [HOSTILE] * 3


def test_the_script_knows_every_kind_and_reason_and_the_order_of_a_bars_fields():
    parsed, _ = page(Panel("predicted", predicted()))
    script = parsed.all("script")[1][2]

    def keys(name):
        body = re.search(rf"const {name} = {{(.*?)\n}};", script, re.DOTALL).group(1)
        return set(re.findall(r"(\w+): [\[\"]", body))

    drawn = {kind.value for kind in Kind} - {"SEND", "RECV"}
    assert keys("COLOURS") == drawn
    assert keys("WORDS") == drawn
    assert keys("HOWS") == {"message", "value", "rank", "channel", "release"}
    fields = re.search(r"const \[(KIND, .*?)\] =\s+\[(.*?)\];", script)
    names = "KIND, STAGE, NUMBER, START, END, WAIT, WAIT_RANK, HOW, SINCE, PAIR, VERSION"
    assert fields.group(1) == names
    assert fields.group(2) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"


def test_32_ranks_with_64_microbatches_stay_a_small_file(tmp_path):
    path = tmp_path / "timeline.html"
    timeline = predicted("1f1b", pp=32, num_microbatches=64)
    write_timeline_html(path, [Panel("predicted", timeline)], title="large")
    assert path.stat().st_size < 500_000
    _, data = page(Panel("predicted", timeline))
    assert sum(len(bars(row)) for row in data["panels"][0]["rows"]) == 32 * (2 * 64 + 1)


GIB = 2**30
RANKS = (
    RankMemory(parameters=GIB, activations=3 * GIB),
    RankMemory(parameters=GIB, stage_inputs=GIB // 2, temporaries=GIB // 2),
)


def test_a_line_has_the_largest_first():
    assert memory_line(RANKS[0]) == "4 GiB (activations 3, parameters 1)"
    assert memory_line(RANKS[1]) == "2 GiB (parameters 1, stage inputs 0.5, temporaries 0.5)"


def test_json_has_every_name_and_the_sum():
    first, second = memory_mapping(RANKS)
    assert first["total"] == 4 * GIB == sum(v for k, v in first.items() if k != "total")
    assert second["stage_inputs"] == GIB // 2
    assert list(first) == list(second)


def test_bars_have_one_scale():
    text = memory_html(RANKS)
    assert text.count('class="row"') == 2
    assert "width:75.000%" in text  # activations of rank 0, which is full
    assert text.count("width:25.000%") == 2  # parameters of both
    assert "recompute" not in text


def test_a_mark_shows_where_memory_ends():
    assert 'left:100.000%"' in memory_html(RANKS, limit_bytes=8 * GIB)
    assert 'left:50.000%"' in memory_html(RANKS, limit_bytes=2 * GIB)


def test_measured_memory_stands_below_the_measured_step_and_says_what_it_is():
    panel = Panel(
        "measured",
        predicted(),
        measured_memory=(GIB, 2 * GIB),
        memory_kind="resident_growth",
    )
    text = timeline_html([panel], title="a step")
    assert "<summary>measured memory at the peak</summary>" in text
    assert "growth of the resident size of each rank's process" in text.replace("&#x27;", "'")
    assert "width:50.000%" in text and "<span>2 GiB</span>" in text
    assert "predicted memory" not in text


def test_small_memory_is_seen_and_the_limit_told():
    held = RankMemory(parameters=2**20, activations=2**20)
    page = memory_html([held], limit_bytes=2.0**32)
    assert "width:50.000%" in page and "2048 times as far" in page and "<b " not in page
    near = memory_html([held], limit_bytes=2.0**22)
    assert "width:25.000%" in near and "times as far" not in near and "<b " in near


def test_memory_of_many_ranks_is_folded():
    assert '<details class="memory" open>' in memory_html(RANKS)
    many = memory_html(RANKS * 16)
    assert '<details class="memory"><summary>predicted memory at the peak of 32 ranks' in many
