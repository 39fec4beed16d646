"""Draw docs/pictures/architecture.svg and request.svg, the diagrams of docs/reading.md, from the source code.

    python -m bench.diagrams

The layers' files and the arrows between layers are read from the import statements, lazy and type-only ones
included; an import of a higher layer is an error, as is a name in the life of a request that does not exist.
"""

import ast
import pkgutil
import textwrap
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {  # from top to bottom; a layer imports only layers below it
    "apps/": "command line, OpenAI-compatible server, batches, Ray",
    "llm.py": "the offline API; builds the worker and the engine",
    "extras/": "options that the core does not name",
    "engine/": "HOST: plain Python, no tensors",
    "device/": "DEVICE: request rows, the step, CUDA graphs",
    "drafters/": "propose tokens, choose K",
    "models/": "decoder, families, weights",
    "config.py, text/, outputs.py": "settings, tokenizer, results",
    "kernels/": "Triton and C++, each next to its plain PyTorch version",
}
FOLDERS = [layer for layer in LAYERS if layer.endswith("/")]
STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
KINDS = {"engine/": "host", "device/": "device"}
VERBS = "admit", "prefill", "step", "fetch", "release"  # the methods of `Worker` that the engine calls


def imports() -> set[tuple[str, str]]:
    """Return the pairs (importing layer, imported layer). Raises ValueError if an import points up."""
    layer_of = {name.strip(" /").removesuffix(".py"): layer for layer in LAYERS for name in layer.split(",")}
    pairs, order = set(), list(LAYERS)
    package_root = ROOT / "nanospec"
    for path in package_root.rglob("*.py"):
        package = path.relative_to(ROOT).parent.parts
        source = layer_of.get(package[1] if package[1:] else path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if source and isinstance(node, ast.ImportFrom) and node.level:
                parts = *package[: len(package) - node.level + 1], *filter(None, [node.module])
                names = parts[1:2] or [alias.name for alias in node.names]  # "from . import a, b"
                targets = (layer_of.get(name.partition(".")[0]) for name in names)
                pairs |= {(source, target) for target in targets if target and target != source}
    for source, target in pairs:
        if order.index(source) > order.index(target):
            raise ValueError(f"{source} imports {target}, which is a higher layer.")
    return pairs


def files(layer: str) -> str:
    """Return the names of the modules and packages of a layer that is a folder."""
    paths = sorted((ROOT / "nanospec" / layer).glob("[!_.]*")) if layer in FOLDERS else ()
    modules = (path for path in paths if path.suffix == ".py" or any(path.glob("*.py")))
    return " · ".join(path.stem + "/" * path.is_dir() for path in modules)


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """Return an SVG text; `kind` of this and other elements is a class of diagrams.css."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "") -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'


def arrow(path: str, kind: str = "") -> str:
    """Return an arrow along an SVG path."""
    return f'<path class="{kind}" d="{path}" marker-end="url(#{kind or "tip"})"/>'


def svg(title: str, width: float, height: float, parts: Iterator[str]) -> str:
    """Return the document of these elements."""
    tips = "".join(
        f'<marker class="{name}" id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto" markerUnits="userSpaceOnUse"><path d="M0 0L8 4L0 8z"/></marker>'
        for name in ("tip", "hook")
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>\n{STYLE}</style>", f"<defs>{tips}</defs>",
                      *parts, "</svg>", ""])  # fmt: skip


def architecture() -> str:
    """Return the diagram of the layers."""
    left, right = 130, 630
    lines = {layer: textwrap.wrap(files(layer), 66) for layer in LAYERS}
    height = {layer: 30 + 16 * len(lines[layer]) for layer in LAYERS}
    top, y = dict[str, int](), 34
    for layer in LAYERS:
        top[layer] = y
        y += height[layer] + (44 if layer == "engine/" else 18)
    middle = {layer: top[layer] + height[layer] // 2 for layer in LAYERS}

    def parts() -> Iterator[str]:
        yield text(20, 18, "Imports point down only; each arc is an import between two layers.")
        for source, target in sorted(imports()):
            start, end = middle[source] + 6, middle[target] - 6
            bend = left - 14 - 0.21 * (end - start)
            yield arrow(f"M{left} {start} C{bend:g} {start} {bend:g} {end} {left} {end}")
        for layer, note in LAYERS.items():
            yield box(left, top[layer], right - left, height[layer], KINDS.get(layer, ""))
            yield text(left + 12, top[layer] + 20, layer, "head")
            yield text(right - 12, top[layer] + 20, note, anchor="end")
            for i, line in enumerate(lines[layer]):
                yield text(left + 12, top[layer] + 38 + 16 * i, line, "code")
        for i, verb in enumerate(VERBS):
            x, end = left + 40 + 95 * i, top["device/"] - 3
            yield arrow(f"M{x} {end - 39} V{end}")
            yield text(x + 6, end - 13, verb, "code")
        for layer in ("engine/", "device/"):
            yield arrow(f"M{right} {middle['extras/']} h24 V{middle[layer]} H{right + 3}", "hook")
        yield arrow(f"M{right + 150} {middle['drafters/']} H{right + 3}", "hook")
        for layer, y, note in (
            ("extras/", 0, "Extension:"),
            ("extras/", 16, "hooks that the engine"),
            ("extras/", 32, "and the worker call"),
            ("drafters/", -24, "Drafter: your own file,"),
            ("drafters/", -8, "LLM(drafter=...)"),
        ):
            yield text(right + 32, middle[layer] + y, note, "hook")

    return svg("The layers of nanospec", right + 180, y, parts())


LIFE: list[tuple[int, str, str]] = [  # lane (0 caller, 1 host, 2 device), event, function
    (0, "prompt to token ids, parameters checked", "llm.LLM.generate"),
    (1, "request queued", "engine.scheduler.Scheduler.add"),
    (1, "cached prefix found, blocks allocated", "engine.scheduler.Scheduler.schedule"),
    (2, "prompt and parameters written to a row", "device.worker.Worker.admit"),
    (2, "K/V of the prompt, chunk by chunk", "device.worker.Worker.prefill"),
    (1, "K chosen, a step queued for all rows", "engine.engine.Engine.step"),
    (2, "one graph replayed for (batch size, K):", "device.graphs.StepGraphs.run"),
    (2, "report copied to a pinned result buffer", "kernels.transfer.to_host"),
    (1, "previous step collected while this one runs", "device.worker.Worker.fetch"),
    (1, "text decoded, stop strings searched", "engine.request.Request.append"),
    (2, "at the end: row freed, full blocks stay cached", "device.worker.Worker.release"),
    (0, "text streamed, or the output returned", "llm.LLM.stream_pieces"),
]
STEP = "propose · lay_out · forward · sample", "accept · commit · learn"


def request() -> str:
    """Return the diagram of a request's life, with time going down."""
    width = 300
    lefts, heights = [20, 340, 660], [42 + 34 * name.endswith("run") for _, _, name in LIFE]
    tops = [44 + sum(heights[:i]) + 16 * i for i in range(len(LIFE))]

    def parts() -> Iterator[str]:
        for x, title in zip(lefts, ("caller", "engine (host)", "worker (device)"), strict=True):
            yield text(x + width / 2, 24, title, "head", "middle")
        for i, (lane, event, name) in enumerate(LIFE):
            pkgutil.resolve_name(f"nanospec.{name}")  # raises AttributeError if it was renamed
            x, top = lefts[lane], tops[i]
            yield box(x, top, width, heights[i], ("", "host", "device")[lane])
            yield text(x + 10, top + 17, event)
            for j, line in enumerate([".".join(name.split(".")[-2:]), *STEP * (heights[i] > 42)]):
                yield text(x + 10, top + 34 + 17 * j, line, "code")
        for i, (lane, after) in enumerate(pairwise(lane for lane, _, _ in LIFE)):
            x, turn, end = lefts[lane], tops[i] + heights[i] // 2, tops[i + 1] - 2
            if after == lane:
                yield arrow(f"M{x + width / 2:g} {tops[i] + heights[i]} V{end}")
            elif after > lane:
                yield arrow(f"M{x + width} {turn} H{lefts[after] + 40} V{end}")
            else:
                yield arrow(f"M{x} {turn} H{lefts[after] + width - 40} V{end}")
        events = [name.rpartition(".")[2] for _, _, name in LIFE]
        x, start, end = lefts[1], tops[events.index("append")] + 32, tops[events.index("step")] + 21
        yield arrow(f"M{x} {start} H{x - 24} V{end} H{x - 2}", "hook")
        yield text(x - 34, (start + end) / 2, "the next step, until a stop token,", "hook", "end")
        yield text(x - 34, (start + end) / 2 + 16, "a stop string or max_tokens", "hook", "end")

    return svg("The life of a request", 980, tops[-1] + heights[-1] + 20, parts())


if __name__ == "__main__":
    for draw in (architecture, request):
        path = ROOT / "docs" / "pictures" / f"{draw.__name__}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(path)
