"""A pool of one actor in this process: the whole of a generate job without Ray, and with a kill at a chosen place."""

import asyncio
from collections.abc import Iterator

from pipelines import storage
from pipelines.generation import GenerationPlan, execute, open_manifest, plan_generation
from pipelines.generation_report import GenerationReport
from pipelines.inference_actor import InferenceActor
from pipelines.manifest import UnitEntry
from pipelines.pool_usage import PoolUsage
from pipelines.unit_output import OutputTask
from pipelines.work_units import UnitRows
from workers.config import GenerateRecipe


class KilledError(Exception):
    """Stands for the end of driver and actor."""


class LocalPool:
    """Decodes unit after unit. Before unit number `dies_at` it dies, with the files of that unit written and its entry not."""

    num_restarts = 0
    trace = ((0.0, 1),)

    def __init__(self, plan: GenerationPlan, dies_at: int | None = None) -> None:
        self._actor = InferenceActor(plan.setup, plan.recipe.decoding)
        self._dies_at = dies_at
        self.names: list[str] = []

    def wait_until_ready(self, *, everybody: bool) -> None:
        asyncio.run(self._actor.load())

    def take_usage(self) -> PoolUsage:
        return PoolUsage(1.0, asyncio.run(self._actor.look()))

    def run(self, units: Iterator[UnitRows], task: OutputTask, num_units: int) -> Iterator[UnitEntry]:
        for number, unit in enumerate(units):
            self.names.append(unit.unit.name)
            entry = asyncio.run(self._actor.decode_unit(task, unit))
            if number == self._dies_at:
                storage.delete(storage.join(task.output, "_manifest", f"unit-{entry.unit}.json"))
                raise KilledError
            yield entry


def run_locally(recipe: GenerateRecipe, dies_at: int | None = None) -> tuple[GenerationReport, list[str]]:
    """What `run_generation` does from the preflight on; returns the report and the units that were decoded."""
    manifest = open_manifest(recipe)
    assert not manifest.check(overwrite=recipe.overwrite)
    plan = plan_generation(recipe, manifest)
    pool = LocalPool(plan, dies_at)
    return execute(plan, pool), pool.names  # type: ignore[arg-type]
