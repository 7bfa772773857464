"""The Slurm scripts, with a fake `srun` that starts each node's processes on this machine."""

import os
import socket
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

PORT = 20000 + 2 * 4321

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
    # A folder of its own, so that a Ray that runs already is left alone; a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        job = {"SLURM_JOB_ID": "4321", "SLURM_JOB_NODELIST": "n1,n2", "CPUS_PER_NODE": "3", "GPUS_PER_NODE": "0"}
        yield {**os.environ, **job, "PATH": path, "FAKE_LOG": str(tmp_path / "log"), "RAY_TMPDIR": folder}


@pytest.fixture
def taken() -> Iterator[int]:
    """The first port that the job would take, which another one has; it refuses calls, which Ray else waits for."""
    with socket.socket() as holds:
        holds.bind(("", PORT))
        yield PORT


@pytest.mark.slow
def test_head_and_workers_start_then_the_run_then_all_end(
    environment: dict[str, str], taken: int, tmp_path: Path
) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    (tmp_path / "slurm").mkdir()
    for name in ("cluster.sh", "settings.sh"):
        (tmp_path / "slurm" / name).write_text((SCRIPTS / name).read_text())
    with (tmp_path / "slurm" / "settings.sh").open("a") as settings:
        settings.write(f"\nRUN=(python {script})\nSTART_LIMIT_S=900\n")
    done = cluster({**environment, "HYDRO_RASDA_SLURM": str(tmp_path / "slurm")})
    assert "RAN ON 2 NODES 6.0 CPUS" in done.stdout, done.stdout + done.stderr[-3000:]
    assert done.returncode == 0
    started = (tmp_path / "log").read_text()
    assert f"ray start --head --node-ip-address 127.0.0.1 --port {taken + 1} " in started
    address = f"127.0.0.1:{taken + 1}".encode()
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if address in _read(p)], "Ray is left behind"


@pytest.mark.slow
def test_a_head_that_ends_ends_the_job_and_says_why(environment: dict[str, str], taken: int) -> None:
    done = cluster({**environment, "RAY_PORT": str(taken), "START_LIMIT_S": "900"})
    assert done.returncode == 1
    assert "Ray ended on n1 before the cluster was up. Its last lines:" in done.stderr
    assert str(taken) in done.stderr.partition("Its last lines:")[2]


def test_a_folder_too_long_for_sockets_is_refused(environment: dict[str, str]) -> None:
    done = cluster({**environment, "RAY_TMPDIR": "/" + "x" * 40})
    assert done.returncode == 1
    assert f"RAY_TMPDIR is /{'x' * 40}, but must have at most 36 characters" in done.stderr


def test_submit_asks_for_what_the_settings_say(environment: dict[str, str], tmp_path: Path) -> None:
    subprocess.run(["bash", str(SCRIPTS / "submit.sh")], env=environment, capture_output=True, check=True)
    asked = (tmp_path / "log").read_text()
    assert "--nodes 2 --partition batch --time 04:00:00" in asked
    assert "--cpus-per-task 3 --mem 0 --exclusive" in asked
    assert "--gpus-per-node" not in asked
    gpus = {**environment, "GPUS_PER_NODE": "4", "EXCLUSIVE": "", "MEMORY_PER_NODE": "64G"}
    subprocess.run(["bash", str(SCRIPTS / "submit.sh")], env=gpus, capture_output=True, check=True)
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert "--cpus-per-task 3 --mem 64G --gpus-per-node 4 --export" in last
    assert f"--export ALL,HYDRO_RASDA_SLURM={SCRIPTS} {SCRIPTS}/cluster.sh" in asked
    assert "--account" not in asked


def cluster(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / "cluster.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000, check=False)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
