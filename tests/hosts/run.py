"""Trains on two hosts that are network namespaces of this machine, cuts the link between them, and says what held.

    python tests/hosts/run.py            # 3 minutes on two cores, 5 on busy ones; the last line is one JSON object

Each host has a torchrun with two ranks, which meet through its c10d rendezvous and share gradients through gloo, over a
pair of virtual network cards. Needs root and `ip netns` (Debian: iproute2). Exit status: 0 if all held, 1 if not, 2 if
there can be no network namespaces here.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests/faults")]
import micro  # noqa: E402

STEPS, SLOW, TIMEOUT = 120, 0.05, 8  # a step takes at least SLOW seconds; TIMEOUT: --timeout where the link stays cut
RUN = ("--max_steps", STEPS, "--batch", 1, "--save_steps", 10, "--keep_last", 3, "--val_steps", 50, "--log_steps", 2)


def ip(*words) -> str:
    """An `ip` command's stdout; RuntimeError if it fails."""
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Two network namespaces and the link between them, as long as a `with`."""

    ADDRESSES = "10.213.0.1", "10.213.0.2"

    def __init__(self):
        self.names = [f"sd{os.getpid()}{letter}" for letter in "ab"]

    def __enter__(self) -> "Hosts":
        a, b = self.names
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", "veth", "netns", a, "type", "veth", "peer", "name", "veth", "netns", b)
            for name, address in zip(self.names, self.ADDRESSES):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth")
                for card in ("lo", "veth"):
                    ip("-n", name, "link", "set", card, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def link(self, state: str):
        """up or down."""
        ip("-n", self.names[0], "link", "set", "veth", state)

    def own(self) -> list[int]:
        """Ids of the processes in the namespaces."""
        listed = [subprocess.run(["ip", "netns", "pids", n], capture_output=True, text=True) for n in self.names]
        return [int(pid) for done in listed for pid in done.stdout.split()]

    def __exit__(self, *_):
        """End what is left in them, and remove them."""
        for pid in self.own():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Trainings:
    """Runs over the hosts, and what held."""

    def __init__(self, work: Path, hosts: Hosts):
        self.work, self.hosts, self.held, self.times, self.count = work, hosts, {}, {}, 0
        self.began = time.time()
        self.data = micro.make_data(work / "data", {"things": 42})

    def check(self, name: str, held: bool, note: str = ""):
        self.held[name] = bool(held)
        print(f"{time.time() - self.began:5.1f} s  {'held' if held else 'DID NOT HOLD'}: {name} {note}", flush=True)

    def begin(self, name: str, *more, slow: float = SLOW, ranks: int = 2, second=(), data: Path | None = None) -> list:
        """torchrun on both hosts, with so many ranks on each, in the run folder work/name. second: further flags of the
        second host; data: what lies at the data's path there (`ip netns exec` gives it mounts of its own)."""
        self.count += 1
        processes = []
        for n, (namespace, address) in enumerate(zip(self.hosts.names, self.hosts.ADDRESSES)):
            argv = micro.flags(self.data, self.work / name, *RUN, *more, *(second if n else ()))
            command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                       f"--nproc_per_node={ranks}", "--rdzv_backend=c10d", f"--rdzv_id={name}{self.count}",
                       f"--rdzv_endpoint={self.hosts.ADDRESSES[0]}:29400", f"--rdzv_conf=is_host={not n}",
                       f"--local_addr={address}",
                       ROOT / "tests/faults/micro.py", "--slow", slow, *argv]  # fmt: skip
            if n and data:
                mount = f'mount --bind "{data}" "{self.data}" && exec "$@"'
                command[4:4] = ["sh", "-c", mount, "sh"]
            environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "veth"}
            with open(self.log_of(name, n), "ab") as log:
                processes.append(subprocess.Popen([str(word) for word in command], stdout=log, stderr=log,
                                                  stdin=subprocess.DEVNULL, env=environ))  # fmt: skip
        return processes

    def log_of(self, name: str, host: int) -> Path:
        return self.work / f"{name}.{host}.log"

    def text(self, name: str) -> str:
        return "".join(self.log_of(name, n).read_text(errors="replace") for n in (0, 1))

    def errors(self, name: str) -> list[str]:
        """The sentences that the programs ended with."""
        return re.findall(r"(?<!\w)error: .*", self.text(name))

    def steps(self, name: str) -> int:
        path = self.work / name / "log.jsonl"
        return 2 * path.read_bytes().count(b"\n") if path.exists() else 0

    def reach(self, name: str, step: int, processes: list, seconds: float = 300):
        end = time.time() + seconds
        while self.steps(name) < step:
            if time.time() > end or any(p.poll() is not None for p in processes):
                raise RuntimeError(f"{name} did not come to step {step}: {self.text(name)[-2000:]}")
            time.sleep(0.05)

    def programs(self) -> list[int]:
        """The trainings' processes: those in the namespaces that torchrun started."""
        return [pid for pid in self.hosts.own() if b"--rdzv_id" not in command_line(pid)]

    def ends(self, processes: list, seconds: float = 300) -> list[int | None]:
        """Their exit statuses; None for one that did not end in time and was killed."""
        end, statuses = time.time() + seconds, []
        for p in processes:
            try:
                statuses.append(p.wait(max(0.1, end - time.time())))
            except subprocess.TimeoutExpired:
                statuses.append(None)
        if None in statuses:
            for pid in self.hosts.own():
                os.kill(pid, signal.SIGKILL)
        return statuses


def one_run(t: Trainings):
    """Two ranks on each of two hosts, and four on one."""
    out = t.work / "whole.txt"
    pids = micro.start_ranks(4, micro.flags(t.data, t.work / "whole", *RUN), out)
    assert [micro.status_of(pid) for pid in pids] == [0] * 4, out.read_text()
    statuses = t.ends(t.begin("two", slow=0))
    found = micro.differences(t.work / "whole", t.work / "two")
    t.check("two_hosts_train_as_one", statuses == [0, 0] and not found, str(found[:3] or ""))


def short_cut(t: Trainings):
    """No packet goes through for 5 s."""
    processes = t.begin("cut")
    t.reach("cut", 20, processes)
    t.hosts.link("down")
    time.sleep(5)
    still = t.steps("cut")
    t.hosts.link("up")
    statuses = t.ends(processes)
    found = micro.differences(t.work / "whole", t.work / "cut")
    t.check("a_cut_of_5_s_changes_nothing", statuses == [0, 0] and not found and still < STEPS, str(found[:3] or ""))


def long_cut(t: Trainings):
    """The link does not come back before all have ended; then the run goes on."""
    processes = t.begin("lost", "--timeout", TIMEOUT)
    t.reach("lost", 26, processes)
    t.hosts.link("down")
    began = time.time()
    while t.programs() and time.time() < began + 60:
        time.sleep(0.1)
    seconds = t.times["s_from_cut_to_end"] = round(time.time() - began, 1)
    errors = t.errors("lost")
    told = len(errors) == 4 and all("has lost the others" in e for e in errors)
    t.check("a_lost_link_ends_all_in_one_sentence", told and seconds < TIMEOUT + 20, f"after {seconds} s")
    for p in processes:  # the second host's torchrun waits for the first's, in which the rendezvous is
        p.terminate()
    t.ends(processes, 20)
    t.hosts.link("up")
    statuses = t.ends(t.begin("lost", "--resume", slow=0))
    t.check("resume_after_it_ends_the_same", statuses == [0, 0] and close(t.work / "whole", t.work / "lost"))


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def close(a: Path, b: Path) -> bool:
    """Whether two runs saw the same pictures in each step and ended with the same weights, to rounding: with more than
    two ranks DDP adds gradients in another order in the step after a start than in those after it."""
    (ta, sa), (tb, sb) = (micro.contents(micro.checkpoints(out)[-1]) for out in (a, b))
    seen = [[row["seen"] for row in micro.rows(out)] for out in (a, b)]
    largest = max(((ta[k] - tb[k]).abs().max() / ta[k].abs().max().clamp(min=1e-3)).item() for k in ta if "unet" in k)
    return seen[0] == seen[1] and sa["step"] == sb["step"] == STEPS and ta.keys() == tb.keys() and largest < 1e-3


def refusals(t: Trainings):
    """The second host has one latent otherwise, or another flag."""
    other = t.work / "other"
    shutil.copytree(t.data, other)
    path = sorted((other / "things/latents").glob("*.npy"))[0]
    values = bytearray(path.read_bytes())
    values[-1] ^= 64  # one bit
    path.write_bytes(values)
    for name, second, data, word in (
        ("other_data", (), other, "disagree on the latents;"),
        ("other_settings", ("--lr", 2e-3), None, "disagree on flags, settings;"),
    ):
        statuses = t.ends(t.begin(name, ranks=1, second=second, data=data))
        errors = t.errors(name)
        refused = len(errors) == 2 and all(word in e for e in errors) and not (t.work / name).exists()
        t.check(f"{name}_on_one_host_are_refused", refused and 0 not in statuses, errors[0] if errors else "")


def missing() -> str | None:
    """What stands in the way, in one sentence; None if nothing does."""
    if shutil.which("ip") is None:
        return "`ip` was wanted and is not installed: on Debian, apt-get install iproute2"
    try:
        with Hosts():
            return None
    except RuntimeError as e:
        return f"network namespaces were wanted, and may not be made here ({e}): run it as root, outside a sandbox"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--keep", action="store_true", help="leave the logs where they are")
    args = p.parse_args()
    if reason := missing():
        print(f"not tried: {reason}", file=sys.stderr)
        print(json.dumps({"test": "hosts", "tried": False, "reason": reason}))
        sys.exit(2)
    work, started = Path(tempfile.mkdtemp(prefix="hosts_test_")), time.time()
    with Hosts() as hosts:
        t = Trainings(work, hosts)
        for part in (one_run, short_cut, long_cut, refusals):
            part(t)
        t.check("everything_started_is_stopped", not hosts.own())
    failed = [name for name, held in t.held.items() if not held]
    if args.keep or failed:
        print(f"logs: {work}")
    else:
        shutil.rmtree(work)
    summary = {"test": "hosts", "tried": True, "held": len(t.held) - len(failed), "of": len(t.held)}
    print(json.dumps(summary | t.held | t.times | {"seconds": round(time.time() - started)}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
