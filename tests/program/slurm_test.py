#!/usr/bin/env python3
"""gyre under a real Slurm of two nodes on this machine, with the commands of docs/slurm.md.

    tests/program/slurm_test.py BUILD_DIR [--time-limit]

--time-limit: also a job that its time limit ends, of two minutes. Slurm's daemons run in namespaces of their own
(processes, mounts, network), which end with the test. If Slurm is not installed, Debian's packages are downloaded into
BUILD_DIR/slurm and seen as installed by this test alone. Exit codes: 0; 1: a check failed; 2: wrong use; 77: there is no
Slurm, or namespaces cannot be made.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from training_job import until, write_set

INSIDE = "GYRE_SLURM_TEST_INSIDE"
NODES = ("n1", "n2")
ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "liblua5.1-0")
EPOCHS = 20
PAUSE = "export GYRE_TEST_WRITE_PAUSE_MS=30"  # so that a checkpoint, and so an epoch, lasts half a second


def run(command: str, seconds: float = 120, check: bool = True) -> str:
    """The output of a shell's command."""
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=seconds, check=False)  # fmt: skip
    if check and done.returncode != 0:
        raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


def downloaded(folder: pathlib.Path) -> pathlib.Path:
    """The folder `usr` of Debian's packages of Slurm."""
    root = folder / "root"
    if not (root / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        get = f"cd {folder} && apt-get download -qq {' '.join(PACKAGES)}"
        own = folder / "apt"  # its lists, where the system's are missing or old
        (own / "partial").mkdir(parents=True)
        update = f"apt-get -qq -o Dir::State::lists={own} update"
        run(f"{get} || {{ {update} && {get} -o Dir::State::lists={own}; }}", 300)
        run(f"cd {folder} && for package in *.deb; do dpkg -x $package root; done")
        for name in ("slurmctld", "slurmd", "slurmstepd"):  # update-alternatives makes these otherwise
            (root / "usr/sbin" / name).symlink_to(f"{name}-wlm")
        (root / "complete").touch()
    return root / "usr"


class Cluster:
    """Slurm's daemons, in this process's namespaces."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        host = run("hostname").strip()
        # Slurm looks names up only if there is an address besides the loopback one.
        run("ip link set lo up; ip link add eth0 type veth peer name eth1; ip address add 10.77.1.1/24 dev eth0; "
            "ip link set eth0 up; ip link set eth1 up")  # fmt: skip
        (folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
        run(f"mount --bind {folder}/hosts /etc/hosts")
        munge = folder / "munge"
        munge.mkdir(mode=0o755)
        run(f"head -c 128 /dev/urandom > {munge}/key; chmod 600 {munge}/key")
        # Not the machine's own, should it have one.
        self.start(f"munged -F --force --key-file={munge}/key --socket={munge}/socket --pid-file={munge}/pid "
                   f"--log-file={munge}/log --seed-file={munge}/seed", "munged")  # fmt: skip
        for name in ("state", *NODES, *(f"tmp-{node}" for node in NODES)):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(f"""ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
SchedulerParameters=batch_sched_delay=1,sched_interval=2
NodeName=n[1-2] NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=4 RealMemory=1000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
""")
        os.environ["SLURM_CONF"] = f"{folder}/slurm.conf"
        until(lambda: (munge / "socket").exists(), "munged", 20)
        self.start("slurmctld -D", "slurmctld")
        for node in NODES:
            self.start(f"unshare --uts bash -c 'hostname {node}; exec slurmd -D -N {node}'", f"slurmd-{node}")
        try:
            until(lambda: run("sinfo -h -t idle -o %D", check=False).strip() == "2", "two idle nodes", 60)
        except TimeoutError as error:
            logs = "".join(path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log"))
            raise AssertionError(f"{error}\n{run('sinfo', check=False)}\n{logs}") from error

    def start(self, command: str, name: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            subprocess.Popen(["bash", "-c", "exec " + command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                             start_new_session=True)  # fmt: skip


class Checks:
    """Each check raises AssertionError."""

    def __init__(self, folder: pathlib.Path, gyre: str) -> None:
        self.folder = folder
        write_set(folder / "set")
        (folder / "model").write_text("conv 8 k3\nrelu\nmaxpool 2\nlinear 64\nrelu\nlinear classes\n")
        self.gyre = gyre
        self.train = f"{gyre} train --threads 1 --shards 4 --global-batch 8 --timeout 20 --data {folder}/set --model {folder}/model"
        self.shell = f"cd {folder}; export OMPI_MCA_mpi_yield_when_idle=1 GYRE_SECRET={os.urandom(32).hex()}; "
        run(f"{self.shell} {self.train} --epochs {EPOCHS} --save whole -q")

    def jobs(self) -> str:
        return run("squeue -h -o '%i %T'", check=False).strip()

    def state(self, job: str) -> str:
        return run(f"scontrol show job {job} -o | grep -o 'JobState=[A-Z_]*' | cut -d= -f2", check=False).strip()

    def restarts(self, job: str) -> int:
        return int(run(f"scontrol show job {job} -o | grep -o 'Restarts=[0-9]*' | cut -d= -f2"))

    def submit(self, script: str, *flags: str) -> str:
        path = self.folder / "job.sh"
        path.write_text(script)
        return run(f"{self.shell} sbatch --parsable {shlex.join(flags)} {path}").strip()

    def wait(self, job: str, states: tuple[str, ...], seconds: float = 120) -> None:
        ends = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
        try:
            until(lambda: self.state(job) in (*states, *ends), " or ".join(states), seconds)
            if self.state(job) not in states:
                raise TimeoutError(f"no {' or '.join(states)}")
        except TimeoutError as error:
            raise AssertionError(f"job {job}: {error}; it is {self.state(job)}\n{self.output(job)}") from error

    def output(self, job: str) -> str:
        path = self.folder / f"slurm-{job}.out"
        return path.read_text(errors="replace")[-3000:] if path.exists() else "(no output)"

    def epochs_of(self, job: str, least: int) -> None:
        try:
            until(lambda: len(re.findall(r"^epoch \d+/", self.output(job), re.MULTILINE)) >= least, f"epoch {least}")
        except TimeoutError as error:
            raise AssertionError(f"job {job}: {error}\n{self.output(job)}") from error

    def nothing_left(self) -> None:
        def ranks() -> list[str]:
            """But those that have ended, which nobody collects here."""
            return [path.parent.name for path in pathlib.Path("/proc").glob("[0-9]*/comm")
                    if name_of(path) == "gyre" and bytes_of(path.with_name("cmdline"))]  # fmt: skip

        try:
            until(lambda: not ranks() and not self.jobs(), "an end of all ranks", 30)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {ranks()} {self.jobs()}") from error

    def same_bytes(self, run_folder: str) -> None:
        for file in ("last.safetensors", "best.safetensors"):
            if (self.folder / run_folder / file).read_bytes() != (self.folder / "whole" / file).read_bytes():
                raise AssertionError(f"{run_folder}/{file} has other bytes than that of a training on one rank")

    def page_script(self, number: int, *changes: tuple[str, str]) -> str:
        """A batch script of docs/slurm.md, changed for this cluster, which has no GPU and few processors."""
        scripts = re.findall(r"^```\n(#!/bin/bash\n.*?)^```\n", (ROOT / "docs/slurm.md").read_text(), re.MULTILINE | re.DOTALL)
        script = scripts[number]
        for there, here in changes:
            if there not in script:
                raise AssertionError(f"script {number} of docs/slurm.md has no '{there}'")
            script = script.replace(there, here)
        return script

    def resuming(self, run_folder: str, epochs: int = EPOCHS) -> str:
        return self.page_script(0, ("--ntasks-per-node=4 --gpus-per-task=1", "--ntasks-per-node=2"),
                                ("build/gyre train --data mnist --virtual-ranks 8 --epochs 100", f"{self.train} --epochs {epochs}"),
                                ("FENCE=ring\n", f"FENCE=ring\n{PAUSE}\n"), ("--save run", f"--save {run_folder}"))  # fmt: skip

    # The checks.

    def pmix(self) -> None:
        run(f"{self.shell} SLURM_PMIX_FENCE=ring srun -N 2 -n 4 --mpi=pmix {self.train} --epochs {EPOCHS} --save pmix")
        self.same_bytes("pmix")

    def plain(self) -> None:
        run(f"{self.shell} srun -N 2 -n 4 {self.train} --epochs {EPOCHS} --save plain")
        self.same_bytes("plain")

    def launch(self) -> None:
        job = self.submit(f"#!/bin/bash\n{self.gyre} launch -n 2 -- {self.train.split(' ', 1)[1]} --epochs {EPOCHS} --save launch\n",
                          "-N", "1", "-n", "2")  # fmt: skip
        self.wait(job, ("COMPLETED",))
        self.same_bytes("launch")

    def requeue(self) -> None:
        """The page's script: told to end, as by --signal before its time limit, it is requeued and resumes."""
        job = self.submit(self.resuming("requeue"))
        self.epochs_of(job, 5)
        run(f"scancel --signal=TERM {job}")
        until(lambda: self.restarts(job) == 1, "a requeued job", 60)
        # Slurm starts it again after two minutes, or when told, once: each word puts it off for a moment. A job that
        # starts in the second in which its last start was ended is taken for that one: "Job credential revoked".
        until(lambda: self.state(job) == "PENDING", "a job that waits", 60)
        run(f"scontrol update jobid={job} StartTime=now+5", check=False)
        self.wait(job, ("COMPLETED",), 300)
        self.same_bytes("requeue")

    def saves(self) -> None:
        job = self.submit(self.resuming("saves"))
        self.epochs_of(job, 3)
        run(f"scancel --signal=USR1 {job}")
        self.wait(job, ("COMPLETED",))
        self.same_bytes("saves")

    def cancelled(self) -> None:
        job = self.submit(self.resuming("cancelled", 100000))
        self.epochs_of(job, 3)
        run(f"scancel {job}")
        self.wait(job, ("CANCELLED",))

    def killed(self) -> None:
        job = self.submit(self.resuming("killed", 100000))
        self.epochs_of(job, 3)
        rank2 = [path.parent.name for path in pathlib.Path("/proc").glob("[0-9]*/environ")
                 if b"SLURM_PROCID=2\0" in bytes_of(path) and name_of(path.parent / "comm") == "gyre"]  # fmt: skip
        os.kill(int(rank2[0]), 9)
        self.wait(job, ("FAILED",), 60)
        if not re.search("rank 2", self.output(job)):
            raise AssertionError("the killed rank is not named: " + self.output(job))

    def array(self) -> None:
        job = self.submit(self.page_script(1, ("build/gyre train --data mnist", f"{self.train} --epochs 2")))
        until(lambda: not self.jobs(), "an end of the array", 120)
        files = [self.folder / f"sweep-{n}/last.safetensors" for n in range(3)]
        if len({bytes_of(path) for path in files} - {b""}) != 3:
            raise AssertionError(f"job {job}: these are not three trainings: {[path.exists() for path in files]}")

    def time_limit(self) -> None:
        script = self.resuming("limit", 1000000)
        job = self.submit(script.replace("--time=02:00:00 --signal=TERM@120", "--time=00:02:00 --signal=TERM@60"))
        until(lambda: self.restarts(job) >= 1, "a requeued job", 240)
        if not re.search("interrupted", self.output(job)):
            raise AssertionError("no clean end: " + self.output(job))
        run(f"scancel {job}")


def bytes_of(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def name_of(path: pathlib.Path) -> str:
    return bytes_of(path).decode(errors="replace").strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--time-limit", action="store_true")
    options = parser.parse_args()
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if INSIDE not in os.environ:
        usr = ""
        if missing():
            try:
                usr = str(downloaded(options.build.resolve() / "slurm"))
            except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
                print(f"skipped: no {', '.join(missing())} here (Debian: slurm-wlm munge), nor to be had: {error}")
                return 77
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        mount = f"mount -t overlay -o lowerdir={usr}:/usr overlay /usr" if usr else "true"
        made = subprocess.run([*unshare, "bash", "-c", mount], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            print(f"skipped: namespaces, or a layer over /usr, cannot be made here: {made.stderr.strip()}")
            return 77
        environment = {**os.environ, INSIDE: mount}
        return subprocess.run([*unshare, sys.executable, *sys.argv], env=environment, check=False).returncode
    run(os.environ[INSIDE])
    if missing():
        print(f"skipped: no {', '.join(missing())} in Debian's packages")
        return 77
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gyre-slurm-") as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        Cluster(folder)
        checks = Checks(folder, str(options.build.resolve() / "gyre"))
        rows: list[tuple[str, Callable[[], None]]] = [
            ("srun --mpi=pmix", checks.pmix), ("plain srun, over Gloo", checks.plain),
            ("gyre launch in a job of one node", checks.launch), ("SIGUSR1 saves, the job continues", checks.saves),
            ("scancel leaves nothing", checks.cancelled), ("a killed rank is named", checks.killed),
            ("an array of jobs sweeps a learning rate", checks.array),
            ("SIGTERM, requeue, the same bytes", checks.requeue),
        ]  # fmt: skip
        if options.time_limit:
            rows.append(("--signal before the time limit, requeue", checks.time_limit))
        for what, check in rows:
            begin = time.monotonic()
            try:
                check()
                checks.nothing_left()
                print(f"ok: {what} ({time.monotonic() - begin:.1f} s)", flush=True)
            except (AssertionError, TimeoutError, FileNotFoundError, IndexError) as error:
                failed += 1
                print(f"FAILED: {what}: {error}", flush=True)
                run("scancel --user=root --full; scancel --user=root", check=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
