"""Accuracy, tokens per forward and tokens per second of one model at a grid of decoding settings.

Each setting is a batch inference job of its own in a sub-folder, decoded by the same pool of actors, so the model is loaded
once and a killed evaluation goes on where it stopped. Answers are scored by the quickstart task's validator where the prompts
come from it; other prompts get figures without an accuracy.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipelines import model_folders, storage
from pipelines.answer_scores import accuracy, score, tokens_by_id, validate_quickstart
from pipelines.generation import (
    GenerationPlan,
    connect,
    execute,
    open_manifest,
    plan_generation,
    resolve_recipe,
    warn_of_wide_windows,
)
from pipelines.generation_report import EXIT_DONE, GenerationReport
from pipelines.inference_pool import InferencePool
from pipelines.prompt_preflight import RESULT_COLUMNS
from pipelines.prompt_rows import json_rows
from pipelines.reports import environment, publish_report, text_table
from pipelines.row_files import parquet_schema
from pipelines.work_units import list_prompt_files
from workers.config import DecodingSettings, EvaluateRecipe, GenerateRecipe, PromptSettings
from workers.decoding.request import allowed_window
from workers.errors import InputError
from workers.models.folder import read_multi_token_settings

_REPORT = "report.json"
_ONE_TOKEN = "one_token"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SettingReport:
    """One row of the table.

    Attributes:
        window: W, or `auto`; `forwards_per_window` says what that was.
        num_identical: answers with the very tokens of one-token decoding.
        accuracy: see `accuracy`; None without a validator for these prompts.
        verdicts: scored answers by verdict; `ok` are the valid ones.
    """

    name: str
    mode: str
    threshold: float | None
    window: int | str
    num_rows: int
    num_errors: int
    num_identical: int
    num_scored: int
    accuracy: float | None
    verdicts: dict[str, int]
    num_generated_tokens: int
    tokens_per_forward: float
    query_tokens_per_token: float
    forwards_per_window: dict[str, int]
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
            "num_identical",
            "tokens_per_forward",
            "query_tokens_per_token",
            "tokens_per_second",
            "num_errors",
        )
        headers = (
            "mode",
            "tau",
            "window",
            "accuracy",
            "as one token",
            "tokens/forward",
            "query/token",
            "tokens/s",
            "errors",
        )
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
    recipes = settings_grid(base, recipe.thresholds, recipe.windows, recipe.verified_windows)
    manifests = {name: open_manifest(each) for name, each in recipes.items()}
    finished = {name: manifest.check(overwrite=recipe.overwrite) for name, manifest in manifests.items()}
    # The input is the same for all settings, so it is read and checked once.
    first = plan_generation(next(iter(recipes.values())), next(iter(manifests.values())))
    _check_grid(first, list(recipes.values()))
    plans = {name: GenerationPlan(recipes[name], first.setup, first.prompt_set, manifests[name]) for name in recipes}
    if dry_run:
        return None
    generated = _generate(plans, finished)
    reference = tokens_by_id(plans[_ONE_TOKEN].recipe.output)
    rows = tuple(_setting_report(name, plans[name], report, reference) for name, report in generated.items())
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
    base: GenerateRecipe,
    thresholds: tuple[float, ...],
    windows: tuple[int, ...],
    verified_windows: tuple[int | Literal["auto"], ...] = (),
) -> dict[str, GenerateRecipe]:
    """The recipes of one-token decoding, of verified decoding at its windows, and of each threshold at each window, by the name of
    their sub-folder."""
    shared = base.decoding.model_dump(exclude={"mode", "threshold", "window", "draft_branches"})

    def variant(name: str, **own: Any) -> GenerateRecipe:
        decoding = DecodingSettings(**shared, **own)
        return base.model_copy(update={"decoding": decoding, "output": storage.join(base.output, name)})

    grid = {_ONE_TOKEN: variant(_ONE_TOKEN, mode="one_token")}
    for width in verified_windows:
        name = f"verified_window_{width}"
        grid[name] = variant(name, mode="verified", window=width)
    for window in windows or (None,):
        for threshold in thresholds:
            # repr tells any two floats apart.
            name = f"tau_{threshold!r}".removesuffix(".0") + (f"_window_{window}" if window is not None else "")
            grid[name] = variant(name, mode="tau", threshold=threshold, window=window)
    return grid


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
        # As many actors for every setting, and all of them loaded before the first: else their speeds could not be compared.
        size = recipe.actors.first
        actors = recipe.actors.model_copy(update={"min": size, "max": size})
        connect(actors, recipe.output)
        with InferencePool(any_plan.setup, recipe.decoding, actors) as pool:
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


def _setting_report(
    name: str, plan: GenerationPlan, report: GenerationReport, reference: Mapping[str | int, int]
) -> SettingReport:
    decoding = plan.recipe.decoding
    tokens = tokens_by_id(plan.recipe.output)
    verdicts = score(plan.recipe.output, plan.recipe.prompts, validate_quickstart)
    return SettingReport(
        name=name,
        mode=decoding.mode,
        threshold=decoding.threshold,
        window=_window(decoding, plan.setup.block_size),
        num_rows=report.num_rows,
        num_errors=report.num_errors,
        num_identical=sum(reference.get(row) == answer for row, answer in tokens.items()),
        num_scored=verdicts.total(),
        accuracy=accuracy(verdicts, report.num_errors),
        verdicts=dict(verdicts),
        num_generated_tokens=report.num_generated_tokens,
        tokens_per_forward=report.tokens_per_forward,
        query_tokens_per_token=report.query_tokens_per_token,
        forwards_per_window=report.forwards_per_window,
        tokens_per_second=report.tokens_per_second,
        seconds=report.seconds,
    )


def _window(decoding: DecodingSettings, block_size: int) -> int | str:
    """The window as set; a threshold that keeps no draft makes it 1 in effect, which the tokens per forward show."""
    if decoding.mode == "tau":
        return decoding.window or block_size
    return allowed_window(decoding, block_size)
