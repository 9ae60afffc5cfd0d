"""`_report.html` of a generate job: its report on one page, which needs no network and no other file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from pipelines.charts import Chart, Series, draw
from pipelines.comparison import Comparison
from pipelines.generation_report import GenerationReport
from pipelines.html_report import listed, render
from pipelines.stage_summary import duration

_ROW_HEADERS = ("row", "seconds from first tokens to last", "tokens", "forwards")


def generation_page(report: GenerationReport) -> str:
    """The page of a finished job."""
    is_good = report.exit_code == 0
    return render(
        "generation.html.jinja",
        {
            "title": f"Answers of {Path(report.settings['model']).name or report.settings['model']}",
            "reload_seconds": None,
            "state": "finished" if is_good else "failed",
            "headline": f"after {duration(report.seconds)}"
            if is_good
            else f"more rows without an answer than max_error_share={report.settings['max_error_share']:g} allows",
            "key_facts": _key_facts(report),
            "decoding_facts": _decoding_facts(report),
            "drawings": _drawings(_histogram(report), _speed(report)),
            "window_rows": _with_shares(report.forwards_per_window, report.num_forwards),
            "differing_rows": report.comparison["differing_rows"],
            "actor_facts": _actor_facts(report),
            "actor_drawings": _drawings(_actors(report)),
            "error_rows": sorted(_with_shares(report.errors, report.num_rows), key=lambda row: (-row[1], row[0])),
            "row_headers": _ROW_HEADERS,
            "slowest_rows": [list(row.values()) for row in report.slowest_rows],
            "longest_rows": [list(row.values()) for row in report.longest_rows],
            "recipe": yaml.safe_dump(report.settings, sort_keys=False),
            "environment_rows": [(name, listed(value)) for name, value in report.environment.items()],
        },
    )


def _key_facts(report: GenerationReport) -> list[tuple[str, Any]]:
    return [
        ("model", report.settings["model"]),
        ("prompts", ", ".join(report.settings["prompts"]["paths"])),
        ("output", report.output),
        ("exit code", report.exit_code),
        ("rows", report.num_rows),
        ("answers", report.num_results),
        ("rows without an answer", report.num_errors),
        ("units", report.num_units),
        ("of these by an earlier start", report.num_units_before),
    ]


def _decoding_facts(report: GenerationReport) -> list[tuple[str, Any]]:
    return [
        ("mode", report.settings["decoding"]["mode"]),
        ("tokens", report.num_generated_tokens),
        ("prompt tokens", report.num_prompt_tokens),
        ("tokens/forward", report.tokens_per_forward),
        ("query tokens/token", report.query_tokens_per_token),
        ("tokens/s", report.tokens_per_second),
        *Comparison(**report.comparison).facts().items(),
    ]


def _actor_facts(report: GenerationReport) -> list[tuple[str, Any]]:
    return [
        ("actor-seconds", report.actor_seconds),
        ("spent in decoding steps", f"{report.actor_utilisation:.1%}"),
        ("slots in use", f"{report.slot_occupancy:.1%}"),
        ("actors replaced", report.num_restarts),
        ("cost", report.cost),
    ]


def _with_shares(counts: Mapping[str, int], total: int) -> list[tuple[str, int, str]]:
    return [(name, count, f"{count / max(1, total):.2%}") for name, count in counts.items()]


def _histogram(report: GenerationReport) -> Chart:
    points = sorted((int(num_kept), count) for num_kept, count in report.kept_per_forward.items())
    bars = Series("forwards", points, is_bars=True)
    return Chart("kept", "Tokens that a forward kept", "forwards of a row", (bars,), None, True, "tokens kept")


def _speed(report: GenerationReport) -> Chart:
    points = [(seconds, rate) for seconds, rate in report.tokens_over_time]
    return Chart("speed", "Throughput", "tokens/s", (Series("tokens/s", points),), None, True, "second")


def _actors(report: GenerationReport) -> Chart:
    """A staircase: the number holds until the next change."""
    points: list[tuple[float, float]] = []
    for seconds, num_ready in report.actors_over_time:
        if points:
            points.append((seconds, points[-1][1]))
        points.append((seconds, num_ready))
    return Chart("actors", "Actors that are ready", "actors", (Series("actors", points),), None, True, "second")


def _drawings(*charts: Chart) -> Sequence[tuple[Chart, Markup]]:
    return [(chart, Markup(draw(chart))) for chart in charts if not chart.is_empty]
