"""benchmarks/finetune_bench.py and finetune_peer.py: the peer trains what it should, the table has the right rows.

pytest tests/test_finetune_bench.py
"""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_peer_trains_a_lora_of_the_right_size_in_fp32_beside_bf16():
    pytest.importorskip("diffusers"), pytest.importorskip("peft")
    import finetune_peer

    unet = finetune_peer.tuned_unet("lora", torch.device("meta"), False)
    trained = [p for p in unet.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 374_016 * 16  # attention and feed-forward of SD 1.5 at rank 16
    assert {p.dtype for p in trained} == {torch.float32}
    assert {p.dtype for p in unet.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert sum(p.numel() for p in unet.parameters() if not p.requires_grad) == 859_520_964


def test_a_step_of_the_peer_changes_what_is_trained_alone():
    pytest.importorskip("diffusers"), pytest.importorskip("peft")
    import finetune_peer

    for work in ("lora", "finetune"):
        torch.manual_seed(0)
        unet = finetune_peer.tuned_unet(work, torch.device("cpu"), True)
        before = {name: p.detach().clone() for name, p in unet.named_parameters()}
        finetune_peer.tuning_step(unet, work, 1, "eager", torch.device("cpu"))()
        changed = {name for name, p in unet.named_parameters() if not torch.equal(p, before[name])}
        if work == "lora":
            assert changed == {name for name in before if "lora_" in name}
        else:
            assert len(changed) > 0.9 * len(before)


def row(side: str, how: str, rate: float, peak: float) -> str:
    own = {"estimated_peak_GiB": 3.5} if side == "ours" else {}
    return json.dumps({"job": "LoRA, batch 4", "side": side, "how": how, "images_per_s": rate, "peak_GiB": peak} | own)


def test_the_table_compares_ours_with_the_peers_fastest_way(tmp_path, monkeypatch, capsys):
    import finetune_bench

    out, started = tmp_path / "rows.jsonl", []
    rows = [("ours", "", 60.0, 3.25), ("peer", "eager", 21.4, 6.7), ("peer", "reduce-overhead", 40.0, 5.0)]
    out.write_text("".join(f"{row(*r)}\n" for r in rows))
    wanted = "| LoRA, batch 4 | 60.0 images/s, 3.2 GiB | 3.5 GiB | 21.4 images/s, 6.7 GiB | 40.0 images/s, 5.0 GiB "
    assert f"{wanted}(reduce-overhead) | 1.50 |" in finetune_bench.table(finetune_bench.read_rows(out))

    # What has a line is not run again; what fails is told, and the others' lines are kept.
    def start(command, log):
        started.append(command)
        return command

    def finish(command, seconds):
        if "--batch 16" in " ".join(command):
            return None
        batches = command[command.index("--batch") + 1 : command.index("--batch") + 4]
        line = {"images_per_s": 1.0, "peak_GiB": None, "estimated_peak_GiB": 0.0}
        return [line] * (sum(b.isdigit() for b in batches) if "--how" in command else 1)

    monkeypatch.setattr(finetune_bench, "start", start)
    monkeypatch.setattr(finetune_bench, "finish", finish)
    monkeypatch.setattr(sys, "argv", ["finetune_bench.py", "--trial", "--out", str(out)])
    with pytest.raises(SystemExit):
        finetune_bench.main()
    assert not [c for c in started if "SD_Train.py" in c and "lora" in c and c[c.index("--batch") + 1] == "4"]
    told = [(r["side"], r["job"]) for r in finetune_bench.read_rows(out)]
    assert ("peer", "LoRA, batch 16") in told and ("ours", "LoRA, batch 16") not in told
    assert "failed, or out of time (see the .log): ours  LoRA, batch 16" in capsys.readouterr().out
    count = len(started)
    monkeypatch.setattr(sys, "argv", ["finetune_bench.py", "--trial", "--out", str(out), "--minutes", "0.1"])
    with pytest.raises(SystemExit):
        finetune_bench.main()
    assert len(started) == count and "left for another call: ours  LoRA, batch 16" in capsys.readouterr().out


def test_our_benchmark_tells_what_is_trained_and_the_memory_that_was_estimated(capsys, monkeypatch):
    import sd.lora
    import sd.speed
    import SD_Model
    import SD_Train

    numbers = []

    def estimate(settings, denoiser, text_encoder, device):
        numbers.append(sum(p.numel() for p in denoiser.trained()))
        assert text_encoder is None and all(p.dtype == torch.float32 for p in denoiser.parameters())
        return {"peak": 3 << 30}

    monkeypatch.setattr(sd.speed, "memory_estimate", estimate)
    words = "--phase lora --model tiny --size 64 --batch 1 --device cpu --dtype bf16 --benchmark 1"
    SD_Train.main(words.split())
    told = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    unet = SD_Model.UNet(SD_Model.PRESETS["tiny"]["unet"])
    sides = [unet.get_submodule(name).weight.shape[:2] for name in sd.lora.targets(unet, "transformer", False)]
    assert told["trained"] == 16 * sum(out + into for out, into in sides) == numbers[0]
    assert told["estimated_peak_GiB"] == 3.0
