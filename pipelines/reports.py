"""Numbers of a job: published as JSON, and printed as tables of aligned columns."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines import storage

_PACKAGES = ("ray", "torch", "transformers", "deepspeed", "pyarrow")


def publish_report(path: str, report: Mapping[str, Any]) -> None:
    """Writes a report as JSON; readers see the old one or the new one, never a half."""
    storage.publish_bytes(path, (json.dumps(report, indent=1) + "\n").encode())


def environment() -> dict[str, Any]:
    """Versions of what the job runs on."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count(), **versions}


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
    """The stages of a training report, then its data and model."""
    columns = ("steps", "epochs", "first_loss", "final_loss", "seconds")
    rows = [[name, *(stage[column] for column in columns)] for name, stage in report["stages"].items()]
    data = report["data"]
    facts = {"samples": data["samples"], "rejected rows": data["rejected"], "model": report["model"]}
    headers = ["stage", *(column.replace("_", " ") for column in columns)]
    return text_table(headers, rows) + "\n" + facts_table(facts)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)
