"""Numbers of a job: published as JSON, and printed as tables of aligned columns."""

import importlib.metadata
import json
import os
import platform
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from pipelines import storage

_PACKAGES = ("marsray", "ray", "torch", "transformers", "deepspeed", "peft", "pyarrow")
_GPU_KIND = "accelerator_type:"  # how Ray names what it has found on a node
_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def publish_report(path: str, report: Mapping[str, Any]) -> None:
    """Writes a report as JSON; readers see the old one or the new one, never a half."""
    storage.publish_bytes(path, (json.dumps(report, indent=1) + "\n").encode())


def environment() -> dict[str, Any]:
    """Versions of what the job runs on, the machine, and the cluster when it has joined one; None for what is not there."""
    nodes = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    resources = [name for node in nodes for name in node["Resources"]]
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "gpus": sorted({name.removeprefix(_GPU_KIND) for name in resources if name.startswith(_GPU_KIND)}),
        "nodes": len(nodes) or None,
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    """The version of an installed package; that of marsray also when it runs from its folder without being installed."""
    if package == "marsray" and _PROJECT.exists():
        return str(tomllib.loads(_PROJECT.read_text())["project"]["version"])
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    """The processor's name, which only Linux tells in a file."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def text_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns under their headers; numbers to the right, everything else to the left. Ends with a line break."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    is_number = [
        bool(rows) and all(value is None or isinstance(value, int | float) for value in column)
        for column in (zip(*rows, strict=True) if rows else [()] * len(headers))
    ]

    def line(texts: Sequence[str]) -> str:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, is_number, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)]) + "\n"


def facts_table(facts: Mapping[str, Any]) -> str:
    """One fact a line: its name, then its value."""
    width = max(map(len, facts), default=0)
    return "".join(f"{name.ljust(width)}  {_text(value)}\n" for name, value in facts.items())


def training_table(report: Mapping[str, Any]) -> str:
    """The stages of a training report, then its data, model and page."""
    columns = ["steps", "epochs", "first_loss", "final_loss", "seconds", "response_tokens_per_second"]
    headers = ["stage", "steps", "epochs", "first loss", "final loss", "seconds", "tokens/s"]
    rows = [[name, *(stage[column] for column in columns)] for name, stage in report["stages"].items()]
    held_out = [stage["held_out"] or {} for stage in report["stages"].values()]
    if any(held_out):
        headers += ["held-out first", "best", "final"]
        rows = [
            row + [losses.get(f"{name}_loss") for name in ("first", "best", "final")]
            for row, losses in zip(rows, held_out, strict=True)
        ]
    data = report["data"]
    facts = {"samples": data["samples"], "rejected rows": data["rejected"], "model": report["model"]}
    return text_table(headers, rows) + "\n" + facts_table(facts | {"page": report["page"]})


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)
