"""Connecting to Ray, and the checks that a cluster must pass before work starts."""

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines.paths import is_submitted_job
from workers.config import ActorSettings
from workers.errors import InputError

_CODE = Path(__file__).resolve().parent.parent
_logger = logging.getLogger(__name__)


def connect() -> None:
    """Joins the cluster of `RAY_ADDRESS` or of `ray start`, or starts a local one; does nothing when already connected.

    A Ray instance that another job has started for itself is left alone: it would end with that job.

    The code reaches the workers by `PYTHONPATH` on a local cluster, as working directory on an existing one; a submitted job
    has brought it along.
    """
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # A submitted job without a working directory runs on the head's own files, so the path is enough there too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_CODE), os.environ.get("PYTHONPATH")]))
    if is_submitted_job():
        ray.init(address="auto", runtime_env={"env_vars": {"PYTHONPATH": str(_CODE)}}, **quiet)
    # What `ray.init()` itself looks at, to join or to start: `RAY_ADDRESS`, or the mark that `ray start` leaves.
    elif canonicalize_bootstrap_address(None) is not None:  # type: ignore[arg-type]
        ray.init(runtime_env={"working_dir": str(_CODE)}, **quiet)
    else:
        ray.init(address="local", include_dashboard=False, **quiet)
    # Ray Data tells of every execution and of its own progress bars; the jobs have their own progress.
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    resources = ray.cluster_resources()
    _logger.info(
        "Ray %s: %d node(s), %g CPUs, %g GPUs",
        ray.__version__,
        sum(node["Alive"] for node in ray.nodes()),
        resources.get("CPU", 0),
        resources.get("GPU", 0),
    )


def require_resources(where: str, *, num_workers: int, cpus: float, gpus: float, reserved_cpus: float = 0.0) -> None:
    """Refuses a group of workers that the cluster, as it is now, cannot place.

    Args:
        where: the setting that says how many workers.
        cpus, gpus: what one worker asks for.
        reserved_cpus: what has to stay free beside them.

    Raises:
        InputError: with the arithmetic.
    """
    resources = ray.cluster_resources()
    beside = f" + {reserved_cpus:g} for Ray Data" if reserved_cpus else ""
    for kind, each, reserved in (("CPU", cpus, reserved_cpus), ("GPU", gpus, 0.0)):
        needed, available = num_workers * each + reserved, resources.get(kind, 0.0)
        if needed > available:
            raise InputError(
                where,
                f"{num_workers} x {each:g} {kind}s{beside if kind == 'CPU' else ''} = {needed:g}",
                f"at most the {available:g} {kind}s of the cluster",
                f"Ask for fewer, or for fewer {kind}s each.",
            )


def require_places(actors: ActorSettings) -> None:
    """Refuses a pool whose `actors.min` actors would not fit on the nodes that are there now, were they empty.

    Raises:
        InputError: names the resource, with the arithmetic.
    """
    wanted = _resources_of(actors)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for kinds in [[kind] for kind in wanted] + [list(wanted)]:
        num_places = (
            sum(min(_num_fitting(node, kind, wanted[kind]) for kind in kinds) for node in nodes) if kinds else 0
        )
        if kinds and num_places < actors.min:
            each = " and ".join(_amount(kind, wanted[kind]) for kind in kinds)
            have = ", ".join(" and ".join(_amount(kind, node.get(kind, 0.0)) for kind in kinds) for node in nodes)
            raise InputError(
                "actors.min",
                f"{actors.min} actors of {each}, with room for {num_places} on nodes of {have}",
                f"room for {actors.min}",
                "Ask for fewer or smaller actors, or start more nodes.",
            )


def missing_resource(actors: ActorSettings) -> str | None:
    """What one more actor lacks at this moment, in words; None when there is enough, all nodes together."""
    free = ray.available_resources()
    lacking = [
        f"{_amount(kind, amount)} for one actor, {_amount(kind, free.get(kind, 0.0))} free"
        for kind, amount in _resources_of(actors).items()
        if free.get(kind, 0.0) < amount
    ]
    return "; ".join(lacking) or None


def _resources_of(actors: ActorSettings) -> dict[str, float]:
    wanted = {"CPU": actors.num_cpus, "GPU": actors.num_gpus, "memory": float(actors.memory_bytes or 0)}
    return {kind: amount for kind, amount in wanted.items() if amount}


def _num_fitting(node: Mapping[str, float], kind: str, each: float) -> int:
    return int(node.get(kind, 0.0) / each + 1e-6)


def _amount(kind: str, amount: float) -> str:
    return f"{amount / 2**30:.3g} GiB of memory" if kind == "memory" else f"{amount:g} {kind}s"


@ray.remote(num_cpus=0)
def _sees(path: str) -> bool:
    return os.path.exists(path)


def require_shared_folder(where: str, path: str) -> None:
    """Refuses a local output folder that some node of the cluster does not see.

    Raises:
        InputError: names the nodes.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) == 1 or "://" in path:
        return
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / f".shared-{uuid.uuid4().hex}"
    marker.touch()
    try:
        strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        seen = ray.get([_sees.options(scheduling_strategy=strategy).remote(str(marker)) for strategy in strategies])
    finally:
        marker.unlink()
    blind = [node["NodeManagerAddress"] for node, sees in zip(nodes, seen, strict=True) if not sees]
    if blind:
        raise InputError(
            where,
            f"{path}, which the nodes {', '.join(blind)} do not see",
            "a folder that every node shares",
            "Give a path on a shared file system.",
        )
