"""Show a result to people: a table of the best trials and a line on the cost, on a console and in a notebook."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hydro_rasda.common.console import duration
from hydro_rasda.common.heat_names import HEAT_NAMES, HeatName
from hydro_rasda.common.short_values import counted, error_line, show
from hydro_rasda.history.lines import number_of, score_in
from hydro_rasda.records.records import (
    DIFFER,
    Cost,
    RunRecord,
    TrialRecord,
    by_heat,
    in_heat,
    second_of,
    winner_of,
)
from hydro_rasda.run.claim import held
from hydro_rasda.run.crash_log import DROPPED, TRY_AGAIN
from hydro_rasda.run.time_left import LEAST_TOLD, roughly
from hydro_rasda.schedulers.ranking import ranked
from hydro_rasda.settings.config import averaged, unaveraged

SHOWN = 8
"""Number of trials in the table on a console; a page has all of them."""


def render(result: RunRecord, shown: int | None = SHOWN) -> Group:
    """Draw a table of the `shown` best trials (None for all), full-size trials first, and the cost of the run."""
    records = best_first(result)[:shown]
    title = f"{len(records)} of {counted(len(result.trials), 'trial')}, by {result.metric} ({result.mode})"
    table = Table(title=Text(title, style="table.title"), title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    middle = any(record.middle_epochs for record in result.trials)
    for heading in ("trial", "sweep\n(epochs)", *["middle\n(epochs)"] * middle, "race\n(epochs)"):
        table.add_column(heading, justify="right")
    table.add_column("status", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    names = varied(result)
    for record in records:
        settings = " ".join(f"{name}={show(value)}" for name, value in record.used.items() if name in names)
        table.add_row(*_row(record, middle), Text(settings))
    return Group(table, *map(Text, _told(result)))


def _told(result: RunRecord) -> list[str]:
    lines = chosen_line(result) + front_lines(result) + doubt_line(result) + agreement_line(result)
    return [*filter(None, [live_line(result), cost_line(result), *lines, failed_and_diverged(result)])]


def as_html(result: RunRecord) -> str:
    """Return the table and the lines of `render` as a piece of HTML, for notebooks."""
    result = result.shown()
    names, records = varied(result), best_first(result)[:SHOWN]
    middle = any(record.middle_epochs for record in result.trials)
    heads = ["trial", "sweep (epochs)", *["middle (epochs)"] * middle, "race (epochs)", "status", *names]
    rows = [[*_row(record, middle), *(show(record.used.get(name)) for name in names)] for record in records]
    winner = winner_of(result)
    used = winner.used if winner is not None and best_score(result)[1] else {}
    best = ", ".join(f"{name}={show(value)}" for name, value in used.items())
    lines = [f"{len(records)} of {counted(len(result.trials), 'trial')}, by {result.metric} ({result.mode})"]
    lines += [f"best configuration (trial {result.best_trial}): {best}"] if best else []
    lines += _told(result)
    table = "".join(f"<tr>{_cells('td', cells)}</tr>" for cells in rows)
    told = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f"<div>{told}<table><thead><tr>{_cells('th', heads)}</tr></thead><tbody>{table}</tbody></table></div>"


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)


def varied(result: RunRecord) -> list[str]:
    """Return the hyperparameters that differ between trials. Only these can explain why one trial beat another."""
    used = [record.used for record in result.trials]
    names = dict.fromkeys(name for values in used for name in values)
    return [n for n in names if len({repr(values.get(n)) for values in used}) > 1]


def best_first(result: RunRecord) -> list[TrialRecord]:
    """Sort trials: the winner first, then full-size models, then surrogates, each by epochs and score.

    Surrogates of the middle heat come before those of the sweep.
    """
    sign = 1.0 if result.mode == "min" else -1.0

    def key(record: TrialRecord) -> list[float]:
        places = [float(record.trial != result.best_trial)]
        for heat in reversed(HEAT_NAMES):
            score, epochs = in_heat(record, heat)
            known = math.isfinite(score)
            # A trial that diverged at full size is ranked by its surrogates.
            places += [-epochs if known or heat != "race" else 0, not known, sign * score if known else 0.0]
        return places

    return sorted(result.trials, key=key)


def cost_line(result: RunRecord) -> str:
    """Say the run's cost and, as an estimate, the time that its surrogates saved (see `Cost.spared_seconds`)."""
    cost = result.cost
    line = f"{duration(cost.seconds)}: {_spent(cost)}"
    if result.transfer is not None:
        line += f"; transfer is {result.transfer.verdict} (rank correlation {result.transfer.rho:.2f})"
    if cost.spared_seconds >= 1:
        line += f"; the fused surrogates spared about {duration(cost.spared_seconds)} of full-size training"
    return line


IN_WORDS: Mapping[HeatName, str] = {"sweep": "sweep", "middle": "middle heat", "race": "race"}


def _spent(cost: Cost) -> str:
    """Say the epochs and the time of each heat."""
    spent = ((IN_WORDS[heat], epochs, duration(seconds)) for heat, (epochs, seconds) in by_heat(cost).items())
    return ", ".join(f"{counted(epochs, 'epoch')} of the {name} in {took}" for name, epochs, took in spent)


def both_units(result: RunRecord, seconds: float) -> str:
    """Say a time; if the run has trained at full size, also say it in full trainings."""
    full = result.cost.full_trainings(seconds, result.max_t)
    return duration(seconds) + (f" ({counted(full, 'full training')})" if math.isfinite(full) else "")


def kept_weights(result: RunRecord) -> str:
    """Say which of the winner's weights its metric measures: their epoch, and whether they are averages.

    Averages are mentioned only if the run's folder tells whether there are any. The text is empty if no full-size model
    has a metric.
    """
    winner = winner_of(result)
    if winner is None or not math.isfinite(result.best_metric):
        return ""
    weights = {None: "", True: ", averaged", False: ", not averaged"}[result.averaged]
    return f"the weights after epoch {winner.kept_epoch} of {winner.epochs}{weights}"


def chosen_line(result: RunRecord) -> list[str]:
    """Say which weights the winner keeps; return no line if no full-size model has a metric."""
    by = kept_weights(result)
    return [f"trial {result.best_trial} wins, by {result.metric} ({result.mode}); it keeps {by}"] if by else []


def front_lines(result: RunRecord) -> list[str]:
    """Name the full-size models on the Pareto front of several metrics, and say if all of them break a bound.

    No line is returned for a single metric without bounds.
    """
    comparison, front = result.comparison, result.pareto
    lines = []
    if comparison.several and front:
        names = [name for name, _ in comparison.objectives]
        told = [f"trial {t.trial} ({', '.join(f'{n} {show(t.metrics[n], 4)}' for n in names)})" for t in front]
        lines = [f"on the front of the full-size models: {'; '.join(told)}"]
    if front and comparison.bounds and any(comparison.violations({t.trial: t.metrics for t in front}).values()):
        lines.append("no full-size model keeps all bounds of `sweep.constraints`: these break them least")
    return lines


def doubt_line(result: RunRecord) -> list[str]:
    """Say how sure the choice of the winner is, and what to do about it; no line if only one finalist trained."""
    trained = {record.trial: record for record in result.trials if not math.isnan(record.chance)}
    winner = trained.get(result.best_trial)
    if winner is None or len(trained) < 2:
        return []
    told = sampling_line(result)
    line = f"trial {winner.trial} won among {len(trained)} at full size (confidence {_percent(winner.chance)}"
    line += " on these validation examples)" if told else ")"
    if result.expected_gain > _NOTHING * abs(result.best_metric):
        change = "lower" if result.mode == "min" else "raise"
        line += f"; one more full training should {change} {result.metric} by at most {show(result.expected_gain)}"
    elif math.isfinite(result.expected_gain):
        line += "; no gain is expected from one more full training"
    other = max(trained.values(), key=lambda record: record.chance)
    likelier = other.status == "stopped" and round(other.chance, 2) > round(winner.chance, 2)
    doubt = f"trial {other.trial} was stopped after epoch {other.epochs} and may have become better"
    more = "time_budget_s" if state_of(result) == "out of time" else "full_trainings"
    doubts = [f"{doubt} ({_percent(other.chance)}): raise `{more}` to find out"] if likelier else []
    without = [] if likelier else _without_averages_line(result, winner)
    return [line, *told, *doubts, *better_line(result), *without]


def _percent(chance: float) -> str:
    return f"{chance:.0%}" if chance < 0.995 else "over 99%"  # an estimate is never 100%


_NOTHING = 1e-3
"""Gains below this share of the best score count as no gain."""


def sampling_line(result: RunRecord) -> list[str]:
    """Return the run's message about the sampling error of its two best trials; no line if there is no such message.

    A message about a former second best trial does not count.
    """
    begins = DIFFER.format(result.best_trial, second_of(result))
    return [message.text for message in result.messages if message.text.startswith(begins)][-1:]


def better_line(result: RunRecord) -> list[str]:
    """Name the trial with a better score than the winner, and say why it did not win; no line without such a trial."""
    winner = winner_of(result)
    if winner is None or not (result.ended and math.isfinite(winner.metric)):
        return []
    broken = result.comparison.violations({record.trial: record.metrics for record in result.trials})
    able = {r.trial: r for r in result.trials if math.isfinite(r.metric) and broken[r.trial] <= broken[winner.trial]}
    best = able[ranked({number: record.metric for number, record in able.items()}, result.mode)[0]]
    if best.metric == winner.metric:
        return []
    stopped = "it was behind others by its latest weights, and was stopped" if result.finished else "training ended"
    why = {
        "finished": "but training left it worse than the winner in the end",
        "stopped": f"but {stopped} after epoch {best.epochs}",
    }.get(best.status, f"but it {best.status} later")
    score = f"{show(best.metric, 4)} after epoch {best.kept_epoch}"
    return [f"trial {best.trial} had a better {result.metric}, {score} (`result.best_model({best.trial})`), {why}"]


def _without_averages_line(result: RunRecord, winner: TrialRecord) -> list[str]:
    """Name a trial whose weights without averages ended better than the winner's.

    No line is returned if there is no such trial, or if trials are compared by several metrics.
    """
    name = unaveraged(result.metric)
    lines = {r.trial: r.history[-1] for r in result.trials if r.status == "finished" and r.history}
    # Leave out a training that ended between milestones. There, only its averages were validated, so its last line has
    # neither of the two names.
    known = {n: line for n, line in lines.items() if {name, averaged(result.metric)} & line.keys()}
    found = {n: line.get(name, line.get(result.metric)) for n, line in known.items()}
    ends = {n: end for n, end in found.items() if end is not None}  # the journal writes None if a value is not finite
    if result.others or name not in lines.get(winner.trial, ()) or winner.trial not in ends:
        return []
    best = ranked(ends, result.mode)[0]
    if ends[best] == ends[winner.trial]:
        return []
    told = f"as training left them in the end, trial {best} has {result.metric} {show(ends[best])}"
    told += f", and the winner {show(ends[winner.trial])}"
    return [f"{told}: to train again without averages, take the configuration of trial {best}"]


def agreement_line(result: RunRecord) -> list[str]:
    """Say whether full-size models and surrogates rank the finalists alike; no line for fewer than two finalists."""
    found = result.agreement
    if found is None or len(found.scores) < 2:
        return []
    if found.verdict == "open":
        return [f"{len(found.scores)} finalists are too few to tell whether surrogates rank them as full size does"]
    line = f"surrogates and full size on {len(found.scores)} finalists after epoch {found.epoch}: "
    line += f"rank correlation {found.rho:.2f}, they {found.verdict} (chance alone: {found.by_chance:.0%})"
    return [line + "; `sweep=SweepConfig(check_transfer=True)` compares more" * (found.verdict == "disagree")]


def state_of(record: RunRecord) -> str:
    """Return a run's state in words; a run that trains on another machine looks interrupted."""
    if record.ended:
        return "finished" if record.finished else "out of time"
    return "running" if held(record.path) else "interrupted"


def progress_of(record: RunRecord, idle: float) -> str:
    """Say which share of a run is done and how much time is left; empty if that is unknown.

    `idle` is the time since the last line of the journal, in seconds.
    """
    if record.ended:
        return "100 %" if record.finished else ""
    left = record.seconds_left
    if left is None:
        return ""
    share = f"{record.cost.seconds / max(record.cost.seconds + left, 1e-9):.0%}".replace("%", " %")
    more = f", about {roughly(left - idle)} left" if left - idle >= LEAST_TOLD else ""
    return f"{share}{more}" if held(record.path) else share


def explained(state: str) -> str:
    """Return a state of `state_of`, with advice on how to resume such a run."""
    if state == "interrupted":
        return "interrupted, or running elsewhere; repeat the call to resume"
    return "out of time; repeat the call with a larger `time_budget_s` to go on" if state == "out of time" else state


def failed_and_diverged(record: RunRecord) -> str:
    """Count the trials that failed and those that diverged; empty if there are none."""
    found, trials = Counter(trial.status for trial in record.trials), len(record.trials)
    counts = [(found[status], status) for status in ("failed", "diverged") if found[status]]
    told = [f"{count} of {counted(trials, 'trial')} {status}" for count, status in counts[:1]]
    return " and ".join([*told, *(f"{count} {status}" for count, status in counts[1:])])


def failure_lines(record: RunRecord) -> list[str]:
    """Return a line for each kind of error, with the number of its trials, and one for the trials that diverged."""
    alike: dict[str, list[TrialRecord]] = {}
    for trial in (trial for trial in record.trials if trial.error):
        # Errors quote the trial's configuration in braces. Without it, equal errors are counted together.
        alike.setdefault(re.sub(r"\{.*\}", "", error_line(trial.error)), []).append(trial)
    lines = [f"failed: {_first_of(trials)}: {error_line(trials[0].error)}" for trials in alike.values()]
    if diverged := [trial for trial in record.trials if trial.status == "diverged"]:
        told = f"its training loss or {record.metric} was no longer finite; a lower `lr` may help"
        lines.append(f"diverged: {_first_of(diverged)}: {told}")
    return lines


def _first_of(trials: Sequence[TrialRecord]) -> str:
    return f"trial {trials[0].trial}{f' and {len(trials) - 1} more' if len(trials) > 1 else ''}"


def closing_lines(result: RunRecord, path: str) -> list[str]:
    """Return the last lines of a run: its result, its cost, its failures, and the next command to type."""
    winner = result.trials[result.best_trial]
    settings = " ".join(f"{name}={show(value)}" for name, value in winner.used.items())
    lines = [f"Best configuration (trial {result.best_trial}): {settings}"]
    data = f"on the {'training' if result.metric.startswith('train_') else 'validation'} data"
    if result.over and winner.spread is not None:
        data = f"over {result.over} (standard deviation {show(winner.spread, 2)})"
    if math.isfinite(result.best_metric):
        kept = f"after epoch {winner.kept_epoch} of {winner.epochs}"
        kept += f" (a full training has {result.max_t})" if winner.epochs < result.max_t else ""
        lines.append(f"Its {result.metric} {data} is {show(result.best_metric, 4)}, at full size {kept}.")
    else:
        score = f"Its {result.metric} {data} is {show(best_score(result)[0], 4)}, on its surrogate"
        lines.append(f"{score}: no full-size model has a score yet.")
    lines += map(sentence, [*front_lines(result), *better_line(result)])
    lines.append(f"Cost: {both_units(result, result.cost.seconds)}; {_spent(result.cost)}.")
    if bad := failed_and_diverged(result):
        lines.append(f"{bad}; to see why: hydro-rasda show {path}")
    lines += dropped_lines(result)
    if not result.finished:
        lines.append(f"The run is {explained(state_of(result))}.")
    return [*lines, f"For figures and all trials: hydro-rasda report {path}"]


def sentence(line: str) -> str:
    """Write a line as a sentence, with a capital letter and a full stop."""
    return f"{line[0].upper()}{line[1:]}."


def dropped_lines(result: RunRecord) -> list[str]:
    """Say which trials were dropped because the tuner's own process died of them, and how to try them again."""
    numbers = [str(trial.trial) for trial in result.trials if (trial.error or "").startswith(DROPPED)]
    if not numbers:
        return []
    one = len(numbers) == 1
    of, it = (f"Trial {numbers[0]} was", "it") if one else (f"Trials {', '.join(numbers)} were", "each")
    again = TRY_AGAIN if one else TRY_AGAIN.replace("tries it", "tries them")
    return [f"{of} dropped: {DROPPED} of {it} three times; {again}."]


def rungs(result: RunRecord) -> dict[HeatName, dict[int, int]]:
    """Return `counts[heat][epoch]`, for each last epoch of a trial: the number of trials that reached this epoch."""
    found = {}
    for heat in HEAT_NAMES:
        reached = [epochs for record in result.trials if (epochs := in_heat(record, heat)[1])]
        if reached:
            found[heat] = {stop: sum(at >= stop for at in reached) for stop in sorted(set(reached))}
    return found


def live_trials(result: RunRecord) -> list[TrialRecord]:
    """Return the trials with epochs at full size since their last checkpoint, the most epochs first."""
    return sorted((trial for trial in result.trials if trial.live), key=lambda trial: -trial.reached)


def live_line(result: RunRecord) -> str:
    """Say which epoch each full-size model in training has reached, and its last score.

    Empty if no full-size model has trained an epoch since its last checkpoint.
    """
    trials = live_trials(result)
    told = [f"trial {t.trial} at epoch {t.reached} of {result.max_t} ({_last(result, t)})" for t in trials[:SHOWN]]
    more = [f"{len(trials) - SHOWN} more"] if len(trials) > SHOWN else []
    return f"under way at full size: {', '.join([*told, *more])}" if told else ""


def _last(result: RunRecord, trial: TrialRecord) -> str:
    return f"{result.metric} {show(number_of(score_in(trial.live[-1], result.metric)), 4)}"


def status_of(record: TrialRecord) -> str:
    """Return a trial's status; while it trains at full size, return its epoch instead."""
    return f"at epoch {record.reached}" if record.live else record.status


def rung_lines(result: RunRecord) -> list[str]:
    """Say the counts of `rungs` in words, a line for each heat."""
    return [
        f"{heat}: {', '.join(f'{count} to epoch {stop}' for stop, count in counts.items())}"
        for heat, counts in rungs(result).items()
    ]


def best_line(result: RunRecord) -> str:
    """Say the best score so far in a few words; empty if no trial has one."""
    score, heat = best_score(result)
    if heat is None:
        return ""
    return f"best {result.metric} {show(score, 4)} in the {IN_WORDS[heat]} (trial {result.best_trial})"


def best_score(result: RunRecord) -> tuple[float, HeatName | None]:
    """Return the best score of the run, and the heat in which it was reached; NaN and None without a score."""
    if math.isfinite(result.best_metric):
        return result.best_metric, "race"
    if (winner := winner_of(result)) is not None:
        heats: tuple[HeatName, ...] = ("middle", "sweep")
        for heat in heats:
            score, _ = in_heat(winner, heat)
            if math.isfinite(score):
                return score, heat
    return math.nan, None


def _row(record: TrialRecord, middle: bool) -> tuple[str, ...]:
    """Return a trial's cells in the table of `render`; `middle` tells if there is a column for the middle heat."""
    spread = "" if record.spread is None else f" ± {show(record.spread, 2)}"
    narrow, full = ("", spread) if record.epochs else (spread, "")
    return (
        str(record.trial),
        f"{show(record.sweep_metric)}{narrow} ({record.sweep_epochs})" if record.sweep_epochs else "",
        *[f"{show(record.middle_metric)} ({record.middle_epochs})" if record.middle_epochs else ""] * middle,
        f"{show(record.metric)}{full} ({_epochs(record)})" if record.epochs else "",
        status_of(record),
    )


def _epochs(record: TrialRecord) -> str:
    kept = "" if record.kept_epoch == record.epochs else f"{record.kept_epoch} of "
    return f"{kept}{record.epochs}"
