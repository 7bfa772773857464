"""What a process loads, each asked of a fresh interpreter: names of modules, never seconds."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import hydro_rasda

OWN = {"cloudpickle", "filelock", "fusion", "hydro_rasda", "mup", "numpy", "surrogate", "torch", "yaml"}
"""Packages that a local search loads."""

LOADED = f"""
    HEAVY = {{"torch._dynamo", "torch.distributed.fsdp", "torch.fx.experimental.symbolic_shapes"}}

    def loaded(before=()):
        '''Packages loaded since, but for Python's own and those of compiled code, which begin with an underscore.'''
        packages = {{name.split(".")[0] for name in sys.modules.keys() - set(before)}}
        known = {OWN} | set(sys.stdlib_module_names) | {{"__main__", "__mp_main__", "cython_runtime"}}
        return sorted(name for name in packages - known if not name.startswith("_"))
"""


def run(script: str) -> str:
    """What a script prints."""
    code = textwrap.dedent(f"import os, sys\n{textwrap.dedent(LOADED)}\n{textwrap.dedent(script)}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_alone_loads_nothing_else() -> None:
    told = run("before = set(sys.modules); import hydro_rasda; print(sorted(sys.modules.keys() - before))")
    loaded = {name.split(".")[0] for name in eval(told)}
    assert "hydro_rasda" in loaded
    assert loaded - sys.stdlib_module_names == {"fusion", "hydro_rasda"}  # of fusion, what makes names lazy


WITHOUT_TORCH = (
    "cli",
    "common",
    "history",
    "packing",
    "records",
    "schedulers",
    "settings",
    "simulator",
    "space/domains",
)
"""Modules and rooms of hydro_rasda that need no torch: those that read settings and journals, decide, or pack."""


def test_reading_and_deciding_need_no_torch() -> None:
    package = Path(hydro_rasda.__file__).parent
    files = [file for name in WITHOUT_TORCH for file in (*package.glob(f"{name}.py"), *(package / name).rglob("*.py"))]
    names = [".".join(("hydro_rasda", *file.relative_to(package).with_suffix("").parts)) for file in files]
    names = [name for name in names if not name.endswith("__main__")]
    assert len(names) > 60
    script = f"""
        import importlib
        for name in {names}:
            importlib.import_module(name.removesuffix(".__init__"))
        from hydro_rasda.common.trial import Trial
        print(Trial(0, {{}}).batch_size, "torch" in sys.modules)
    """
    assert run(script) == "64 False"


def test_tune_loads_what_a_local_search_needs() -> None:
    script = """
        import torch
        before = set(sys.modules)
        from hydro_rasda import choice, loguniform, tune
        print(loaded(before), sorted(name for name in sys.modules.keys() - before if name.startswith("torch.")))
    """
    foreign, of_torch = eval(run(script).replace("] [", "], ["))
    assert foreign == []
    assert not [name for name in of_torch if name.startswith(("torch.distributed.fsdp", "torch.distributed.tensor"))]
    assert not {"torch._dynamo", "torch.fx.experimental.symbolic_shapes"} & set(of_torch)


SEARCH = """
    import tempfile, warnings
    import numpy as np
    import torch
    from torch import nn

    folder, here = sys.argv[1], os.getpid()
    x, y = (torch.tensor(values) for values in np.load(os.path.join(folder, "digits.npz")).values())
    before = set(sys.modules)
    from hydro_rasda import LocalBackend, RaceConfig, choice, loguniform, tune

    def model_fn(config, width_ratio=1.0):
        if os.getpid() != here:
            with open(os.path.join(folder, str(os.getpid())), "w") as file:
                file.write(" ".join([*loaded(before), *HEAVY & sys.modules.keys()]))
        width = int(64 * width_ratio)
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    result = tune(
        model_fn,
        {"lr": loguniform(1e-3, 0.1), "optimizer": choice(["sgd", "adamw"]), "batch_size": 64},
        train_data=(x[:600], y[:600]), val_data=(x[600:900], y[600:900]), num_samples=4, max_t=2,
        race=RaceConfig(top_k=2), backend=BACKEND, storage_path=tempfile.mkdtemp(dir=folder), progress=False,
    )
    result.best_model()
    print([*loaded(before), *HEAVY & sys.modules.keys()])
"""


@pytest.mark.parametrize("backend", ["'local'", pytest.param("LocalBackend(['cpu', 'cpu'])", marks=pytest.mark.slow)])
def test_a_whole_local_search_loads_no_more(backend: str, tmp_path: Path) -> None:
    """Nor do the processes that train: those forked of the script, or started for a device each.

    Of torch, that is neither its compiler nor FSDP.
    """
    digits = load_digits()  # here, as scikit-learn loads pandas and rich, too
    np.savez(tmp_path / "digits.npz", x=digits.data.astype(np.float32) / 16, y=digits.target)
    told = run(SEARCH.replace("BACKEND", backend).replace("sys.argv[1]", repr(str(tmp_path))))
    # Devices that are shared have a daemon, as jobs of `pack` have; processes forked of this one have it loaded, too.
    here = "" if backend == "'local'" else "psutil rich"
    assert eval(told) == here.split()
    children = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name.isdecimal()}
    assert "" in children.values()
    assert set(children.values()) <= {"", here}
