"""Shows tables, sentences and figures in the notebooks, in the reports' colors and words.

Figures are SVG with text as text: matplotlib ships no font for Chinese, but browsers have one.
"""

import html
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from IPython.display import SVG, Markdown, display
from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from zoo.planner.plan import Item, Plan, indices
from zoo.report.escaping import markdown_table
from zoo.report.matplotlib_charts import COLORS, STYLE, bare

WIDTH = 8.6  # inches
# in the order of the compared runs: the baseline, ours, others
PALETTE = [COLORS[role] for role in ("baseline", "checkpointed", "scheme", "at-work")]
CHINESE = ("Noto Sans CJK SC", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei",
           "WenQuanYi Micro Hei")  # fmt: skip
# words in this package's charts; longer ones before those that they contain
WORDS = {
    "en": {},
    "zh_CN": {
        "predicted peak of a training step": "训练步的预测峰值",
        "time; the baseline is ×1": "时间（基线为 ×1）",
        "least time for each budget": "各预算下的最短时间",
        "saved by each step": "每个步骤保存的大小",
        "saved by each block": "每个块保存的大小",
        "segments: recomputed in one go, nested ones lower": "段：整段一次重计算，嵌套的更低",
        "recomputed more often": "重计算多次",
        "recomputed twice": "重计算两次",
        "saved activations": "保存的激活值",
        "optimizer state": "优化器状态",
        "classic schemes": "经典方案",
        "below any plan": "任何方案都达不到",
        "least memory": "最省显存",
        "recomputation": "重计算中",
        "recomputed": "重计算",
        "checkpointed": "梯度检查点",
        "temporaries": "临时张量",
        "parameters": "参数",
        "gradients": "梯度",
        "allocated": "已分配",
        "best plan": "最优方案",
        "optimizer": "优化器",
        "baseline": "基线",
        "backward": "反向",
        "forward": "前向",
        "buffers": "buffer",
        "kernel workspace": "kernel 的 workspace",
        "memory": "显存",
        "inputs": "输入",
        "steps": "个步骤",
        "step": "个步骤",
        "kept": "保留",
        "peak": "峰值",
        "time": "时间",
    },
}
_language = "en"

Numbers = Sequence[float]


def start(language: str, *packages: str) -> None:
    """Sets the language of the charts, and shows the versions of packages."""
    global _language  # noqa: PLW0603 a notebook has one language
    _language = language
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "zoo-checkpoint", *packages)))


def say(text: str) -> None:
    """Shows a sentence, in Markdown."""
    display(Markdown(text))


def table(head: Sequence[str], *rows: Sequence[Any]) -> None:
    """Shows a table, with numbers aligned to the right."""
    words = WORDS[_language]
    say(markdown_table(head, [[words.get(str(cell), str(cell)) for cell in row] for row in rows]))


def chart(title: str, drawn: Any) -> None:
    """Draws an anatomy, a report, a frontier or a timeline, which draws itself."""
    with figure(title, 3.8) as (axes,):
        drawn.plot(axes)


def curves(
    title: str,
    x_title: str,
    x: Numbers,
    named: Mapping[str, Numbers],
    *,
    levels: Mapping[str, float] | None = None,
    log: str = "",
) -> None:
    """Draws curves by name, and horizontal levels; `log` names the logarithmic axes."""
    with figure(title, 3.4) as (axes,):
        for color, (name, y) in zip(PALETTE, named.items(), strict=False):
            # a long curve may be equal to another; the first is thicker, below it
            marks = {"ms": 4} if len(x) < 20 else {"ms": 0, "lw": 5 if color is PALETTE[0] else 1.5}
            axes.plot(x[: len(y)], y, "o-", color=color, label=name, **marks)
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        spot: Any = {"textcoords": "offset points", "ha": "right", "bbox": behind}
        for name, level in (levels or {}).items():
            axes.axhline(level, color=COLORS["ink"], lw=1, ls="--")
            axes.annotate(name, (x[-1], level), (0, 4), **spot)
        axes.set(xlabel=x_title, **{f"{axis}scale": "log" for axis in log})
        axes.set_ylim(None if "y" in log else 0)
        axes.yaxis.set_major_formatter("{x:g}")
        if len(x) < 10:
            axes.set_xticks(x, [f"{number:g}" for number in x])
        axes.minorticks_off()
        bare(axes, "both")
        axes.legend(frameon=False)


def bars(title: str, panels: Mapping[str, Mapping[str, float]], form: str = "{:.1f}") -> None:
    """Draws panels of horizontal bars with numbers, with the same names and scale."""
    names = list(dict.fromkeys(name for sizes in panels.values() for name in sizes))
    most = max(max(sizes.values()) for sizes in panels.values())
    colors = PALETTE if len(panels) > 1 else PALETTE[1:]
    with figure(title, 0.7 + 0.26 * len(names), len(panels)) as row:
        for axes, color, (heading, sizes) in zip(row, colors, panels.items(), strict=False):
            values = [sizes.get(name, 0) for name in names]
            drawn = axes.barh(names, values, 0.72, color=color)
            axes.bar_label(drawn, [*map(form.format, values)], padding=3)
            axes.set_title(heading, loc="left", fontsize=10)
            axes.set_yticks(range(len(names)), names if axes is row[0] else [""] * len(names))
            axes.set_xlim(0, 1.16 * most)
            axes.invert_yaxis()
            bare(axes, "x")


def pictures(
    rows: Sequence[Mapping[str, Any]], *, shades: Sequence[str] = (), height: float = 1.8
) -> None:
    """Draws rows of images by title: (H, W, 3), or (H, W) of values or (if ints) classes."""
    with figure("", height * len(rows), max(map(len, rows)), len(rows), dpi=80) as grid:
        for axes, (title, image) in zip(
            grid, (item for row in rows for item in row.items()), strict=False
        ):
            classes = {"cmap": ListedColormap([*shades]), "vmin": 0, "vmax": len(shades) - 1}
            look: Any = {"cmap": "gray"} if image.dtype.is_floating_point else classes
            look["origin"] = "lower" if image.ndim == 2 else "upper"
            axes.imshow(image, interpolation="nearest", **look)
            axes.set_title(title, fontsize=9)
            axes.axis("off")


def moments(plan: Plan) -> list[tuple[int, str, dict[int, str]]]:
    """Lists the moments of a training step: number, phase, and the held inputs with their colors.

    The number is that of a step of the plan. Steps are assumed equal, each with one input that its
    backward needs.
    """
    inputs: dict[int, str] = {}
    listed: list[tuple[int, str, dict[int, str]]] = []

    def run(items: Sequence[Item], phase: str, color: str) -> None:
        for steps in ([*indices(item)] for item in items):
            inputs.setdefault(steps[0], color)
            listed.extend((step, phase, dict(inputs)) for step in steps)

    def back(items: Sequence[Item]) -> None:
        for item in reversed(items):
            if isinstance(item, int):
                listed.append((item, "backward", dict(inputs)))
                del inputs[item]
            else:
                run(item, "recompute", "recomputed")
                back(item)

    run(plan, "forward", "kept")
    back(plan)
    return listed


def stepwise(titles: Mapping[str, Plan]) -> None:
    """Draws plans moment by moment: the step that runs, and the inputs that are held."""
    steps = max(len(plan.flatten()) for plan in titles.values())
    lengths = [len(moments(plan)) for plan in titles.values()]
    marks = {"forward": ">", "recompute": ">", "backward": "<"}
    with figure("", 0.9 + 0.19 * steps, len(titles), ratios=lengths) as row:
        for axes, (title, plan) in zip(row, titles.items(), strict=True):
            shown = moments(plan)
            for x, (_, _, inputs) in enumerate(shown):
                colors = [COLORS[color] for color in inputs.values()]
                axes.bar([x] * len(inputs), 0.9, 0.9, [s - 0.45 for s in inputs], color=colors)
            for phase, shape in marks.items():
                spots = [(x, step) for x, (step, now, _) in enumerate(shown) if now == phase]
                if spots:
                    axes.plot(*zip(*spots, strict=True), shape, color=COLORS["ink"], ms=4)
            axes.set_title(title, loc="left", fontsize=10)
            axes.set(yticks=range(steps), xticks=[], ylim=(steps - 0.5, -0.5))
            bare(axes, "y")


@contextmanager
def figure(
    title: str, height: float, columns: int = 1, rows: int = 1, *,
    ratios: Numbers | None = None, dpi: int = 100,
) -> Iterator[list[Axes]]:  # fmt: skip
    """Yields the axes of a figure so many inches high, row by row; then shows it."""
    fonts = [name for name in CHINESE if name in font_manager.get_font_names()]
    family: Any = {
        "svg.fonttype": "none",
        "font.family": ["DejaVu Sans", *fonts],
        "figure.dpi": dpi,
    }
    with rc_context({**STYLE, **family}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        drawing = Figure(figsize=(WIDTH, height + 0.3 * bool(title)), layout="constrained")
        if title:
            drawing.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        grid = drawing.subplots(rows, columns, squeeze=False, width_ratios=ratios)
        yield list(grid.flat)
        file = io.StringIO()
        drawing.savefig(file, format="svg", dpi=dpi, metadata={"Date": None})
    # a hundredth of a point is invisible
    picture = re.sub(r"(\.\d\d)\d+", r"\1", file.getvalue())

    def words(text: re.Match[str]) -> str:
        return html.escape(translated(html.unescape(text[0])), quote=False)

    display(SVG(re.sub(r"(?<=>)[^<>]+(?=</text>)", words, picture)))


def translated(text: str) -> str:
    """Translates the words of charts into the notebook's language."""
    words = WORDS[_language]
    pattern = rf"\b(?:{'|'.join(words)})"
    return re.sub(pattern, lambda match: words[match[0]], text) if words else text
