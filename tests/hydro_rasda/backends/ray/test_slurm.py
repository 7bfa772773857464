"""The Slurm scripts, with a fake `srun` that starts each node's processes on this machine."""

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[4] / "examples" / "slurm"

FAKES = {
    # Drops Slurm's own options; each node is a Ray node of its own, though of one machine.
    "srun": """
        while [[ $1 == --* ]]; do
            case $1 in --overlap) shift ;; *) shift 2 ;; esac
        done
        echo "srun: $*" >> "$FAKE_LOG"
        exec "$@"
    """,
    "scontrol": 'printf "%s\\n" ${SLURM_JOB_NODELIST//,/ }',
    "hostname": "echo 127.0.0.1",
    "sbatch": 'echo "sbatch: $*" >> "$FAKE_LOG"; echo "$HYDRO_RASDA_SLURM"',
}

RUN = """
import ray
ray.init(address="auto", log_to_driver=False)
print("RAN ON", sum(node["Alive"] for node in ray.nodes()), "NODES", ray.cluster_resources()["CPU"], "CPUS")
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    for name, body in FAKES.items():
        fake = tmp_path / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(body)}\n")
        fake.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    # A port and a folder of its own, so that a Ray that runs already is left alone; a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield {**os.environ, "PATH": path, "FAKE_LOG": str(tmp_path / "log"), "RAY_PORT": "26379", "RAY_TMPDIR": folder}


@pytest.mark.slow
def test_head_and_workers_start_then_the_run_then_all_end(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    (tmp_path / "slurm").mkdir()
    for name in ("cluster.sh", "settings.sh"):
        (tmp_path / "slurm" / name).write_text((SCRIPTS / name).read_text())
    with (tmp_path / "slurm" / "settings.sh").open("a") as settings:
        settings.write(f"\nRUN=(python {script})\nCPUS_PER_NODE=3\nGPUS_PER_NODE=0\nSTART_LIMIT_S=120\n")
    job = {**environment, "SLURM_JOB_NODELIST": "n1,n2", "HYDRO_RASDA_SLURM": str(tmp_path / "slurm")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "cluster.sh")], env=job, capture_output=True, text=True, timeout=200, check=False
    )
    assert "RAN ON 2 NODES 6.0 CPUS" in done.stdout, done.stdout + done.stderr[-3000:]
    assert done.returncode == 0
    started = (tmp_path / "log").read_text()
    assert "ray start --head --node-ip-address 127.0.0.1 --port 26379" in started
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"127.0.0.1:26379" in _read(p)], "Ray is left behind"


def test_submit_asks_for_what_the_settings_say(environment: dict[str, str], tmp_path: Path) -> None:
    subprocess.run(["bash", str(SCRIPTS / "submit.sh")], env=environment, capture_output=True, check=True)
    asked = (tmp_path / "log").read_text()
    assert "--nodes 2 --partition batch --time 04:00:00" in asked
    assert f"--export ALL,HYDRO_RASDA_SLURM={SCRIPTS} {SCRIPTS}/cluster.sh" in asked
    assert "--account" not in asked


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
