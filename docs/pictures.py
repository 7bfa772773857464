"""Every picture of the repository, drawn again by one command.

    python -m docs.pictures           all; `make pictures` does the same
    python -m docs.pictures NAME ...  these, such as docs/report-light.png

Pictures of measurements are drawn from the result files. Those of the report are photographs by Chromium of searches on
digits (a minute each); without chromium and chromedriver they stay as they are, and the command says so.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs import idea

if TYPE_CHECKING:
    from hydro_rasda import TuneResult
    from hydro_rasda.schedulers.named_rules import RuleName

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE_WIDTH = 1000

REPORT: dict[str, tuple[RuleName, str, tuple[str, ...]]] = {
    "docs/report-light.png": ("halving", "light", ("Best score over time", "Learning curves")),
    "docs/report-dark.png": ("halving", "dark", ("The two most important", "Parallel coordinates", "Timeline")),
    "docs/population.png": ("pbt", "light", ("Population",)),
}
"""Maps each picture of a report to the rule of its sweep, its color scheme and the headings of its sections."""


def rasda_paper(path: Path) -> None:
    """Draw RASDA's experiments in virtual time."""
    from benchmarks import rasda_paper, rasda_settings
    from benchmarks.result_files import read

    results = json.loads(path.with_suffix(".json").read_text())
    assumptions = rasda_settings.Assumptions(**results["assumptions"])
    rasda_paper.plot(results, read(rasda_paper.SCALING)["fig4"], rasda_paper.timeline(assumptions), path)


def replay(path: Path) -> None:
    """Draw regret over cost on the recorded trainings."""
    from benchmarks.replay import anytime
    from benchmarks.replay.table import pooled

    anytime.page(pooled(path.with_suffix("")), path)


def transfer(path: Path) -> None:
    """Draw the scores at several widths against those at full width."""
    from benchmarks.transfer_quality import plot

    plot(json.loads(path.with_suffix(".json").read_text()), path)


def vs_asha(path: Path) -> None:
    """Draw the test score over seconds of `tune` and of ASHA."""
    from benchmarks.vs_asha.figure import plot
    from benchmarks.vs_asha.report import METHOD_NAMES, read

    plot(read(path.with_suffix("")), METHOD_NAMES, path)


def idea_picture(path: Path) -> None:
    """Draw the idea in one colour scheme."""
    idea.main([path.stem.removeprefix("idea-")])


PICTURES: dict[str, Callable[[Path], None]] = {
    **{f"docs/idea-{name}.svg": idea_picture for name in idea.SCHEMES},
    "benchmarks/results/rasda_paper.png": rasda_paper,
    "benchmarks/results/replay.png": replay,
    **{f"benchmarks/results/transfer_{task}.png": transfer for task in ("cifar10", "digits", "shakespeare")},
    "benchmarks/results/vs_asha.png": vs_asha,
    "benchmarks/results/vs_asha_gpu.png": vs_asha,
}
"""Maps each picture, except those of a report, to the function that draws it."""
SETTLED = ("benchmarks/results/rasda_beyond.png",)
"""Pictures of studies that are over; their pages name the commit that has their scripts."""


def draw_report(names: Sequence[str]) -> None:
    """Tune once by each rule, and photograph the reports."""
    with tempfile.TemporaryDirectory() as folder:
        for rule in dict.fromkeys(REPORT[name][0] for name in names):
            tune_digits(rule, Path(folder)).report(Path(folder) / f"{rule}.html")
        with _chromium(folder) as browser:
            for name in names:
                rule, scheme, titles = REPORT[name]
                page = (Path(folder) / f"{rule}.html").as_uri()
                (ROOT / name).write_bytes(photograph(browser, page, scheme, titles))


def tune_digits(rule: RuleName, folder: Path, num_samples: int = 128, max_t: int = 27) -> TuneResult:
    """Tune an MLP of 4 layers on scikit-learn's digits by a rule, with enough hyperparameters for a picture."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.utils import shuffle
    from torch import nn

    from hydro_rasda import SweepConfig, choice, loguniform, tune, uniform

    images, labels = shuffle(*load_digits(return_X_y=True), random_state=0)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    activations = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}

    def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
        width, activation = int(512 * width_ratio), activations[config["activation"]]
        hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), activation())]
        return nn.Sequential(nn.Linear(64, width), activation(), *hidden, nn.Linear(width, 10))

    space = {
        "lr": loguniform(1e-4, 1),
        "momentum": uniform(0.5, 0.999),
        "weight_decay": loguniform(1e-6, 1e-2),
        "optimizer": choice(["sgd", "adamw"]),
        "activation": choice(list(activations)),
        "batch_size": choice([32, 64]),
    }
    return tune(
        model_fn,
        space,
        train_data=(x[:1200], y[:1200]),
        val_data=(x[1200:1500], y[1200:1500]),
        num_samples=num_samples,
        max_t=max_t,
        sweep=SweepConfig(rule=rule),
        storage_path=folder,
        name=rule,
    )


def photograph(browser: Any, url: str, scheme: str, titles: Sequence[str]) -> bytes:
    """Return a PNG of the sections of a page from the first of `titles` to the last."""
    from tests.hydro_rasda.browser import ALL_DRAWN, open_page, wait

    open_page(browser, url, PAGE_WIDTH, height=12_000, scheme=scheme)  # so high that no scroll bar is shown
    wait(browser, ALL_DRAWN)
    places = {}
    for section in browser.find_elements("css selector", "section"):
        places[section.find_element("tag name", "h2").text] = section.rect
    first, last = places[titles[0]], places[titles[-1]]
    clip = {"x": 0, "y": first["y"], "width": PAGE_WIDTH, "height": last["y"] + last["height"] - first["y"], "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    return base64.b64decode(shot["data"])


@contextmanager
def _chromium(folder: str) -> Iterator[Any]:
    from tests.hydro_rasda.browser import start

    browser = start(folder)
    try:
        yield browser
    finally:
        browser.quit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of pictures; all, if none is named")
    names = parser.parse_args(arguments).names or [*PICTURES, *REPORT]
    if unknown := [name for name in names if name not in PICTURES and name not in REPORT]:
        parser.error(f"no picture {unknown[0]!r}: choose from {', '.join([*PICTURES, *REPORT])}")
    for name in names:
        if name in PICTURES:
            PICTURES[name](ROOT / name)
            print(f"drew {name}", flush=True)
    photographs = [name for name in names if name in REPORT]
    if photographs and not (shutil.which("chromium") and shutil.which("chromedriver")):
        print(f"left as they are, for want of chromium and chromedriver: {', '.join(photographs)}")
    elif photographs:
        draw_report(photographs)
        print(f"drew {', '.join(photographs)}")


if __name__ == "__main__":
    main()
