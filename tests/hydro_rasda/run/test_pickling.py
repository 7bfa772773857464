from __future__ import annotations

import sys
from typing import Any

import torch.distributed.config
from ray import cloudpickle

from hydro_rasda import elastic

SCRIPT = """
def train(worker):
    worker.config["lr"], torch.distributed.is_initialized()
"""


def test_a_scripts_function_may_read_config_and_call_torch_distributed() -> None:
    """Its names spell `torch.distributed.config`, which cloudpickle takes along."""
    script: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(SCRIPT, script)  # as a script's, it is pickled by value
    elastic(script["train"])
    cloudpickle.loads(cloudpickle.dumps(script["train"]))
    module = sys.modules["torch.distributed.config"]
    assert cloudpickle.loads(cloudpickle.dumps(module)) is module
