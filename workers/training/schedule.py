"""Learning-rate schedules: a linear warm-up, then cosine, linear or constant."""

import math

from workers.config import OptimizationSettings


def learning_rate_factor(step: int, num_steps: int, settings: OptimizationSettings) -> float:
    """Share of the peak learning rate for one optimizer step.

    Args:
        step: optimizer step, counted from 0.
        num_steps: steps of the whole stage.
        settings: `schedule`, `warmup_share` and `final_learning_rate_share` are read.

    Returns:
        A factor in (0, 1]; the first step already moves.
    """
    num_warmup = math.ceil(settings.warmup_share * num_steps)
    if step < num_warmup:
        return (step + 1) / (num_warmup + 1)
    if settings.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    floor = settings.final_learning_rate_share
    falling = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * falling
