"""Fixtures that several test files share."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Cores are shared: how long one example takes says nothing.
settings.register_profile("marsray", deadline=None)
settings.load_profile("marsray")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """One Ray instance of two CPUs for all tests that need one; yields its context, which knows the dashboard's address."""
    import ray

    # Submitted scripts start with `env python3`, which must be this one on the cluster too.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    yield ray.init(
        num_cpus=2,
        include_dashboard=True,
        dashboard_port=0,
        logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
    )
    ray.shutdown()


@pytest.fixture(scope="session")
def finished(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """An unbroken training run of both stages: shard, run folder, report."""
    from training_runs import arguments, recipe_of, write_shard

    from pipelines.training import run_training

    folder = tmp_path_factory.mktemp("run")
    shard = write_shard(folder)
    report = run_training(recipe_of(*arguments(shard, folder / "run")))
    assert report is not None
    return shard, folder / "run", report
