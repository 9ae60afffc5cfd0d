"""Whose folder a run may take, and what it may never delete."""

import pytest

from pipelines import storage
from pipelines.run_folder import RunFolder
from workers.config import DistributedSettings, TrainSftRecipe
from workers.errors import InputError


def test_an_input_inside_the_run_folder_is_refused(tmp_path):
    """With run.overwrite=true the folder of the start model was deleted before it was read."""
    run = RunFolder(str(tmp_path / "run"), TrainSftRecipe())
    run.require_outside("model.path", str(tmp_path / "model"))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for inside in (tmp_path / "run" / "sft" / "model", tmp_path / "link" / "model", tmp_path / "run" / ".." / "run"):
        with pytest.raises(InputError, match=r"model\.path"):
            run.require_outside("model.path", str(inside))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["file", "file/run", "x" * 300, "/proc/run"])
def test_outputs_that_cannot_be_made_are_refused(name, overwrite, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run\.output: found .*which cannot be made"):
        RunFolder(str(tmp_path / name), TrainSftRecipe()).check(overwrite=overwrite)
    RunFolder(str(tmp_path / "run"), TrainSftRecipe()).check(overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_changed_inputs_are_refused_and_the_same_ones_are_not(tmp_path):
    run = RunFolder(str(tmp_path / "run"), TrainSftRecipe())
    run.take(overwrite=False)
    run.bind({"data.train": "a", "model.path": "b"})
    run.bind({"data.train": "a", "model.path": "b"})
    with pytest.raises(InputError, match=r"model\.path"):
        run.bind({"data.train": "a", "model.path": "c"})


def test_a_run_may_go_on_with_another_number_of_workers_but_no_other_zero_stage(tmp_path):
    def run(**changes: int) -> RunFolder:
        return RunFolder(str(tmp_path / "run"), TrainSftRecipe(distributed=DistributedSettings(**changes)))

    run(num_workers=2).take(overwrite=False)
    storage.publish_bytes(str(tmp_path / "run" / "mars" / "checkpoints" / "step-00000002" / "part"), b"")
    run(num_workers=3).check(overwrite=False)
    with pytest.raises(InputError, match=r"distributed\.zero_stage: found 3; expected 2"):
        run(num_workers=2, zero_stage=3).check(overwrite=False)


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path) -> str:
    """Where a run folder may be made; both kinds must behave the same."""
    return str(tmp_path) if request.param == "local" else request.getfixturevalue("bucket")


def test_a_run_is_taken_resumed_finished_and_overwritten(place):
    path = f"{place}/run"
    run = RunFolder(path, TrainSftRecipe())
    run.check(overwrite=False)
    assert storage.is_empty(path)
    run.take(overwrite=False)
    run.bind({"data.train": "a", "model.path": "b"})
    storage.publish_bytes(run.join("sft", "model", "config.json"), b"")
    same = RunFolder(path, TrainSftRecipe(run={"log_every": 3}))
    same.check(overwrite=False)
    with pytest.raises(InputError, match=r"data\.train"):
        same.bind({"data.train": "other", "model.path": "b"})
    other = RunFolder(path, TrainSftRecipe(run={"seed": 7}))
    with pytest.raises(InputError, match=r"run\.seed: found 7; expected 0"):
        other.check(overwrite=False)
    assert run.finished_report() is None
    storage.publish_bytes(run.report_path, b'{"exit_code": 0}')
    assert run.finished_report() == {"exit_code": 0}
    other.check(overwrite=True)
    other.take(overwrite=True)
    assert [info.path for info in storage.list_folder(path)] == [f"{path}/run.json"]


def test_a_run_without_a_checkpoint_is_begun_anew_with_other_settings(place):
    """Corrected, an option that had failed before the first step was refused as another run's."""
    path = f"{place}/run"
    run = RunFolder(path, TrainSftRecipe())
    run.take(overwrite=False)
    run.bind({"data.train": "a", "model.path": "b"})
    prepared = ["data/index.json", "held_out_data/index.json"]
    for name in (*prepared, "initial_model/model.safetensors", "sft/metrics.jsonl", "sft/checkpoints/snapshot.json"):
        storage.publish_bytes(run.join(*name.split("/")), b"")
    run.take(overwrite=False)
    assert storage.exists(run.join("sft", "metrics.jsonl")), "the same settings go on"
    other = RunFolder(path, TrainSftRecipe(run={"seed": 7}))
    other.check(overwrite=False)
    assert storage.exists(run.join("initial_model")), "a check deletes nothing"
    other.take(overwrite=False)
    names = [info.path.removeprefix(f"{path}/") for info in storage.list_folder(path)]
    assert names == [*prepared, "run.json"]
    other.bind({"data.train": "c", "model.path": "d"})
    with pytest.raises(InputError, match=r"data\.train"):
        other.bind({"data.train": "a", "model.path": "b"})
    storage.publish_bytes(other.join("sft", "checkpoints", "step-00000002", "part"), b"")
    for refusing in (lambda: run.check(overwrite=False), lambda: run.take(overwrite=False)):
        with pytest.raises(InputError, match=r"run\.seed: found 0; expected 7"):
            refusing()


def test_a_folder_with_other_files_is_not_taken(place):
    path = f"{place}/precious"
    storage.publish_bytes(f"{path}/.thesis", b"years of work")
    for overwrite in (False, True):
        with pytest.raises(InputError, match="precious"):
            RunFolder(path, TrainSftRecipe()).check(overwrite=overwrite)
    assert storage.read_bytes(f"{path}/.thesis") == b"years of work"


def test_inputs_inside_and_around_the_run_folder_are_refused(place):
    run = RunFolder(f"{place}/runs/a", TrainSftRecipe())
    for path in (f"{place}/runs/ab", f"{place}/data", "/elsewhere", "s3://other/runs/a"):
        run.require_outside("data.train", path)
    with pytest.raises(InputError, match=r"data\.train"):
        run.require_outside("data.train", f"{place}/runs/a/data/parts")
    # The run's own parts would be shards of the next start.
    for path in (f"{place}/runs", f"{place}/runs/", place):
        with pytest.raises(InputError, match=r"run\.output: found .*inside data\.train"):
            run.require_outside("data.train", path)


@pytest.mark.parametrize(
    "path", ["s3://bucket", "s3://bucket/", "s3:///run", "s3://bucket//run", "s3://bucket/a/../run"]
)
def test_paths_on_s3_that_cannot_be_a_run_folder_are_refused(path):
    with pytest.raises(InputError, match=r"run\.output"):
        RunFolder(path, TrainSftRecipe())


def test_a_run_folder_on_s3_may_have_odd_names(bucket):
    run = RunFolder(f"{bucket}/my run/ü 100%25/", TrainSftRecipe())
    run.check(overwrite=False)
    run.take(overwrite=False)
    assert [info.path for info in storage.list_folder(bucket)] == [f"{bucket}/my run/ü 100%25/run.json"]


def test_a_bucket_that_may_not_be_written_to_is_refused_before_work(bucket, proxy):
    with pytest.raises(InputError, match="no bucket 'no-such-bucket'"):
        RunFolder("s3://no-such-bucket/run", TrainSftRecipe()).check(overwrite=False)
    proxy(lambda method, path, number: (403, "AccessDenied") if method == "PUT" else None)
    with pytest.raises(InputError, match="access denied"):
        RunFolder(f"{bucket}/run", TrainSftRecipe()).check(overwrite=False)
