"""Tables of the decoding benchmarks. (Those of `pipelines.reports` need Ray, which a device check does without.)"""

from collections.abc import Sequence
from typing import Any


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns under their headers, aligned; numbers to the right."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    is_left = [any(isinstance(row[place], str) for row in rows) for place in range(len(headers))]
    lines = [list(headers), ["-" * width for width in widths], *cells]
    return "".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
