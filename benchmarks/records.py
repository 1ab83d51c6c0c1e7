"""Writes the records of all processors into docs/performance.md: a table for each `results/*/report.json`.

python benchmarks/records.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.report import RIVALS
from benchmarks.peers.table import period

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- records: written by benchmarks/records.py -->\n", "<!-- end of records -->\n"


def write_page() -> None:
    """Puts all records into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_records(page, records(RESULTS)), encoding="utf-8")


def records(results: Path) -> list[dict[str, Any]]:
    """All reports that lie in a folder of their processor's."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*/report.json"))]


def with_records(page: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """The page with these records between its two marks, in place of what stood there."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(section(report) for report in reports) + "\n" + END + after


def section(report: Mapping[str, Any]) -> str:
    """One processor's record: tokens/s, seconds to the first token, peak memory; engines beside each other."""
    setup, processor = report["setup"], report["processor"]
    sizes = [str(size) for size in setup["workload"]["batch_sizes"]]
    note = f" {report['note']}" if "note" in report else ""
    header = ["model", "engines", f"prefill {setup['workload']['prefill_len']}", *sizes, "start, s", "MB"]
    lines = [
        f"### {processor['kind']}",
        "",
        f"{processor['name']}, {setup['threads']} threads, {setup['rounds']} round(s), measured "
        f"{period(report['measured'])}.{note}",
        "",
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
    ]
    for model, figures in report["models"].items():
        name = f"`{model}`"
        for side in ((ours, *rivals) for ours, rivals in RIVALS.items()):
            measured = {each for each, engine in figures["engines"].items() if "decode" in engine}
            engines = {each: figures["engines"][each] for each in side if each in measured}
            if side[0] in engines:
                lines.append(f"| {name} | {_row(engines, sizes)} |")
                name = ""
    return "\n".join(lines) + "\n"


def _row(engines: Mapping[str, Any], sizes: Sequence[str]) -> str:
    def beside(cell: Any) -> str:
        return " / ".join(cell(engine) for engine in engines.values())

    rates = [beside(lambda engine, size=size: _rate(engine["decode"][size]["median"])) for size in sizes]
    cells = [
        " / ".join(engines),
        beside(lambda engine: _rate(engine["prefill"]["median"])),
        *rates,
        beside(lambda engine: _rate((engine["startup_seconds"] or engine["first_start_seconds"])["median"])),
        beside(lambda engine: f"{engine['peak_memory_bytes']['median'] / 1e6:.0f}"),
    ]
    return " | ".join(cells)


def _rate(rate: float) -> str:
    """With three digits or so."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"


if __name__ == "__main__":
    write_page()
