"""The ways of decoding that the benchmarks compare, each as a function from work to tokens and seconds.

`transformers` is used as its documentation says: `generate` on left-padded batches in order, each as long as its longest answer,
and the continuous batching of its `ContinuousBatchingManager` with requests of their own budgets. The latter runs on a CPU too,
with paged attention through SDPA: keys and values of all running rows are gathered and attended to under one block-diagonal mask,
so its attention grows with the square of the rows; kernels that read pages in place exist for CUDA only (flash-attn).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers import logging as transformers_logging

from benchmarks.decoding_models import Subject
from benchmarks.decoding_work import Work
from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request
from workers.decoding.statistics import RunStatistics

PAGE_SIZE = 64
PREFILL_TOKENS = 512  # prompt tokens of one forward, for continuous batching and for the engine
SECONDS_TO_WAIT = 1.0
PADDING_ID = 0  # hidden by the attention mask


@dataclass(frozen=True)
class Decoded:
    """Answers in the order of the rows. `seconds` are those of the device's clock; the engine's own counts stand beside them."""

    answers: list[tuple[int, ...]]
    seconds: float
    wall_seconds: float
    statistics: RunStatistics | None = None

    @property
    def seconds_per_token(self) -> float:
        """Of the kept tokens of all rows, prefill included."""
        return self.seconds / sum(map(len, self.answers))


Method = Callable[[Work], Decoded]


class Clock:
    """Time since it was made: on a CPU the CPU seconds of the process, which has one busy thread; on a GPU wall-clock seconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._synchronize()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        """Seconds of the device's clock, wall-clock seconds."""
        self._synchronize()
        wall = time.perf_counter() - self._wall
        return (wall if self._device.type == "cuda" else time.process_time() - self._cpu), wall

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def generate_method(subject: Subject, batch_size: int) -> Method:
    """`model.generate`, greedy, with its default cache."""

    def run(work: Work) -> Decoded:
        clock = Clock(subject.device)
        answers: list[tuple[int, ...]] = []
        for first in range(0, len(work.prompts), batch_size):
            rows = slice(first, first + batch_size)
            answers += _generate_batch(subject, work.prompts[rows], work.budgets[rows], work.end_ids)
        return Decoded(answers, *clock.seconds())

    return run


def _generate_batch(
    subject: Subject, prompts: Sequence[tuple[int, ...]], budgets: Sequence[int], end_ids: frozenset[int]
) -> list[tuple[int, ...]]:
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[PADDING_ID] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    is_token = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    tokens = subject.model.generate(
        input_ids.to(subject.device),
        attention_mask=is_token.to(subject.device),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=max(budgets), eos_token_id=sorted(end_ids) or None, pad_token_id=PADDING_ID
        ),
    )
    answers = tokens[:, longest:].tolist()
    return [until_end(answer, budget, end_ids) for answer, budget in zip(answers, budgets, strict=True)]


def until_end(answer: Sequence[int], budget: int, end_ids: frozenset[int]) -> tuple[int, ...]:
    """Tokens up to and with the first end token, within the budget."""
    place = next((place for place, token in enumerate(answer) if token in end_ids), budget)
    return tuple(answer[: min(place + 1, budget)])


def continuous_batching_method(subject: Subject, batch_size: int, max_length: int) -> Method:
    """The manager of `transformers`, as many requests in a batch as we have slots, pages for as many tokens.

    Starting the manager and allocating its pages is not timed, as the making of our engine is not.

    Raises:
        RuntimeError: a request failed, with the manager's reason.
    """
    transformers_logging.get_logger("ContinuousBatchingLogger").setLevel("ERROR")

    def run(work: Work) -> Decoded:
        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=batch_size * (max_length // PAGE_SIZE + 1),
            max_batch_tokens=PREFILL_TOKENS,
            max_requests_per_batch=batch_size,
        )
        greedy = GenerationConfig(do_sample=False, max_new_tokens=max(work.budgets), eos_token_id=-1, pad_token_id=0)
        with subject.model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=config
        ) as manager:
            # One token of one row first, for the manager makes its cache when it begins to run.
            _serve(manager, Work(work.prompts[:1], (1,), frozenset()))
            clock = Clock(subject.device)
            answers = _serve(manager, work)
            seconds = clock.seconds()
        return Decoded(answers, *seconds)

    return run


def _serve(manager: Any, work: Work) -> list[tuple[int, ...]]:
    names = [
        manager.add_request(list(prompt), max_new_tokens=budget, eos_token_id=sorted(work.end_ids) or -1)
        for prompt, budget in zip(work.prompts, work.budgets, strict=True)
    ]
    answers: dict[str, tuple[int, ...]] = {}
    while len(answers) < len(names):
        output = manager.get_result(timeout=SECONDS_TO_WAIT)
        if output is None:
            if not manager.is_running():
                raise RuntimeError("continuous batching ended before its requests")
        elif output.error is not None:
            raise RuntimeError(f"continuous batching: {output.error}")
        elif output.is_finished():
            answers[output.request_id] = tuple(output.generated_tokens)
    return [until_end(answers[name], budget, work.end_ids) for name, budget in zip(names, work.budgets, strict=True)]


@dataclass
class Engines:
    """Our engines for one model, batch size and length: one for each cache, shared by all variants, made when first asked for."""

    subject: Subject
    batch_size: int
    max_length: int
    _engines: dict[tuple[str, frozenset[int]], DecodingEngine] = field(default_factory=dict)

    def method(self, cache: Literal["ragged", "block", "none"], **settings: Any) -> Method:
        """Decoding with these settings in each row, for instance `mode="verified", window=4`."""

        def run(work: Work) -> Decoded:
            engine = self._engine(cache, work.end_ids)
            engine.statistics = RunStatistics()
            requests = make_requests(work, settings)
            clock = Clock(self.subject.device)
            results = engine.generate_all(requests)
            seconds = clock.seconds()
            bad = next((result.error for result in results if result.error is not None), None)
            assert bad is None, bad
            return Decoded([result.token_ids for result in results], *seconds, engine.statistics)

        return run

    def _engine(self, cache: Literal["ragged", "block", "none"], end_ids: frozenset[int]) -> DecodingEngine:
        key = (cache, end_ids)
        if key not in self._engines:
            self._engines[key] = make_engine(self.subject, cache, self.batch_size, self.max_length, end_ids)
        return self._engines[key]


def make_engine(
    subject: Subject,
    cache: Literal["ragged", "block", "none"],
    num_slots: int,
    max_length: int,
    end_ids: frozenset[int],
) -> DecodingEngine:
    """An engine with the defaults of the project where nothing is named."""
    return DecodingEngine(
        subject.model,
        subject.tokenizer,
        mask_token_id=subject.mask_token_id,
        end_ids=end_ids,
        block_size=subject.block_size,
        num_slots=num_slots,
        max_length=max_length,
        cache=cache,
    )


def make_requests(work: Work, settings: dict[str, Any]) -> list[Request]:
    """One request for each row, with its budget."""
    return [
        Request(row, prompt, RowDecodingSettings(max_new_tokens=budget, **settings))
        for row, (prompt, budget) in enumerate(zip(work.prompts, work.budgets, strict=True))
    ]
