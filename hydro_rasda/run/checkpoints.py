"""Checkpoints of a run: they are written atomically, and loaded only if their content is unchanged.

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
"""Key in a run's checkpoints. It holds the run's `id` and the name of the checkpoint file."""

_CHECKPOINT = 2
"""Depth of a checkpoint file below the run's folder."""


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is missing, or not as it was written. The message names the file and the damage."""


def save_checkpoint(path: Path, payload: Mapping[str, Any]) -> None:
    """Write tensors and plain values atomically. If writing fails, an earlier file stays as it was."""
    import torch  # imported here, because reading only a journal should not wait for this import

    with replacing(path, _CHECKPOINT) as file:
        torch.save(dict(payload), file)


def load_checkpoint(path: Path, device: str | torch.device | None = None, run: str = "") -> dict[str, Any]:
    """Load a checkpoint. Nothing in it can run code.

    Args:
        device: The device of the loaded tensors; None for the device from which they were saved.
        run: The `id` of the run that must have written the file under this name; empty to skip the check.

    Raises:
        DamagedCheckpoint: if the file cannot be read, or is not as it was written.
    """
    import torch

    from fusion.evaluate.backoff import is_out_of_memory

    try:
        with open_to_read(path, _CHECKPOINT) as file:
            # Refuse an archive that was changed, or that unpacks to more than its size. Torch writes none such, because
            # it does not compress.
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
    except Exception as error:  # one flipped bit in an archive can raise many kinds of errors
        if is_out_of_memory(error):
            raise
        raise DamagedCheckpoint(f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    written_as = loaded.pop(WRITTEN_AS, None)
    if run and written_as != [run, path.name]:
        raise DamagedCheckpoint(f"the checkpoint {path} is not the one that this run wrote there")
    return loaded
