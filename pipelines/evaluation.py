"""Accuracy, tokens per forward and tokens per second of one model at a grid of decoding settings.

Each setting is a batch inference job of its own in a sub-folder, decoded by the same pool of actors, so the model is loaded
once and a killed evaluation goes on where it stopped. Answers are scored by the quickstart task's validator where the prompts
come from it; other prompts get figures without an accuracy.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.parquet as pq

from pipelines import model_folders, storage
from pipelines.generation import (
    EXIT_DONE,
    GenerationPlan,
    GenerationReport,
    connect,
    execute,
    open_manifest,
    plan_generation,
    resolve_recipe,
    warn_of_wide_windows,
)
from pipelines.inference_pool import InferencePool
from pipelines.prompt_preflight import RESULT_COLUMNS
from pipelines.prompt_rows import json_rows
from pipelines.quickstart_task import validate_answer
from pipelines.reports import environment, publish_report, text_table
from pipelines.row_files import parquet_schema
from pipelines.work_units import list_prompt_files
from workers.config import DecodingSettings, EvaluateRecipe, GenerateRecipe, PromptSettings
from workers.errors import InputError
from workers.models.folder import read_multi_token_settings

_REPORT = "report.json"
_logger = logging.getLogger(__name__)

# A validator looks at an output row with its prompt and says `ok`, what is wrong, or None for a prompt that it does not know.
Validator = Callable[[Mapping[str, Any], str], str | None]


@dataclass(frozen=True)
class SettingReport:
    """One row of the table.

    Attributes:
        accuracy: see `accuracy`; None without a validator for these prompts.
        verdicts: scored answers by verdict; `ok` are the valid ones.
    """

    name: str
    mode: str
    threshold: float | None
    window: int
    num_rows: int
    num_errors: int
    num_scored: int
    accuracy: float | None
    verdicts: dict[str, int]
    num_generated_tokens: int
    tokens_per_forward: float
    query_tokens_per_token: float
    tokens_per_second: float
    seconds: float


@dataclass(frozen=True)
class EvaluationReport:
    """What an evaluation found; the content of `report.json`."""

    rows: tuple[SettingReport, ...]
    model: str
    output: str
    exit_code: int
    settings: dict[str, Any]
    environment: dict[str, Any]

    def table(self) -> str:
        """One line per setting."""
        columns = (
            "mode",
            "threshold",
            "window",
            "accuracy",
            "tokens_per_forward",
            "query_tokens_per_token",
            "tokens_per_second",
            "num_errors",
        )
        headers = ("mode", "tau", "window", "accuracy", "tokens/forward", "query/token", "tokens/s", "errors")
        return text_table(headers, [[getattr(row, column) for column in columns] for row in self.rows])


def run_evaluation(recipe: EvaluateRecipe, *, dry_run: bool = False) -> EvaluationReport | None:
    """Runs or resumes all settings and returns the report. A dry run checks everything and returns None.

    Raises:
        InputError: for everything that the user can mend, before a model loads where it can be known then.
        PoolError: actors died too often; the same command resumes.
    """
    base = resolve_recipe(
        GenerateRecipe(
            model=recipe.model,
            prompts=recipe.prompts,
            output=recipe.output,
            decoding=DecodingSettings(mode="one_token", **recipe.decoding.model_dump()),
            actors=recipe.actors,
            max_error_share=1.0,
            overwrite=recipe.overwrite,
        )
    )
    base = base.model_copy(update={"prompts": _with_prompts_in_output(base.prompts)})
    recipes = settings_grid(base, recipe.thresholds, recipe.windows)
    manifests = {name: open_manifest(each) for name, each in recipes.items()}
    finished = {name: manifest.check(overwrite=recipe.overwrite) for name, manifest in manifests.items()}
    # The input is the same for all settings, so it is read and checked once.
    first = plan_generation(next(iter(recipes.values())), next(iter(manifests.values())))
    _check_grid(first, list(recipes.values()))
    plans = {name: GenerationPlan(recipes[name], first.setup, first.prompt_set, manifests[name]) for name in recipes}
    if dry_run:
        return None
    generated = _generate(plans, finished)
    rows = tuple(_setting_report(name, plans[name], report) for name, report in generated.items())
    report = EvaluationReport(
        rows=rows,
        model=first.setup.folder,
        output=base.output,
        exit_code=EXIT_DONE,
        settings=json.loads(recipe.model_dump_json()),
        environment=environment(),
    )
    publish_report(storage.join(base.output, _REPORT), asdict(report))
    return report


def settings_grid(
    base: GenerateRecipe, thresholds: tuple[float, ...], windows: tuple[int, ...]
) -> dict[str, GenerateRecipe]:
    """The recipes of one-token decoding and of each threshold at each window, by the name of their sub-folder."""
    shared = base.decoding.model_dump(exclude={"mode", "threshold", "window"})

    def variant(name: str, **own: Any) -> GenerateRecipe:
        decoding = DecodingSettings(**shared, **own)
        return base.model_copy(update={"decoding": decoding, "output": storage.join(base.output, name)})

    grid = {"one_token": variant("one_token", mode="one_token")}
    for window in windows or (None,):
        for threshold in thresholds:
            # repr tells any two floats apart.
            name = f"tau_{threshold!r}".removesuffix(".0") + (f"_window_{window}" if window is not None else "")
            grid[name] = variant(name, mode="tau", threshold=threshold, window=window)
    return grid


def validate_quickstart(row: Mapping[str, Any], answer: str) -> str | None:
    """The verdict of the quickstart task's validator, or None when the prompt is not one of that task."""
    prompt = {name: row[name] for name in ("messages", "prompt") if row.get(name) is not None}
    try:
        return validate_answer(prompt, answer).reason
    except InputError:
        return None


def score(output: str, prompts: PromptSettings, validator: Validator) -> Counter[str]:
    """The verdicts on the answers in an output folder; answers to prompts that the validator does not know are left out."""
    verdicts: Counter[str] = Counter()
    names = {prompts.prompt_column: "prompt", prompts.messages_column: "messages"}
    for info in storage.list_folder(output):
        if not info.path[len(output.rstrip("/")) + 1 :].startswith("part-"):
            continue
        with storage.open_read(info.path) as file:
            columns = ["text", *prompts.passthrough]
            for row in pq.read_table(file, columns=columns).to_pylist():
                verdict = validator({names.get(name, name): value for name, value in row.items()}, row["text"])
                if verdict is not None:
                    verdicts[verdict] += 1
    return verdicts


def accuracy(verdicts: Mapping[str, int], num_errors: int) -> float | None:
    """Valid answers / rows of the validator's task, where a row without an answer is a wrong one; None for another task.

    Args:
        verdicts: of `score`.
        num_errors: rows without an answer; they count as rows of the task when any of the answers belongs to it.
    """
    num_scored = sum(verdicts.values())
    return verdicts.get("ok", 0) / (num_scored + num_errors) if num_scored else None


def _check_grid(first: GenerationPlan, recipes: Sequence[GenerateRecipe]) -> None:
    """Refuses tau decoding of an ordinary model; warns of windows beyond the block size, each once.

    Raises:
        InputError: names `thresholds`.
    """
    settings = [recipe.decoding for recipe in recipes]
    with model_folders.facts(first.setup.folder) as folder:
        is_ordinary = read_multi_token_settings(folder) is None
    if any(decoding.mode == "tau" for decoding in settings) and is_ordinary:
        raise InputError(
            "thresholds",
            f"tau decoding of {first.setup.folder}, which was not trained to predict several tokens (it has no marsray.json)",
            "[] for an ordinary model",
            "Set thresholds=[] to evaluate one-token decoding alone, or train the model with jobs/train_mars.py.",
        )
    warn_of_wide_windows(settings, first.setup.block_size)


def _generate(plans: Mapping[str, GenerationPlan], finished: Mapping[str, bool]) -> dict[str, GenerationReport]:
    """The generation reports of all settings; finished ones are read, the others are run on one pool."""
    reports = {name: GenerationReport(**plans[name].manifest.report()) for name in plans if finished[name]}
    open_plans = {name: plan for name, plan in plans.items() if name not in reports}
    if open_plans:
        any_plan = next(iter(open_plans.values()))
        recipe = any_plan.recipe
        connect(recipe.actors, recipe.output)
        with InferencePool(any_plan.setup, recipe.decoding, recipe.actors) as pool:
            # Else the first setting would look slow: it would share its time with the loading of the other actors.
            pool.wait_until_ready(everybody=True)
            for name, plan in open_plans.items():
                reports[name] = execute(plan, pool, title=name)
    else:
        _logger.info("all settings are finished; overwrite=true would repeat them")
    return {name: reports[name] for name in plans}


def _with_prompts_in_output(prompts: PromptSettings) -> PromptSettings:
    """Passes the prompt through to the output, where a validator needs it, if all shards have it in the same column."""
    columns = (prompts.messages_column, prompts.prompt_column)
    present = set(columns)
    for file in list_prompt_files(prompts.paths):
        if file.is_parquet:
            present &= set(parquet_schema(file)[0].names)
        else:
            first = next((row for row in json_rows(file, columns) if row.values), None)
            present &= set(first.values if first else columns)
    wanted = [name for name in columns if name in present and name not in (*prompts.passthrough, *RESULT_COLUMNS)]
    return prompts.model_copy(update={"passthrough": (*prompts.passthrough, *wanted)})


def _setting_report(name: str, plan: GenerationPlan, report: GenerationReport) -> SettingReport:
    decoding = plan.recipe.decoding
    verdicts = score(plan.recipe.output, plan.recipe.prompts, validate_quickstart)
    return SettingReport(
        name=name,
        mode=decoding.mode,
        threshold=decoding.threshold,
        window=1 if decoding.mode == "one_token" else decoding.window or plan.setup.block_size,
        num_rows=report.num_rows,
        num_errors=report.num_errors,
        num_scored=verdicts.total(),
        accuracy=accuracy(verdicts, report.num_errors),
        verdicts=dict(verdicts),
        num_generated_tokens=report.num_generated_tokens,
        tokens_per_forward=report.tokens_per_forward,
        query_tokens_per_token=report.query_tokens_per_token,
        tokens_per_second=report.tokens_per_second,
        seconds=report.seconds,
    )
