"""Line and bar charts as inline SVG, in the colours and the font of the page. matplotlib is imported when one is drawn."""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

MAX_POINTS = 400  # more cannot be told apart; neighbours are averaged
_INCHES = (5.4, 2.9)
_HEADROOM = 1.08  # above the highest point
# Colours of the drawing that stand for the page's own: see `--ink`, `--faint` and `--line-N` in `page.html.jinja`.
_INK, _FAINT = "#010101", "#020202"
_LINES = ("#030301", "#030302", "#030303", "#030304")
_VARIABLES = {_INK: "--ink", _FAINT: "--faint"} | {color: f"--line-{n}" for n, color in enumerate(_LINES, 1)}
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Series:
    """One line of a chart, single points of it, or bars. Points without a finite value are left out."""

    name: str
    points: Points
    is_dotted: bool = False
    is_bars: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart over steps, or over what `across` names. `right` has an axis of its own on the right side.

    Args:
        name: part of the ids in the drawing; letters, digits and `-`, unique on a page.
        title: what is shown.
        unit: label of the left axis.
    """

    name: str
    title: str
    unit: str
    left: tuple[Series, ...]
    right: Series | None = None
    from_zero: bool = False
    across: str = "step"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(_finite(series.points) for series in self.left)


def draw(chart: Chart) -> str:
    """The chart as an `<svg>` element with a title for those who do not see it; its size is that of where it stands."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no state that threads share
    from matplotlib.ticker import MaxNLocator

    looks = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.name,
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _FAINT,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.spines.top": False,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(looks):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        lines = [series for series in chart.left if _finite(series.points)]
        handles = [_plot(axes, series, color) for series, color in zip(lines, _LINES, strict=False)]
        axes.grid(color=_FAINT, linewidth=0.5, alpha=0.6)
        axes.set_xlabel(chart.across)
        axes.set_ylabel(chart.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if chart.from_zero:
            axes.set_ylim(0, _HEADROOM * max(value for series in lines for _, value in _finite(series.points)) or None)
        if chart.right is not None:
            other = axes.twinx()
            handles.append(_plot(other, chart.right, _LINES[len(lines)]))
            other.set_ylabel(chart.right.name)
        else:
            axes.spines.right.set_visible(False)
        if len(handles) > 1:
            figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.5)
        file = io.StringIO()
        # The backend named here is the only one loaded: no display is looked for.
        figure.savefig(file, format="svg", backend="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _as_element(file.getvalue(), chart)


def _plot(axes: Any, series: Series, color: str) -> Any:
    points = _finite(series.points)
    if series.is_bars:
        return axes.bar(*zip(*points, strict=True), color=color, label=series.name)
    if series.is_dotted or len(points) == 1:
        style: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 4}
    else:
        points, style = thin(points), {"linewidth": 1.6}
    steps, values = [step for step, _ in points], [value for _, value in points]
    return axes.plot(steps, values, color=color, label=series.name, **style)[0]


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points: each is the mean of its neighbours, at the step of the last one."""
    size = math.ceil(len(points) / limit)
    if size <= 1:
        return list(points)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]


def _as_element(svg: str, chart: Chart) -> str:
    """Makes a stand-alone drawing a part of a page: no prolog, ids of its own, colours and size of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{chart.name}-', svg)
    svg = re.sub(r'url\(#|(?<=href=")#', lambda match: f"{match[0]}{chart.name}-", svg)
    svg = re.sub("#0[123]0[123]0[1234]", lambda match: f"var({_VARIABLES[match[0]]})", svg)
    svg = re.sub(r" font-family: [^;]*;|<style.*?</style>", "", svg, flags=re.DOTALL).replace("xlink:href", "href")
    head = re.sub(r' (?:width|height|xmlns(?::\w+)?|version)="[^"]*"', "", svg[: svg.index(">") + 1])
    named = head[:-1] + f' role="img" aria-labelledby="{chart.name}-title">'
    return f'{named}<title id="{chart.name}-title">{escape(_alternative(chart))}</title>{svg[svg.index(">") + 1 :]}'


def _alternative(chart: Chart) -> str:
    """The chart in words."""
    lines = [*chart.left, *([chart.right] if chart.right else [])]
    words = []
    for series in lines:
        points = _finite(series.points)
        if points:
            (first, start), (last, end) = points[0], points[-1]
            where = chart.across
            words.append(f"{series.name}: {start:.4g} at {where} {first:g}, {end:.4g} at {where} {last:g}")
    return f"{chart.title}. {'; '.join(words)}."
