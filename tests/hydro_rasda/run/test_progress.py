from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console

from hydro_rasda import MessageSaid, TuneResult, loguniform
from hydro_rasda.run.progress import Progress


def test_progress_tells_of_each_decision(capsys: pytest.CaptureFixture[str], quick: Callable[..., TuneResult]) -> None:
    quick(progress=True, space={"lr": loguniform(1e-3, 0.3)}, num_samples=4, max_t=2)
    said = " ".join(capsys.readouterr().out.split())
    assert "surrogates at epoch 1: 2 of 4 go on, best val_loss" in said
    assert "full size at epoch 1: 1 of 2 go on" in said
    assert "full size at epoch 2: done" in said
    assert "4 of 4 trials, by val_loss (min)" in said
    quick(progress=True, space={"lr": loguniform(1e-3, 0.3)}, num_samples=4, max_t=2)
    assert "going on with the run in" in capsys.readouterr().out
    quick(progress=False, name="silent", space={"lr": loguniform(1e-3, 0.3)}, num_samples=4, max_t=2)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_message_is_shown_as_it_is() -> None:
    progress = Progress(Console(width=20))
    with progress.console.capture() as captured:
        progress.on_event(MessageSaid(seconds=0.0, text="going on with [/red] in a folder of a long name"))
    assert captured.get() == "going on with [/red] in a folder of a long name\n"
