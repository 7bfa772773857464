"""Hosts of two ranks, as processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


class Host:
    """Two ranks of `pipeline.py`.

    Args:
        schedule: By its name.
        micro_batches: Of a step.
        steps: At most.
        folder: Where it says what it came to.
        source: Of guests; None for none.
    """

    def __init__(self, schedule: str, micro_batches: int, steps: int, folder: Path, source: Path | None = None) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        told = json.dumps([schedule, micro_batches, steps, str(folder), None if source is None else str(source)])
        command = [sys.executable, "-m", "tests.hydro_rasda.bubbles.pipeline", told]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        root = Path(__file__).parents[3]
        self.ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank)}, cwd=root, stdin=subprocess.DEVNULL)
            for rank in range(2)
        ]

    def enough(self) -> None:
        """No more steps after the one that is under way."""
        (self.folder / "enough").touch()

    def told(self) -> list[dict[str, Any]]:
        """What each rank came to, once it is over."""
        assert [rank.wait() for rank in self.ranks] == [0, 0]
        return [json.loads((self.folder / f"rank-{rank}.json").read_text()) for rank in range(2)]

    def kill(self) -> None:
        """As where a machine fails."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()
