"""What runs inside one actor of the pool: a model, a decoding engine, and the units that are decoded on it at the moment.

The methods are coroutines that share one engine: while one unit waits for its last rows, the next one has its rows in the engine
already, so the slots stay full across units.
"""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipelines.comparison import is_compared
from pipelines.manifest import UnitEntry
from pipelines.model_folders import fetch
from pipelines.pool_usage import Work
from pipelines.row_requests import RequestBuilder, RowFault
from pipelines.unit_output import Answer, OutputTask, publish_unit
from pipelines.work_units import UnitRows
from workers.config import DecodingSettings, PromptFormat

if TYPE_CHECKING:
    from workers.decoding.async_engine import AsyncEngine
    from workers.decoding.request import Request
    from workers.decoding.statistics import RunStatistics


@dataclass(frozen=True)
class ModelSetup:
    """What an actor loads, known before it does: `folder` is local or on S3, `block_size` 1 for a model without placeholders."""

    folder: str
    mask_token_id: int
    block_size: int
    prompt_format: PromptFormat
    end_ids: frozenset[int]
    uses_gpu: bool


class InferenceActor:
    """Loads a model once and decodes units with it."""

    def __init__(self, setup: ModelSetup, decoding: DecodingSettings) -> None:
        self._setup, self._decoding = setup, decoding
        self._engine: AsyncEngine | None = None
        self._tokenizer: Any = None
        self._statistics: RunStatistics | None = None
        self._num_advances = 0

    async def place(self) -> None:
        """Answers as soon as there is a process."""

    async def look(self) -> Work:
        """What has been done since the model was loaded."""
        counts = self._statistics
        if counts is None:
            return Work()
        return Work(
            num_advances=self._num_advances + counts.num_model_calls,
            busy_seconds=counts.model_seconds + counts.engine_seconds,
            num_slot_steps=counts.num_slot_steps,
            num_slots_in_use=counts.num_slots_in_use,
        )

    async def load(self) -> float:
        """Loads model and tokenizer; returns the seconds that took.

        Raises:
            InputError: the folder is no model that this engine can run, or runs rightly, or the cache does not fit.
        """
        import torch

        from workers.decoding.async_engine import AsyncEngine
        from workers.decoding.engine import DecodingEngine
        from workers.models.folder import load_tokenizer
        from workers.models.loading import load_causal_lm

        started = time.monotonic()
        if not self._setup.uses_gpu:
            torch.set_num_threads(1)
        device = torch.device("cuda" if self._setup.uses_gpu else "cpu")
        folder = fetch(self._setup.folder)
        model = load_causal_lm(folder, dtype=torch.bfloat16 if self._setup.uses_gpu else torch.float32)
        self._tokenizer = load_tokenizer(folder)
        engine = DecodingEngine(
            model.to(device),
            self._tokenizer,
            mask_token_id=self._setup.mask_token_id,
            end_ids=self._setup.end_ids,
            block_size=self._setup.block_size,
            num_slots=self._decoding.num_slots,
            max_length=self._decoding.max_length,
            cache=self._decoding.cache,
            cache_block=self._decoding.cache_block,
            prefill_chunk=self._decoding.prefill_chunk,
            run_seed=self._decoding.seed or 0,
        )
        engine.check(model)
        self._engine, self._statistics = AsyncEngine(engine), engine.statistics
        return time.monotonic() - started

    async def decode_unit(self, task: OutputTask, unit_rows: UnitRows) -> UnitEntry:
        """Decodes the rows of one unit and publishes its two files, then its manifest entry."""
        outcomes = await self._decode(task, unit_rows)
        self._num_advances += 1
        # In a thread, so that the engine goes on with the rows of the next unit.
        return await asyncio.to_thread(publish_unit, task, unit_rows, outcomes)

    async def _decode(self, task: OutputTask, unit_rows: UnitRows) -> dict[int, Answer | RowFault]:
        """The outcome of each row by its place in the unit."""
        engine = self._engine
        assert engine is not None, "load() comes first"
        builder = RequestBuilder(
            self._tokenizer,
            end_ids=self._setup.end_ids,
            prompt_format=self._setup.prompt_format,
            prompts=task.prompts,
            decoding=task.decoding,
        )
        # In a thread, so that the engine goes on with the rows of other units.
        built = await asyncio.to_thread(lambda: [builder.build(row) for row in unit_rows.rows])
        self._num_advances += 1
        requests = [request for request in built if not isinstance(request, RowFault)]
        answers = iter(await asyncio.gather(*(_answer(engine, request, task.compared_share) for request in requests)))
        return {
            place: request if isinstance(request, RowFault) else next(answers) for place, request in enumerate(built)
        }


async def _answer(engine: "AsyncEngine", request: "Request", compared_share: float) -> Answer:
    """The result of a request, beside one-token decoding when the row is one of the share that is compared."""
    if request.decoding.mode == "one_token" or not is_compared(request.id, compared_share):
        return await _timed(engine, request)
    changes = {"mode": "one_token", "threshold": None, "window": None, "draft_branches": None}
    # The seed follows from the id, so both draw the same numbers.
    other = replace(request, decoding=request.decoding.model_copy(update=changes))
    answer, one_token = await asyncio.gather(_timed(engine, request), _timed(engine, other))
    return replace(answer, one_token=one_token.result.token_ids)


async def _timed(engine: "AsyncEngine", request: "Request") -> Answer:
    """The result of a request, with the time that it was being written."""
    began: float | None = None
    async for progress in engine.stream(request):
        began = time.monotonic() if began is None else began
        if progress.result is not None:
            return Answer(progress.result, time.monotonic() - began)
    raise AssertionError("a stream ends with a result")
