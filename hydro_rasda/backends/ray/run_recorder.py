"""What becomes of full-size trials on Ray, as the run records it: units that end where a checkpoint was taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydro_rasda.backends.ray.event_log import EventLog
from hydro_rasda.backends.ray.rank_worker import CHECKPOINT_FILE
from hydro_rasda.run.files import DamagedCheckpoint, load_checkpoint
from hydro_rasda.run.journal import JournalLine
from hydro_rasda.run.state import Run
from hydro_rasda.run.targets import record_end, record_epochs, record_failure, saved_epochs
from hydro_rasda.schedulers.sweep_rule import CHANGEABLE


class RunRecorder:
    """Takes the events of a log into a run; all methods belong to the main thread.

    Tune tells of an epoch first and of the checkpoint taken there later. An epoch therefore waits until a checkpoint
    holds it, or its trial is over; until then the log alone has it. Each is taken in once, however often Tune repeats
    it.
    """

    def __init__(self, run: Run, log: EventLog) -> None:
        self._run, self._log = run, log
        self._pending: dict[int, list[tuple[JournalLine, float]]] = {}
        self._workers: dict[int, int] = {}

    def record_new(self) -> None:
        """What happened since the last time."""
        events = list(self._log.read())
        newest = {event["trial"]: place for place, event in events if event["event"] == "saved"}
        for place, event in events:
            if event["event"] == "metrics":
                self._take_epoch(event)
            elif event["event"] != "saved":
                self._take_ending(event)
            elif newest[event["trial"]] == place:
                self._take_checkpoint(event)

    def _take_epoch(self, event: JournalLine) -> None:
        number, epoch = event["trial"], event["epoch"]
        if epoch <= self._epochs(number):
            return  # repeated after a failure
        line = {"event": "metrics", "stage": "target", "trial": number, "epoch": epoch, **event["metrics"]}
        self._pending.setdefault(number, []).append((line, event["seconds"]))
        before, workers = self._workers.get(number), line.get("workers", 1)
        self._workers[number] = workers
        if before not in (None, workers):
            self._run.say(f"full size: trial {number} goes on with {workers} workers from epoch {epoch}")

    def _epochs(self, number: int) -> int:
        pending = self._pending.get(number)
        return int(pending[-1][0]["epoch"]) if pending else self._run.epochs("target", number)

    def _take_checkpoint(self, event: JournalLine) -> None:
        try:
            saved = load_checkpoint(Path(event["path"], CHECKPOINT_FILE), "cpu")
        except DamagedCheckpoint:
            return  # Tune has a newer one, which is next, or was killed while it wrote this one
        number, epoch = event["trial"], saved["iteration"]
        if epoch > saved_epochs(self._run, number):
            more = self._changed(event)
            changed = {"event": "trial", "trial": number, "config": event["config"]}
            lines = [changed] if more != _only_changes(self._last(number)) else []
            more |= {name: saved[name] for name in ("rescaled", "measured") if saved[name]}
            self._record(number, epoch, lines, saved["state"], **more)

    def _changed(self, event: JournalLine) -> dict[str, Any]:
        """What PBT had a trial go on with, where it is not what was sampled: whose model, and what else it changed."""
        number, origin = event["trial"], event["origin"]
        mutable, sampled = (
            {name: config[name] for name in CHANGEABLE if name in config}
            for config in (event["config"], self._run.trials[number].config)
        )
        return {} if (origin, mutable) == (number, sampled) else {"origin": origin, "mutable": mutable}

    def _last(self, number: int) -> Mapping[str, Any]:
        """What the unit of a trial's last checkpoint says."""
        name = self._run.checkpoints.get(number)
        return {} if name is None else self._run.store.units()[name].value

    def _record(
        self,
        number: int,
        epoch: int,
        lines: Sequence[JournalLine] = (),
        state: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Record the epochs that wait, up to one of them."""
        pending = self._pending.pop(number, [])
        taken = [(line, seconds) for line, seconds in pending if line["epoch"] <= epoch]
        self._pending[number] = pending[len(taken) :]
        if taken:
            seconds = sum(seconds for _, seconds in taken)
            record_epochs(self._run, number, [*lines, *(line for line, _ in taken)], state, seconds, **more)

    def _take_ending(self, event: JournalLine) -> None:
        number, kind = event["trial"], event["event"]
        if kind != "recovers":
            self._record(number, self._epochs(number))
        if kind == "ended":
            record_end(self._run, number)
        elif kind == "failed":
            # A model that was trained to the end is there, whatever its process died of after that.
            trained = saved_epochs(self._run, number) >= self._run.settings.max_t
            if not trained and self._run.failures.get(number) != event["error"]:
                record_failure(self._run, number, event["error"])
        self._run.say(f"full size: trial {number} {self._told(event)}")

    def _told(self, event: JournalLine) -> str:
        epoch = self._epochs(event["trial"])
        if event["event"] == "ended":
            score = self._run.score("target", event["trial"])
            how = "is done" if epoch >= self._run.settings.max_t else "stops"
            return f"{how} after epoch {epoch}, {self._run.settings.metric} {score:.4g}"
        what = "failed" if event["event"] == "failed" else "goes on from its last checkpoint"
        return f"{what} after epoch {epoch}: {event['error'].splitlines()[0]}"


def _only_changes(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[name] for name in ("origin", "mutable") if name in value}
