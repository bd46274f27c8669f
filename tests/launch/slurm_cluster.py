"""A real Slurm on this machine: munge, slurmctld and a slurmd for each virtual node, on loopback.

Everything lies in one folder, and every daemon ends with the block that started it. It runs as
whoever starts it, next to any other Slurm of the machine.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Names that are addresses: tasks find each other by their nodes' names.
NODES = ("127.0.0.1", "127.0.0.2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
# Runs a program until the other end of the input is closed, as it is when a test is killed.
_GUARDED = """
"$@" </dev/null & child=$!
read -r _ || true
kill "$child" 2>/dev/null || true
wait "$child" || true
"""
_CONFIG = """\
ClusterName=xmod
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A job that is queued again waits until its credential has expired: two minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
SchedulerType=sched/builtin
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
MinJobAge=3600
{nodes}
PartitionName=work Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Programs that a Slurm needs and this machine lacks."""
    return [name for name in _PROGRAMS if program(name) is None]


def program(name: str) -> str | None:
    """Path of a program, also where only an administrator's PATH has it."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Slurm:
    """A running cluster of two nodes with one CPU each."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: object, **variables: str) -> str:
        """What a command of Slurm's prints; it must succeed."""
        done = subprocess.run(
            [str(part) for part in command],
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stderr or done.stdout}"
        return done.stdout.strip()

    def job(self, name: str) -> dict[str, str]:
        """The fields of a job, or of an array's element as ``12_3``."""
        words = self.call("scontrol", "--oneliner", "show", "job", name).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(self, what: str, true: Callable[[], bool], seconds: float) -> None:
        """Looks again and again until `true`; fails with what Slurm says when it takes too long."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"{what}: not within {seconds} s\n{self.report()}"
            time.sleep(0.1)

    def report(self) -> str:
        """Queue, nodes and the last lines of every log."""
        jobs = subprocess.run(
            ["scontrol", "show", "job"], env=self.environment, capture_output=True, text=True
        ).stdout
        logs = (f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
        return "\n".join([jobs, *logs])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def _write_config(folder: pathlib.Path) -> None:
    ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={node} NodeHostname={node} Port={port} CPUs=1 State=UNKNOWN"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    user = pwd.getpwuid(os.getuid()).pw_name
    text = _CONFIG.format(folder=folder, user=user, ports=ports, nodes=nodes)
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))


def _munge(folder: pathlib.Path) -> list[str]:
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    names |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    options = [f"--{option}={folder / name}" for option, name in names.items()]
    return [program("munged") or "munged", "--foreground", "--force", *options]


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[Slurm]:
    """A cluster with its files in a folder that nobody else writes to."""
    _write_config(folder)
    slurm = Slurm(folder)
    commands: list[Sequence[str]] = [
        _munge(folder),
        [program("slurmctld") or "slurmctld", "-D", "-c"],
        *([program("slurmd") or "slurmd", "-D", "-N", node] for node in NODES),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"daemon_{number}.log").open("wb") as log:
                daemons.append(
                    subprocess.Popen(
                        ["bash", "-c", _GUARDED, "_", *command],
                        env=slurm.environment,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                    )
                )
            if number == 0:
                slurm.until("munge", (folder / "munge.socket").exists, 30)
        idle = lambda: _states(slurm) == ["idle"] * len(NODES)
        slurm.until("idle nodes", idle, 60)
        yield slurm
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _cancel_all(slurm)
        for daemon in reversed(daemons):
            daemon.communicate(timeout=60)


def _cancel_all(slurm: Slurm) -> None:
    """Ends every job, so that nothing is left of it when the daemons are gone."""
    options: dict[str, Any] = {
        "env": slurm.environment,
        "capture_output": True,
        "text": True,
        "timeout": 20,
    }
    subprocess.run(["scancel", "--state=PENDING", f"--user={os.getuid()}"], **options)
    subprocess.run(["scancel", "--full", "--signal=KILL", f"--user={os.getuid()}"], **options)
    end = time.monotonic() + 30
    jobs = ["squeue", "--noheader"]
    while subprocess.run(jobs, **options).stdout and time.monotonic() < end:
        time.sleep(0.2)


def _states(slurm: Slurm) -> list[str]:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=work", "--format=%T"],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.split()
