"""Runs a study: the same training under other flags and seeds, one after the other or one a GPU, and one page of it.

    python SD_Sweep.py plans/lora_lr.json --out runs/study --set pictures=photos base=v1-5.ckpt steps=900 lr=1e-4
    python SD_Sweep.py plans/lora_lr.json --out runs/study --set ... --dry_run
    python SD_Sweep.py plans/lora_lr.json --out runs/study --set ... --gpus 0,1,2,3    # after a stop it goes on
    python SD_Sweep.py plans/lora_lr.json --out runs/study --set ... -- --size 256 --model small  # all trainings have

A plan is a JSON object:

    base      words of SD_Train.py that all trainings have in common; {name} in them is filled in by --set name=value,
              {name*3} by three times that number; words behind -- follow them
    grid      flag: list of its values. true: the flag alone; false or null: without it; a list: several words;
              {"name": ..., "flags": [...]}: a set of flags under a name (then a word may stand instead of the flag)
    seeds     each choice is trained with each of them
    skip      rows of flag: value, in words as the page shows them, whose choices are left out
    measure   command lines that follow each training; {out} is its run folder
    figures   label: "{out}/file.json:path.to.number", what of them goes into the table
    split, weights   whose loss is compared: val or train, ema or live
    name, about      for the page

Every training is a run folder in --out; a training that fails is told, and the others go on (exit status 1 at the end).
--out gets index.html (curves of all choices by images seen, the table, the last grids), the held-out curves alone as
curves.png, the table as table.md, results.csv and results.json. Seeds differ in the noise that they are measured with
too, so choices are compared seed by seed: "above the best" is how far a choice's lowest loss lies above that of the
best choice with the same seed.
"""

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from sd import page
from sd.cli import parser
from sd.errors import InputError, run
from sd.files import atomic_write, make_folder
from sd.sweep import (
    Trial,
    as_csv,
    curve,
    draw_curves,
    in_words,
    markdown,
    mean_curves,
    read_plan,
    result_of,
    summary,
    table_of,
    trials,
    with_words,
)

ROOT = Path(__file__).resolve().parent


def fill_in(plan: dict, values: list[str]) -> dict:
    """The plan with {name} replaced by --set name=value. InputError for names that stay open or are not there."""
    text, given = json.dumps({"base": plan["base"], "grid": plan["grid"], "measure": plan["measure"]}), {}
    for word in values:
        name, equals, value = word.partition("=")
        if not equals or not re.search(rf"\{{{re.escape(name)}[*}}]", text):
            raise InputError(f"--set wants NAME=VALUE for a {{NAME}} of the plan, found {word!r}")
        given[name] = value

    def value_of(found: re.Match) -> str:
        name, factor = found.groups()
        if name not in given or not factor:
            return given.get(name, found[0])
        try:
            return f"{float(given[name]) * float(factor):.6g}"
        except ValueError:
            raise InputError(f"the plan has {found[0]}, and --set {name} is no number: {given[name]}") from None

    def filled(part):
        if isinstance(part, str):
            part = re.sub(r"\{(\w+)(?:\*([^}]*))?\}", value_of, part)
            if "{" in part.replace("{out}", ""):
                raise InputError(f"the plan leaves {part!r} open: add --set NAME=VALUE")
            return part
        if isinstance(part, dict):
            return {k: filled(v) for k, v in part.items()}
        return [filled(v) for v in part] if isinstance(part, list) else part

    return plan | {name: filled(plan[name]) for name in ("base", "grid", "measure")}


class Runner:
    """Trains and measures trials, each in processes of its own."""

    def __init__(self, out: Path, plan: dict, bar: tqdm):
        self.out, self.plan, self.bar, self.failed, self.running, self.stopped = out, plan, bar, {}, set(), False

    def stop(self, *_):
        """Trainings save and end; what is done stays done."""
        self.stopped = True
        for process in list(self.running):
            process.terminate()

    def work(self, waiting: queue.Queue, gpu: str | None):
        """Trial after trial, on one GPU."""
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
        while not self.stopped:
            try:
                trial = waiting.get_nowait()
            except queue.Empty:
                return
            if why := self.train(trial, environment):
                self.failed[trial.name] = why
                self.bar.write(f"failed: {trial.name}: {why}")
            self.bar.update()

    def train(self, trial: Trial, environment: dict) -> str | None:
        """Train and measure, unless that is done; why not, if it fails."""
        folder = self.out / trial.name
        done = folder / "study.json"
        lines = [["SD_Train.py", *trial.words, "--out", str(folder), "--resume"]]
        lines += [[str(w).replace("{out}", str(folder)) for w in line] for line in self.plan["measure"]]
        if done.exists() and json.loads(done.read_text()).get("lines") == lines:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        started = time.time()
        with open(folder / "output.txt", "ab") as output:
            for line in lines:
                if self.stopped:
                    return "stopped"
                process = subprocess.Popen([sys.executable, *line], cwd=ROOT, env=environment, stdout=output,
                                           stderr=output, start_new_session=True)  # fmt: skip
                self.running.add(process)
                status = process.wait()
                self.running.discard(process)
                if self.stopped:
                    return "stopped"
                if status:
                    last = (folder / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
                    return f"{line[0]} ended with status {status}: {' '.join(last)[-300:]}"
        atomic_write(done, json.dumps({"lines": lines, "seconds": round(time.time() - started, 1)}))
        return None


def write_page(out: Path, plan: dict, todo: list[Trial], failed: dict[str, str]) -> list[dict]:
    """index.html, results.csv and results.json of what there is so far; returns the table's rows."""
    results = [result_of(t, out / t.name, plan) for t in todo if (out / t.name / "study.json").exists()]
    rows = summary(results, plan)
    atomic_write(out / "results.csv", as_csv(rows))
    each = [{"name": r.trial.name, "choice": r.trial.label, "seed": r.trial.seed, "lowest": r.lowest, "at_images": r.at,
             "last": r.last, "images_per_s": r.images_per_s, **r.figures} for r in results]  # fmt: skip
    atomic_write(out / "results.json", json.dumps({"plan": plan, "summary": rows, "runs": each}, indent=1))

    held_out = mean_curves(results, {r.trial.name: r.losses for r in results})
    training = mean_curves(
        results, {r.trial.name: curve(out / r.trial.name, "train", plan["weights"]) for r in results}
    )
    draw_curves(out / "curves.png", held_out, plan["name"])
    head, lines = table_of(rows, plan)
    atomic_write(out / "table.md", markdown(head, lines))
    about = [plan["about"]] if plan["about"] else []
    parts = [page.section("What was compared", *about, page.table(head, lines))]
    for title, series in (("Held-out pictures", held_out), ("Training pictures, the same noise", training)):
        if any(series.values()):
            parts.append(page.section(f"Loss: {title.lower()}", page.curves(series, "images seen", "loss")))
    newest = [(r.trial, sorted((out / r.trial.name / "samples").glob("*.png"))[-1:]) for r in results]
    grids = [(f"{trial.label}, seed {trial.seed}", Image.open(grid)) for trial, found in newest for grid in found]
    if grids:
        parts.append(page.section("The last grid of each", page.pictures(grids, thumb=480)))
    if failed:
        parts.append(page.section("Not finished", page.table(["training", "why"], [list(x) for x in failed.items()])))
    words = [[t.name, shlex.join(["python", "SD_Train.py", *t.words])] for t in todo]
    parts.append(page.section("Commands", page.table(["training", "command"], words)))
    atomic_write(out / "index.html", page.document(plan["name"], parts))
    return rows


def main(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("the study")
    g.add_argument("plan", type=Path, metavar="PLAN", help="a plan in JSON, as in plans/")
    g.add_argument("--out", type=Path, required=True, help="folder of its runs and its page")
    g.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="fill in {NAME} of the plan (default: "
                   "nothing)")  # fmt: skip
    g = p.add_argument_group("running")
    g.add_argument("--gpus", help="run one training on each of these, as in 0,1,2, or on one several at "
                   "once, as in 0,0,0 (default: one after the other)")  # fmt: skip
    g.add_argument("--page", action="store_true", help="write the page of what is done, and train nothing")
    g.add_argument("--dry_run", action="store_true", help="print every command, and stop")
    argv = list(sys.argv[1:] if argv is None else argv)
    end = argv.index("--") if "--" in argv else len(argv)
    args = p.parse_args(argv[:end])
    plan = fill_in(with_words(read_plan(args.plan), argv[end + 1 :]), args.set)
    todo = trials(plan)
    if args.dry_run:
        for trial in todo:
            print(shlex.join(["python", "SD_Train.py", *trial.words, "--out", str(args.out / trial.name), "--resume"]))
        print(f"{len(todo)} trainings: {len(todo) // len(plan['seeds'])} choices with {len(plan['seeds'])} seeds")
        return
    gpus = args.gpus.split(",") if args.gpus else [None]
    if any(g is not None and not g.strip().isdigit() for g in gpus):
        raise InputError(f"--gpus wants numbers with commas between, found {args.gpus!r}")
    make_folder(args.out)
    failed = {}
    if not args.page:
        waiting = queue.Queue()
        for trial in todo:
            waiting.put(trial)
        with tqdm(total=len(todo), unit="training") as bar:
            runner = Runner(args.out, plan, bar)
            for s in (signal.SIGTERM, signal.SIGINT):
                signal.signal(s, runner.stop)
            threads = [threading.Thread(target=runner.work, args=(waiting, gpu)) for gpu in gpus]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.2)  # in the main thread, which gets the signals
        failed = runner.failed
    rows = write_page(args.out, plan, todo, failed)
    for row in rows:
        loss = in_words(row, "lowest held-out loss")
        print(f"{row['choice']}: {loss} at {in_words(row, 'at images')} images ({row['seeds']} seeds)")
    print(args.out / "index.html")
    if failed:
        raise SystemExit(f"error: {len(failed)} of {len(todo)} trainings are not finished; run the same command again")


if __name__ == "__main__":
    run(main)
