"""Whose folder a run may take, and what it may never delete."""

import pytest

from pipelines.run_folder import RunFolder
from workers.config import TrainSftRecipe
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
