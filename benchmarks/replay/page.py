"""Everything that the replay tables say, as one page beside them; what people read from it is written by hand.

python -m benchmarks.replay write
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.replay import ablations, anytime, calibration, family, few, live, recall, study
from benchmarks.replay.table import FOLDER, Table, recorded
from benchmarks.replay.truth import Keep

NOTES = "replay_notes.md"
ENDS: dict[Keep, str] = {
    "last": "The last epoch's weights count",
    "best": "The best epoch's weights count, at full width averaged ones",
}
ANYTIME = (
    'If a search were stopped: regret, as under "Policies", of the configuration that validated best of those in '
    "training at full width, as far as each has come; every method keeps its best epoch. As long as nothing has been "
    "trained at full width, a run counts as 10 behind, the most that any does. Optuna's TPE has 7.5 trainings to "
    "spend; where configurations are few, it has tried them all before that."
)
ABLATIONS = (
    "Today's rule with one thing changed: its cost, its regret, how often its test score is no more than a standard "
    "deviation behind ASHA's, and how often it reaches the validation score of ASHA's winner, where the best epoch's "
    "weights count and where the last one's do."
)
LIVE = (
    "Of the searches that [were run live](vs_asha.md), those whose configurations are recorded, each with its own "
    "weights and orders of examples: how often a policy comes to a validation score as good as the one that Ray's ASHA "
    "came to in that run, and how often to a test score no more than a standard deviation between seeds behind. "
    "`cost`: mean over tasks, in full trainings, by CPU seconds of one thread. Best epochs are kept, of averaged "
    "weights."
)
FEW = (
    "Each on 50 random subsets of so many configurations and each seed: mean cost, in full trainings, and regret "
    'behind the best of the subset, as under "Policies". Best epochs are kept, of averaged weights.'
)
SECTIONS = (
    (
        "Where the best configuration is lost",
        recall,
        "The true best has the best validation score in the end at full width, as the mean over seeds. `rho`: "
        "Spearman's correlation with that, over all configurations. `best in k`: how often the true best of a "
        "random half of the configurations is among the k best there. `its place`: of the best of all, the median"
        " over seeds. `regret of 4`: by how much the best of the first 4 is behind, in standard deviations "
        "between seeds. The right half ranks by averaged weights.",
    ),
    (
        "What is foreseen",
        calibration,
        "Standard deviations, in those between seeds, of how the eight best surrogates' configurations end at "
        "full size: `ends`: without any forecast; `by surrogate`: less the surrogate's last score; then after a "
        "part of the full-size training, less the score there, that `and change` of the surrogate from there on, "
        "and with the best share of that change.",
    ),
    (
        "Policies",
        study,
        "Each on 100 random three quarters of the configurations and each seed. `cost`: median, in full "
        "trainings, by CPU seconds of one thread. `regret`: by how much the winner's validation score with the "
        "other seeds is behind the best configuration's; `test against ASHA`: their test scores compared; both in"
        " standard deviations between seeds, 10 at most. `not worse by 1`: how often it is not behind ASHA by "
        "more than one. Optuna's TPE begins no further configuration once its trainings are spent or all are tried.",
    ),
    (
        "What a budget buys",
        family,
        "The best four of about 1,000 policies for a budget. They were chosen on the tables that they are shown on.",
    ),
)


def overview(tables: Mapping[str, Table]) -> str:
    """For each task, width and seed, how many configurations are recorded, and the CPU minutes that they took."""
    lines = ["| task | width | seed | configurations | CPU minutes |", "|---|---|---|---|---|"]
    for name, table in tables.items():
        for i, width in enumerate(table.about.widths):
            for j, seed in enumerate(table.about.seeds):
                there = table.recorded[i, j]
                minutes = table.seconds[i, j][there].sum() / 60
                lines.append(f"| {name} | {width:g} | {seed} | {there.sum()} of {len(there)} | {minutes:.1f} |")
    return "\n".join(lines)


def write(folder: Path = FOLDER) -> Path:
    """Draw the page and its figure beside the folder of the tables."""
    tables = recorded(folder)
    environments = {json.dumps(e, sort_keys=True) for table in tables.values() for e in table.about.environments}
    parts = ["# Replay", "", f"Drawn by `python -m benchmarks.replay write`; [what to read from it]({NOTES}).", ""]
    parts += [f"Recorded with: {', '.join(sorted(environments))}.", "", overview(tables), ""]
    path = folder.parent / "replay.md"
    parts += ["## Anytime", "", ANYTIME, "", anytime.page(tables, path.with_suffix(".png")), ""]
    searches = live.setups(folder)
    parts += ["## The live searches, replayed", "", LIVE, "", live.page(searches), "", live.agreements(searches), ""]
    parts += ["## Few configurations", "", FEW, "", few.page(tables), ""]
    parts += ["## Ablations", "", ABLATIONS, "", ablations.page(tables), ""]
    for keep, told in ENDS.items():
        for title, module, meaning in SECTIONS:
            parts += [f"## {title}", "", f"{told}. {meaning}", "", module.page(tables, keep), ""]
    path.write_text("\n".join(parts).rstrip() + "\n")
    return path
