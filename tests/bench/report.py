"""How the benchmarks show their figures: one JSON object, and a table for people."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

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


def show(name: str, rows: list[Row], parameters: Row, path: Path | None) -> None:
    """Print the table to stderr and the JSON to stdout, and to ``path``."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_text(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    for line in (columns, ["-" * width for width in widths], *cells):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)), file=sys.stderr)
    text = json.dumps(
        {"benchmark": name, "machine": machine(), "parameters": parameters, "results": rows}, indent=2
    )
    print(text)
    if path is not None:
        path.write_text(text + "\n")


def _text(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )
