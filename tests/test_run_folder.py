"""Whose folder a run may take, and what it may never delete."""

import pytest

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
@pytest.mark.parametrize("name", ["file", "file/run", "x" * 300])
def test_outputs_that_cannot_be_made_are_refused(name, overwrite, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run\.output"):
        RunFolder(str(tmp_path / name), TrainSftRecipe()).check(overwrite=overwrite)


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
    run(num_workers=3).check(overwrite=False)
    with pytest.raises(InputError, match=r"distributed\.zero_stage: found 3; expected 2"):
        run(num_workers=2, zero_stage=3).check(overwrite=False)
