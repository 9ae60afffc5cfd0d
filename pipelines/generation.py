"""Batch inference: a prompt set through a pool of actors into an output folder.

Rows in = rows in `part-*.parquet` + rows in `_errors/part-*.parquet`, each once, whatever is killed and however often the
job is started; see `manifest` for how, and `inference_pool` for why the pool is our own.
"""

import copy
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipelines import cluster, model_folders
from pipelines.generation_page import generation_page
from pipelines.generation_report import GenerationReport, exit_code, make_report
from pipelines.inference_actor import ModelSetup
from pipelines.inference_pool import InferencePool
from pipelines.manifest import Manifest, Totals, fingerprint
from pipelines.paths import resolve
from pipelines.progress import Progress
from pipelines.prompt_preflight import check_prompt_set, require_apart
from pipelines.run_folder import newest_example_run
from pipelines.throughput import Throughput, progress_note
from pipelines.unit_output import OutputTask
from pipelines.work_units import PromptSet, list_prompt_files
from workers.chat import check_prompt_format
from workers.config import ActorSettings, DecodingSettings, GenerateRecipe, PromptFormat
from workers.decoding.request import allowed_window
from workers.errors import InputError
from workers.models.folder import inspect_model_folder, load_tokenizer, read_multi_token_settings
from workers.models.loading import check_loadable
from workers.models.placeholder import find_placeholder

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationPlan:
    """A checked job: nothing of it has been written yet."""

    recipe: GenerateRecipe
    setup: ModelSetup
    prompt_set: PromptSet
    manifest: Manifest

    def task(self) -> OutputTask:
        """What the actors are told about every unit."""
        recipe, prompts = self.recipe, self.prompt_set
        return OutputTask(
            recipe.output,
            recipe.prompts,
            recipe.decoding,
            prompts.id_type,
            prompts.extra,
            recipe.compare_with_one_token,
        )


def run_generation(recipe: GenerateRecipe, *, dry_run: bool = False) -> GenerationReport | None:
    """Runs or resumes a job and returns its report; a finished job is left as it is. A dry run checks everything and returns None.

    Raises:
        InputError: for everything that the user can mend, before a model loads where it can be known then.
        PoolError: actors died too often; the same command resumes.
    """
    recipe = resolve_recipe(recipe)
    manifest = open_manifest(recipe)
    is_finished = manifest.check(overwrite=recipe.overwrite)
    if is_finished and not dry_run:
        _logger.info("%s is finished; overwrite=true would repeat it", recipe.output)
        report = GenerationReport(**manifest.report())
        return replace(report, exit_code=exit_code(recipe, report.num_errors, report.num_rows))
    plan = plan_generation(recipe, manifest)
    _logger.info(
        "%d prompts in %d files, %d units",
        plan.prompt_set.num_rows,
        len(plan.prompt_set.files),
        plan.prompt_set.num_units,
    )
    if dry_run:
        return None
    connect(recipe.actors, recipe.output)
    with InferencePool(plan.setup, recipe.decoding, recipe.actors) as pool:
        return execute(plan, pool)


def resolve_recipe(recipe: GenerateRecipe) -> GenerateRecipe:
    """The recipe with absolute paths, and with the newest example run's model and held-out prompts where it names none."""
    model, paths = recipe.model, recipe.prompts.paths
    if model is None or not paths:
        example = newest_example_run()
        model = model or str(json.loads((example / "report.json").read_text())["model"])
        paths = paths or (str(example / "example" / "heldout"),)
    prompts = recipe.prompts.model_copy(update={"paths": tuple(resolve(path) for path in paths)})
    return recipe.model_copy(update={"model": resolve(model), "prompts": prompts, "output": resolve(recipe.output)})


def open_manifest(recipe: GenerateRecipe) -> Manifest:
    """The manifest of a resolved recipe's output; looks at the listing of the input and at the model folder."""
    assert recipe.model is not None
    files = list_prompt_files(recipe.prompts.paths)
    require_apart(recipe.prompts.paths, files, recipe.output)
    with model_folders.facts(recipe.model) as folder:
        inspect_model_folder(folder)
    uses_gpu = recipe.actors.num_gpus > 0
    return Manifest(recipe.output, fingerprint(files, recipe.model, recipe.prompts, recipe.decoding, uses_gpu))


def plan_generation(recipe: GenerateRecipe, manifest: Manifest) -> GenerationPlan:
    """Checks model folder and prompts of a resolved recipe.

    Raises:
        InputError: what is wrong, and where.
    """
    assert recipe.model is not None
    setup = model_setup(recipe.model, recipe.decoding, uses_gpu=recipe.actors.num_gpus > 0)
    return GenerationPlan(recipe, setup, check_prompt_set(recipe.prompts, recipe.output), manifest)


def model_setup(path: str, decoding: DecodingSettings, *, uses_gpu: bool) -> ModelSetup:
    """What the files of a model folder, local or on S3, say about decoding with it, read without loading the weights.

    Warns of a window beyond the block size here, since an actor's log is not the user's.

    Raises:
        InputError: not a folder that can be decoded with these settings.
    """
    with model_folders.facts(path) as folder:
        return replace(_inspect(folder, decoding, uses_gpu), folder=path)


def _inspect(folder: str, decoding: DecodingSettings, uses_gpu: bool) -> ModelSetup:
    check_loadable(folder)
    facts = inspect_model_folder(folder)
    if (
        decoding.max_length is not None
        and facts.max_positions is not None
        and decoding.max_length > facts.max_positions
    ):
        raise InputError(
            "decoding.max_length", str(decoding.max_length), f"at most the model's {facts.max_positions} positions"
        )
    tokenizer = load_tokenizer(folder)
    settings = read_multi_token_settings(folder, facts.vocab_size)
    if settings is not None:
        check_prompt_format(tokenizer, settings.prompt_format, folder)
        warn_of_wide_windows([decoding], settings.block_size)
        return ModelSetup(
            folder, settings.mask_token_id, settings.block_size, settings.prompt_format, facts.end_ids, uses_gpu
        )
    if decoding.mode == "tau":
        raise InputError(
            "decoding.mode",
            f"tau, but {folder} was not trained to predict several tokens (it has no marsray.json)",
            "one_token or verified for an ordinary model",
            "Leave decoding.mode and decoding.threshold out, or train the model with jobs/train_mars.py.",
        )
    mask_token_id = find_placeholder(tokenizer, facts.vocab_size).token_id
    prompt_format: PromptFormat = "chat" if tokenizer.chat_template else "raw"
    return ModelSetup(folder, mask_token_id, 1, prompt_format, facts.end_ids, uses_gpu)


def warn_of_wide_windows(settings: Iterable[DecodingSettings], block_size: int) -> None:
    """Says so, once for each window, when it is larger than the block size that the model was trained with."""
    windows = {allowed_window(decoding, block_size) for decoding in settings}
    for window in sorted(window for window in windows if window != "auto"):
        if window > block_size:
            _logger.warning(
                "window %d is larger than %d, the block size that the model was trained with", window, block_size
            )


def connect(actors: ActorSettings, output: str) -> None:
    """Joins the cluster and checks that it can hold the actors and that all of it sees the output folder."""
    cluster.connect()
    cluster.require_places(actors)
    cluster.require_shared_folder("output", output)


def execute(plan: GenerationPlan, pool: InferencePool, title: str = "generate") -> GenerationReport:
    """Decodes what is not done yet with the actors of a pool, and publishes report and mark of success.

    Touches the output only when an actor has loaded the model: a folder that cannot be loaded costs no earlier answers.
    """
    recipe, prompt_set, manifest = plan.recipe, plan.prompt_set, plan.manifest
    pool.wait_until_ready(everybody=False)
    manifest.start(overwrite=recipe.overwrite)
    totals = Totals()
    finished = manifest.finished_units()
    for entry in finished.values():
        totals.add(entry)
    if finished:
        _logger.info("%s: resuming after %d of %d units", recipe.output, len(finished), prompt_set.num_units)
    before = copy.copy(totals)
    units = prompt_set.read(finished.keys())
    throughput = Throughput()
    started = time.monotonic()
    with Progress(title, prompt_set.num_rows, "rows") as progress:
        for entry in pool.run(units, plan.task(), prompt_set.num_units - len(finished)):
            totals.add(entry)
            seconds = time.monotonic() - started
            throughput.add(seconds, totals.num_generated_tokens - before.num_generated_tokens)
            progress.update(totals.num_rows, progress_note(before, totals, prompt_set.num_rows, seconds))
    seconds = time.monotonic() - started
    usage = pool.take_usage()
    assert (totals.num_units, totals.num_rows) == (prompt_set.num_units, prompt_set.num_rows), "rows were lost"
    report = make_report(recipe, before, totals, usage, throughput, seconds, pool.num_restarts, pool.trace)
    manifest.finish(vars(report), generation_page(report))
    return report
