"""Fused training steps of this version of the library against those of another, in pairs on one CPU.

    python -m benchmarks.fusion_versions --against baece07
    python -m benchmarks.fusion_versions --against baece07 --add

Steps and models are those of `fusion_throughput`, in groups of fixed sizes. Each round starts a process of either
version, with the same benchmark code, and has them take turns: a pass of the one, a pass of the other, now this one
first, now that. A ratio is the other version's time over this one's: above 1, this one is faster. Another round
(`--add`) has other processes, whose blocks of memory lie elsewhere, which makes a difference of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusion
from benchmarks.fusion_cases import CASES
from benchmarks.fusion_throughput import (
    MIN_PAIRS,
    RESULTS,
    SEED,
    STEPS,
    Pass,
    Times,
    environment,
    fused_pass,
    quartiles,
    spread,
    timed,
)
from fusion.width import keep_freed_memory

ROOT = Path(__file__).parents[1]
NAME = "fusion_versions"
CLIPPED = 1.0
"""The norm that each trial's gradients are clipped to, where they are."""


class Group(NamedTuple):
    """What trains as one: trials of a case."""

    case: str
    trials: int
    clipped: bool = False


GROUPS = (
    *(Group("mlp", trials) for trials in (8, 32, 64)),
    *(Group("transformer", trials) for trials in (8, 32, 64)),
    *(Group("conv", trials) for trials in (8, 16)),
    *(Group("resnet18", trials) for trials in (4, 8)),
    Group("lora", 8),
    Group("mlp", 32, clipped=True),
    Group("resnet18", 8, clipped=True),
)
"""Those that planning chose for `fusion_throughput`, and two of them with clipping."""


class Version:
    """A process in which one version of `fusion` trains.

    Args:
        folder: Where that version lies: it has a folder `fusion`.
        scratch: An empty folder.
        threads: Of torch.

    Raises:
        RuntimeError: where the process imported another one.
    """

    def __init__(self, folder: Path, scratch: Path, threads: int) -> None:
        (scratch / "fusion").symlink_to(folder / "fusion")
        (scratch / "benchmarks").symlink_to(ROOT / "benchmarks")
        command = [sys.executable, "-m", f"benchmarks.{NAME}", "--serve", "--threads", str(threads)]
        self._process = subprocess.Popen(command, cwd=scratch, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        imported = Path(self._answer())
        if imported != (folder / "fusion" / "__init__.py").resolve():
            raise RuntimeError(f"{imported} was imported for {folder}")

    def __enter__(self) -> Version:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # which closes its pipes and waits
            pass

    def prepare(self, group: Group) -> None:
        """Have it build a group, and train it for two passes."""
        self._ask(list(group))

    def time(self) -> Times:
        """Have it train for one more."""
        return Times(*self._ask(None))

    def _ask(self, what: Any) -> Any:
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"a version's process ended with exit status {self._process.wait()}")
        return json.loads(line)


def serve() -> None:
    """What a `Version`'s process does: answers lines of JSON by lines of JSON."""
    keep_freed_memory()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr
    print(json.dumps(str(Path(fusion.__file__).resolve())), file=answers, flush=True)
    run: Pass = lambda: None  # noqa: E731
    for line in sys.stdin:
        asked = json.loads(line)
        if asked is not None:
            run = _passes(Group(*asked))
            run()
            run()
        print(json.dumps(None if asked is not None else timed(run)), file=answers, flush=True)


def _passes(group: Group) -> Pass:
    case = next(case for case in CASES if case.name == group.case)
    modules, configs = case.trials(group.trials, SEED)
    batch = case.batch(torch.Generator().manual_seed(SEED))
    return fused_pass(case, modules, configs, batch, CLIPPED if group.clipped else None)


def race(other: Version, this: Version, seconds: float) -> dict[str, Any]:
    """Pairs of passes for about `seconds`: ratios, and milliseconds of a step of the whole group."""
    times: dict[Version, list[Times]] = {other: [], this: []}
    start = time.perf_counter()
    for pair in count():
        if pair >= MIN_PAIRS and time.perf_counter() - start > seconds:
            break
        for version in (other, this) if pair % 2 else (this, other):
            times[version].append(version.time())
    pairs = list(zip(times[other], times[this]))
    return {
        "ratios": [round(a.wall / b.wall, 4) for a, b in pairs],
        "cpu_ratios": [round(a.cpu / b.cpu, 4) for a, b in pairs],
        "ms_other": 1e3 * statistics.median(a.wall for a in times[other]) / STEPS,
        "ms_this": 1e3 * statistics.median(b.wall for b in times[this]) / STEPS,
        "load": os.getloadavg()[0],
    }


def measure(
    folder: Path, groups: Sequence[Group], seconds: float, threads: int
) -> Iterator[tuple[Group, dict[str, Any]]]:
    """One round: each group, with the version in `folder` against this one, in two new processes."""
    with ExitStack() as stack:
        scratch = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        other = stack.enter_context(Version(folder, scratch[0], threads))
        this = stack.enter_context(Version(ROOT, scratch[1], threads))
        for group in groups:
            for version in (other, this):
                version.prepare(group)
            yield group, race(other, this, seconds)


def unpacked(revision: str, folder: Path) -> Path:
    """A folder with the `fusion` of a revision of this repository."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", revision, "fusion"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A group's medians and quartiles over the pairs of all rounds, and the rounds' own medians."""
    found: dict[str, Any] = {"pairs": sum(len(each["ratios"]) for each in rounds)}
    for name in ("ratios", "cpu_ratios"):
        pairs = [ratio for each in rounds for ratio in each[name]]
        found[name] = statistics.median(pairs), *quartiles(pairs)
    for name in ("ms_other", "ms_this"):
        found[name] = statistics.median(each[name] for each in rounds)
    found["rounds"] = [statistics.median(each["ratios"]) for each in rounds]
    found["slower"] = found["ratios"][2] < 1 and max(found["rounds"]) < 1
    return found


def title(group: Group) -> str:
    """The group in words."""
    case = next(case for case in CASES if case.name == group.case)
    return f"{case.title}, {group.trials} trials{', each clipped' if group.clipped else ''}"


def render(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    env = result["environment"]
    lines = [
        "# Fused steps of two versions, CPU",
        "",
        f"This version against {result['against']}; {env['date']}; {env['cpu']}, {env['cores']} cores, "
        f"{env['threads']} threads; Python {env['python']}, torch {env['torch']}; seed {env['seed']}.",
        "",
        f"`python -m benchmarks.{NAME} --against {result['against'].split()[0]}`, with `--add` for each further round. "
        "Faster by: time of a pass of fused training steps of the other version over that of this one. It is the "
        "median of all pairs, quartiles in brackets. By round: the medians of the rounds, each of new processes. Both "
        "ms columns have the time of a step of the whole group. A group is slower if its upper quartile, and its "
        "median in every round, is below 1.",
        "",
        "| group (batch) | faster by, wall | by round | faster by, CPU | ms before | ms now | pairs | slower |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        found = summary(row["rounds"])
        (wall, *walls), (cpu, *cpus) = found["ratios"], found["cpu_ratios"]
        cells = [title(Group(*row["group"])), spread(wall, walls), ", ".join(f"{m:.2f}" for m in found["rounds"])]
        cells += [spread(cpu, cpus), f"{found['ms_other']:.1f}", f"{found['ms_this']:.1f}", str(found["pairs"])]
        lines.append("| " + " | ".join([*cells, "**yes**" if found["slower"] else "no"]) + " |")
    return "\n".join([*lines, "", *result.get("notes", [])]).rstrip() + "\n"


def main() -> None:
    """Measure a round, and write `fusion_versions.json` and `.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="a revision of this repository")
    parser.add_argument("--add", action="store_true", help="to the rounds that are there")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=14.0, help="for each group")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.serve:
        serve()
        return
    if arguments.against is None:
        parser.error("--against is needed")
    told = ["git", "show", "--no-patch", "--format=%h of %as", arguments.against]
    against = subprocess.run(told, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    path = arguments.out / f"{NAME}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if arguments.add else {"against": against, "rows": []}
    if result["against"] != against:
        raise SystemExit(f"{path} has rounds against another version")
    rounds = {Group(*row["group"]): row["rounds"] for row in result["rows"]}
    result["environment"] = environment(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    groups = [group for group in GROUPS if group.case in arguments.cases]
    with tempfile.TemporaryDirectory() as folder:
        for group, raced in measure(
            unpacked(arguments.against, Path(folder)), groups, arguments.seconds, arguments.threads
        ):
            rounds.setdefault(group, []).append(raced)
            result["rows"] = [{"group": each, "rounds": rounds[each]} for each in GROUPS if each in rounds]
            path.write_text(json.dumps(result, indent=1) + "\n")
            path.with_suffix(".md").write_text(render(result))
            print(group, *(f"{value:.3f}" for value in summary([raced])["ratios"]), flush=True)


if __name__ == "__main__":
    main()
