"""Our training step and the diffusers library's, one after the other on one NVIDIA GPU: same batch, precision and work.

    python benchmarks/train_bench.py --size 256 --batch 128             # against the compiled peer
    python benchmarks/train_bench.py --size 512 --batch 32 --peer eager --rounds 2

A step is forward, backward, clipping, AdamW and EMA of the SD 1.5 network on random latents and text, in bf16 autocast.
Each side runs in a process of its own: ours, peer, ours, peer, ..., ours. The last line is JSON with the ratio of the
means. The peer needs `pip install diffusers`; it gets fused AdamW and a foreach EMA, which it has to be given by hand.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from sd.cli import parser  # noqa: E402


def peer_unet(size: int, device="cuda", **changes):
    """The library's UNet with SD 1.5's configuration, for so many pixels a side. changes: of that configuration."""
    from diffusers import UNet2DConditionModel

    config = dict(
        sample_size=size // 8, in_channels=4, out_channels=4, layers_per_block=2, attention_head_dim=8,
        block_out_channels=(320, 640, 1280, 1280), cross_attention_dim=768,
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    )  # fmt: skip
    with torch.device(device):
        return UNet2DConditionModel(**(config | changes))


def want_gpu():
    if not torch.cuda.is_available():
        print("error: an NVIDIA GPU was wanted, and torch finds none; run this on one", file=sys.stderr)
        raise SystemExit(2)


def tune():
    """As SD_Train.py does: TF32 for what is left in fp32, cuDNN's search."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def peer_step(size: int, batch: int, how: str):
    """One training step of the peer as a function without arguments. how: eager, compiled or checkpointed."""
    tune()
    unet = peer_unet(size).train()
    with torch.device("cuda"):
        latents, text = torch.randn(batch, 4, size // 8, size // 8), torch.randn(batch, 77, 768)
    if how == "checkpointed":
        unet.enable_gradient_checkpointing()
    weights = list(unet.parameters())
    averages = [p.detach().clone() for p in weights]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, weight_decay=1e-2, fused=True)
    net = torch.compile(unet) if how == "compiled" else unet

    def step():
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (batch,), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            predicted = net(latents + noise, t, text).sample
        F.mse_loss(predicted.float(), noise).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(averages, [p.detach() for p in weights], 1e-4)

    return step


def time_peer(step, batch: int, steps: int) -> dict:
    """Sustained rate over the steps, after ten to warm up."""
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    for _ in range(9):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / steps
    return {"images_per_s": round(batch / seconds, 2), "ms_per_step": round(seconds * 1e3, 2),
            "first_step_s": round(first, 1), "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "card": torch.cuda.get_device_name(), "torch": torch.__version__}  # fmt: skip


def last_json(command: list[str]) -> dict:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with status {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def race(ours: list[str], peer: list[str], rounds: int, name: str, /, **settings):
    """Both sides' commands by turns: ours, peer, ours, ..., ours. Prints the JSON each ends with, and at last one with
    these settings, the card, each side's mean of the number of that name, their ratio and peaks of memory."""
    rows = {"ours": [], "peer": []}
    for i in range(2 * rounds + 1):
        side, command = ("peer", peer) if i % 2 else ("ours", ours)
        rows[side].append(last_json(command))
        print(side, json.dumps(rows[side][-1]), flush=True)
    rate = {side: statistics.mean(row[name] for row in rows[side]) for side in rows}
    print(json.dumps({
        **settings, "card": rows["peer"][0]["card"],
        **{f"{side}_{name}": round(r, 1) for side, r in rate.items()},
        **{f"{side}_peak_GiB": rows[side][0]["peak_GiB"] for side in rows if "peak_GiB" in rows[side][0]},
        "ratio": round(rate["ours"] / rate["peer"], 3),
    }))  # fmt: skip


def main():
    p = parser(__doc__)
    g = p.add_argument_group("work")
    g.add_argument("--size", type=int, default=256, help="pixels a side")
    g.add_argument("--batch", type=int, default=128, help="images a step")
    g.add_argument("--steps", type=int, default=200, help="to time, of each side and round")
    g.add_argument("--rounds", type=int, default=1, help="of ours and the peer; then ours once more")
    g.add_argument("--peer", choices=["eager", "compiled", "checkpointed"], default="compiled", help="how it runs")
    g.add_argument("--side", choices=["peer"], help=argparse.SUPPRESS)  # the peer's own process
    g.add_argument("ours", nargs="*", help="flags for our side, after -- (default: none)")
    args = p.parse_args()
    want_gpu()
    if args.side:
        return print(json.dumps(time_peer(peer_step(args.size, args.batch, args.peer), args.batch, args.steps)))
    common = ["--size", str(args.size), "--batch", str(args.batch)]
    ours = [sys.executable, "SD_Train.py", "--phase", "scratch_256", "--accumulate", "1", *common, "--benchmark",
            str(args.steps), *args.ours]  # fmt: skip
    peer = [sys.executable, __file__, *common, "--steps", str(args.steps), "--peer", args.peer, "--side", "peer"]
    race(ours, peer, args.rounds, "images_per_s", size=args.size, batch=args.batch, peer=args.peer)


if __name__ == "__main__":
    main()
