"""Fused trials against separate ones, and how surrogates rank."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import compiled_steps
from benchmarks.claims.claim import Claim, machine_of, read_file, waiting
from benchmarks.fusion_cases import CASES

RHO = 0.95


def throughput(folder: Path) -> list[Claim]:
    """Fused trials against one after another, on a CPU."""
    result = read_file(folder / "fusion_throughput.json")
    if result is None:
        return []
    cases = {case.name: case for case in CASES}
    return [
        Claim(
            f"32 fused trials against one after another: {cases[row['case']].title}",
            f"{row['speedup']:.2f}x [{row['quartiles'][0]:.2f}, {row['quartiles'][1]:.2f}]",
            f"{cases[row['case']].target:g}x",
            row["speedup"] >= cases[row["case"]].target,
            f"{machine_of(result['environment'])}; load {row['load']:.1f}",
            "fusion_throughput.md",
        )
        for row in result["rows"]
        if row["trials"] == 32
    ]


def compiled(folder: Path) -> list[Claim]:
    """Compiled steps against the same as they are written, on a CPU."""
    result = read_file(folder / compiled_steps.FILE)
    if result is None:
        return []
    titles = {case.name: case.title for case in CASES}
    found = []
    for row in result["rows"]:
        name = f"Compiled steps of {row['trials']} fused trials against the same as written: {titles[row['case']]}"
        shown = "not compiled"
        if "speedup" in row:
            steps = row["pays_from_steps"]
            less = f"takes less time from {steps:,} steps on" if steps else "takes more time"
            shown = f"{row['speedup']:.2f}x; with {row['compile_seconds'][0]:.0f} s to compile, {less}"
        found.append(Claim(name, shown, "", None, machine_of(result["environment"]), "compiled_steps.md"))
    return found


def on_a_gpu(folder: Path) -> list[Claim]:
    """Fused trials on a GPU, against the full width alone."""
    result = read_file(folder / "fusion_cuda.json")
    if result is None:
        return []
    environment, source = result["environment"], "fusion_cuda.md"
    found = []
    for case, target in environment["targets"].items():
        name = f"Fused trials on a GPU: {case} against the full width alone"
        rows = [row for row in result["rows"] if row["case"] == case and not row["error"]]
        if not rows:
            found.append(waiting(name, f"{target:g}x", source, environment["device"]))
            continue
        best = max(rows, key=lambda row: row["gain"])
        measured = f"{best['gain']:.1f}x ({best['K']} trials, {best['precision']}, {best['how']})"
        where = f"{environment['device']}; {environment['date'][:10]}"
        found.append(Claim(name, measured, f"{target:g}x", best["gain"] >= target, where, source))
    return found


def ranking(folder: Path) -> list[Claim]:
    """How surrogates rank configurations, against the full width."""
    found = []
    for path in sorted(folder.glob("transfer_*.json")):
        result = json.loads(path.read_text())
        narrow = [row for row in result["rows"] if row["scheme"] == "muP"]
        row = min(narrow, key=lambda row: row["width_ratio"])
        where = f"{machine_of(result['environment'])}; {len(result['configs'])} configurations"
        ratio, regret = f"1/{1 / row['width_ratio']:.0f}", row["regret"]["3"]
        name = f"Surrogates at {ratio} of the width rank as the full width does: {result['task']}"
        rhos = {(other["scheme"], other["width_ratio"]): other["rho"] for other in result["rows"]}
        ceiling, plain = rhos["reseed", 1.0], rhos["plain", row["width_ratio"]]
        rho = f"rho {row['rho']:.3f}; plain narrow models {plain:.3f}; other seeds of the full width {ceiling:.3f}"
        spread = result["seed_spread"]
        source = "transfer_quality.md"
        found += [
            Claim(name, rho, f"{RHO:g}", row["rho"] >= RHO, where, source),
            Claim(
                "... the best of their three best is behind the best of all by",
                f"{regret:.3g}",
                f"the seed spread, {spread:.3g}",
                regret <= spread,
                where,
                source,
            ),
        ]
    return found
