"""All benchmarks on one page: a table for each question that a user has.

    python -m benchmarks.results_page

The page, `RESULTS.md`, is drawn from the result files alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.answers import held_out, studies, tune
from benchmarks.answers.answer import Answer, settled
from benchmarks.result_files import RESULTS, columns

PAGE = Path(__file__).parent / "RESULTS.md"

AUTHORS: tuple[Callable[[Path], Iterable[Answer]], ...] = (
    tune.sooner,
    tune.as_good,
    tune.at_smaller_prices,
    tune.against_peers,
    tune.in_own_loops,
    tune.in_reinforcement_learning,
    held_out.held_out,
    held_out.anytime,
    settled("folds"),
    studies.throughput,
    studies.on_a_gpu,
    settled("compiled_steps"),
    studies.ranking,
    settled("searchers", "population", "schedules_live", "front", "structures"),
    studies.packed,
    studies.as_published,
    settled("rasda_scaling", "rasda_beyond", "rasda_regret", "large_batch", "noise_scale"),
    studies.really_run,
    studies.on_ray,
    studies.in_bubbles,
    tune.own_cost,
)
"""Functions that return the answers, in the order of the page."""

PICTURES = {"rasda_beyond.png": "RASDA and its neighbours in virtual time: GPUs held, run times, GPU hours"}
"""Figures of the folder of results that end the page."""

_HEAD = """# Results

Each table answers a question, best row first, and links to the pages that it is drawn from. They have the settings,
seeds and versions, and the command that measures each number again. Numbers are medians, with quartiles in brackets.

- **A seed's spread** is the standard deviation of a score between trainings of one configuration from different seeds.
- **Regret** is how far the winner of a search is behind the best configuration of that search.
- **A full training** is one training of the model to the end."""


def answers(folder: Path) -> list[Answer]:
    """Return the answers from a folder of results. A benchmark without a result file gives no answer."""
    return [answer for author in AUTHORS for answer in author(folder)]


def page(found: Sequence[Answer], folder: str, pictures: Sequence[str] = ()) -> str:
    """Return the page.

    Args:
        folder: The folder of results, relative to the page.
        pictures: Names of figures in that folder.
    """
    parts = [_HEAD, "\n".join(f"- [{answer.question}](#{_anchor(answer.question)})" for answer in found)]
    for answer in found:
        sources = ", ".join(f"[{source}]({folder}/{source})" for source in answer.sources)
        measured = f"*From {sources}." + (f" Measured: {answer.where}.*" if answer.where else "*")
        parts += [f"## {answer.question}", answer.meaning, columns(answer.columns, answer.rows), measured]
    return "\n\n".join([*parts, *(f"![{PICTURES[name]}]({folder}/{name})" for name in pictures)]) + "\n"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def render(results: Path, folder: str = "results") -> str:
    """Return the page of a folder of results. `folder` is its path relative to the page."""
    return page(answers(results), folder, [name for name in PICTURES if (results / name).exists()])


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(render(RESULTS))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
