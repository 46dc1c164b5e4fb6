import pytest

import strategies
from strategies import errors


def test_every_name_that_is_offered_is_there():
    torch_free = set(strategies.__all__) - {"PipelineStrategy"}
    assert all(getattr(strategies, name).__name__ == name for name in torch_free)


def test_a_name_that_is_not_offered_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'strategies' has no attribute 'pipeline'"):
        strategies.pipeline  # noqa: B018


def test_what_a_user_causes_exits_with_2_and_a_run_that_failed_with_1():
    kinds = [
        getattr(errors, name)
        for name in vars(errors)
        if name.endswith("Error") and name != "PipelineError"
    ]
    assert len(kinds) >= 7
    assert all(issubclass(kind, errors.PipelineError) for kind in kinds)
    assert {kind.__name__: kind.exit_code for kind in kinds if kind.exit_code != 2} == {
        "RunError": 1,
        "NotFiniteError": 1,
    }


def test_styles_of_tensor_parallelism_are_where_modules_of_users_import_them_from():
    from strategies.models import tensor_parallel as home
    from strategies.runtime import tensor_parallel

    assert all(getattr(tensor_parallel, name) is getattr(home, name) for name in home.__all__)
