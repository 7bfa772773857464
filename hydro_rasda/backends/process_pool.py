"""Several devices of this machine, each with a process of its own.

The processes are started anew, because CUDA does not survive a fork. They do not run the user's script. The problem is
sent by cloudpickle, which includes functions of scripts and notebooks. The data are in one file, which all processes
map.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import shutil
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from hydro_rasda.backends.pool import LOOK_S, Answer, DeviceDied, DevicePool
from hydro_rasda.common.import_path import import_path
from hydro_rasda.data.tensors_datasets_loaders import from_bytes, to_bytes
from hydro_rasda.processes.die_with_parent import depend_on
from hydro_rasda.processes.forks import Notify, ending, receive, send
from hydro_rasda.processes.temporary_folders import make_folder, owner, remove_left
from hydro_rasda.run.checkpoints import load_checkpoint
from hydro_rasda.run.files import open_pickled, refuse_open_to_others
from hydro_rasda.run.state import Run
from hydro_rasda.training.device import DeviceShare, Trainer
from hydro_rasda.training.group_training import Load

if TYPE_CHECKING:
    from hydro_rasda.packing.mps import Daemons

PROBLEM = "problem.pickle"
"""The file in the run's folder from which all processes load the problem; it exists while they train."""

_ALIGNED, _LENGTH = 64, struct.Struct("<Q")
_SERVE = "from hydro_rasda.backends.process_pool import serve; serve({}, {})"


class LocalProcesses(DevicePool):
    """Train on several devices of this machine; `memory` is as in `LocalBackend`."""

    def __init__(self, run: Run, devices: Sequence[torch.device], memory: float | None = None) -> None:
        from hydro_rasda.packing.mps import Daemons  # imported only here: the devices' processes do not need it

        each_its_own = len({*devices}) == len(devices) and all(device.type == "cuda" for device in devices)
        super().__init__(run, len(devices), "nccl" if each_its_own else "gloo")
        remove_left()
        self._where, self._memory = devices, memory
        self._daemons = Daemons("processes")
        self._file = run.store.path / PROBLEM
        self._threads = max(1, torch.get_num_threads() // len(devices))

    def __enter__(self) -> LocalProcesses:
        try:
            write_shared(self._file, self._run.problem)
            self.begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            self._daemons.stop()
            self._file.unlink(missing_ok=True)

    def _process(self, device: int) -> _Process:
        where = self._where[device]
        share = DeviceShare(self._where.count(where), self._memory if where.type == "cpu" else None)
        shared = environment_of_shared_gpu(self._daemons, where) if share.processes > 1 else {}
        if shared:
            where = torch.device(where.type, 0)
        return _Process(self._file, where, self._threads, share, shared, partial(self._hear, device))

    def _meeting(self, devices: Sequence[int]) -> Path:
        return Path(make_folder(owner(os.getpid())), "meeting")

    def _end_meeting(self, meeting: Path) -> None:
        shutil.rmtree(meeting.parent, ignore_errors=True)

    def _ready(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        of = {answer.connection: answer for answer in answers if isinstance(answer, _ProcessAnswer)}
        ready = wait(list(of), LOOK_S)
        return [answer for connection, answer in of.items() if connection in ready and answer.arrived()]

    def _load(self, keys: Iterable[str]) -> Load:
        return partial(loaded, {key: self._run.store.file(key) for key in keys})


def environment_of_shared_gpu(daemons: Daemons, where: torch.device) -> dict[str, str]:
    """Return the environment in which a process computes on a GPU at the same time as others, instead of in turns.

    NVIDIA's Multi-Process Service (MPS) makes that possible, if it is installed. The process sees only that GPU, as its
    first. Return an empty dict if processes must take turns, or if the device is no GPU.
    """
    gpu = uuid_of(where) if daemons.possible else None
    if gpu is None or not (found := daemons.environment(gpu)):
        return {}
    return {**found, "CUDA_VISIBLE_DEVICES": gpu}


def uuid_of(where: torch.device) -> str | None:
    """Return the name of a GPU for NVIDIA's programs; None for other devices, and for a part of a GPU (MIG)."""
    if where.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(where)
    return None if " MIG " in found.name else f"GPU-{found.uuid}"  # the UUID of a part begins with "MIG-"


def loaded(files: Mapping[str, Path], key: str) -> Mapping[str, Any]:
    """Load a checkpoint by its key from the file that holds it."""
    return load_checkpoint(files[key], "cpu")


class _ProcessAnswer:
    """The answer that a process will give to a request, after messages about its progress; see `pool.Answer`."""

    def __init__(self, connection: Connection, status: Callable[[], int], hear: Callable[[str, Any], None]) -> None:
        self.connection, self._status, self._hear = connection, status, hear
        self._last: tuple[str, Any] | None = None

    def arrived(self) -> bool:
        """Wait for the next message of the process and handle it; return whether it was the answer."""
        kind, content = receive(self.connection)
        if kind in ("notified", "warned"):
            self._hear(kind, content)
            return False
        self._last = kind, content
        return True

    def result(self) -> Any:
        while self._last is None:
            self.arrived()
        kind, content = self._last
        if kind == "died":
            raise DeviceDied(ending(self._status()))
        if kind == "raised":
            raise RuntimeError(f"the process of a device cannot go on:\n{content}")
        return content


class _Process:
    """A process that holds a `Trainer`; see `pool.DeviceProcess`."""

    def __init__(
        self,
        problem: Path,
        where: torch.device,
        threads: int,
        share: DeviceShare,
        environment: Mapping[str, str],
        hear: Callable[[str, Any], None],
    ) -> None:
        self._connection, theirs = Pipe()
        self._hear = hear
        # Pass on `sys.path`, because the script may have added to it.
        environment = {**os.environ, **environment, "PYTHONPATH": import_path()}
        command = [sys.executable, "-c", _SERVE.format(theirs.fileno(), os.getpid())]
        # In its own session, the process gets no Ctrl-C. The tuner ends it instead.
        self._popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()
        self._send("open", problem, str(where), threads, share)

    def ask(self, method: str, *arguments: Any) -> _ProcessAnswer:
        self._send(method, *arguments)
        return _ProcessAnswer(self._connection, self._ended, self._hear)

    def _send(self, *words: Any) -> None:
        # Ignore that the process has died, because `result` of the answer reports it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(cloudpickle.dumps(words))

    def _ended(self) -> int:
        code = self._popen.wait()
        return -code if code < 0 else code << 8

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._connection.close()


def serve(handle: int, parent: int) -> None:
    """Carry out the tuner's requests in a device's process; end with the tuner's process."""
    if sys.platform == "linux":
        depend_on(parent)
    connection = Connection(handle)
    answer_all(connection, partial(_opened, partial(report, connection)))


def answer_all(connection: Connection, opened: Callable[..., Trainer], more: Callable[[], bool] = lambda: True) -> None:
    """Carry out a connection's requests one after another, until it closes or `more` returns False.

    `more` is called before each request, and may wait. `opened` makes the trainer from the content of the first
    message.
    """
    trainer: Trainer | None = None
    while more():
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            with warnings.catch_warnings(record=True) as caught:
                method, *arguments = pickle.loads(message)
                if method == "open":
                    trainer = opened(*arguments)
                    continue
                result = getattr(trainer, method)(*arguments)
            send(connection, "warned", caught)
            send(connection, "done", result)
        except Exception:
            send(connection, "raised", traceback.format_exc())


def report(connection: Connection, *content: Any) -> None:
    """Report the progress of training to the tuner."""
    send(connection, "notified", content)


def _opened(notify: Notify, problem: Path, where: str, threads: int, share: DeviceShare) -> Trainer:
    device = torch.device(where)
    if device.type == "cuda":
        # In the user's code, "cuda" then means this device.
        torch.cuda.set_device(device)
    return Trainer(read_shared(problem), device, threads, notify, share=share)


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """A pickler that keeps the bytes of tensors outside of the pickle, so that processes can map them."""

    def reducer_override(self, part: Any) -> Any:
        dense = type(part) is torch.Tensor and part.layout == torch.strided and part.device.type == "cpu"
        if dense and part.numel() and not part.requires_grad and not part.is_conj() and not part.is_neg():
            return from_bytes, (to_bytes(part),)
        return super().reducer_override(part)


def write_shared(path: Path, thing: Any) -> None:
    """Write an object to a file that processes can map, so that its tensors and arrays are in memory only once.

    Raise Unsafe if other users own the folder or can write to it.
    """
    refuse_open_to_others(path.parent)
    buffers: list[pickle.PickleBuffer] = []
    content = io.BytesIO()
    _Pickler(content, protocol=5, buffer_callback=buffers.append).dump(thing)
    raw = [buffer.raw() for buffer in buffers]
    head = pickle.dumps((content.getvalue(), [buffer.nbytes for buffer in raw]))
    path.unlink(missing_ok=True)
    # Reading the file runs code. So "x" follows no link that somebody put there, and only this user can open the file.
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(_LENGTH.pack(len(head)))
        file.write(head)
        for part in raw:
            file.write(b"\0" * (-file.tell() % _ALIGNED))
            file.write(part)


def read_shared(path: Path) -> Any:
    """Return the object that `write_shared` wrote. Changes to it stay in this process."""
    with open_pickled(path) as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    at = _LENGTH.size + _LENGTH.unpack(whole[: _LENGTH.size])[0]
    content, lengths = pickle.loads(whole[_LENGTH.size : at])
    buffers = []
    for length in lengths:
        at += -at % _ALIGNED
        buffers.append(whole[at : at + length])
        at += length
    return pickle.loads(content, buffers=buffers)
