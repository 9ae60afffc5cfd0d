"""The training loop of every objective, on one page.

An objective packs samples into micro-batches; its loss module turns a micro-batch into sums. The loop knows nothing else of them.
"""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from workers.config import OptimizationSettings
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import PackedBatch, Sample
from workers.training.engine import agree_on_step
from workers.training.evaluation import HeldOut, HeldOutLosses


@dataclass(frozen=True)
class Metrics:
    """Means over the steps since the last report, over all ranks. Losses are nats per response token.

    `grad_norm` is of the last step, before clipping; None where DeepSpeed keeps none (bf16 without ZeRO).
    The held-out losses are None at steps where they are not due.
    `data_wait_seconds` is the mean of the ranks; the numbers of samples and response tokens are of these steps. `peak_memory_mb`
    is the most that any rank has held since it started: of the GPU if it has one, otherwise resident in memory.
    """

    step: int
    loss: float
    ar_loss: float
    mask_loss: float
    grad_norm: float | None
    learning_rate: float
    response_tokens_per_second: float
    padding_share: float
    data_wait_share: float
    data_wait_seconds: float
    num_samples: int
    num_response_tokens: int
    peak_memory_mb: float
    held_out_loss: float | None = None
    held_out_ar_loss: float | None = None
    held_out_mask_loss: float | None = None

    def with_held_out(self, losses: HeldOutLosses) -> "Metrics":
        """The same with the held-out losses after `step` steps."""
        return replace(
            self,
            held_out_loss=losses.loss,
            held_out_ar_loss=losses.ar_loss,
            held_out_mask_loss=losses.mask_loss,
        )

    def as_dict(self) -> dict[str, float | None]:
        """The fields as a plain mapping, for JSON."""
        return asdict(self)


class _Interval:
    """Sums of this rank between two reports; one all-reduce turns them into `Metrics`."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # ar, mask
        self.counts = torch.zeros(
            5, dtype=torch.float64
        )  # response tokens, positions, padding, seconds of waiting, samples
        self.learning_rate = 0.0
        self.started = time.perf_counter()

    def metrics(self, step: int, engine: Any, objective: MarsObjective) -> Metrics:
        seconds = time.perf_counter() - self.started
        total = torch.cat([self.sums.cpu(), self.counts]).to(self.sums.device)  # sync: once per report
        dist.all_reduce(total)
        ar_sum, mask_sum, num_response_tokens, num_positions, num_padding, waited, num_samples = total.tolist()
        num_responses = max(1.0, num_response_tokens)
        wait_seconds = waited / dist.get_world_size()
        grad_norm = engine.get_global_grad_norm()
        ar_loss, mask_loss = ar_sum / num_responses, mask_sum / num_responses
        return Metrics(
            step=step,
            loss=objective.ar_weight * ar_loss + objective.mask_weight * mask_loss,
            ar_loss=ar_loss,
            mask_loss=mask_loss,
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=self.learning_rate,
            response_tokens_per_second=num_responses / seconds,
            padding_share=num_padding / max(1.0, num_positions),
            data_wait_share=wait_seconds / seconds,
            data_wait_seconds=wait_seconds,
            num_samples=round(num_samples),
            num_response_tokens=round(num_response_tokens),
            peak_memory_mb=_peak_memory_mb(total.device),
        )


def train(
    engine: Any,
    objective: MarsObjective,
    steps: Iterator[list[Sample]],
    settings: OptimizationSettings,
    *,
    first_step: int,
    num_steps: int,
    log_every: int,
    checkpoint_every: int,
    on_metrics: Callable[[Metrics], None],
    on_checkpoint: Callable[[int, Metrics], None],
    held_out: HeldOut | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Runs optimizer steps `first_step` to `num_steps`; returns how many are done at the end, fewer only when it was stopped.

    Args:
        engine: DeepSpeed engine around a `LossModule`.
        steps: this rank's samples of each step, an empty list where it has none.
        on_metrics: called on every rank after each `log_every` steps, and with a held-out loss, a checkpoint and the last step.
        on_checkpoint: called on every rank with the number of finished steps, each `checkpoint_every` steps and at the end.
        held_out: adds the held-out losses to the metrics when they are due; their time counts in no figure.
        should_stop: asked on every rank at the start of each step; once true on one of them, that step is the last of all.
    """
    interval = _Interval(engine.device)
    for step in range(first_step, num_steps):
        is_stopping = _run_step(engine, objective, steps, settings, interval, should_stop())
        done, is_last = step + 1, step + 1 == num_steps
        is_checkpoint = done % checkpoint_every == 0 or is_last or is_stopping
        is_evaluation = held_out is not None and held_out.is_due(done, is_checkpoint=is_checkpoint, is_last=is_last)
        if done % log_every == 0 or is_checkpoint or is_evaluation:
            metrics = interval.metrics(done, engine, objective)
            if held_out is not None and is_evaluation:
                metrics = metrics.with_held_out(held_out.losses())
            on_metrics(metrics)
            if is_checkpoint:
                on_checkpoint(done, metrics)
            interval = _Interval(engine.device)
        if is_stopping:
            return done
    return num_steps


def _run_step(
    engine: Any,
    objective: MarsObjective,
    steps: Iterator[list[Sample]],
    settings: OptimizationSettings,
    interval: _Interval,
    should_stop: bool,
) -> bool:
    """One optimizer step, counted in `interval`; returns whether the ranks have agreed that it is the last."""
    module: LossModule = engine.module
    asked = time.perf_counter()
    samples = next(steps)
    interval.counts[3] += time.perf_counter() - asked
    interval.counts[4] += len(samples)
    batches = objective.pack(samples, row_tokens=settings.row_tokens, micro_batch_rows=settings.micro_batch_rows)
    shape = agree_on_step(
        len(batches),
        max((module.num_chunks_of(batch) for batch in batches), default=1),
        sum(batch.num_response_tokens for batch in batches),
        engine.device,
        should_stop=should_stop,
    )
    batches += [objective.empty_batch()] * (shape.num_micro_batches - len(batches))
    scale = dist.get_world_size() / max(1, shape.num_response_tokens)
    for batch in batches:
        sums = engine(batch.to(engine.device), shape.num_chunks)
        # DeepSpeed averages over ranks: the world size turns that mean into the sum that the count divides.
        engine.backward(sums.loss * scale, scale_wrt_gas=False)
        interval.sums += torch.stack([sums.ar_sum, sums.mask_sum]).detach()
        interval.counts[:3] += _counts(batch)
    interval.learning_rate = engine.get_lr()[0]
    engine.step()
    return shape.is_last


def _counts(batch: PackedBatch) -> torch.Tensor:
    return torch.tensor([batch.num_response_tokens, batch.num_tokens + batch.num_padding, batch.num_padding])


def _peak_memory_mb(device: torch.device) -> float:
    """The most memory that any rank has held, in MB of 10^6 bytes. Every rank must call it."""
    if device.type == "cuda":
        num_bytes = torch.cuda.max_memory_allocated(device)
    else:
        num_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    most = torch.tensor(num_bytes, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return round(most.item() / 1e6, 1)
