"""Fixtures that several test files share."""

import logging
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server as servers
from hypothesis import settings

from pipelines import s3_client

# Cores are shared: how long one example takes says nothing.
settings.register_profile("marsray", deadline=None)
settings.load_profile("marsray")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server in its own process, to which the environment points; yields its URL."""
    folder = tmp_path_factory.mktemp("s3")
    with servers.running_server(folder / "server.log") as url:
        settings_here = {**servers.SETTINGS, "AWS_ENDPOINT_URL": url, "MARSRAY_CACHE": str(folder / "cache")}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings_here.items():
                patch.setenv(name, value)
            s3_client.client.cache_clear()
            yield url
        s3_client.client.cache_clear()


@pytest.fixture
def bucket(s3_server: str) -> str:
    """A new, empty bucket as `s3://name`."""
    name = f"test-{uuid.uuid4().hex}"
    s3_client.client().create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture
def proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.StartProxy]:
    """Starts a proxy in front of the server and points this process to it."""
    proxies: list[servers.FaultyProxy] = []

    def start(fault: servers.Decide) -> servers.FaultyProxy:
        proxies.append(servers.FaultyProxy(s3_server, fault))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxies[-1].url)
        s3_client.client.cache_clear()
        return proxies[-1]

    yield start
    for each in proxies:
        each.close()
    s3_client.client.cache_clear()


@pytest.fixture(scope="session")
def ray_session(s3_server: str) -> Iterator[Any]:
    """One Ray instance of two CPUs for all tests that need one; yields its context, which knows the dashboard's address.

    Its processes inherit the environment, so they use the S3 server too.
    """
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
