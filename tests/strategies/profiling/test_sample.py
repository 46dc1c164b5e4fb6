from strategies.profiling.sample import sample_units


def sampled(classes, size=1):
    found = sample_units(classes, [size] * len(classes))
    stages = [[found.units[unit] for unit in stage] for stage in found.stages]
    for kind, stage in enumerate(found.singles):
        assert [classes[place] for place in stages[stage]] == [kind]
    return stages


def test_every_class_is_alone_once_and_runs_have_one_and_two_layers():
    classes = [0, *[1, 2] * 6, 3]
    assert sampled(classes) == [[0], [1], [2], [3, 4], [5, 6, 7, 8], [13]]


def test_layers_of_one_unit():
    assert sampled([0, 1, 1, 1, 1, 1, 2]) == [[0], [1], [2], [3, 4], [6]]


def test_a_model_of_one_layer_has_no_runs():
    assert sampled([0, 1, 2, 3]) == [[0], [1], [2], [3]]


def test_a_large_model_has_the_short_run_only():
    assert sampled([0, *[1, 2] * 6, 3], size=10**8) == [[0], [1], [2], [3, 4], [13]]


def test_layers_of_two_kinds():
    stages = sampled([0, 1, 2, 1, 2, 1, 2, 3])
    assert [0] in stages
    assert [7] in stages
