"""A Slurm of this machine's own for as long as a `with`: munge, slurmctld and two nodes on loopback, in one folder.

Nothing of an installed Slurm's settings is read or changed, and no port is open to the outside.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CryptoType=crypto/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=10
MinJobAge=300
ReturnToService=2
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=10
PartitionName=low Nodes=n1,n2 MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
"""


def missing() -> str | None:
    """What stands in the way of a cluster on this machine, in one sentence; None if nothing does."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return (f"{', '.join(lacking)} were wanted and are not installed: on Debian, apt-get install "
                "--no-install-recommends slurmd slurmctld slurm-client munge")  # fmt: skip
    if os.geteuid() != 0:
        return "root was wanted, for slurmd starts jobs as other users: run it as root, in a container if need be"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "nothing"
    if not address.startswith("127."):
        return (f"the machine's name {socket.gethostname()} was wanted to be 127.0.0.1 and is {address}, to which "
                f"srun's ports would be open: add it to the line of 127.0.0.1 in /etc/hosts")  # fmt: skip
    return None


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Cluster:
    """with Cluster(folder) as c: c.sbatch(...)."""

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, []
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "MASTER_"))}
        self.environ |= {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        f = self.folder
        (f / "state").mkdir(parents=True)
        (f / "munge.key").write_bytes(os.urandom(1024))
        (f / "munge.key").chmod(0o400)
        f.chmod(0o755)
        conf = CONF.format(host=socket.gethostname(), folder=f, ports=free_ports(3), user="root")
        (f / "slurm.conf").write_text(conf)
        files = [f"--{name}={f}/munge.{end}" for name, end in
                 (("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"),
                  ("seed-file", "seed"))]  # fmt: skip
        try:
            self._start("munged", "--foreground", "--force", *files)
            self._wait(lambda: (f / "munge.sock").exists(), "munged")
            self._start("slurmctld", "-D", "-f", f / "slurm.conf")
            for node in ("n1", "n2"):
                self._start("slurmd", "-D", "-f", f / "slurm.conf", "-N", node)
            self._wait(lambda: len(re.findall(r"State=IDLE\b", self.ask("scontrol", "show", "node"))) == 2, "Slurm")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, *command):
        log = open(self.folder / f"{command[0]}{len(self.daemons)}.out", "wb")
        self.daemons.append(subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, env=self.environ,
                                             stdin=subprocess.DEVNULL, start_new_session=True))  # fmt: skip

    def _wait(self, condition, what: str, seconds: float = 30):
        end = time.time() + seconds
        while not condition():
            if time.time() > end or any(d.poll() is not None for d in self.daemons):
                logs = "".join(p.read_text(errors="replace")[-600:] for p in self.folder.glob("*.out"))
                raise RuntimeError(f"{what} did not start within {seconds:.0f} s: {logs}")
            time.sleep(0.1)

    def ask(self, *command) -> str:
        """A command's stdout."""
        return subprocess.run([str(word) for word in command], env=self.environ, capture_output=True, text=True).stdout

    def sbatch(self, *words, **environ) -> int:
        """Submit; returns the job's number."""
        done = subprocess.run(["sbatch", "--parsable", *map(str, words)], env=self.environ | environ,
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"sbatch {' '.join(map(str, words))}: {done.stderr}")
        return int(done.stdout.split(";")[0])

    def job(self, job: int) -> dict[str, str]:
        """What scontrol says of a job; {} if it does not answer, as on a busy machine."""
        return next(iter(self.tasks(job)), {})

    def tasks(self, job: int) -> list[dict[str, str]]:
        """The same for every task of an array, with its own number (JobId)."""
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in
                self.ask("scontrol", "--oneliner", "show", "job", job).splitlines() if line]  # fmt: skip

    def own(self) -> list[int]:
        """Ids of processes of this cluster, jobs' included: those with its slurm.conf in their environment."""
        found, mark = [], f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it has ended
                pass
        return found

    def __exit__(self, *_):
        """End the jobs, then the daemons, then whatever is left of either."""
        self.ask("scancel", "--user=root")
        end = time.time() + 10
        while self.ask("squeue", "-h") and time.time() < end:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.own():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        end = time.time() + 5
        while self.own() and time.time() < end:
            time.sleep(0.1)
