"""The table of deliberate faults: runs that are broken on purpose, and healthy ones, each given to SD_Doctor.py.

    python tests/doctor/run.py                      # or: make doctor_table
    python tests/doctor/run.py --only betas ema     # some rows of it

A broken run is found if one of the rules that its fault belongs to says 'broken' or 'look here'. Its last line is one
JSON object.
"""

import copy
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / p) for p in ("..", "", "faults", "doctor"))

import micro
import numpy as np
import safetensors.torch
import torch
from binding import rebind
from conftest import make_pipeline
from world import HELD_OUT, World, in_fork

import sd.data
import sd.files
import sd.log
import sd.optim
import sd.setup
import sd.text
import SD_Doctor
import SD_Model
import SD_Train
from sd.cli import parser

BASE = "base"  # the healthy run that some faults are made of afterwards


# ----------------------------------------------------------------------------------------------------------------
# Faults of the data: what World.source() is given
# ----------------------------------------------------------------------------------------------------------------


def few(w: World, count: int) -> dict:
    """A source with all held-out pictures and `count` training ones."""
    n = HELD_OUT + count
    return dict(latents=w.latents[:n], captions=w.captions[:n], keys=w.keys[:n])


def repeated(w: World, share: float, noise: float = 0.0) -> np.ndarray:
    """Latents of which a share is one picture, to the bit or nearly."""
    values, rng = w.latents.copy(), np.random.default_rng(0)
    same = rng.random(len(values)) < share
    values[same] = values[-1] + noise * rng.standard_normal((same.sum(), *values.shape[1:]))
    return values


def sources(w: World) -> dict[str, dict]:
    rng = np.random.default_rng(0)
    nan, leaked, order = w.latents.copy(), w.latents.copy(), rng.permutation(len(w.captions))
    nan[HELD_OUT + 7, 0, 0, 0] = np.nan
    leaked[:HELD_OUT] = leaked[HELD_OUT : 2 * HELD_OUT]
    ids = sd.text.tokenize(w.tokenizer, w.captions)
    short = copy.deepcopy(w.tokenizer)
    short.model_max_length = 6
    words = len(w.tokenizer) - 2  # ids below are of words, above of start and end
    return {
        "unscaled": dict(latents=w.latents / 0.18215),
        "scaled_twice": dict(latents=w.latents * 0.18215),
        "other_vae": dict(latents=w.latents[:, [2, 0, 3, 1]] * np.array([-1, 1, -1, 1])[:, None, None]),
        "empty": dict(captions=[""] * len(w.captions)),
        "equal": dict(captions=["a picture"] * len(w.captions)),
        "shuffled": dict(captions=[w.captions[i] for i in order]),
        "cut": dict(tokenizer=short),
        "other_ids": dict(ids=np.where(ids < words, (ids * 7 + 3) % words, ids)),
        "nan": dict(latents=nan),
        "repeated": dict(latents=repeated(w, 0.6)),
        "leaked": dict(latents=leaked),
        "few": few(w, 24),
        "four": few(w, 4),
        "one": dict(latents=repeated(w, 0.97, 0.02)),
        "half": few(w, 512),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# Faults of the program: called in the process that trains
# ----------------------------------------------------------------------------------------------------------------


def average_never():
    rebind(sd.optim, "update_ema", lambda ema, live, decay: None)


def average_slowly():
    rebind(sd.optim, "ema_decay", lambda decay, updates: 0.9995)


def freeze(which):
    """Weights whose names which(name) picks are not trained."""

    def hook():
        real = sd.setup.fresh_unet

        def fresh(*args):
            net = real(*args)
            for name, p in net.named_parameters():
                p.requires_grad_(not which(name))
            return net

        rebind(sd.setup, "fresh_unet", fresh)

    return hook


def zeros_for_null():
    real = sd.setup.text_for

    def text_for(encoder, *args):
        text_of, null = real(encoder, *args), encoder.tokenize([""])[0]
        return lambda ids: text_of(ids) * (ids != null).any(dim=1)[:, None, None]

    rebind(sd.setup, "text_for", text_for)


def no_end():
    rebind(SD_Model, "NoiseSchedule", functools.partial(SD_Model.NoiseSchedule, beta_end=0.002))


def slow_data():
    real = sd.data.make_batch
    rebind(sd.data, "make_batch", lambda *args: time.sleep(0.6) or real(*args))


# ----------------------------------------------------------------------------------------------------------------
# Faults of what a run left: run folder -> what the doctor is given
# ----------------------------------------------------------------------------------------------------------------


def newest(run: Path) -> Path:
    return micro.checkpoints(run)[-1]


def seal(folder: Path):
    """The manifest anew, so that the change is not a damage."""
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(sd.files.digests(folder)))


def told(**schedule):
    """The checkpoint says something else of its schedule than what it was trained with."""

    def change(run: Path) -> Path:
        path = newest(run) / "model.json"
        values = json.loads(path.read_text())
        values["schedule"] |= schedule
        path.write_text(json.dumps(values))
        seal(path.parent)
        return run

    return change


def weights(name: str, function):
    """function on one tensor of all weights."""

    def change(run: Path) -> Path:
        for file in newest(run).glob("unet*.safetensors"):
            tensors = safetensors.torch.load_file(file)
            tensors[name] = function(tensors[name])
            safetensors.torch.save_file(tensors, file)
        seal(newest(run))
        return run

    return change


def with_nan(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.view(-1)[3] = float("nan")
    return t


def damaged(run: Path) -> Path:
    file = newest(run) / "unet.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)
    return run


def clamping(run: Path) -> Path:
    """A folder of the diffusers library, whose scheduler says that latents are clamped. Its network is a random one."""
    tokenizer = SD_Model.TextEncoder.from_pretrained(str(run.parent.parent / "text_encoder")).tokenizer
    out = run.with_name(f"{run.name}_diffusers")
    make_pipeline(tokenizer).save_pretrained(out)
    path = out / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clip_sample": True}))
    return out


MIDDLE = "middle_block.1.transformer_blocks.0.attn1.to_q.weight"

# name: (rules that may tell it, settings of training, hook, change of what it left, flags of the doctor)
BROKEN = {
    "latents not scaled": (["latent scale"], dict(source="unscaled"), None, None, []),
    "latents scaled twice": (["latent scale"], dict(source="scaled_twice"), None, None, []),
    "latents of another VAE": (["VAE"], dict(source="other_vae"), None, None, []),
    "captions empty": (["captions empty"], dict(source="empty"), None, None, []),
    "captions all alike": (["captions differ"], dict(source="equal"), None, None, []),
    "captions shuffled": (["captions match", "text"], dict(source="shuffled"), None, None, []),
    "captions cut": (["captions cut"], dict(source="cut"), None, None, []),
    "ids of another tokenizer": (["tokenizer"], dict(source="other_ids"), None, None, []),
    "a latent with NaN": (["latents finite", "skipped steps"], dict(source="nan"), None, None, []),
    "data duplicated": (["duplicates"], dict(source="repeated"), None, None, []),
    "held-out pictures trained on": (["held-out pictures"], dict(source="leaked"), None, None, []),
    "overtrained": (["overtraining"], dict(source="few", max_steps=480), None, None, []),
    "learned by heart": (["learned by heart"], dict(source="four", max_steps=400), None, None, []),
    "one picture for all": (["near duplicates", "pictures differ"], dict(source="one"), None, None, []),
    "zeros as the null condition": (["null condition"], dict(drop=0.3, max_steps=500), zeros_for_null, None, []),
    "no caption dropout": (["caption dropout"], dict(drop=0), None, None, []),
    "all captions dropped": (["caption dropout", "text"], dict(drop=1), None, None, []),
    "said to predict noise, predicts v": (["prediction"], dict(prediction="v"), None, told(prediction="epsilon"), []),
    "a schedule without an end": (["end"], {}, no_end, None, []),
    "said to be of other betas": (["betas"], dict(betas="squaredcos_cap_v2"), None, told(betas="scaled_linear"), []),
    "clamped at sampling": (["clamp"], None, None, clamping, []),
    "learning rate far too high": (["size of updates", "diverged"], dict(lr=0.3), None, None, []),
    "learning rate far too low": (["size of updates", "learned"], dict(lr=1e-7), None, None, []),
    "warm-up longer than the run": (["warm-up"], dict(warmup=1000), None, None, []),
    "averages that never move": (["EMA moves", "EMA lag"], {}, average_never, None, []),
    "averages too slow for the run": (["EMA moves", "EMA lag"], {}, average_slowly, None, []),
    "every step clipped": (["clipping"], dict(clip=0.01), None, None, []),
    "a dead block": (["dead weights"], {}, freeze(lambda n: "middle_block.2.out_layers.3" in n), None, []),
    "weights not trained": (["untrained weights", "every weight has one"], {},
                            freeze(lambda n: n.startswith("input_blocks.1.1")), None, []),
    "NaN in a layer's weights": (["weights finite", "layers finite"], None, None, weights(MIDDLE, with_nan), []),
    "overflow in half precision": (["layers finite"], None, None,
                                   weights("input_blocks.0.0.weight", lambda t: t * 3e5), []),
    "guidance that burns": (["contrast"], None, None, None, ["--cfg", "40"]),
    "a sampler with too few steps": (["steps"], None, None, None, ["--steps", "2"]),
    "training waits for data": (["data wait"], dict(max_steps=32, log_steps=2), slow_data, None, []),
    "a damaged checkpoint": (["whole"], None, None, damaged, []),
}  # fmt: skip

HEALTHY = [
    {}, dict(seed=2), dict(seed=3), dict(seed=4), dict(model="mini_48"), dict(model="mini_2"),
    dict(model="mini_48", seed=5, lr=2e-3), dict(model="mini_2", seed=6), dict(prediction="v"),
    dict(prediction="v", seed=7), dict(prediction="v", zero_terminal_snr=True),
    dict(prediction="v", zero_terminal_snr=True, betas="squaredcos_cap_v2", seed=8), dict(betas="squaredcos_cap_v2"),
    dict(betas="squaredcos_cap_v2", seed=9), dict(betas="linear"), dict(betas="linear", prediction="v", seed=10),
    dict(batch=32), dict(batch=8, max_steps=300), dict(lr=2e-3, max_steps=300), dict(lr=6e-3),
    dict(lr_schedule="constant", lr=2e-3), dict(ema=0.9), dict(ema=0.99), dict(drop=0.05, seed=11), dict(drop=0.2),
    dict(adaptive_clip=3, clip=0), dict(weighting="none"), dict(weighting="debiased", offset_noise=0.05),
    dict(source="half", seed=12), dict(train_text_encoder=True, batch=8, accumulate=2),
]  # fmt: skip


def examine(w: World, name: str, settings: dict | None, hook, change, flags: list[str]):
    """Train, break, and write the doctor's findings to <name>.json. In a process of its own."""
    sys.argv[0] = "SD_Train.py"
    rebind(sd.log, "plot_run", lambda out: None)
    run = w.root / "runs" / name
    if settings is None:
        shutil.copytree(w.root / "runs" / BASE, run)
    else:
        if hook:
            hook()
        SD_Train.main(w.flags(run, **settings))
    SD_Doctor.main([str(change(run) if change else run), "--deep", "--device", "cpu", *flags,
                    "--json", str(w.root / f"{name}.json")])  # fmt: skip


def all_in_forks(jobs: dict, workers: int, root: Path) -> set[str]:
    """Run jobs, name -> function, a few at a time; returns those that failed. Output goes to <name>.txt."""
    waiting, running, failed = list(jobs), {}, set()
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)

            def job(name=name):
                file = os.open(root / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1), os.dup2(file, 2)
                jobs[name]()

            running[in_fork(job)] = name
        pid, status = os.wait()
        name = running.pop(pid)
        if os.waitstatus_to_exitcode(status):
            failed.add(name)
        print(f"  {len(jobs) - len(waiting) - len(running)} of {len(jobs)}: {name}", file=sys.stderr, flush=True)
    return failed


def accused(path: Path, verdict: str | None = None) -> dict[str, str]:
    """Rules of a report that accuse (with this verdict), and their evidence."""
    rows = json.loads(path.read_text())
    wanted = [verdict] if verdict else ["broken", "look here"]
    return {r["rule"]: r["evidence"] for r in rows if r["verdict"] in wanted}


def main():
    p = parser(__doc__)
    g = p.add_argument_group("the table")
    g.add_argument("--only", nargs="+", metavar="WORD", help="rows whose names have one of these (default: all)")
    g.add_argument("--out", help="folder to keep everything in (default: a temporary one)")
    g.add_argument("--workers", type=int, default=2, help="processes")
    args = p.parse_args()
    torch.set_num_threads(1)
    started, root = time.perf_counter(), Path(args.out or tempfile.mkdtemp(prefix="sd_doctor_"))
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    w = World(root)
    for name, parts in sources(w).items():
        w.source(name, **parts)
    jobs = {name: row[1:] for name, row in BROKEN.items()}
    jobs |= {f"healthy {i + 1}": (settings, None, None, []) for i, settings in enumerate(HEALTHY)}
    if args.only:
        jobs = {name: row for name, row in jobs.items() if any(word in name for word in args.only)}
    late = {name for name, row in jobs.items() if row[0] is None}
    first = {BASE: lambda: examine(w, BASE, {}, None, None, [])} if late else {}
    first |= {n: functools.partial(examine, w, n, *row) for n, row in jobs.items() if n not in late}
    failed = all_in_forks(first, args.workers, root)
    failed |= all_in_forks({n: functools.partial(examine, w, n, *jobs[n]) for n in late}, args.workers, root)

    found, broken, look, healthy = 0, 0, 0, 0
    print(f"\n{'run':36} {'found':7} by")
    for name in jobs:
        if name in failed:
            print(f"{name:36} FAILED  see {root / name}.txt")
            continue
        path = root / f"{name}.json"
        if name in BROKEN:
            by = [rule for rule in accused(path) if rule in BROKEN[name][0]]
            found += bool(by)
            others = ", ".join(sorted(set(accused(path)) - set(by)))
            print(f"{name:36} {'yes' if by else 'MISSED':7} {', '.join(by)}{f' (and {others})' if others else ''}")
        else:
            healthy += 1
            hard, soft = accused(path, "broken"), accused(path, "look here")
            broken, look = broken + bool(hard), look + bool(soft)
            for rule, evidence in (hard | soft).items():
                print(f"{name:36} {'BROKEN?' if rule in hard else 'LOOK?':7} {rule}: {evidence}")
    seconds = round(time.perf_counter() - started)
    print(json.dumps({"broken": sum(n in BROKEN for n in jobs), "found": found, "healthy": healthy,
                      "false_broken": broken, "false_look_here": look, "failed": len(failed),
                      "seconds": seconds}))  # fmt: skip
    if not args.out and not failed:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
