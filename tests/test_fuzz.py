"""Every program, given inputs that were spoiled at random: it ends well with right counts, or refuses in one sentence.

    make test_slow                                                    # among others
    SD_FUZZ_ROUNDS=200 pytest -m slow tests/test_fuzz.py -k filter    # more rounds of one program
    SD_FUZZ_SEED=filter:17 pytest -m slow tests/test_fuzz.py -s       # one round again, with all that it printed

A round copies a program's valid inputs, spoils something (tests/faults/mutate.py), and runs the program in a forked
process. It must end with status 0 and outputs that hold what they claim, or with status 2 and one line that begins with
`error: `. Whatever the end, no file is half-written under its final name.
"""

import faulthandler
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
import mutate
from binding import rebind
from conftest import make_pipeline
from safetensors.torch import save_file
from test_data_pipeline import load

import encode_latents
import sd.errors
import sd.files
import sd.log
import sd.pictures
import sd.shapes
import sd.text
import sd.weights.merge
import sd.weights.read
import SD_Convert
import SD_ImageGen
import SD_Run
import SD_Train
import SD_TrainVAE
from sd.folders import is_picture

pytestmark = pytest.mark.slow
ROUNDS = int(os.environ.get("SD_FUZZ_ROUNDS", 70))
ONE = os.environ.get("SD_FUZZ_SEED", "")
TELL = bool(ONE) or "SD_FUZZ_TELL" in os.environ
LIMIT_S = 20  # of one round

# ---------------------------------------------------------------------------------------------------------------------
# What outputs must hold if the program ended well


def pictures_in_tars(work: Path):
    """Of the scripts that write tars: the manifest's count is that of the tars' pictures, which all can be decoded."""
    folder = work / "out/images"
    manifest = json.loads((folder / "manifest.json").read_text())
    found = 0
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for name in tar.getnames():
                if is_picture(name):
                    assert sd.pictures.decode_image(tar.extractfile(name).read()) is not None
                    found += 1
    assert manifest["complete"] and manifest["pictures"] == found > 0, (manifest, found)


def rows_of(folder: Path, pattern="*.parquet") -> int:
    return sum(pq.read_metadata(p).num_rows for p in folder.glob(pattern))


def filtered(work: Path):
    manifest = json.loads((work / "out/manifest.json").read_text())
    assert manifest["complete"] and manifest["kept"] == rows_of(work / "out") > 0
    assert manifest["rows"] == rows_of(work / "meta")


def tokenised(work: Path):
    manifest = json.loads((work / "out/manifest.json").read_text())
    assert manifest["complete"] and manifest["rows"] == rows_of(work / "out") > 0
    for path in (work / "out").glob("*.parquet"):
        table = pq.read_table(path)
        assert table["image_key"].null_count == table["caption"].null_count == 0
        assert all(len(ids) == manifest["max_length"] for ids in table["input_ids"].to_pylist())


def has_tokenizer(work: Path):
    manifest = json.loads((work / "out/manifest.json").read_text())
    tokenizer = sd.text.load_tokenizer(str(work / "out"))
    assert manifest["complete"] and manifest["tokens"] == len(tokenizer) > 256


def dataset(work: Path):
    manifest = json.loads((work / "out/manifest.json").read_text())
    for split in ("train", "val"):
        rows = sum(pa.ipc.open_stream(p).read_all().num_rows for p in (work / "out" / split).glob("*.arrow"))
        assert rows == manifest["counts"][split]
    assert manifest["complete"] and manifest["counts"]["train"] > 0


def page(work: Path):
    text = (work / "report.html").read_text()
    assert text.startswith("<!") and len(text) > 2000


def latents(work: Path):
    manifest, found = json.loads((work / "out/manifest.json").read_text()), 0
    for path in (work / "out").glob("*.npy"):
        values = np.load(path)
        assert np.isfinite(values).all() and len(values) == pq.read_metadata(path.with_suffix(".parquet")).num_rows
        found += len(values)
    assert manifest["count"] == found > 0, (manifest["count"], found)


def trained(work: Path):
    """The last checkpoint is of the step that was asked for, and its weights are finite."""
    newest = micro.checkpoints(work / "out")[-1]
    state = json.loads((newest / "state.json").read_text())
    config = json.loads((work / "out/config.json").read_text())
    assert state["step"] >= 1 and config
    unet = sd.weights.read.open_model(str(newest)).unet()
    assert all(torch.isfinite(p).all() for p in unet.parameters())


def trained_vae(work: Path):
    result = json.loads((work / "out/result.json").read_text())
    vae = sd.weights.read.load_vae(str(work / "out/vae"))
    assert all(torch.isfinite(p).all() for p in vae.parameters()) and np.isfinite(result["psnr"])


def converted(work: Path):
    out = next(p for p in (work / "out.safetensors", work / "out") if p.exists())
    model = sd.weights.read.open_model(str(out))
    assert sum(p.numel() for p in model.unet().parameters()) > 0 and model.vae() is not None


def painted(work: Path):
    pictures = [p for p in (work / "out").glob("*.png") if re.fullmatch(r"\d{5}\.png", p.name)]
    assert pictures, sorted(work.glob("out/*"))
    for path in pictures:
        settings = json.loads(Image.open(path).text["sd"])
        assert isinstance(settings["prompt"], str) and 0 <= settings["seed"] < 2**64


def a_lora(work: Path):
    model = sd.weights.read.open_model(str(work / "model"))
    assert sd.weights.merge.with_loras(model, [str(work / "out")])[1][0][0].changes


def anything(work: Path):
    pass


# ---------------------------------------------------------------------------------------------------------------------
# Programs and what they are given


@dataclass
class Program:
    name: str
    main: Callable  # called with the arguments
    inputs: str  # what is copied from the world, and may be spoiled
    line: str  # arguments; numbers among them may be spoiled
    check: Callable
    others: str = ""  # copied, and left as they are

    def argv(self) -> list[str]:
        return [word.replace("␣", " ") for word in self.line.split()]


def script(name: str) -> Callable:
    def main(argv: list[str]):
        sys.argv = [name, *argv]
        load(name).main()

    return main


def train(argv: list[str]):
    rebind(sd.log, "plot_run", lambda out: None)  # takes longer than the training
    SD_Train.main(argv)


TRAIN = (
    "--phase demo --model micro --size 64 --data s --data_root . --text_encoder text_encoder --out out --max_steps 3 "
    "--batch 4 --accumulate 1 --lr 1e-3 --warmup 2 --ema 0.9 --save_steps 2 --keep_last 0 --log_steps 1 --val_steps 2 "
    "--val_images 8 --sample_steps 3 --wandb disabled --device cpu --seed 1 --drop 0.1 --gamma 5 --decay 0.01 "
    "--clip 1 --offset_noise 0 --latent_fraction 1 --beta1 0.9 --beta2 0.99 "
    "--max_skipped 3 --sample_prompts prompts.txt"
)
VAE = (
    "--images s/images --model micro --out out --size 64 --batch 4 --max_steps 3 --save_steps 2 --log_steps 1 "
    "--warmup 1 --workers 0 --held_out_share 0.3 --device cpu --lr 1e-3 --muon_lr 0.01 --weight_decay 0.01 --ema 0.9 "
    "--grad_clip 1 --seed 0 --l1_weight 1 --l2_weight 8 --edge_weight 0 --kl_weight 1e-3 --ram_gib 1"
)
PAINT = "--out out --seed 5 --n 1 --steps 2 --batch 2 --cfg 7.5 --cfg_rescale 0 --device cpu --width 64 --height 64"
FILTER = (
    "--in meta --out out --min_aesthetic 1 --min_similarity 0 --max_watermark 0.9 --max_unsafe 0.9 --min_width 8 "
    "--min_height 8 --max_aspect 3 --min_caption 1 --max_caption 300 --languages en --workers 1 "
    "--blocklist blocklist.txt --block_domains domains.txt --drop_duplicate_urls"
)
SIZES = "--size 32 --min_side 8 --shard_size 5 --seed 0 --workers 1"
PROGRAMS = [
    Program("shapes", script("00_make_shapes.py"), "",
            "--out out --count 7 --seed 0 --size 32 --shard_size 5 --workers 1", pictures_in_tars),
    Program("faces", script("01d_faces.py"), "pictures about.csv templates.txt",
            f"--path pictures --out out --about about.csv --templates templates.txt --per_identity 3 {SIZES}",
            pictures_in_tars),
    Program("faces_zip", script("01d_faces.py"), "pictures.zip about.csv",
            f"--path pictures.zip --out out --about about.csv {SIZES}", pictures_in_tars),
    Program("coco", script("01e_coco.py"), "coco", f"--path coco --out out --min_height 0.3 {SIZES}", pictures_in_tars),
    Program("folder", script("01f_folder.py"), "pictures",
            "--in pictures --out out --size 32 --shard_size 5 --workers 1", pictures_in_tars),
    Program("folder_csv", script("01f_folder.py"), "pictures captions.csv",
            "--in pictures --out out --captions captions.csv --shard_size 5 --workers 1", pictures_in_tars),
    Program("folder_jsonl", script("01f_folder.py"), "pictures captions.jsonl",
            "--in pictures --out out --captions captions.jsonl --shard_size 5 --workers 1", pictures_in_tars),
    Program("classes", script("01g_classes.py"), "pictures classes.json",
            f"--path pictures --classes classes.json --out out {SIZES}", pictures_in_tars),
    Program("filter", script("02_filter.py"), "meta blocklist.txt domains.txt", FILTER, filtered),
    Program("tokenise", script("04_tokenise.py"), "s/images tokenizer",
            "--in s/images --out out --tokenizer tokenizer --workers 1", tokenised),
    Program("make_tokenizer", script("04a_make_tokenizer.py"), "s/images",
            "--in s/images --out out --vocab_size 520 --max_length 16", has_tokenizer),
    Program("dataset", script("05_build_hf_dataset.py"), "s/tokens",
            "--in s/tokens --out out --val_fraction 0.2 --file_rows 5", dataset),
    Program("report", script("06_report.py"), "s vae",
            "--in s --out report.html --pictures 3 --seed 0 --vae vae", page),
    Program("encode", encode_latents.main, "s/images vae", "--images s/images --vae vae --out out --size 64 --batch 4 "
            "--workers 0 --device cpu", latents),
    Program("encode_again", encode_latents.main, "out s/images", "--images s/images --vae vae --out out --size 64 "
            "--batch 4 --workers 0 --device cpu", latents, "vae"),
    Program("train_vae", SD_TrainVAE.main, "s/images", VAE, trained_vae),
    Program("resume_vae", SD_TrainVAE.main, "out", VAE + " --resume", trained_vae, "s/images"),
    Program("train", train, "s/dataset s/latents text_encoder vae prompts.txt", TRAIN, trained),
    Program("resume", train, "out", TRAIN + " --resume --stop_at 3", trained,
            "s/dataset s/latents text_encoder vae prompts.txt"),
    Program("init_from", train, "run", TRAIN + " --init_from run", trained,
            "s/dataset s/latents text_encoder vae prompts.txt"),
    Program("paint_run", SD_ImageGen.main, "run text_encoder prompts.txt init.png", "--model run --text_encoder "
            f"text_encoder --prompts_file prompts.txt --init_image init.png --strength 0.8 {PAINT}", painted, "vae"),
    Program("paint_folder", SD_ImageGen.main, "model prompts.jsonl",
            f"--model model --prompts_file prompts.jsonl {PAINT}", painted),
    Program("paint_file", SD_ImageGen.main, "model.safetensors painted.png", "--model model.safetensors --from_png "
            f"painted.png {PAINT}", painted),
    Program("convert_run", SD_Convert.main, "run text_encoder", "run out --format native --text_encoder text_encoder",
            converted, "vae"),
    Program("convert_folder", SD_Convert.main, "model", "model out.safetensors --format ldm", converted),
    Program("convert_file", SD_Convert.main, "model.safetensors",
            "model.safetensors out --format diffusers", converted),
    Program("paint_lora", SD_ImageGen.main, "lora.safetensors adapter", "--model model --lora lora.safetensors:0.5 "
            f"--lora adapter --prompt circle {PAINT}", painted, "model"),
    Program("convert_lora", SD_Convert.main, "adapter lora.safetensors",
            "adapter out --lora lora.safetensors --format native --base model", a_lora, "model"),
    Program("plot", SD_Run.main, "run", "--plot run", anything),
    Program("lineage", SD_Run.main, "run", "--lineage run", anything),
]  # fmt: skip
BY_NAME = {program.name: program for program in PROGRAMS}


def write(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def make_pictures(root: Path) -> list[str]:
    names = []
    for i in range(9):
        picture, about = sd.shapes.sample(0, i, 64)
        ending = ("png", "jpg")[i % 2]
        name = f"n0000000{i % 3}/{i:04d}.{ending}"
        encode = sd.pictures.encode_jpeg if i % 2 else sd.pictures.encode_png
        write(root / "pictures" / name, encode(picture))
        write(root / "pictures" / name.replace(ending, "txt"), f"a {about['colour']} {about['shape']}")
        names.append(name)
    return names


def make_texts(root: Path, names: list[str]) -> None:
    """Lists of captions, classes, people, prompts; a COCO of those pictures."""
    write(root / "captions.csv", "file,caption\n" + "".join(f'{n},"a picture, {n[:9]}"\n' for n in names))
    write(root / "captions.jsonl", "".join(json.dumps({"file": n, "caption": f"about {n}"}) + "\n" for n in names))
    classes = {"n00000000": "tench", "n00000001": ["a_cat", "a dog"], "0": ["n00000002", "x"]}
    write(root / "classes.json", json.dumps(classes))
    people = 'n00000000, "A_B", 3, 1, m\nn00000001, "C", 3, 1, f\n'
    write(root / "about.csv", "Class_ID, Name, Sample_Num, Flag, Gender\n" + people)
    write(root / "templates.txt", "a photo of a {person}\nportrait of a {person}\n")
    write(root / "prompts.txt", "a red circle\na (green:1.2) square\n# no remark\n")
    write(root / "prompts.jsonl", '{"prompt": "a red circle", "seed": 3}\n{"prompt": "blue", "negative": "red"}\n')
    write(root / "blocklist.txt", "watermark\nbad words\n")
    write(root / "domains.txt", "example.org\nbad.com\n")
    images, captions, people = [], [], []
    for i, name in enumerate(names):
        file = name.replace("/", "_")
        images.append({"id": i, "file_name": file, "height": 64, "width": 64, "coco_url": f"http://x/{file}"})
        captions.append({"image_id": i, "id": i, "caption": f"a person {i}"})
        people.append({"image_id": i, "category_id": 1, "bbox": [4, 4, 30, 50], "iscrowd": 0, "id": i})
        write(root / "coco/train2017" / file, (root / "pictures" / name).read_bytes())
    write(root / "coco/annotations/captions_train2017.json", json.dumps({"images": images, "annotations": captions}))
    instances = {"images": images, "annotations": people, "categories": [{"id": 1, "name": "person"}]}
    write(root / "coco/annotations/instances_train2017.json", json.dumps(instances))
    for n in range(2):
        rows = range(10 * n, 10 * n + 10)
        table = pa.table({
            "URL": [f"http://a{i}.com/{i}.jpg" for i in rows], "TEXT": [f"a picture of {i}" for i in rows],
            "WIDTH": pa.array([100 + i for i in rows], pa.int32()), "HEIGHT": pa.array([90] * 10, pa.int32()),
            "similarity": [0.3] * 10, "aesthetic": [5.5] * 10, "pwatermark": [0.1] * 10, "punsafe": [0.01] * 10,
            "LANGUAGE": ["en"] * 10, "key": [f"{i:09d}" for i in rows],
        })  # fmt: skip
        (root / "meta").mkdir(exist_ok=True)
        pq.write_table(table, root / f"meta/{n:05d}.parquet")


def make_loras(root: Path):
    """lora.safetensors of kohya's names, and PEFT's folder `adapter`, for two layers of the folder `model`."""
    layers = [f"down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_{x}" for x in "qk"]
    parts = {"down": torch.randn(2, 16), "up": torch.randn(16, 2)}
    kohya = {f"lora_unet_{n.replace('.', '_')}.lora_{k}.weight": t * 0.1 for n in layers for k, t in parts.items()}
    kohya |= {f"lora_unet_{n.replace('.', '_')}.alpha": torch.tensor(1.0) for n in layers}
    save_file(kohya, root / "lora.safetensors", {"ss_v2": "False", "ss_base_model_version": "sd_v1"})
    ends = {"lora_A": parts["down"], "lora_B": parts["up"]}
    (root / "adapter").mkdir()
    save_file({f"base_model.model.{n}.{end}.weight": t * 0.1 for n in layers for end, t in ends.items()},
              root / "adapter/adapter_model.safetensors")  # fmt: skip
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {"to_k": 1}, "use_rslora": True}
    write(root / "adapter/adapter_config.json", json.dumps(settings))


@pytest.fixture(scope="module")
def world(tmp_path_factory, small_tokenizer) -> Path:
    """Valid inputs of every program, each made by the program whose output it is."""
    root = tmp_path_factory.mktemp("fuzz") / "world"
    names = make_pictures(root)
    make_texts(root, names)
    shutil.make_archive(str(root / "pictures"), "zip", root / "pictures")
    torch.manual_seed(0)  # a round is the same in every session
    tokenizer = micro.make_tokenizer()
    tokenizer.save_pretrained(root / "tokenizer")
    micro.SD_Model.TextEncoder.new(micro.SD_Model.PRESETS["micro"]["text"], tokenizer).save(root / "text_encoder")

    def ran(main, line: str):
        status, text = run_forked(root, lambda: main(line.split()))
        assert status == 0, f"{line}\n{text}"

    ran(script("00_make_shapes.py"), "--out s --count 16 --size 64 --shard_size 6")
    ran(SD_TrainVAE.main, VAE.replace("--out out", "--out vae_run"))
    shutil.copytree(root / "vae_run/vae", root / "vae")
    ran(script("04_tokenise.py"), "--in s/images --out s/tokens --tokenizer tokenizer")
    ran(script("05_build_hf_dataset.py"), "--in s/tokens --out s/dataset --val_fraction 0.2")
    ran(encode_latents.main, "--images s/images --vae vae --out s/latents --size 64 --device cpu --batch 4")
    ran(train, TRAIN.replace("--out out", "--out run"))
    make_pipeline(small_tokenizer, widths=(16, 16)).save_pretrained(root / "model")
    ran(SD_Convert.main, "model model.safetensors --format ldm")
    ran(SD_ImageGen.main, f"--model model.safetensors --prompt circle {PAINT}")
    shutil.move(root / "out/00000.png", root / "painted.png")
    shutil.rmtree(root / "out")
    make_loras(root)
    write(root / "init.png", sd.pictures.encode_png(sd.shapes.sample(0, 1, 64)[0]))
    return root


# ---------------------------------------------------------------------------------------------------------------------
# Rounds


def run_forked(folder: Path, main: Callable, spoil: Callable | None = None) -> tuple[int, str]:
    """Run main() as a program would be, in a forked process inside `folder`: its exit status, and what it printed."""
    reader, writer = os.pipe()  # and no file, whose size full_disk() limits
    sys.stdout.flush(), sys.stderr.flush()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            os.dup2(writer, 1), os.dup2(writer, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.stderr)
            os.chdir(folder)
            torch.set_num_threads(1)
            mutate.without_privileges()
            if spoil:
                spoil()
            sd.errors.run(main)
            status = 0
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
            if isinstance(e.code, str):
                print(e.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush(), sys.stderr.flush()
            finally:
                os._exit(status)
    os.close(writer)
    printed, end = b"", time.monotonic() + LIMIT_S + 10
    while select.select([reader], [], [], max(0, end - time.monotonic()))[0]:
        if not (block := os.read(reader, 1 << 16)):
            break
        printed += block
    else:  # not even faulthandler could end it
        os.kill(pid, signal.SIGKILL)
        printed += b"Timeout (\n"
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed.decode(errors="replace")


def copy_inputs(world: Path, work: Path, program: Program) -> list[Path]:
    """Copies what a program reads; returns the files that may be spoiled."""
    for name in [*program.inputs.split(), *program.others.split()]:
        source = world / name
        if name == "out":
            source = world / {"encode_again": "s/latents", "resume": "run", "resume_vae": "vae_run"}[program.name]
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, work / name) if source.is_dir() else shutil.copy(source, work / name)
    if program.name == "resume":  # of its checkpoints the first, to have steps to make
        shutil.rmtree(micro.checkpoints(work / "out")[-1])
    if program.name == "resume_vae":
        (work / "out/result.json").unlink()
        shutil.rmtree(sorted((work / "out/checkpoints").glob("step_*"))[-1])
    below = [p for name in program.inputs.split() for p in [work / name, *sorted((work / name).rglob("*"))]]
    return [p for p in below if p.is_file()]


def put_checksums_right(work: Path) -> None:
    """After an edit in a checkpoint: its manifest says what the files are now, so that they are looked into. Not of
    state.json, which training alone writes and reads, and trusts once its checksum is right."""
    for manifest in work.rglob("checkpoints/*/manifest.json"):
        try:
            sums = json.loads(manifest.read_text())
            sums |= {
                n: sd.files.sha256(manifest.parent / n)
                for n in sums
                if n != "state.json" and (manifest.parent / n).is_file()
            }
            manifest.write_text(json.dumps(sums))
        except (ValueError, TypeError, OSError):
            pass


def spoil_flags(argv: list[str], r: random.Random) -> str:
    numbers = [i for i, word in enumerate(argv) if i and re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", word)]
    if not numbers:
        return "nothing"
    at = r.choice(numbers)
    argv[at] = r.choice(mutate.NUMBERS)
    if argv[at - 1] == "--workers":  # in-process, a script's functions cannot be sent to workers
        argv[at] = r.choice(["-1", "0", "1.5", "x", "4294967296", "1" + "0" * 40])
    return f"{argv[at - 1]} {argv[at][:50]}"


def spoil_out(work: Path, r: random.Random) -> str:
    """The place where the outputs go."""
    kind, out = r.choice(["a file", "read-only", "foreign", "dangling", "parent read-only"]), work / "out"
    if kind == "a file" and not out.exists():
        out.write_text("mine")
    elif kind == "foreign" and not out.exists():
        write(out / "images/mine.txt", "mine")
        write(out / "mine.txt", "mine")
    elif kind == "dangling" and not out.exists():
        out.symlink_to("nowhere/below")
    elif kind == "read-only":
        out.mkdir(exist_ok=True)
        [p.chmod(0o555) for p in [out, *out.rglob("*")] if p.is_dir()]
    else:
        work.chmod(0o555)
    return f"out: {kind}"


def one_round(world: Path, base: Path, program: Program, number: int) -> list[str]:
    """Runs one round; returns what was wrong with it, beginning with what had been done, or []."""
    r = random.Random(f"{program.name}:{number}")
    work = base / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    files = copy_inputs(world, work, program)
    argv, environment, umask, size, seconds = program.argv(), {}, None, None, None
    kinds = ["file"] * 14 * bool(files) + ["flags"] * 4 + ["alike"] * 2 * bool(files) + ["environment"] * 2
    kinds += ["out", "umask", "disk", "disk", "killed"]
    done, kind = [], r.choice(kinds)
    if kind == "file":
        for path in r.sample(files, min(len(files), r.choice([1, 1, 1, 2]))):
            if path.is_file():
                done.append(mutate.spoil_path(work, path, r))
        if r.random() < 0.7:
            put_checksums_right(work)
    elif kind == "flags":
        done.append(spoil_flags(argv, r))
    elif kind == "environment":
        environment = mutate.spoil_environment(r)
        done.append(f"environment {environment}")
    elif kind == "alike":
        done.append(mutate.spoil_alike(files, r))
    elif kind == "disk":
        size = int(10 ** r.uniform(1, 4.5))
        done.append(f"files may hold {size} bytes")
    elif kind == "killed":
        seconds = r.uniform(0.01, 0.6)
        done.append(f"killed after {seconds:.3f} s")
    elif kind == "umask":
        umask = r.choice([0o777, 0o077, 0o400, 0o200, 0o111])
        done.append(f"umask {umask:o}")
    else:
        done.append(spoil_out(work, r))
    before = mutate.stamps(work)

    def surroundings():
        os.environ.update(environment)
        if umask is not None:
            os.umask(umask)
        if size is not None:
            mutate.full_disk(size)
        if seconds is not None:
            mutate.die_after(seconds)

    status, text = run_forked(work, lambda: program.main(argv), surroundings)
    work.chmod(0o755)
    if TELL:
        print(f"{program.name}:{number}: {'; '.join(done)}\nstatus {status}\n{text}")
    wrong = mutate.broken_files(work, before)
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    errors = [line for line in lines if re.match(r"(\S+\.py: )?error: ", line)]
    if "Timeout (" in text:
        if kind != "flags":  # a large number may be a long work, and its end in the middle is looked at above
            wrong.append(f"not done after {LIMIT_S} s")
    elif status == 1 and len(errors) == 1 and lines[-1] == errors[0] and program.main is train:
        pass  # a training that could not do all, and has said so, as tests/faults/run.py wants it
    elif status == -signal.SIGALRM and kind == "killed":
        pass
    elif "Traceback (most recent call last)" in text or status not in (0, 2):
        wrong.append(f"status {status}")
    elif status == 2 and (len(errors) != 1 or lines[-1] != errors[0]):
        wrong.append(f"{len(errors)} lines of error")
    elif status == 0 and errors:
        wrong.append("an error and status 0")
    elif status == 0:
        try:
            program.check(work)
        except Exception as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            wrong.append(f"ended well, but {type(e).__name__} in {where.name}: {e}")
    if wrong:
        tail = [line for line in lines if "it/s" not in line][-8:]
        return [f"{program.name}:{number}: {'; '.join(done)}", *wrong, *(f"    {line[:300]}" for line in tail)]
    OUTCOMES.append((program.name, status))
    return []


OUTCOMES: list[tuple[str, int]] = []


@pytest.mark.parametrize("name", BY_NAME)
def test_spoiled_inputs(name, world, tmp_path):
    if ONE and ONE.split(":")[0] != name:
        pytest.skip("another round is asked for")
    begin = time.perf_counter()
    rounds = [int(ONE.split(":")[1])] if ONE else range(ROUNDS)
    failures = [found for number in rounds if (found := one_round(world, tmp_path, BY_NAME[name], number))]
    well = sum(n == name and status == 0 for n, status in OUTCOMES)
    print(f"{name}: {len(rounds)} rounds in {time.perf_counter() - begin:.0f} s, {well} ended well, "
          f"{len(rounds) - well - len(failures)} were refused or cut short, {len(failures)} failed")  # fmt: skip
    told = "\n\n".join("\n".join(found) for found in failures)
    assert not failures, f"{len(failures)} of {len(rounds)} rounds; SD_FUZZ_SEED=name:number repeats one\n\n{told}"


@pytest.mark.parametrize("name", BY_NAME)
def test_unspoiled_inputs(name, world, tmp_path):
    """Else all rounds could be refused for the same reason."""
    program, work = BY_NAME[name], tmp_path / "work"
    work.mkdir()
    copy_inputs(world, work, program)
    status, text = run_forked(work, lambda: program.main(program.argv()))
    assert status == 0, text
    program.check(work)
