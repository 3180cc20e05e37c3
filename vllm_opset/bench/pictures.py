"""Pictures of results: engines beside stock vLLM, and the ops' speed-up over their peers. They need matplotlib."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_opset.bench.compare_report import BASELINE, Report, cases_in_order
from vllm_opset.bench.figures import RATE
from vllm_opset.bench.format import TIMES
from vllm_opset.bench.report import OpsReport

# Inches; a picture is shown 800 pixels wide, at 100 pixels an inch. SHARPNESS: pixels an inch in the file.
WIDTH, ROW, HEADER, OP_BAR, SHARPNESS = 8.0, 0.19, 1.4, 0.24, 200
# A comparison of fewer cases looks at one question, and belongs on the page alone.
ENOUGH_CASES = 3
# The ends of the colours: few ratios of tokens per second to stock's lie beyond.
LEAST, MOST = 0.8, 1.5
COLOURS = "RdBu"
SHORT = 7  # characters of a commit
BLUE, ORANGE = "#1b6ca8", "#e08214"
# The modes of an engine by the module of its vLLM platform.
MODES = {
    "vllm_opset.platform.cuda": "without compiled kernels",
    "vllm_opset.platform.native": "on vLLM's own wheel",
    "vllm_opset.platform.cpu": "on a CPU",
}
# Whose kernel a speed-up is over, by whether vLLM has a compiled one.
PEERS = {True: ("over vLLM's compiled kernel", BLUE), False: ("over the fastest peer", ORANGE)}


def draw_engines(reports: list[Report], file: Path) -> None:
    """Draw output tokens per second to stock vLLM's, and starts, of the last comparison of each shape as a table.

    Colours show which ratios are above 1. A mode that one comparison has twice is drawn once.
    """
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    compared = [one for one in reports if BASELINE in one.engines and len(one.by_case()) >= ENOUGH_CASES]
    drawn = list({one.title: one for one in compared}.values())
    if not drawn:
        raise ValueError(f"no comparison with {BASELINE} vLLM has {ENOUGH_CASES} cases or more to draw")
    cases = cases_in_order([one.by_case() for one in drawn])
    rows = [row for one in drawn for row in _rows(one)]
    ratios = [[row.ratios.get(case, math.nan) for case in cases] for row in rows]
    figure, axes = pyplot.subplots(figsize=(WIDTH, HEADER + ROW * len(rows)), layout="constrained")
    axes.imshow(ratios, cmap=COLOURS, norm=TwoSlopeNorm(1, LEAST, MOST), aspect="auto", alpha=0.7)
    for y, row in enumerate(rows):
        texts = [f"{row.ratios[case]:.2f}{TIMES}" if case in row.ratios else "" for case in cases]
        for x, text in enumerate([*texts, row.start]):
            axes.text(x, y, text, ha="center", va="center", fontsize=7)
        if row.first:
            axes.axhline(y - 0.5, color="black", linewidth=0.4)
    axes.set_xlim(-0.5, len(cases) + 0.5)
    axes.set_xticks(range(len(cases) + 1), [*cases, "start, s (stock)"], rotation=40, ha="left", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("output tokens per second to stock vLLM's, by requests x prompt tokens / output tokens", fontsize=8)
    _save(figure, file)


@dataclass(frozen=True)
class _Row:
    """An engine's row. first: of its comparison. ratios: of its tokens per second to stock's, by case."""

    label: str
    first: bool
    ratios: Mapping[str, float]
    start: str


def _rows(report: Report) -> Iterator[_Row]:
    """A row for each mode of a comparison."""
    commit = (report.run["commit"] or "unknown")[:SHORT]
    seconds = {engine["name"]: engine["seconds"] for engine in report.run["engines"]}
    names: dict[str, str] = {}
    for engine in report.run["engines"]:
        if engine["name"] != BASELINE:
            names.setdefault(_mode(engine), engine["name"])
    for number, (mode, name) in enumerate(names.items()):
        shape = "" if number else f"{report.run['shape']['name']}, {commit}   "
        ratios = {case: _rate(results[name]) / _rate(results[BASELINE]) for case, results in report.by_case().items()}
        both = (seconds[name], seconds[BASELINE])
        yield _Row(f"{shape}{mode}", not number, ratios, "" if None in both else "{:.0f} ({:.0f})".format(*both))


def _rate(result: Mapping) -> float:
    return statistics.median(result["metrics"][RATE])


def _mode(engine: Mapping) -> str:
    return next((mode for module, mode in MODES.items() if engine["platform"].startswith(module)), engine["name"])


def draw_ops(reports: list[OpsReport], file: Path) -> None:
    """Draw a bar for each op with the median of its cases' speed-up, and a line from the worst case to the best.

    It is of the last report that times the op beside a peer. Raises ValueError for reports of several devices, and if
    there is nothing to draw.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    found = _speed_ups(reports)
    figure, axes = pyplot.subplots(figsize=(WIDTH, OP_BAR * (len(found) + 4)), layout="constrained")
    for place, (compiled, ups) in enumerate(found.values()):
        median, worst, best = statistics.median(ups), min(ups), max(ups)
        label, colour = PEERS[compiled]
        axes.barh(place, median - 1, left=1, height=0.7, color=colour, label=label)
        axes.plot([worst, best], [place, place], color="black", linewidth=1, marker="|")
        text = f"{median:.2f}{TIMES}  ({worst:.2f} to {best:.2f})"
        axes.text(1.01, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{TIMES}"))
    axes.set_yticks(range(len(found)), found)
    axes.set_xlabel("speed-up: bar, the median of an op's cases; line, from the worst case to the best")
    axes.set_title(f"Kernels on {reports[0].device}", loc="left", fontsize=10)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label.keys(), loc="outside upper center", ncols=2, frameon=False)
    _save(figure, file)


def _speed_ups(reports: list[OpsReport]) -> dict[str, tuple[bool, list[float]]]:
    """By op: whether its peer is vLLM's compiled kernel, and the speed-ups of its cases."""
    if len(devices := {report.device: None for report in reports}) > 1:
        raise ValueError(f"a picture shows one device, and these results are of {' and '.join(devices)}")
    of_each = (
        {op: report.speed_ups(op) for op in dict.fromkeys(one.op for one in report.results)} for report in reports
    )
    found = {op: (compiled, ups) for by_op in of_each for op, (compiled, ups) in by_op.items() if ups}
    if not found:
        raise ValueError("no kernel was timed beside a peer: there is nothing to draw")
    return found


def _save(figure, file: Path) -> None:
    """Save on white, which can be read on a dark page too."""
    from matplotlib import pyplot

    figure.savefig(file, dpi=SHARPNESS, facecolor="white")
    pyplot.close(figure)
