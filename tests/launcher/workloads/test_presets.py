import pytest

from launcher.workloads.presets import PRESETS
from launcher.workloads.transformer_shape import unit_specs


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2_124m", 124_439_808),  # transformers, openai-community/gpt2
        ("gpt3_1_6b", 1.6e9),
        ("gpt3_13b", 13.0e9),  # GPT-3's paper, table 2.1
        ("gpt3_6_7b", 6.7e9),
        ("gpt3_175b", 175e9),
        ("llama2_7b", 6_738_415_616),  # meta-llama/Llama-2-7b-hf
        ("llama2_3b", 3_426_473_600),  # openlm-research/open_llama_3b
        ("llama2_13b", 13_015_864_320),  # meta-llama/Llama-2-13b-hf
    ],
)
def test_published_models_have_their_published_number_of_parameters(name, published):
    tolerance = 0 if isinstance(published, int) else 0.015 if name == "gpt3_13b" else 0.035
    assert PRESETS[name].num_parameters == pytest.approx(published, rel=tolerance)


def test_the_fold_example_has_the_shape_of_its_command_line():
    shape = PRESETS["fold_example"]
    assert (shape.layers, shape.hidden, shape.ffn, shape.heads) == (30, 6656, 17920, 52)


def test_the_laptop_presets_read_bytes_and_can_be_cut_for_four_ranks():
    assert {PRESETS[name].vocab for name in ("tiny", "small")} == {256}
    assert PRESETS["tiny"].num_units >= 4 * 3
    assert PRESETS["tiny"].num_parameters < 2_000_000 < PRESETS["small"].num_parameters


def test_an_end_to_end_step_of_llama2_13b_is_near_six_times_parameters_times_tokens():
    shape = PRESETS["llama2_13b"]
    flops = 3 * sum(unit.forward_flops for unit in unit_specs(shape))
    assert flops / (6 * shape.num_parameters * shape.sequence) == pytest.approx(1.1, abs=0.06)
