"""`simulate`: how long would a search like a past run take on N GPUs, and which rule and GPUs are best?"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from hydro_rasda.cli.output import print_json, print_table, say, size
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.console import duration
from hydro_rasda.common.short_values import counted, show
from hydro_rasda.schedulers import Mode
from hydro_rasda.simulator import Forecast, PastRun, Recommendation, Scenario, forecast, read_past_run, recommend, why
from hydro_rasda.simulator.forecast import TOLERANCE, TUNE
from hydro_rasda.simulator.scenario import HOUR, cost_model

_UNITS = {"s": 1 / HOUR, "m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0}


def print_forecasts(
    path: str, options: Mapping[str, Any], metric: str | None, mode: Mode | None, within: str | None, as_json: bool
) -> bool:
    """Print the forecast of each rule, and a recommendation if there is a limit.

    `options` has "gpu_hours", and the fields of `Scenario` for which there is a command-line option. None stands for
    the default. Return False if there is a limit that nothing keeps, else True.
    """
    deadline, budget = _hours(within), options["gpu_hours"]
    scenario = Scenario(**{field.name: options[field.name] for field in fields(Scenario) if field.name in options})
    try:
        run = read_past_run(path, metric, mode)
        forecasts = forecast(run, scenario)
        limited = deadline is not None or budget is not None
        advice = recommend(run, scenario, deadline, budget) if limited else None
    except ValueError as error:
        raise ValueError(_as_given(error, {*options, "rules", "metric", "mode"})) from error
    if as_json:
        chosen = advice and {name: each and _row(each) for name, each in vars(advice).items()}
        print_json({"forecasts": [_row(each) for each in forecasts], "recommended": chosen})
    else:
        _print_table(run, scenario, forecasts)
        if advice:
            limits = [f"within {within}"] if within else []
            limits += [f"for {budget:g} GPU hours"] if budget is not None else []
            say("\n" + "\n".join(_advice(advice, scenario, " and ".join(limits))))
    return advice is None or advice.rule is not None or advice.tune is not None


def _as_given(error: ValueError, options: Collection[str]) -> str:
    """Rewrite an error for the command line: the argument `max_t` becomes --max-t."""
    return re.sub(r"`(\w+)`", lambda name: f"`{_flag(name[1])}`" if name[1] in options else name[0], str(error))


def _flag(name: str) -> str:
    return "--rule" if name == "rules" else "--" + name.replace("_", "-")


def _hours(text: str | None) -> float | None:
    """Convert a duration such as "4h", "90m" or "2d" to hours; None stays None."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)\s*", text)
    holds = found is not None and found[2] in _UNITS and 0 < float(found[1]) < math.inf
    require(holds, "--within", text, "a number above 0 and its unit, such as 4h, 90m or 2d")
    assert found is not None
    return float(found[1]) * _UNITS[found[2]]


def _row(each: Forecast) -> dict[str, Any]:
    """Return a forecast as plain values for JSON, with a name for each part of its GPU time."""
    return asdict(each) | {"spending": each.spending._asdict()}


def _print_table(run: PastRun, scenario: Scenario, forecasts: Sequence[Forecast]) -> None:
    say("\n".join([*_basis(run, scenario), ""]))
    rows = []
    for f in forecasts:
        spread = " to ".join(duration(hours * HOUR) for hours in f.hours_range)
        regret = "" if math.isnan(f.regret) else f"{f.regret:.3g}"
        hours = (
            round(h, 3 if h < 1 else 2 if h < 10 else 1 if h < 100 else None)
            for h in (f.gpu_hours, f.reserved_gpu_hours)
        )
        counts = f"{f.utilization:.0%}", round(f.epochs), round(f.finished)
        rows.append((f.name, duration(f.hours * HOUR), spread, *hours, *counts, regret))
    print_table(["rule", "takes", "from", "GPU hours", "reserved", "used", "epochs", "to the end", "regret"], rows)
    say("\n" + "\n".join(_reasons(forecasts)))


def _basis(run: PastRun, scenario: Scenario) -> list[str]:
    cost = cost_model(scenario, run)
    trials = run.workload.trials if scenario.trials is None else scenario.trials
    epoch = cost.steps * cost.step_seconds + cost.serial_seconds
    gradients = f"{size(int(cost.gradient_bytes))} of gradients" if cost.gradient_bytes else "gradients without cost"
    measured = scenario.restart_seconds is None and run.restart_seconds is not None
    told = f" (as in the run's {counted(run.resizes, 'resize')})" if measured else ""
    return [
        f"{counted(trials, 'trial')} on {_gpus(scenario.gpus)}, {scenario.workers} for a new trial, "
        f"{counted(scenario.seeds, 'seed')}",
        f"an epoch on one GPU {duration(epoch)} ({scenario.serial:.0%} of it serial), {gradients}, "
        f"a restart {duration(cost.restart_seconds)}{told}",
    ]


def _reasons(forecasts: Sequence[Forecast]) -> list[str]:
    """Say why rules take at least 1 % longer than the fastest rule, and explain columns of the table of forecasts."""
    rules = [each for each in forecasts if each.rule != TUNE]
    best, *slower = rules
    lines = []
    for each in slower:
        if (times := each.hours / best.hours) >= 1.01:
            reason = why(each.spending, best.spending, (each.epochs, best.epochs), each.gpus)
            lines.append(f"{each.name}: {times:.2f} times as long as {best.name}; {reason}")
    for each in forecasts:
        if each.rule == TUNE:
            share = each.sweep_hours / each.hours
            lines.append(f'tune(backend="ray"): surrogates take {share:.0%} of it; epochs are those at full size')
    return [
        *lines,
        *([""] if lines else []),
        "reserved: all GPUs from start to end; used: share of that which trials had; to the end: trials that trained",
        "to the last epoch; regret: by how much the winner is worse there than the best of all trials, where curves",
        "that ended early are continued",
    ]


def _advice(advice: Recommendation, scenario: Scenario, limits: str) -> list[str]:
    lines = []
    if advice.rule:
        lines.append(f"{limits[0].upper()}{limits[1:]}: {_chosen(advice.rule)}")
    else:
        lines.append(f"Nothing {limits} on at most {_gpus(scenario.gpus)}; nearest: {_chosen(advice.nearest)}")
    if advice.tune:
        lines.append(f"With surrogates first: {_chosen(advice.tune)}")
    lines.append(
        f"(for each seed; of rules whose mean regret is within {TOLERANCE:.0%} of the way from best to median trial)"
    )
    return lines


def _gpus(count: int) -> str:
    return f"{count:,} GPU{'s' * (count != 1)}"


def _chosen(each: Forecast) -> str:
    what = 'tune(backend="ray")' if each.rule == TUNE else each.name
    return (
        f"{what} on {_gpus(each.gpus)}, {_gpus(each.workers)} for a new trial: {duration(each.hours * HOUR)}, "
        f"{show(each.reserved_gpu_hours)} GPU hours"
    )
