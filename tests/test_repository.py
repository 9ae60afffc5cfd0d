"""What holds for the repository as a whole: recipes fit their jobs, the cluster file fits Ray's schema, rooms import downwards."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from jobs import command_line
from workers.config import EvaluateRecipe, GenerateRecipe, TrainMarsRecipe, TrainSftRecipe

ROOT = Path(__file__).resolve().parent.parent
RECIPE_TYPES = {
    "train_sft": TrainSftRecipe,
    "train_mars": TrainMarsRecipe,
    "generate": GenerateRecipe,
    "evaluate": EvaluateRecipe,
}
# A recipe is named after its job; those of one model begin with the objective: mars_qwen2.5_7b.
RECIPES = {**RECIPE_TYPES, "sft_": TrainSftRecipe, "mars_": TrainMarsRecipe}


@pytest.mark.parametrize("path", sorted((ROOT / "jobs" / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_fits_its_job(path):
    job = next(name for name in RECIPES if path.stem.startswith(name))
    command_line.parse(RECIPES[job], path.name, [])


def test_the_cluster_file_fits_the_schema_of_ray():
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((ROOT / "ray_cluster.yaml").read_text()), schema)


def test_imports_run_from_jobs_to_pipelines_to_workers():
    linter = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_workers_import_without_ray_and_without_deepspeed():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "workers").rglob("*.py"))
        if path.stem != "__init__"
    ]
    code = f"import sys; sys.modules.update(ray=None, deepspeed=None)\nfor name in {modules}: __import__(name)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_jobs_are_executable_and_answer_help():
    for name in RECIPE_TYPES:
        path = ROOT / "jobs" / f"{name}.py"
        assert path.stat().st_mode & 0o111
        assert path.read_text().startswith("#!/usr/bin/env python3\n")
        answer = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, check=True)
        assert "usage:" in answer.stdout
