"""A result for people: a table of the best trials and a line on the cost, on a console and in a notebook."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hydro_rasda.console import show
from hydro_rasda.results.records import RunRecord, TrialRecord
from hydro_rasda.run.run_lock import held

SHOWN = 8
"""Trials in the table on a console; a page has all of them."""


def render(result: RunRecord, shown: int | None = SHOWN) -> Group:
    """The best trials, those trained at full size first, and what the run cost.

    Args:
        result: What a run found.
        shown: Rows of the table; None for all trials.
    """
    records = best_first(result)[:shown]
    title = f"{len(records)} of {len(result.trials)} trials, by {result.metric} ({result.mode})"
    table = Table(title=Text(title, style="table.title"), box=SIMPLE)
    for heading in ("trial", "surrogate\n(epochs)", "full size\n(epochs)"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    names = _varied(result)
    for record in records:
        settings = " ".join(f"{name}={show(record.config[name])}" for name in names if name in record.config)
        table.add_row(*_row(record), Text(settings))
    lines = [cost_line(result), *chosen_line(result), *doubt_line(result), *agreement_line(result)]
    return Group(table, *map(Text, lines))


def as_html(result: RunRecord, shown: int = SHOWN) -> str:
    """The same as a piece of HTML, for notebooks."""
    result = result.shown()
    names, records = _varied(result), best_first(result)[:shown]
    heads = ["trial", "surrogate (epochs)", "full size (epochs)", "status", *names]
    rows = [[*_row(record), *(show(record.config.get(name)) for name in names)] for record in records]
    best = ", ".join(f"{name}={show(value)}" for name, value in result.best_config.items())
    lines = [f"{len(records)} of {len(result.trials)} trials, by {result.metric} ({result.mode})"]
    lines += [f"best configuration (trial {result.best_trial}): {best}"] if best else []
    lines += [cost_line(result), *chosen_line(result), *doubt_line(result), *agreement_line(result)]
    table = "".join(f"<tr>{_cells('td', cells)}</tr>" for cells in rows)
    told = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f"<div>{told}<table><thead><tr>{_cells('th', heads)}</tr></thead><tbody>{table}</tbody></table></div>"


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)


def _varied(result: RunRecord) -> list[str]:
    """Names whose values differ between trials: the others do not tell why one beat another."""
    names = dict.fromkeys(name for record in result.trials for name in record.config)
    return [n for n in names if len({repr(record.config.get(n)) for record in result.trials}) > 1]


def best_first(result: RunRecord) -> list[TrialRecord]:
    """The winner, then records by how far their full-size models went and how well they did, or their surrogates."""
    sign = 1.0 if result.mode == "min" else -1.0

    def key(record: TrialRecord) -> tuple[float, ...]:
        full, narrow = record.metric, record.surrogate_metric
        return (
            float(record.trial != result.best_trial),
            *((0.0, -record.epochs, sign * full) if math.isfinite(full) else (1.0, 0.0, 0.0)),
            -record.surrogate_epochs,
            *((0.0, sign * narrow) if math.isfinite(narrow) else (1.0, 0.0)),
        )

    return sorted(result.trials, key=key)


def cost_line(result: RunRecord) -> str:
    """What the run cost, and what training its surrogates spared (an estimate: see `Cost.spared_seconds`)."""
    cost = result.cost
    line = (
        f"{cost.seconds:.1f} s: {cost.surrogate_epochs} epochs of surrogates in {cost.surrogate_seconds:.1f} s, "
        f"{cost.target_epochs} epochs at full size in {cost.target_seconds:.1f} s"
    )
    if result.transfer is not None:
        line += f"; transfer is {result.transfer.verdict} (rank correlation {result.transfer.rho:.2f})"
    if cost.spared_seconds >= 1:
        line += f"; the fused surrogates spared about {cost.spared_seconds:.0f} s of full-size training"
    return line


def kept_weights(result: RunRecord) -> str:
    """Which weights of the winner its metric is of: after which epoch, and whether they are averages.

    It says what the run's folder says, and no more. Empty where no full-size model has a metric.
    """
    winner = next((trial for trial in result.trials if trial.trial == result.best_trial), None)
    if winner is None or not math.isfinite(result.best_metric):
        return ""
    weights = {None: "", True: ", averaged", False: ", not averaged"}[result.averaged]
    return f"the weights after epoch {winner.kept_epoch} of {winner.epochs}{weights}"


def chosen_line(result: RunRecord) -> list[str]:
    """Which weights the winner hands back; nothing where no full-size model has a metric."""
    by = kept_weights(result)
    return [f"trial {result.best_trial} wins, by {result.metric} ({result.mode}); it keeps {by}"] if by else []


def doubt_line(result: RunRecord) -> list[str]:
    """How sure the choice among the finalists is, and who or what might be better; nothing where only one trained."""
    trained = {record.trial: record for record in result.trials if not math.isnan(record.chance)}
    winner = trained.get(result.best_trial)
    if winner is None or len(trained) < 2:
        return []
    line = f"trial {winner.trial} is the best of {len(trained)} at full size with probability {winner.chance:.2f}"
    if math.isfinite(result.expected_gain):
        line += f"; training one more would be expected to gain at most {show(result.expected_gain)} in {result.metric}"
    other = max(trained.values(), key=lambda record: record.chance)
    if other.status != "stopped" or round(other.chance, 2) <= round(winner.chance, 2):
        return [line]
    doubt = f"trial {other.trial}, stopped after epoch {other.epochs}, may have become better ({other.chance:.2f})"
    return [line, f"{doubt}: a larger `full_trainings` would show"]


def agreement_line(result: RunRecord) -> list[str]:
    """Whether full size ranks the finalists as their surrogates do; nothing for fewer than two."""
    found = result.agreement
    if found is None or len(found.scores) < 2:
        return []
    line = f"surrogates and full size on {len(found.scores)} finalists after epoch {found.epoch}: "
    if math.isnan(found.rho):
        return [f"{line}no rank correlation"]
    told = {"agree": "they agree", "disagree": "they disagree", "open": "too few to tell"}[found.verdict]
    line += f"rank correlation {found.rho:.2f}, {told} (chance alone: {found.by_chance:.0%})"
    return [line + "; `sweep.check_transfer=True` compares more" * (found.verdict == "disagree")]


def state_of(record: RunRecord) -> str:
    """A word for where a run stands; "not finished" is one that was interrupted, or that goes on on another machine."""
    if record.ended:
        return "finished" if record.finished else "out of time"
    return "running" if held(record.path) else "not finished"


def rungs(result: RunRecord) -> dict[str, dict[int, int]]:
    """How many trials came to which epoch, by stage: the epochs at which one of them stands."""
    found = {}
    for stage, epochs in (("surrogates", "surrogate_epochs"), ("full size", "epochs")):
        reached = [getattr(record, epochs) for record in result.trials if getattr(record, epochs)]
        if reached:
            found[stage] = {stop: sum(at >= stop for at in reached) for stop in sorted(set(reached))}
    return found


def rung_lines(result: RunRecord) -> list[str]:
    """The same in words, a line for each stage."""
    return [
        f"{stage}: {', '.join(f'{count} to epoch {stop}' for stop, count in counts.items())}"
        for stage, counts in rungs(result).items()
    ]


def best_line(result: RunRecord) -> str:
    """The best so far in a few words; empty where no trial has a score."""
    if math.isfinite(result.best_metric):
        return f"best {result.metric} {show(result.best_metric, 4)} at full size (trial {result.best_trial})"
    if result.best_config and math.isfinite(score := result.trials[result.best_trial].surrogate_metric):
        return f"best {result.metric} {show(score, 4)} on a surrogate (trial {result.best_trial})"
    return ""


def _row(record: TrialRecord) -> tuple[str, ...]:
    return (
        str(record.trial),
        f"{show(record.surrogate_metric)} ({record.surrogate_epochs})" if record.surrogate_epochs else "",
        f"{show(record.metric)} ({_epochs(record)})" if record.epochs else "",
        record.status,
    )


def _epochs(record: TrialRecord) -> str:
    kept = "" if record.kept_epoch == record.epochs else f"{record.kept_epoch} of "
    return f"{kept}{record.epochs}"
