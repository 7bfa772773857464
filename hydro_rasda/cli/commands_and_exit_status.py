"""The commands, their options, and their exit statuses."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

NAME = "hydro-rasda"
NOTHING, REFUSED = 1, 2
"""Exit statuses besides 0. NOTHING: there is no answer, or the user said no. REFUSED: bad input. Ctrl-C gives 130."""

app = typer.Typer(
    name=NAME,
    help="Hyperparameter tuning for PyTorch: see what runs have found. Exit status: 0; 1 where there is no answer, or "
    "you said no; 2 for bad input.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

RunPath = Annotated[str, typer.Argument(metavar="PATH", help="Folder of a run: storage_path/name.")]
Style = Literal["yaml", "json", "python"]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of a run's name or values
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name=NAME)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        from hydro_rasda.cli.output import say

        say(f"{NAME}: {error}", error=True)
        status = REFUSED
    else:
        status = 0
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _without_reader()
    return status


def _without_reader() -> int:
    """Discard further output, because its reader (such as `head`) has left, and return the exit status for that.

    Otherwise, Python's last flush would raise an error.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return NOTHING


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"{NAME} {version(NAME)}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)]


@app.callback()
def _common(version: Version = False) -> None:
    pass


@app.command()
def runs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A storage_path.")] = "runs",
    json: Json = False,
) -> None:
    """List the runs in a folder, the last written first."""
    from hydro_rasda.cli.runs import list_runs

    list_runs(folder, json)


@app.command()
def show(path: RunPath, json: Json = False) -> None:
    """Print what a run has found, or has found so far."""
    from hydro_rasda.cli.runs import show_run

    show_run(path, json)


@app.command()
def trials(
    path: RunPath,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", "-w", metavar="CONDITION", help="Such as 'lr<0.01' or status=stopped; may be repeated."
        ),
    ] = None,
    sort: Annotated[str | None, typer.Option("--sort", "-s", metavar="COLUMN", help="Default: the best first.")] = None,
    reverse: Annotated[
        bool, typer.Option("--reverse", "-r", help="Largest first; what is missing stays last.")
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=0, metavar="N", help="Only the first N.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV, all columns.")] = False,
    json: Json = False,
) -> None:
    """List a run's trials.

    Columns: trial, status, sweep_metric, sweep_epochs, metric, epochs, chance, kept_epoch, and the names of the
    hyperparameters. The table leaves out chance and kept_epoch. Hyperparameters that are the same in all trials stand
    below it. --csv prints all columns.
    """
    from hydro_rasda.cli.trials import list_trials

    list_trials(path, where or [], sort, reverse, limit, csv, json)


@app.command()
def best(
    path: RunPath,
    style: Annotated[Style, typer.Option("--format", "-f", help="Format of what is printed.")] = "yaml",
    json: Annotated[bool, typer.Option("--json", help="As --format json; with --recipe, the loop as JSON.")] = False,
    trial: Annotated[int | None, typer.Option("--trial", metavar="N", help="Another trial than the best.")] = None,
    export: Annotated[
        str | None,
        typer.Option("--export", metavar="DIR", help="Also write model.safetensors and config.json there."),
    ] = None,
    recipe: Annotated[
        bool, typer.Option("--recipe", help="Print, in its place, a plain torch loop that trains it again.")
    ] = False,
) -> None:
    """Print the best configuration, and write the trained model."""
    from hydro_rasda.cli.output import say
    from hydro_rasda.cli.trials import print_best

    if not print_best(path, "json" if json else style, trial, export, recipe):
        say(f"{NAME}: no trial of the run in {path} has a score yet", error=True)
        raise typer.Exit(NOTHING)


@app.command()
def report(
    path: RunPath,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Default: report.html in the run's folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a run as an HTML page that works offline."""
    from hydro_rasda.cli.runs import write_report

    write_report(path, out, json)


@app.command()
def dashboard(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A storage_path, which may be yet to be made.")] = "runs",
    host: Annotated[
        str, typer.Option(help="Where to listen; wherever that is, the address that is printed holds a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8470,
    json: Annotated[bool, typer.Option("--json", help="Print the address as a line of JSON.")] = False,
) -> None:
    """Show all runs of a folder in a browser, live, until Ctrl-C.

    You may start it before a run, during it or after it. It only reads.
    """
    from hydro_rasda.cli.dashboard import serve

    serve(folder, host, port, as_json=json)


@app.command()
def compare(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Folders of two runs or more.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Also write them side by side as an HTML page.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what runs were asked, found and cost, where they differ."""
    from hydro_rasda.cli.runs import compare_runs

    compare_runs(paths, json, out)


@app.command()
def clean(
    path: RunPath,
    best_only: Annotated[
        bool, typer.Option("--best-only", help="Keep the best model alone; the run can then not be extended.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; without --yes, nothing is removed.")] = False,
) -> None:
    """Remove checkpoints that nothing needs, after asking.

    A killed process leaves such checkpoints behind. Finalists keep theirs, unless you give --best-only: `best_model`
    and resuming the run need them.
    """
    from hydro_rasda.cli.clean import clean_run

    if not clean_run(path, best_only, yes, json):
        raise typer.Exit(NOTHING)


@app.command()
def watch(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder of a run, which may be yet to begin.")],
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each change.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for an interrupted run, or one that another machine works on.")
    ] = False,
) -> None:
    """Follow a run until it is over, from another terminal.

    It may start before the run, during it or after it, and only reads. Without a terminal, it prints a line when there
    is something new, at most one in a minute. It ends with status 1 if a run was interrupted: no process on this
    machine works on it, and nothing was written for 30 seconds.
    """
    from hydro_rasda.cli.watch import watch_run

    if not watch_run(path, json, wait=wait):
        raise typer.Exit(NOTHING)


Rules = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="random, synchronous, asha, rasda, waiting, efficient or both; may be repeated. Default: all.",
    ),
]
Within = Annotated[
    str | None, typer.Option(metavar="TIME", help="Recommend what ends in time for the fewest GPU hours: 4h, 90m.")
]
Mode = Annotated[
    Literal["min", "max"] | None,
    typer.Option(help="Whether less or more is better, if the run does not tell."),
]
ReductionFactor = Annotated[
    int | None, typer.Option(help="rf: one in rf survives a milestone; ASHA's milestones lie rf apart.")
]
ScalingFactor = Annotated[
    int | None, typer.Option(help="sf: a survivor's workers grow by it; RASDA's milestones lie sf apart.")
]
PastRun = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A past run: its folder, that of a Ray Tune experiment, or a CSV file."),
]
EpochSeconds = Annotated[float | None, typer.Option(help="Seconds of an epoch on one GPU, in place of --speed.")]
GpuHours = Annotated[
    float | None,
    typer.Option(help="Recommend what takes at most this many GPU hours: all GPUs, from start to end."),
]
RestartSeconds = Annotated[
    float | None, typer.Option(help="From the grant of GPUs to the first step. Default: as in the run, or 30.")
]
LaunchSeconds = Annotated[float, typer.Option(help="Seconds of the head node to start each process in turn.")]


@app.command()
def simulate(
    run: PastRun,
    gpus: Annotated[int, typer.Option(help="GPUs of the cluster; with a limit, the most.")],
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 4,
    rule: Rules = None,
    within: Within = None,
    gpu_hours: GpuHours = None,
    metric: Annotated[str | None, typer.Option(help="Name of the score, if the run does not tell.")] = None,
    mode: Mode = None,
    trials: Annotated[int | None, typer.Option(help="Configurations. Default: the run's. More repeat these.")] = None,
    max_t: Annotated[int | None, typer.Option(help="Epochs of a full training; at most the past run's.")] = None,
    grace_period: Annotated[int | None, typer.Option(help="Epochs before the first decision.")] = None,
    reduction_factor: ReductionFactor = None,
    scaling_factor: ScalingFactor = None,
    workers: Annotated[int, typer.Option(help="GPUs of a new trial; with a limit, the fewest.")] = 1,
    max_workers: Annotated[int | None, typer.Option(help="Most GPUs of a trial. Default: all.")] = None,
    wait: Annotated[float, typer.Option(help="Longest wait at a milestone, as a share of a trial's time to it.")] = 0.1,
    seeds: Annotated[int, typer.Option(help="Simulations to take the median of.")] = 5,
    speed: Annotated[float, typer.Option(help="Speed of a GPU over that of the past run's device.")] = 1.0,
    epoch_seconds: EpochSeconds = None,
    steps: Annotated[float | None, typer.Option(help="Steps of an epoch on one GPU. Default: the run's.")] = None,
    parameters: Annotated[int | None, typer.Option(help="Parameters of the model, if the run does not tell.")] = None,
    serial: Annotated[float, typer.Option(help="Share of an epoch that more GPUs do not shorten.")] = 0.1,
    intra_bandwidth: Annotated[float, typer.Option(help="GB/s of a GPU within its node.")] = 300.0,
    inter_bandwidth: Annotated[float, typer.Option(help="GB/s of a node.")] = 25.0,
    jitter: Annotated[float, typer.Option(help="Relative standard deviation of step times.")] = 0.02,
    restart_seconds: RestartSeconds = None,
    launch_seconds: LaunchSeconds = 0.0,
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Mean time between a node's failures. Default: never.")
    ] = None,
    json: Json = False,
) -> None:
    """Forecast a study on N GPUs from a past run.

    Runs the library's schedulers in virtual time, at full size, over the learning curves, epoch times and model size of
    a past run. Settings that you do not give are those of that run. A CSV file has a row for each trial and epoch:
    trial, epoch and score, and the seconds and workers of that epoch if they are known. With --within or --gpu-hours,
    it also says which GPUs, workers and rule to take. The exit status is 1 if none keeps the limit.
    """
    apart = ("run", "rule", "within", "metric", "mode", "json")
    given = {name: value for name, value in locals().items() if name not in apart}
    from hydro_rasda.cli.simulate import print_forecasts

    if rule:
        given["rules"] = tuple(dict.fromkeys(rule))
    if not print_forecasts(run, given, metric, mode, within, json):
        raise typer.Exit(NOTHING)
