from launcher.report.memory_bars import memory_html, memory_line, memory_mapping
from strategies.memory_model import RankMemory

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
