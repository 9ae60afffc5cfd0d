"""Every setting of every job: frozen, strict, and the only place where a default stands. Torch-free.

A recipe (`jobs/recipes/*.yaml`) is one of the `*Recipe` models here, written as YAML. Unknown keys, wrong types and impossible
combinations are refused here, before any model loads.
"""

from workers.config.base import PromptFormat, Settings
from workers.config.inference import (
    ActorSettings,
    AnswerSettings,
    DecodingSettings,
    EngineSettings,
    EvaluateRecipe,
    EvaluationDecodingSettings,
    GenerateRecipe,
    PromptSettings,
    RowDecodingSettings,
)
from workers.config.training import (
    DataSettings,
    DistributedSettings,
    FromScratch,
    LoraSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizationSettings,
    RunSettings,
    TrainMarsRecipe,
    TrainSftRecipe,
)

__all__ = [
    "ActorSettings",
    "AnswerSettings",
    "DataSettings",
    "DecodingSettings",
    "DistributedSettings",
    "EngineSettings",
    "EvaluateRecipe",
    "EvaluationDecodingSettings",
    "FromScratch",
    "GenerateRecipe",
    "LoraSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "OptimizationSettings",
    "PromptFormat",
    "PromptSettings",
    "RowDecodingSettings",
    "RunSettings",
    "Settings",
    "TrainMarsRecipe",
    "TrainSftRecipe",
]
