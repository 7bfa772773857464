"""Torch's optimizers in a process that leaves out torch's compiler, asked of a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
    import sys
    import torch
    from hydro_rasda.processes.without_compiler import COMPILER, leave_out_compiler

    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type)]
    kinds = [cls for cls in dict.fromkeys(classes) if cls not in (torch.optim.Optimizer, torch.optim.SparseAdam)]

    def trained(cls):
        generator = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(3, 2, generator=generator))
        optimizer, calls = cls([parameter], lr=0.1), []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))

        def loss():
            optimizer.zero_grad()
            value = (parameter ** 2).sum()
            value.backward()
            return value

        for _ in range(3):
            loss()
            optimizer.step(loss)
            assert torch.is_grad_enabled()
        optimizer.load_state_dict(optimizer.state_dict())
        assert len(calls) == 3
        return parameter.detach()

    leave_out_compiler()
    without = [trained(cls) for cls in kinds]
    assert COMPILER not in sys.modules
    import torch._dynamo
    assert all(torch.equal(one, trained(cls)) for one, cls in zip(without, kinds, strict=True))
    print(sorted(cls.__name__ for cls in kinds))
"""


def test_optimizers_do_the_same_without_the_compiler() -> None:
    """To the last bit, hooks included; once the compiler is there, they are torch's own again."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"Adam", "AdamW", "LBFGS", "Muon", "RMSprop", "SGD"} <= set(eval(done.stdout))
