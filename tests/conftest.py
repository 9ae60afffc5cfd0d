"""Fixtures that several test files share."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Cores are shared: how long one example takes says nothing.
settings.register_profile("marsray", deadline=None)
settings.load_profile("marsray")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray instance of two CPUs for all tests that need one."""
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=200 * 2**20)
    yield
    ray.shutdown()
