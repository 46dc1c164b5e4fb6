import pytest

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import measure
from strategies.compiler import compile_plan
from strategies.errors import PlanError
from strategies.ir.kinds import Kind
from strategies.ir.versions import gradient_sums, staleness, weight_versions
from strategies.plan import Plan
from tests.strategies.schedules.figures import picture


def test_the_papers_figure(golden):
    golden("schedules/pipedream", "\n".join(picture("pipedream", 4, 1)) + "\n")


def program(pp, microbatches=1, **more):
    return compile_program(schedule="pipedream", pp=pp, num_microbatches=microbatches, **more)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_a_rank_stashes_a_version_per_microbatch_under_way(pp):
    made = program(pp)
    assert weight_versions(made) == tuple(range(pp, 0, -1))
    assert gradient_sums(made) == (1,) * pp
    assert staleness(made) == tuple(range(pp - 1, -1, -1))
    for rank, row in enumerate(made.ranks):
        for item in row:
            if item.kind in (Kind.F, Kind.B):
                assert item.version == max(item.microbatch - (pp - 1 - rank), 0)


@pytest.mark.parametrize("pp", [2, 4])
def test_vertical_sync_is_one_version_on_all_ranks(pp):
    made = program(pp, vertical_sync=True)
    assert staleness(made) == (pp - 1,) * pp
    assert weight_versions(made) == tuple(range(pp, 0, -1))
    assert gradient_sums(made) == tuple(range(1, pp + 1))
    read = {}
    for row in made.ranks:
        for item in row:
            if item.kind is Kind.F:
                read.setdefault(item.microbatch, set()).add(item.version)
    assert all(len(versions) == 1 for versions in read.values())


@pytest.mark.parametrize(
    ("pp", "batches", "late", "sums"),
    [
        (2, 3, (1, 0), (2, 1)),
        (4, 2, (2, 1, 1, 0), (2, 1, 2, 1)),
        (4, 3, (1, 1, 1, 0), (1, 2, 2, 1)),
    ],
)
def test_an_update_of_several_microbatches_takes_the_newest_weights(pp, batches, late, sums):
    made = compile_plan(Plan("pipedream", pp, 1, accumulation=batches)).train
    assert staleness(made) == late
    assert weight_versions(made) == tuple(n + 1 for n in late)
    assert gradient_sums(made) == sums
    synced = compile_plan(Plan("pipedream", pp, 1, accumulation=batches, vertical_sync=True)).train
    assert staleness(synced) == (late[0],) * pp
    figures = measure(simulate(made, UniformCosts()), UniformCosts())
    assert (figures.period, figures.bubble_ratio) == (3, pytest.approx(0, abs=1e-9))
    with pytest.raises(PlanError, match=f"=2 with accumulate_grad_batches={batches}: .*2bw"):
        compile_plan(Plan("pipedream", pp, 2, accumulation=batches))


@pytest.mark.parametrize("microbatches", [1, 4, 7])
@pytest.mark.parametrize("sync", [False, True])
def test_in_steady_state_nobody_waits(microbatches, sync):
    costs = UniformCosts()
    figures = measure(simulate(program(4, microbatches, vertical_sync=sync), costs), costs)
    assert figures.period == 3 * microbatches
    assert figures.bubble_ratio == pytest.approx(0, abs=1e-9)
    assert figures.peak_activations == (4, 3, 2, 1)
