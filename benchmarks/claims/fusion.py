"""Fused trials against separate ones, and how surrogates rank."""

from __future__ import annotations

from pathlib import Path

from benchmarks import compiled_steps
from benchmarks.claims.claim import Claim, machine_of, of_source, waiting
from benchmarks.fusion_cases import CASES
from benchmarks.result_files import read

RHO = 0.95


def throughput(folder: Path) -> list[Claim]:
    """Fused trials against one after another, on a CPU."""
    result, claim = read(folder / "fusion_throughput.json", {"rows": []}), of_source("fusion_throughput.md")
    cases, found = {case.name: case for case in CASES}, []
    for row in (row for row in result["rows"] if row["trials"] == 32):
        what = f"32 fused trials against one after another: {cases[row['case']].title}"
        measured = f"{row['speedup']:.2f}x [{row['quartiles'][0]:.2f}, {row['quartiles'][1]:.2f}]"
        target, where = cases[row["case"]].target, f"{machine_of(result['environment'])}; load {row['load']:.1f}"
        found.append(claim(what, measured, f"{target:g}x", row["speedup"] >= target, where))
        if row["jax"].replace(".", "").isdigit():
            by_jax = "... as one `jit(vmap)` of JAX, against the same one after another"
            found.append(claim(by_jax, f"{row['jax']}x", "no faster", row["speedup"] >= float(row["jax"])))
    return found


def compiled(folder: Path) -> list[Claim]:
    """Compiled steps against the same as they are written, on a CPU."""
    result, claim = read(folder / compiled_steps.FILE, {"rows": []}), of_source("compiled_steps.md")
    titles, found = {case.name: case.title for case in CASES}, []
    for row in result["rows"]:
        what = f"Compiled steps of {row['trials']} fused trials against the same as written: {titles[row['case']]}"
        shown = "not compiled"
        if "speedup" in row:
            steps = row["pays_from_steps"]
            less = f"takes less time from {steps:,} steps on" if steps else "takes more time"
            shown = f"{row['speedup']:.2f}x; with {row['compile_seconds'][0]:.0f} s to compile, {less}"
        found.append(claim(what, shown, where=machine_of(result["environment"])))
    return found


def on_a_gpu(folder: Path) -> list[Claim]:
    """Fused trials on a GPU, against the full width alone."""
    result = read(folder / "fusion_cuda.json")
    if result is None:
        return []
    environment, found = result["environment"], []
    claim = of_source("fusion_cuda.md", f"{environment['device']}; {environment['date'][:10]}")
    for case, target in environment["targets"].items():
        name = f"Fused trials on a GPU: {case} against the full width alone"
        rows = [row for row in result["rows"] if row["case"] == case and not row["error"]]
        if not rows:
            found.append(waiting(name, f"{target:g}x", "fusion_cuda.md", environment["device"]))
            continue
        best = max(rows, key=lambda row: row["gain"])
        measured = f"{best['gain']:.1f}x ({best['K']} trials, {best['precision']}, {best['how']})"
        found.append(claim(name, measured, f"{target:g}x", best["gain"] >= target))
    return found


def ranking(folder: Path) -> list[Claim]:
    """How surrogates rank configurations, against the full width."""
    found = []
    for path in sorted(folder.glob("transfer_*.json")):
        result = read(path)
        narrow = [row for row in result["rows"] if row["scheme"] == "muP"]
        row = min(narrow, key=lambda row: row["width_ratio"])
        where = f"{machine_of(result['environment'])}; {len(result['configs'])} configurations"
        claim, ratio = of_source("transfer_quality.md", where), f"1/{1 / row['width_ratio']:.0f}"
        name = f"Surrogates at {ratio} of the width rank as the full width does: {result['task']}"
        rhos = {(other["scheme"], other["width_ratio"]): other["rho"] for other in result["rows"]}
        ceiling, plain = rhos["reseed", 1.0], rhos["plain", row["width_ratio"]]
        rho = f"rho {row['rho']:.3f}; plain narrow models {plain:.3f}; other seeds of the full width {ceiling:.3f}"
        regret, spread = row["regret"]["3"], result["seed_spread"]
        behind = "... the best of their three best is behind the best of all by"
        found += [
            claim(name, rho, f"{RHO:g}", row["rho"] >= RHO),
            claim(behind, f"{regret:.3g}", f"the seed spread, {spread:.3g}", regret <= spread),
        ]
    return found
