from launcher.report.sweep_labels import make_sweep

from .sweeps import job


def test_a_job_is_labelled_by_what_varies(tmp_path):
    asked = [["mode=simulate", f"schedule={s}", f"pp={p}"] for p in (2, 4) for s in ("a", "b")]
    jobs = [job(tmp_path, index, *words) for index, words in enumerate(asked)]
    sweep = make_sweep(jobs, asked)
    assert sweep.varied == ("schedule", "pp")
    assert [sweep.label(j) for j in jobs] == [
        "schedule=a pp=2", "schedule=b pp=2", "schedule=a pp=4", "schedule=b pp=4",
    ]  # fmt: skip


def test_a_key_that_only_some_jobs_have_varies(tmp_path):
    asked = [["+data.path=x=y"], ["seed=1"]]
    sweep = make_sweep([job(tmp_path, 0, *asked[0])], asked)
    assert sweep.varied == ("data.path", "seed")
    assert sweep.num_jobs == 2
    assert sweep.label(sweep.jobs[0]) == "data.path=x=y"


def test_a_single_job_is_labelled_by_all_of_its_overrides(tmp_path):
    words = ["mode=simulate", "pp=2", "schedule=gpipe"]
    sweep = make_sweep([job(tmp_path, 0, *words)], [words])
    assert sweep.label(sweep.jobs[0]) == "pp=2 schedule=gpipe"
    bare = make_sweep([job(tmp_path, 0)], [[]])
    assert bare.label(bare.jobs[0]) == "job 0"
