"""The held-out loss: the training loss of samples that are never trained on, without gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from workers.config import OptimizationSettings
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import Sample
from workers.training.engine import agree_on_step


class HeldOutLosses(NamedTuple):
    """Nats per response token."""

    loss: float
    ar_loss: float
    mask_loss: float


class HeldOut:
    """The samples of this rank, packed once, and the steps at which their loss is wanted.

    The same samples in the same batches with the same block cuts each time, so that only the weights make a difference. All
    ranks must make one, and ask for the losses at the same steps: they run the same number of passes, as ZeRO-3 needs.

    Args:
        samples: this rank's; another rank may have one more, or none at all.
        every: steps between evaluations.
        at_checkpoints: also evaluate before each checkpoint, so that checkpoints can be compared.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        engine: Any,
        objective: MarsObjective,
        settings: OptimizationSettings,
        *,
        every: int,
        at_checkpoints: bool,
    ) -> None:
        self._engine, self._objective = engine, objective
        self._every, self._at_checkpoints = every, at_checkpoints
        module: LossModule = engine.module
        batches = objective.pack(samples, row_tokens=settings.row_tokens, micro_batch_rows=settings.micro_batch_rows)
        self._shape = agree_on_step(
            len(batches),
            max((module.num_chunks_of(batch) for batch in batches), default=1),
            sum(batch.num_response_tokens for batch in batches),
            engine.device,
        )
        self._batches = batches + [objective.empty_batch()] * (self._shape.num_micro_batches - len(batches))

    def is_due(self, num_steps_done: int, *, is_checkpoint: bool, is_last: bool) -> bool:
        """Whether the losses are wanted after so many steps."""
        return num_steps_done % self._every == 0 or is_last or (is_checkpoint and self._at_checkpoints)

    def losses(self) -> HeldOutLosses:
        """The losses over the samples of all ranks.

        Dropout is off and nothing is drawn, so the random state stays what it was.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self._engine.device)
        self._engine.eval()
        with torch.no_grad():
            for batch in self._batches:
                losses = self._engine(batch.to(self._engine.device), self._shape.num_chunks)
                sums += torch.stack([losses.ar_sum, losses.mask_sum])
        self._engine.train()
        dist.all_reduce(sums)
        ar_loss, mask_loss = (sums / max(1, self._shape.num_response_tokens)).tolist()
        loss = self._objective.ar_weight * ar_loss + self._objective.mask_weight * mask_loss
        return HeldOutLosses(loss, ar_loss, mask_loss)
