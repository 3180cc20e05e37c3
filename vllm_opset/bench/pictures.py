"""Pictures of results: engines beside stock vLLM, and the ops' speed-up over their peers. They need matplotlib."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vllm_opset.bench.compare_report import BASELINE, Report
from vllm_opset.bench.format import TIMES
from vllm_opset.bench.report import Report as OpsReport

# Inches; a picture is shown 800 pixels wide, at 100 pixels an inch. SHARPNESS: pixels an inch in the file.
WIDTH, BAR, OP_BAR, SHARPNESS = 8.0, 0.17, 0.24, 200
# A comparison of fewer cases looks at one question, and belongs on the page alone.
ENOUGH_CASES = 3
# The right end of the axis, with room for the number behind the longest bar.
MOST_TIMES_STOCK = 2.0
RATE = "output tokens/s"
SHORT = 7  # characters of a commit
GREY, BLUE, ORANGE, PURPLE = "#9a9a9a", "#1b6ca8", "#e08214", "#7a4f9a"
# The modes of an engine by the module of its vLLM platform. An engine that repeats a mode has the last colour.
MODES = {
    "vllm_opset.platform.cuda": ("opset, vLLM without compiled kernels", BLUE),
    "vllm_opset.platform.native": ("opset's parts on vLLM's own wheel", ORANGE),
    "vllm_opset.platform.cpu": ("opset on a CPU", BLUE),
}
STOCK, OTHER = ("stock vLLM", GREY), PURPLE
# Whose kernel a speed-up is over, by whether vLLM has a compiled one.
PEERS = {True: ("over vLLM's compiled kernel", BLUE), False: ("over the fastest peer", ORANGE)}


def draw_engines(reports: list[Report], file: Path) -> None:
    """Draw output tokens per second and start-up beside stock vLLM: a row for the last comparison of a shape."""
    from matplotlib import pyplot

    compared = [one for one in reports if BASELINE in one.engines and len(one.by_case()) >= ENOUGH_CASES]
    drawn = list({one.title: one for one in compared}.values())
    if not drawn:
        raise ValueError(f"no comparison with {BASELINE} vLLM has {ENOUGH_CASES} cases or more to draw")
    heights = [(len(one.engines) + 1) * len(one.by_case()) + 2 for one in drawn]  # bars, and the title's room
    figure, rows = pyplot.subplots(
        len(drawn), 2, figsize=(WIDTH, BAR * sum(heights)), layout="constrained", squeeze=False, sharey="row",
        gridspec_kw={"width_ratios": [2.4, 1], "height_ratios": heights},
    )  # fmt: skip
    for report, (speed, start) in zip(drawn, rows, strict=True):
        _draw_speed(report, speed)
        _draw_starts(report, start)
    rows[-1][0].set_xlabel("output tokens per second, to stock\n(requests x prompt tokens / output tokens)")
    rows[-1][1].set_xlabel("start-up, s")
    _legend(figure, rows.flat)
    _save(figure, file)


def draw_ops(reports: list[OpsReport], file: Path) -> None:
    """Draw a bar for each op with the median of its cases' speed-up, and a line from the worst case to the best."""
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    found = {op: report.speed_ups(op) for report in reports for op in dict.fromkeys(one.op for one in report.results)}
    found = {op: (compiled, ups) for op, (compiled, ups) in found.items() if ups}
    if not found:
        raise ValueError("no kernel was timed beside a peer: there is nothing to draw")
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
    _finish(axes)
    _legend(figure, [axes])
    _save(figure, file)


def _draw_speed(report: Report, axes) -> None:
    """Bars of tokens per second as shares of stock's, by case."""
    cases = report.by_case()
    for number, (name, label, colour) in enumerate(_modes(report)):
        rates = [statistics.median(results[name]["metrics"][RATE]) for results in cases.values()]
        stocks = [statistics.median(results[BASELINE]["metrics"][RATE]) for results in cases.values()]
        shares = [rate / stock for rate, stock in zip(rates, stocks, strict=True)]
        places = [place * (len(report.engines) + 1) + number for place in range(len(cases))]
        bars = axes.barh(places, shares, height=0.9, color=colour, label=label)
        texts = [f"{rate:,.0f}" for rate in rates]
        if name != BASELINE:
            texts = [f"{text}  {share:.2f}{TIMES}" for text, share in zip(texts, shares, strict=True)]
        axes.bar_label(bars, texts, padding=3, fontsize=8)
    middle = (len(report.engines) - 1) / 2
    axes.set_yticks([place * (len(report.engines) + 1) + middle for place in range(len(cases))], cases)
    axes.set(xlim=(0, MOST_TIMES_STOCK), xticks=(0, 0.5, 1))
    commit = (report.run["commit"] or "unknown")[:SHORT]
    version = report.run["engines"][0]["versions"]["vllm"]
    axes.set_title(f"{report.run['shape']['name']}, vLLM {version}, {commit}", loc="left", fontsize=10)
    axes.invert_yaxis()
    _finish(axes)


def _draw_starts(report: Report, axes) -> None:
    """Bars of seconds until an engine is ready."""
    seconds = {engine["name"]: engine["seconds"] for engine in report.run["engines"]}
    for number, (name, label, colour) in enumerate(_modes(report)):
        if seconds[name] is not None:
            axes.bar_label(
                axes.barh(number, seconds[name], height=0.9, color=colour, label=label),
                fmt="%.0f s", padding=3, fontsize=8,
            )  # fmt: skip
    axes.tick_params(left=False)
    axes.set_xlim(0, 1.3 * max(filter(None, seconds.values())))
    _finish(axes)


def _legend(figure, plots: Iterable) -> None:
    """One legend above all plots, with each label once."""
    handles = {label: bar for axes in plots for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=2, frameon=False)


def _finish(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _modes(report: Report) -> Iterator[tuple[str, str, str]]:
    """(name, label, colour) of each engine, the baseline first."""
    taken = set()
    engines: Mapping[str, Mapping] = {engine["name"]: engine for engine in report.run["engines"]}
    for name in report.engines:
        label, colour = _stock(engines[name]) if name == BASELINE else _mode(engines[name])
        if label in taken:  # the same mode with another setting, which its name says
            label, colour = f"{label}: {name}", OTHER
        taken.add(label)
        yield name, label, colour


def _mode(engine: Mapping) -> tuple[str, str]:
    found = [mode for module, mode in MODES.items() if engine["platform"].startswith(module)]
    return found[0] if found else (engine["name"], OTHER)


def _stock(engine: Mapping) -> tuple[str, str]:
    """The label says what one must know of stock's sampled cases."""
    label, colour = STOCK
    without = engine["env"].get("VLLM_USE_FLASHINFER_SAMPLER") == "0"
    return f"{label}, without FlashInfer's sampler" if without else label, colour


def _save(figure, file: Path) -> None:
    """Save on white, which can be read on a dark page too."""
    from matplotlib import pyplot

    figure.savefig(file, dpi=SHARPNESS, facecolor="white")
    pyplot.close(figure)
