"""A disk that is full in the middle of a file: one sentence, and nothing under a final name that is not whole. Each
program runs in a forked process in which files may hold so many bytes and no more. Found by tests/test_fuzz.py."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import mutate
from test_cases_pictures import PICTURE, encode
from test_data_pipeline import load, make_tar

import sd.errors
import sd.latents
import sd.log
import sd.shards
import sd.weights.tensors


def on_a_full_disk(function, size: int) -> tuple[int, str]:
    """What function() ends with where files hold `size` bytes at most: its status, and what it printed on stderr."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            os.dup2(writer, 2)
            sys.stderr = open(2, "w", closefd=False)
            mutate.full_disk(size)
            sd.errors.run(function)
            status = 0
        except SystemExit as e:
            status = e.code
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    with open(reader) as file:
        printed = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed


def whole(folder: Path) -> list[str]:
    """The final files of a folder, all of which must be whole."""
    assert mutate.broken_files(folder, {}) == []
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".tmp"))


@pytest.mark.parametrize("size", [100, 1192, 3000])
def test_latents(size, tmp_path):
    """3,200 bytes, fewer than a buffer of C's: np.save would end well, and atomic_path rename what it left."""
    latents = np.zeros((6, 4, 8, 8), np.float16)
    vae = {"config": {"scaling_factor": 1.0}}
    settings = {"vae": vae, "buckets": None, "size": 64, "kind": "mean", "flip": False}
    arrays = {"00000": (latents, [(f"s/0/{i}", "x") for i in range(6)])}

    def save():
        sd.latents.write_shard(tmp_path, "00000", arrays, {"settings": settings}, settings)

    status, text = on_a_full_disk(save, size)
    assert status == 2 and text.startswith("error: ") and text.count("\n") == 1, text
    assert whole(tmp_path) == []


def test_latents_are_as_np_save_writes_them(tmp_path):
    latents = np.arange(6 * 4 * 8 * 8).reshape(6, 4, 8, 8).astype(np.float16)
    settings = {"buckets": None, "size": 64}
    for array in (latents, np.asfortranarray(latents), latents[::-1], latents[:0]):
        index = [(f"s/0/{i}", "x") for i in range(len(array))]
        sd.latents.write_shard(tmp_path, "00000", {"00000": (array, index)}, {"settings": settings}, settings)
        np.save(expected := io.BytesIO(), np.ascontiguousarray(array))
        assert (tmp_path / "00000.npy").read_bytes() == expected.getvalue()


def test_a_tokenizer(tmp_path):
    (tmp_path / "s/images").mkdir(parents=True)
    make_tar(tmp_path / "s/images/00000.tar", [("0.png", encode(PICTURE, "PNG")), ("0.txt", b"a red cat")])
    script = load("04a_make_tokenizer.py")

    def make():
        sys.argv = ["04a", "--in", str(tmp_path / "s/images"), "--out", str(tmp_path / "out"), "--vocab_size", "520"]
        script.main()

    for size in (160, 400, 3000):
        status, text = on_a_full_disk(make, size)
        assert status == 2 and text.splitlines()[-1].startswith("error: ") and "Traceback" not in text, text
        assert "tokenizer.json" not in whole(tmp_path / "out")


def test_curves(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 1.0, "lr": 0.1}\n')
    sd.log.plot_run(tmp_path)
    before = (tmp_path / "curves.png").read_bytes()
    status, text = on_a_full_disk(lambda: sd.log.plot_run(tmp_path), 98)
    assert status == 2 and text.startswith("error: ") and (tmp_path / "curves.png").read_bytes() == before


def test_weights(tmp_path):
    status, text = on_a_full_disk(
        lambda: sd.weights.tensors.save_tensors({"a": torch.zeros(9999)}, tmp_path / "a.safetensors"), 500
    )
    assert (status, text) == (
        2, f"error: {tmp_path / 'a.safetensors'}: File too large: put that right and run the command again\n"
    )  # fmt: skip


def test_errors_of_libraries_in_rust():
    """tokenizers raises a bare Exception."""
    status, text = on_a_full_disk(lambda: (_ for _ in ()).throw(Exception("No space left (os error 28)")), 10**6)
    assert (status, text) == (
        2,
        "error: the system: No space left on device: put that right and run the command again\n",
    )
    with pytest.raises(Exception, match="bug"):
        sd.errors.run(lambda: (_ for _ in ()).throw(Exception("bug")))
