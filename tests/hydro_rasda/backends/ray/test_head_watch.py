import socket
import threading

import pytest

from hydro_rasda.backends.ray import backend
from hydro_rasda.backends.ray.backend import head_watched


def test_a_head_that_is_gone_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backend, "_HEAD_ASKED_EVERY_S", 0.01)
    head = socket.create_server(("127.0.0.1", 0))
    with head_watched(f"127.0.0.1:{head.getsockname()[1]}"):
        head.accept()[0].close()  # it is asked
        assert "does not answer" not in capsys.readouterr().err
        head.close()
        (watch,) = [thread for thread in threading.enumerate() if thread.name == "head watch"]
        watch.join(60)
    assert "the same call goes on with it" in capsys.readouterr().err


def test_a_head_that_answers_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head, head_watched(f"127.0.0.1:{head.getsockname()[1]}"):
        pass
    assert capsys.readouterr().err == ""
