"""Checkpoints of a run: they are written atomically, and read back only if they are what was written.

Torch writes checkpoints as zip archives with a checksum of each part, but does not verify the checksums when it reads
them.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydro_rasda.run.files import open_to_read, replacing

if TYPE_CHECKING:
    import torch

WRITTEN_AS = "written_as"
"""Key of a run's checkpoints: the run's `id`, and the name of the file."""

_CHECKPOINT = 2
"""Levels below the run's folder at which a checkpoint lies."""


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is gone, or is not the one that was written; the message names the file and the damage."""


def save_checkpoint(path: Path, payload: Mapping[str, Any]) -> None:
    """Write tensors and plain values atomically: the file is whole, or as it was."""
    import torch  # here, so that reading a journal alone need not wait for it

    with replacing(path, _CHECKPOINT) as file:
        torch.save(dict(payload), file)


def load_checkpoint(path: Path, device: str | torch.device | None = None, run: str = "") -> dict[str, Any]:
    """Read a checkpoint back; nothing in it can run code.

    Args:
        device: The device of the loaded tensors; None: the one they were saved from.
        run: The `id` of the run that must have written it under this name; empty for any.

    Raises:
        DamagedCheckpoint: if it cannot be read, or is not the one that was written.
    """
    import torch

    from fusion.evaluate.backoff import is_out_of_memory

    try:
        with open_to_read(path, _CHECKPOINT) as file:
            # Refuse an archive that was changed, or that could hold more than its own bytes: torch compresses nothing.
            with zipfile.ZipFile(file) as archive:
                parts = archive.infolist()
                stored = all(part.compress_type == zipfile.ZIP_STORED for part in parts)
                if not stored or sum(part.file_size for part in parts) > os.fstat(file.fileno()).st_size:
                    raise zipfile.BadZipFile("its parts are compressed, or overlap, and torch writes none such")
                if (part := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"the checksum of its part {part!r} is not that of what was written")
            file.seek(0)
            loaded: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        told = f"the checkpoint {path} cannot be read: it holds more than tensors and plain values, and may run code"
        raise DamagedCheckpoint(told) from error
    except Exception as error:  # a flipped bit in an archive raises many kinds of error
        if is_out_of_memory(error):
            raise
        raise DamagedCheckpoint(f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    written_as = loaded.pop(WRITTEN_AS, None)
    if run and written_as != [run, path.name]:
        raise DamagedCheckpoint(f"the checkpoint {path} is not the one that this run wrote there")
    return loaded
