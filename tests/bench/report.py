"""How the benchmarks show their figures: one JSON object, and a table for people."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def machine() -> Row:
    """What the figures were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "pyarrow", "msgspec")},
    }


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--repeats", type=int, default=5, help="runs of each part; the median is shown, with its spread"
    )
    made.add_argument("--json", type=Path, help="also write the JSON here")
    return made


def median_and_spread(measure: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Median of ``repeats`` runs, and half the distance of the outer quartiles as a share of it."""
    values = sorted(measure() for _ in range(repeats))
    middle = statistics.median(values)
    low, high = values[len(values) // 4], values[-1 - len(values) // 4]
    return middle, (high - low) / 2 / middle if middle else 0.0


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The e of cost = c * size ** e that fits best: 1 for what grows in proportion, 2 for a quadratic."""
    slope, _ = np.polyfit(np.log(np.array(sizes, float)), np.log(np.array(costs, float)), 1)
    return float(slope)


def cpu_s(pid: int) -> float:
    """CPU seconds a process has used, all threads, to the nearest clock tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(name: str, rows: list[Row], parameters: Row, path: Path | None) -> None:
    """Print the table to stderr and the JSON to stdout, and to ``path``."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_text(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    for line in (columns, ["-" * width for width in widths], *cells):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)), file=sys.stderr)
    text = json.dumps(
        {
            "benchmark": name,
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "load": os.getloadavg()[0],
            "parameters": parameters,
            "results": rows,
        },
        indent=2,
    )
    print(text)
    if path is not None:
        path.write_text(text + "\n")


def markdown(found: dict[str, Any]) -> str:
    """The docs' page of what benchmarks told, by name."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench` from [bench.json](bench.json); do not edit. What the figures mean and what was done",
        "about them is in [performance.md](performance.md). Each table was taken by the command above it on the",
        "machine named; cells are medians, *spread* is half the distance of the outer quartiles. The load average is",
        "that at the end of the run: where it is above the number of cores, other work shared them, and only ratios",
        "of figures of one table say something.",
        "",
    ]
    for name, told in found.items():
        columns = list(dict.fromkeys(column for row in told["results"] for column in row))
        versions = {key: value for key, value in told["machine"].items() if key not in ("cpu", "cores")}
        lines += [
            f"## {name.replace('_', ' ')}",
            "",
            f"`{told['command']}`",
            "",
            f"{told['machine']['cores']} cores of {told['machine']['cpu']}, "
            + ", ".join(f"{key} {value}" for key, value in versions.items())
            + f"; load average {told['load']:.1f}; "
            + ", ".join(f"{key} {_text(value)}" for key, value in told["parameters"].items()),
            "",
            "| " + " | ".join(columns) + " |",
            "|" + "---|" * len(columns),
            *(
                "| " + " | ".join(_text(row.get(column, "")) for column in columns) + " |"
                for row in told["results"]
            ),
            "",
        ]
    return "\n".join(lines)


def _text(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )
