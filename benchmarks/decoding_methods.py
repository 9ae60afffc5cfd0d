"""The ways of decoding that the benchmarks compare, each as a function from work to tokens and seconds.

`transformers` is used as its documentation says: `generate` on left-padded batches, sorted as suits it best, each as long as its
longest answer, and continuous batching by the manager behind `generate_batch`, which takes requests with budgets of their own (the
function itself has one budget for all, and would make the manager anew each time). It runs on a CPU too, with paged attention
through SDPA: keys and values of all running rows are gathered and attended to under one block-diagonal mask, so its attention grows
with the square of the rows; kernels that read pages in place exist for CUDA only (flash-attn).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers import logging as transformers_logging

from benchmarks.decoding_drafts import AgreeingEngine, Agreement
from benchmarks.decoding_models import Subject
from benchmarks.decoding_work import Work
from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request, Result
from workers.decoding.statistics import RunStatistics

PAGE_SIZE = 64
PREFILL_TOKENS = 512  # prompt tokens of one forward, for continuous batching and for the engine
SECONDS_TO_WAIT = 1.0
PACE_PROMPT, PACE_STEPS = 32, 4
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
    """`model.generate`, greedy, with its default cache, on the batches that suit it best."""
    paces: list[Pace] = []

    def run(work: Work) -> Decoded:
        order = list(range(len(work.prompts)))
        if len(order) > batch_size:
            if not paces:
                paces.append(_measure_pace(subject, batch_size))
            order = best_order(work, batch_size, paces[0])
        clock = Clock(subject.device)
        answers: dict[int, tuple[int, ...]] = {}
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            prompts, budgets = [work.prompts[row] for row in rows], [work.budgets[row] for row in rows]
            answers.update(zip(rows, _generate_batch(subject, prompts, budgets, work.end_ids), strict=True))
        return Decoded([answers[row] for row in range(len(order))], *clock.seconds())

    return run


@dataclass(frozen=True)
class Pace:
    """Seconds of `generate`: for a token of a prompt, padding included, and for a step of a batch."""

    prompt_token: float
    step: float


def best_order(work: Work, batch_size: int, pace: Pace) -> list[int]:
    """Rows sorted by budget, by prompt or by the seconds of both: the one of them whose batches take least at this pace."""
    sizes = [(len(prompt), budget) for prompt, budget in zip(work.prompts, work.budgets, strict=True)]

    def seconds(order: list[int]) -> float:
        total = 0.0
        for first in range(0, len(order), batch_size):
            rows = [sizes[row] for row in order[first : first + batch_size]]
            total += len(rows) * max(prompt for prompt, _ in rows) * pace.prompt_token
            total += max(budget for _, budget in rows) * pace.step
        return total

    keys: list[Callable[[int], Any]] = [
        lambda row: (sizes[row][1], sizes[row][0]),
        lambda row: sizes[row],
        lambda row: batch_size * sizes[row][0] * pace.prompt_token + sizes[row][1] * pace.step,
    ]
    return min((sorted(range(len(sizes)), key=key) for key in keys), key=seconds)


def _measure_pace(subject: Subject, batch_size: int) -> Pace:
    """From one token and a few behind equal prompts; a run before them is not timed."""
    prompts, seconds = [tuple([3] * PACE_PROMPT)] * batch_size, []
    for num_tokens in (1, 1, 1 + PACE_STEPS):
        clock = Clock(subject.device)
        _generate_batch(subject, prompts, [num_tokens] * batch_size, frozenset())
        seconds.append(clock.seconds()[0])
    _, first, all_steps = seconds
    return Pace(first / (batch_size * PACE_PROMPT), max(all_steps - first, 0.0) / PACE_STEPS)


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
    """Our engines for one model, batch size and length: one for each cache, made when first asked for, and shared by the variants.

    The automatic window has one of its own, for what it knows of drafts must come from its own steps, and each probability of
    agreement too.
    """

    subject: Subject
    batch_size: int
    max_length: int
    _engines: dict[tuple[Any, ...], DecodingEngine] = field(default_factory=dict)
    _answers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def method(
        self, cache: Literal["ragged", "block", "none"], *, agreement: float | None = None, **settings: Any
    ) -> Method:
        """Decoding with these settings in each row, for instance `mode="verified", window=4`.

        Args:
            cache: of the engine.
            agreement: with this probability each draft is the true token, see `decoding_drafts`; None leaves drafts alone. The
                true tokens are those of an earlier one-token run.
            settings: of the rows.
        """
        is_auto = settings.get("window") == "auto"

        def run(work: Work) -> Decoded:
            engine = self._engine(cache, work.end_ids, agreement, is_auto)
            engine.statistics = RunStatistics()
            if agreement is not None:
                assert isinstance(engine, AgreeingEngine)
                answers = [self._answers[prompt] for prompt in work.prompts]
                engine.agreement = Agreement.drawn(answers, agreement, work.seed, self.subject.mask_token_id)
            requests = make_requests(work, settings)
            clock = Clock(self.subject.device)
            results = engine.generate_all(requests)
            seconds = clock.seconds()
            bad = next((result.error for result in results if result.error is not None), None)
            assert bad is None, bad
            if settings["mode"] == "one_token":
                self._remember(work, results)
            return Decoded([result.token_ids for result in results], *seconds, engine.statistics)

        return run

    def _remember(self, work: Work, results: Sequence[Result]) -> None:
        for prompt, result in zip(work.prompts, results, strict=True):
            self._answers[prompt] = max(self._answers.get(prompt, ()), result.token_ids, key=len)

    def _engine(
        self,
        cache: Literal["ragged", "block", "none"],
        end_ids: frozenset[int],
        agreement: float | None,
        is_auto: bool,
    ) -> DecodingEngine:
        key = (cache, end_ids, agreement, is_auto)
        if key not in self._engines:
            kind = DecodingEngine if agreement is None else AgreeingEngine
            self._engines[key] = make_engine(self.subject, cache, self.batch_size, self.max_length, end_ids, kind)
        return self._engines[key]


def make_engine(
    subject: Subject,
    cache: Literal["ragged", "block", "none"],
    num_slots: int,
    max_length: int,
    end_ids: frozenset[int],
    kind: type[DecodingEngine] = DecodingEngine,
) -> DecodingEngine:
    """An engine with the defaults of the project where nothing is named."""
    return kind(
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
