"""What `training_quality` trains: variants of one stage that differ in a single setting, from one start model."""

from dataclasses import dataclass
from typing import Any

from benchmarks.held_out import HeldOutLosses
from jobs.command_line import parse
from pipelines.evaluation import EvaluationReport, run_evaluation
from pipelines.training import run_training
from workers.config import (
    ActorSettings,
    EvaluateRecipe,
    EvaluationDecodingSettings,
    PromptSettings,
    TrainMarsRecipe,
    TrainSftRecipe,
)

THRESHOLD = 0.95
WINDOWS = (4, 8)


@dataclass(frozen=True)
class Variant:
    """A training stage behind the common start: AR SFT (`block_size` 1) or MARS; or the start itself (`block_size` 0)."""

    block_size: int
    ar_weight: float = 1.0
    random_block_phase: bool = True

    @property
    def name(self) -> str:
        """Names the run folder and the row of the table."""
        if self.block_size < 2:
            return ("start", "ar")[self.block_size]
        return f"mars_B{self.block_size}_ar{self.ar_weight:g}_{'random' if self.random_block_phase else 'fixed'}"


START = Variant(0)
# AR SFT gets as many steps on the same samples as MARS, so that more training alone cannot explain a difference.
AR = Variant(1)
MARS = Variant(8)
VARIANTS = (
    AR,
    *(Variant(block_size, ar_weight) for block_size in (4, 8, 16) for ar_weight in (1.0, 0.0)),
    Variant(8, random_block_phase=False),
)


@dataclass(frozen=True)
class Outcome:
    """What became of one variant with one seed.

    Attributes:
        floor: the least one-token loss that a model can have, where it is known.
        accuracy: of one-token decoding; None where nothing was decoded, as is `tau`, which is accuracy and tokens/forward by
            window.
    """

    variant: Variant
    seed: int
    losses: HeldOutLosses
    floor: float | None
    seconds: float
    accuracy: float | None
    tau: dict[int, tuple[float, float]]


def train_variant(variant: Variant, output: str, overrides: list[str]) -> tuple[str, float]:
    """Trains one variant, or finds it trained; returns its model folder and the seconds of its stage.

    The start is AR SFT of the quickstart's recipe from random weights; the others continue from the `model.path` among `overrides`.
    """
    recipe: TrainSftRecipe | TrainMarsRecipe
    settings = [f"run.output={output}", *overrides]
    if variant.block_size < 2:
        recipe, _ = parse(TrainSftRecipe, "train_sft.yaml", settings)
    else:
        objective = [
            f"objective.block_size={variant.block_size}",
            f"objective.ar_weight={variant.ar_weight}",
            f"objective.random_block_phase={str(variant.random_block_phase).lower()}",
        ]
        recipe, _ = parse(TrainMarsRecipe, "train_mars.yaml", ["sft=null", *objective, *settings])
    report: dict[str, Any] | None = run_training(recipe)
    assert report is not None
    (stage,) = report["stages"].values()
    return report["model"], stage["seconds"]


def decode(variant: Variant, model: str, prompts: str, output: str) -> EvaluationReport:
    """One-token decoding of the prompts, and for a MARS model tau decoding at each window."""
    is_ar = variant.block_size < 2
    recipe = EvaluateRecipe(
        model=model,
        prompts=PromptSettings(paths=(prompts,), rows_per_unit=64),
        output=output,
        thresholds=() if is_ar else (THRESHOLD,),
        windows=() if is_ar else WINDOWS,
        verified_windows=(),
        decoding=EvaluationDecodingSettings(max_new_tokens=128, num_slots=16),
        actors=ActorSettings(num_cpus=0.75),
    )
    report = run_evaluation(recipe)
    assert report is not None
    return report


def outcome_of(
    variant: Variant, seed: int, losses: HeldOutLosses, floor: float, seconds: float, report: EvaluationReport
) -> Outcome:
    """Gathers the figures of one variant."""
    by_mode = {(row.mode, row.window): row for row in report.rows}
    one_token = by_mode["one_token", 1]
    tau = {
        int(window): (row.accuracy or 0.0, row.tokens_per_forward)
        for (mode, window), row in by_mode.items()
        if mode == "tau"
    }
    return Outcome(variant, seed, losses, floor, seconds, one_token.accuracy, tau)
