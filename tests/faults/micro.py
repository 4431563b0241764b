"""A training so small that a step takes milliseconds: preset `micro`, its data, and processes that run SD_Train on it.

python tests/faults/micro.py --data DIR                   # write the data
python tests/faults/micro.py --phase demo ...             # SD_Train.py with the preset `micro` known
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  (this and the next line: imported once here, and not in each fork)
from binding import rebind  # noqa: E402
from transformers import CLIPTextModel, CLIPTokenizer  # noqa: E402, F401

import sd.errors  # noqa: E402
import sd.files  # noqa: E402
import sd.log  # noqa: E402
import sd.objective  # noqa: E402
import sd.parallel  # noqa: E402
import sd.report  # noqa: E402
import sd.text  # noqa: E402
import sd.weights.parts  # noqa: E402
import sd.weights.read  # noqa: E402
import SD_Model  # noqa: E402
import SD_Train  # noqa: E402

SIZE, LENGTH = 64, 12  # pixels a side, token ids a caption
SD_Model.PRESETS["micro"] = dict(
    unet=SD_Model.UNetConfig(
        channels=(16,), attention=(True,), num_res_blocks=1, num_heads=2, context_dim=16, norm_groups=4
    ),
    vae=SD_Model.VAEConfig(channels=(8,), num_res_blocks=0, norm_groups=4, mid_attention=False, patch=8),
    text=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
)


def make_tokenizer(words: int = 0):
    """A CLIP tokenizer of bytes, with `words` further tokens that no text has."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(x + "</w>" for x in letters), *(f"<{i}>" for i in range(words))]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=LENGTH)


def write_dataset(folder: Path, tokenizer, keys: dict[str, list[str]]):
    """An Arrow dataset as data_pipeline/05 writes it: keys by split; captions are colours and numbers."""
    for split, names in keys.items():
        (folder / split).mkdir(parents=True)
        captions = [f"{('red', 'green', 'blue')[i % 3]} {i}" for i in range(len(names))]
        ids = pa.array(sd.text.tokenize(tokenizer, captions).ravel() if names else [], pa.int32())
        table = pa.table({"image_key": pa.array(names, pa.string()), "caption": pa.array(captions, pa.string()),
                          "input_ids": pa.FixedSizeListArray.from_arrays(ids, LENGTH)})  # fmt: skip
        with pa.ipc.new_stream(folder / split / "data.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
        (folder / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    counts = {split: len(names) for split, names in keys.items()}
    sd.files.write_manifest(folder, {"complete": True, "tokenizer_hash": sd.text.tokenizer_hash(tokenizer),
                                   "max_length": LENGTH, "counts": counts})  # fmt: skip


def write_latents(folder: Path, keys: list[str], vae: dict, seed: int, shards: int = 3, size: int = SIZE):
    """Packed latents of unit variance, in shards, as encode_latents.py writes them."""
    folder.mkdir(parents=True)
    values = np.random.default_rng(seed).standard_normal((len(keys), 4, size // 8, size // 8)).astype(np.float16)
    for n, rows in enumerate(np.array_split(np.arange(len(keys)), shards)):
        np.save(folder / f"{n:05d}.npy", values[rows])
        table = pa.table({"image_key": pa.array([keys[i] for i in rows], pa.string()),
                          "row": pa.array(range(len(rows)), pa.int32())})  # fmt: skip
        pq.write_table(table, folder / f"{n:05d}.parquet")
    manifest = {"format": "latents-1", "vae": vae, "size": size, "latent_shape": list(values.shape[1:]), "kind": "mean",
                "scaled": True, "count": len(keys), "shards": shards}  # fmt: skip
    sd.files.write_manifest(folder, manifest)


def make_data(root: Path, sizes: dict[str, int], held_out: int = 8) -> Path:
    """vae/, tokenizer/, text_encoder/, and <source>/dataset, <source>/latents with sizes[source] training pictures."""
    torch.manual_seed(0)
    vae = SD_Model.VAE(SD_Model.PRESETS["micro"]["vae"])
    sd.weights.parts.save_vae(vae, root / "vae")
    described = {"hash": SD_Model.weights_hash(vae), "name": str(root / "vae"), "config": {}}
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(root / "tokenizer")
    SD_Model.TextEncoder.new(SD_Model.PRESETS["micro"]["text"], tokenizer).save(root / "text_encoder")
    SD_Model.TextEncoder.from_pretrained(str(root / "text_encoder"))  # so that forks find its imports and tables made
    for seed, (source, size) in enumerate(sizes.items()):
        keys = [f"{source}/{i // 100:05d}/{i:09d}" for i in range(size + held_out)]
        write_dataset(root / source / "dataset", tokenizer, {"train": keys[held_out:], "val": keys[:held_out]})
        write_latents(root / source / "latents", keys, described, seed)
    return root


def flags(root: Path, out: Path, *more) -> list[str]:
    """A command line of SD_Train: 12 steps of 4, logged each, saved every 3."""
    settings = dict(
        phase="demo", model="micro", size=SIZE, data="things", data_root=root, text_encoder=root / "text_encoder",
        out=out, max_steps=12, batch=4, accumulate=1, lr=1e-3, warmup=2, ema=0.9, save_steps=3, keep_last=0,
        log_steps=1, val_steps=4, val_images=8, sample_steps=0, wandb="disabled", device="cpu", seed=1,
    )  # fmt: skip
    more = [str(word) for word in more]
    while "--without" in more:  # --without NAME leaves one of the above out
        i = more.index("--without")
        del settings[more[i + 1]], more[i : i + 2]
    return [str(word) for name, value in settings.items() for word in (f"--{name}", value)] + more


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork_ranks(function, count: int = 2) -> bytes:
    """What function(rank) returns in that many processes of one gloo group, one after another. Each ends at once, as a
    DDP that outlives its group can hang."""
    port, results, pids = free_port(), [tempfile.TemporaryFile() for _ in range(count)], []
    for rank, result in enumerate(results):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                torch.set_num_threads(1)  # the parent's do not live here, and work for several would wait for them
                torch.distributed.init_process_group("gloo")
                result.write(function(rank))
                result.flush()
                torch.distributed.barrier()
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(0)
    [os.waitpid(pid, 0) for pid in pids]
    return b"".join(result.seek(0) or result.read() for result in results)


class FileMemory:
    """In the place of torch's handle of symmetric memory: a file for each process, which all of them map."""

    def __init__(self, size: int):
        paths = [f"/dev/shm/sd_test_{os.environ['MASTER_PORT']}_{r}" for r in range(torch.distributed.get_world_size())]
        self.of_rank = [torch.from_file(p, shared=True, size=size, dtype=torch.uint8) for p in paths]
        self.barrier()
        Path(paths[torch.distributed.get_rank()]).unlink()

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        return self.of_rank[rank].view(dtype)[storage_offset : storage_offset + sizes[0]]

    def barrier(self, channel=0, timeout_ms=0):
        torch.distributed.barrier()


def peer_memory(possible: bool = True) -> list[tuple]:
    """What to set, as (owner, name, value), for processes on a CPU to reach each other's memory as GPUs do."""
    return [
        (sd.parallel.PeerCopies, "possible", lambda device: possible),
        (sd.parallel, "_symmetric_empty", lambda size, device: torch.empty(size, dtype=torch.uint8)),
        (sd.parallel, "_symmetric_handle", lambda memory: FileMemory(len(memory))),
    ]


def start(argv: list[str], output: Path, hook=None, curves=False, limit=120, **environment) -> int:
    """Run SD_Train's command line in a forked process, which spares the imports; returns its id.

    hook() is called in it first, to break something. Its stdout and stderr go to the file `output`. Without `curves` no
    curves.png and no report.html is drawn, which takes longer than the training. After `limit` seconds it prints its
    stacks and ends.
    """
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update({k: str(v) for k, v in environment.items()})
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        sys.argv[0] = "SD_Train.py"
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.stderr)
        if not curves:
            rebind(sd.log, "plot_run", lambda out: None)
            rebind(sd.report, "write_report", lambda out: None)
        if hook is not None:
            hook()
        sd.errors.run(lambda: SD_Train.main(argv))
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def start_ranks(world: int, argv: list[str], output: Path, hook=None, **environment) -> list[int]:
    """As start, in `world` processes of one group. hook(rank) is called in each."""
    shared = dict(WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()) | environment
    return [
        start(argv, output, hook and (lambda rank=rank: hook(rank)), **{"RANK": rank, "LOCAL_RANK": rank} | shared)
        for rank in range(world)
    ]


def status_of(pid: int) -> int:
    """Wait for a process: its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def rows(out: Path, name: str = "log.jsonl") -> list[dict]:
    """Lines of a run's log, less what depends on the clock."""
    lines = [json.loads(line) for line in (out / name).read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("images_per_s", "data_wait")} for row in lines]


def checkpoints(out: Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    return sd.weights.read.checkpoint_folders(out)[::-1]


def contents(checkpoint: Path) -> tuple[dict, dict]:
    """Every tensor of a checkpoint by name, and its state.json with the optimizer's settings."""
    tensors = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(path).items():
            tensors[f"{path.relative_to(checkpoint)}/{name}"] = tensor
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    for i, state in optimizer["state"].items():
        tensors |= {f"optimizer/{i}/{name}": torch.as_tensor(t) for name, t in state.items()}
    state = json.loads((checkpoint / "state.json").read_text())
    return tensors, state | {"groups": optimizer["param_groups"]}


def differences(a: Path, b: Path, settings: bool = True) -> list[str]:
    """What differs between the ends of two runs: weights, EMA, optimizer, progress, each logged loss, lr and sum of
    images seen, each validation; all bit for bit. settings: those too."""
    (ta, sa), (tb, sb) = contents(checkpoints(a)[-1]), contents(checkpoints(b)[-1])
    found = sorted(ta.keys() ^ tb.keys()) + [k for k in ta.keys() & tb.keys() if not torch.equal(ta[k], tb[k])]
    found += [
        f"state.json: {k}" for k in sa.keys() | sb.keys() if sa.get(k) != sb.get(k) and (settings or k != "settings")
    ]
    return found + [name for name in ("log.jsonl", "validation.jsonl") if rows(a, name) != rows(b, name)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--data"]:
        make_data(Path(sys.argv[2]), {"things": 42})
    else:
        if sys.argv[1:2] == ["--slow"]:  # so many seconds more a micro-batch
            seconds, real = float(sys.argv[2]), sd.objective.backward
            del sys.argv[1:3]
            rebind(sd.objective, "backward", lambda *args: time.sleep(seconds) or real(*args))
        sd.errors.run(SD_Train.main)
