"""Training jobs: check, prepare the data, run the stages through Ray Train, report.

A run folder holds `run.json` (its settings), `data/` (prepared samples and rejected rows), one folder per stage (`checkpoints/`,
`metrics.jsonl`, `model/`) and `report.json`, which is written last. The same command goes on where a killed or stopped run was.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

from pipelines import cluster
from pipelines.manifest import identify_model
from pipelines.mixture import describe_sources
from pipelines.paths import resolve
from pipelines.progress import Progress
from pipelines.reports import environment, publish_report
from pipelines.run_folder import RunFolder
from pipelines.run_lock import RunLock
from pipelines.sft_data import PreparedIndex, prepare_sft_data
from pipelines.sft_source import list_shards
from pipelines.stop_signals import StopSignals
from pipelines.trackers import check_tracker
from pipelines.training_inputs import StartModel, TrainingInputs
from pipelines.training_page import TrainingPage
from pipelines.training_stage import TrainRecipe, stage_job, stages_of, train_stage
from workers.training.deepspeed_options import check_deepspeed_options

_CPUS_FOR_RAY_DATA = 0.5  # workers stream their samples through tasks of it
_logger = logging.getLogger(__name__)


def run_training(recipe: TrainRecipe, *, dry_run: bool = False) -> dict[str, Any] | None:
    """Trains all stages of a recipe and returns the report, which `report.json` in the run folder also holds.

    A dry run checks inputs, output and model, writes nothing, and returns None.

    Raises:
        InputError: for everything that the user can mend, before work starts where it can be known then.
    """
    run = RunFolder(resolve(recipe.run.output, "run.output", "a folder for the run, local or s3://"), recipe)
    run.check(overwrite=recipe.run.overwrite)
    finished = None if recipe.run.overwrite else run.finished_report()
    if finished is not None and not dry_run:
        _logger.info("the run in %s is finished; run.overwrite=true would repeat it", run.path)
        return finished
    check_deepspeed_options(recipe.distributed)
    check_tracker(recipe.run)
    inputs = TrainingInputs(recipe.model, recipe.data, recipe.run.seed, run, lora=recipe.lora)
    inputs.check()
    if dry_run:
        return None
    with StopSignals() as signals, RunLock(run.path, signals.abort):
        return _train(recipe, run, inputs, signals)


def _train(recipe: TrainRecipe, run: RunFolder, inputs: TrainingInputs, signals: StopSignals) -> dict[str, Any]:
    """The run itself, after the first checks; returns its report."""
    started = time.time()
    _connect(recipe, run)
    signals.install()  # Ray has taken SIGTERM for itself
    run.take(overwrite=recipe.run.overwrite)
    model = recipe.model.path or f"new {recipe.model.from_scratch.architecture}"
    with TrainingPage(run.join(), recipe, model, environment()) as page:
        start, index, held_out = _prepare(inputs, run)
        data = {
            "samples": index.num_rows,
            "rejected": index.num_rejected,
            "reasons": index.reasons,
            "sources": describe_sources(index),
        }
        page.set_data(data)
        stage_reports = {}
        for stage in stages_of(recipe):
            job = stage_job(recipe, run, stage, start, index, held_out)
            stage_reports[stage.name] = train_stage(recipe, run, job, signals, page)
            start = start.after(stage.name, job.final_model)
    report = {
        "model": start.folder,
        "stages": stage_reports,
        "data": data,
        "train_seconds": round(time.time() - started, 1),
        "exit_code": 0,
        "environment": environment(),
        "page": page.path,
    }
    publish_report(run.report_path, report)
    return report


def _connect(recipe: TrainRecipe, run: RunFolder) -> None:
    """Joins the cluster and checks that it can hold the workers and that all of it sees the run folder."""
    cluster.connect()
    cluster.require_resources(
        "distributed.num_workers",
        num_workers=recipe.distributed.num_workers,
        cpus=recipe.distributed.cpus_per_worker,
        gpus=1.0 if recipe.distributed.use_gpu else 0.0,
        reserved_cpus=_CPUS_FOR_RAY_DATA,
    )
    cluster.require_shared_folder("run.output", run.path)


def _prepare(inputs: TrainingInputs, run: RunFolder) -> tuple[StartModel, PreparedIndex, PreparedIndex | None]:
    """The start model, the prepared samples and the held-out ones; refuses to go on with other ones than the run began with."""
    start, data = inputs.materialize()

    def prepare(title: str, paths: Sequence[str] | None, where: str, output: str) -> PreparedIndex:
        with Progress(title, len(list_shards(data.train if paths is None else paths, where)), "shards") as progress:
            index = prepare_sft_data(
                data,
                tokenizer_folder=start.folder,
                mask_token_id=start.mask_token_id,
                end_ids=start.end_ids,
                output=run.join(output),
                report=lambda done, total: progress.update(done),
                paths=paths,
                where=where,
            )
        reasons = "".join(f", {count} {reason}" for reason, count in sorted(index.reasons.items()))
        _logger.info("%s: %d samples, %d rejected rows%s", title, index.num_rows, index.num_rejected, reasons)
        return index

    index = prepare("data", None, "data.train", "data")
    if data.weights:
        for source in describe_sources(index):
            _logger.info("data: %(path)s: %(rows)d samples x %(weight)g, %(samples_per_epoch)g an epoch", source)
    held_out = prepare("held-out data", data.held_out, "data.held_out", "held_out_data") if data.held_out else None
    bound = {"data.train": index.fingerprint, "model.path": identify_model(start.folder)}
    run.bind(bound | ({"data.held_out": held_out.fingerprint} if held_out else {}))
    return start, index, held_out
