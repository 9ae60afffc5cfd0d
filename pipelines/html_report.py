"""The one-page report of a training run: facts in, one HTML file out, which needs no network and no other file.

`render` and `templates/page.html.jinja` are the frame of any report page; the rest is what a training run shows in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipelines.charts import Chart, Series, draw
from pipelines.metrics_file import Line
from pipelines.stage_summary import duration, seconds_left, summarize_stage

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_RELOAD_SECONDS = 60
_STAGE_HEADERS = (
    "stage",
    "steps",
    "epochs",
    "first loss",
    "final loss",
    "held-out first",
    "held-out best",
    "held-out final",
) + ("seconds of training", "tokens/s, median", "memory, MB")


@dataclass(frozen=True)
class StageFacts:
    """One stage: how far it should go, and what its workers have told so far."""

    name: str
    num_steps: int
    epochs: float
    lines: Sequence[Line]
    groups: Sequence[Mapping[str, Any]]
    is_done: bool


@dataclass(frozen=True)
class TrainingFacts:
    """Everything that the page of a training run shows.

    Args:
        model: folder or name of the model it starts from.
        output: the run folder.
        state: `running`, `finished`, `stopped` or `failed`.
        reason: why it ended early; empty otherwise.
        started, updated: in words.
        data: samples, rejected rows and their reasons, and the sources of a mixture; None before they are known.
        changed_settings: (name, value, default) of each setting that has another value than its default.
        recipe: all settings, as YAML.
    """

    model: str
    output: str
    state: str
    reason: str
    exit_code: int | None
    started: str
    updated: str
    seconds: float
    data: Mapping[str, Any] | None
    stages: Sequence[StageFacts]
    changed_settings: Sequence[tuple[str, str, str]]
    recipe: str
    environment: Mapping[str, Any] = field(default_factory=dict)


def render(template: str, values: Mapping[str, Any]) -> str:
    """Fills a template; whatever is not markup by its type is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["figure"] = _figure
    return environment.get_template(template).render(values)


def training_page(facts: TrainingFacts) -> str:
    """The page of a training run."""
    summaries = [summarize_stage(stage.lines, stage.groups) for stage in facts.stages]
    restarts = [
        (stage.name, group["time"], group["first_step"], group["steps_done_again"], group["ranks"], group["host"])
        for stage in facts.stages
        for group in stage.groups[1:]
    ]
    headers, rows = _without_empty_columns(
        _STAGE_HEADERS, [_stage_row(*pair) for pair in zip(facts.stages, summaries, strict=True)]
    )
    sources = (facts.data or {}).get("sources") or []
    return render(
        "training.html.jinja",
        {
            "title": f"Training {Path(facts.model).name or facts.model}",
            "reload_seconds": _RELOAD_SECONDS if facts.state == "running" else None,
            "state": facts.state,
            "headline": _headline(facts),
            "reason": facts.reason,
            "updated": facts.updated,
            "key_facts": _key_facts(facts, summaries),
            "stages": [_stage_view(stage) for stage in facts.stages],
            "stage_headers": headers,
            "stage_rows": rows,
            "restart_rows": restarts,
            "data": facts.data,
            "data_facts": _data_facts(facts.data),
            "reason_rows": _reason_rows(facts.data),
            "source_headers": [name.replace("_", " ") for name in sources[0]] if sources else [],
            "source_rows": [list(source.values()) for source in sources],
            "changed_settings": facts.changed_settings,
            "recipe": facts.recipe,
            "environment_rows": [(name, listed(value)) for name, value in facts.environment.items()],
        },
    )


def _headline(facts: TrainingFacts) -> str:
    """Where the run stands, in a sentence."""
    current = next((stage for stage in facts.stages if not stage.is_done), None)
    if current is None or facts.state == "finished":
        return f"after {duration(facts.seconds)}"
    step = current.lines[-1]["step"] if current.lines else 0
    words = f"{current.name}, step {step}/{current.num_steps}"
    left = seconds_left(current.lines[-20:], current.num_steps)
    if facts.state == "running" and left is not None:
        words += f", {duration(left)} left in this stage"
    return words


def _key_facts(facts: TrainingFacts, summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    groups = [stage.groups[-1] for stage in facts.stages if stage.groups]
    return [
        ("model", facts.model),
        ("run folder", facts.output),
        ("exit code", facts.exit_code),
        ("started", facts.started),
        ("duration", duration(facts.seconds)),
        ("samples", facts.data["samples"] if facts.data else None),
        ("response tokens trained", sum(summary["response_tokens"] or 0 for summary in summaries)),
        ("parameters", groups[-1]["parameters"] if groups else None),
        ("trainable", groups[-1]["trainable_parameters"] if groups else None),
        ("ranks", f"{groups[-1]['ranks']} x {groups[-1]['device']}" if groups else None),
    ]


def _stage_view(stage: StageFacts) -> dict[str, Any]:
    state = "done" if stage.is_done else "running" if stage.groups else "waiting"
    drawings = [(chart, Markup(draw(chart))) for chart in stage_charts(stage.name, stage.lines) if not chart.is_empty]
    step = stage.lines[-1]["step"] if stage.lines else 0
    return {"name": stage.name, "state": state, "step": step, "num_steps": stage.num_steps, "drawings": drawings}


def _stage_row(stage: StageFacts, summary: Mapping[str, Any]) -> list[Any]:
    held_out = summary["held_out"] or {}
    step = stage.lines[-1]["step"] if stage.lines else 0
    return [
        stage.name,
        f"{step}/{stage.num_steps}",
        stage.epochs * step / stage.num_steps,
        summary["first_loss"],
        summary["final_loss"],
        *(held_out.get(f"{name}_loss") for name in ("first", "best", "final")),
        stage.lines[-1]["seconds"] if stage.lines else None,
        summary["response_tokens_per_second"],
        summary["peak_memory_mb"],
    ]


def _without_empty_columns(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[list[str], list[list[Any]]]:
    kept = [column for column in range(len(headers)) if any(row[column] is not None for row in rows)]
    return [headers[column] for column in kept], [[row[column] for column in kept] for row in rows]


def stage_charts(stage: str, lines: Sequence[Line]) -> list[Chart]:
    """The charts of a stage: losses, pace, speed, waiting and padding."""

    def series(field_name: str, name: str, *, is_dotted: bool = False) -> Series:
        return Series(name, [(line["step"], line.get(field_name)) for line in lines], is_dotted)

    def chart(name: str, title: str, unit: str, *left: Series, right: Series | None = None, zero: bool = True) -> Chart:
        return Chart(f"{stage}-{name}", title, unit, left, right, zero)

    losses = [series("loss", "loss"), series("held_out_loss", "held out", is_dotted=True)]
    if any(line["mask_loss"] for line in lines):  # an AR stage has one part only
        losses += [series("ar_loss", "next token"), series("mask_loss", "masked")]
    return [
        chart("loss", "Loss", "nats per response token", *losses, zero=False),
        chart(
            "pace",
            "Learning rate and gradient norm",
            "learning rate",
            series("learning_rate", "learning rate"),
            right=series("grad_norm", "gradient norm"),
        ),
        chart("speed", "Throughput", "response tokens/s", series("response_tokens_per_second", "response tokens/s")),
        chart(
            "shares",
            "Waiting for data, and padding",
            "share",
            series("data_wait_share", "time waiting for data"),
            series("padding_share", "positions that are padding"),
        ),
    ]


def _data_facts(data: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    if data is None:
        return []
    total = data["samples"] + data["rejected"]
    return [
        ("rows read", total),
        ("samples", data["samples"]),
        ("rejected rows", data["rejected"]),
        ("rejected share", f"{data['rejected'] / max(1, total):.2%}"),
    ]


def _reason_rows(data: Mapping[str, Any] | None) -> list[tuple[str, int, str]]:
    if data is None:
        return []
    total = max(1, data["samples"] + data["rejected"])
    ordered = sorted(data["reasons"].items(), key=lambda item: (-item[1], item[0]))
    return [(reason, count, f"{count / total:.2%}") for reason, count in ordered]


def listed(value: Any) -> Any:
    """A list as people write it; anything else as it is."""
    return ", ".join(map(str, value)) or None if isinstance(value, list) else value


def _figure(value: Any) -> str:
    """A value as people read it: thousands apart, few decimals, a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
