"""Our sampling and the diffusers library's, one after the other on one NVIDIA GPU: SD 1.5's UNet under guidance, DDIM.

    python benchmarks/sample_bench.py --pictures 1 --mode reduce-overhead     # the compiled peer at its best for one
    python benchmarks/sample_bench.py --pictures 16

512 px, bf16, random weights, cuDNN's search on both sides. Each side runs in a process of its own: ours, peer, ours.
The last line is JSON with the ratio of UNet evaluations a second. The peer needs `pip install diffusers`.
"""

import argparse
import json
import sys
import time

import torch
from train_bench import peer_unet, race, tune, want_gpu

from sd.cli import parser

SIDE, CFG, DTYPE = 64, 7.5, torch.bfloat16  # of latents; guidance


def ours(pictures: int, steps: int) -> dict:
    """SD_ImageGen's own benchmark."""
    import SD_Model
    from sd.fused import FusedUNet, apply
    from sd.painting import fast
    from sd.speed import sampling_benchmark

    device = torch.device("cuda", 0)
    unet = fast(SD_Model.UNet(zero_init="none").eval().requires_grad_(False), device, DTYPE)
    vae = SD_Model.VAE().eval().requires_grad_(False)
    if isinstance(unet, FusedUNet):
        apply(vae)
    context = torch.randn(77, 768, device=device, dtype=DTYPE)
    settings = argparse.Namespace(benchmark=steps, batch=pictures, cfg=CFG)
    return sampling_benchmark(unet, vae, context, settings, (4, SIDE, SIDE), device, DTYPE)


@torch.inference_mode()
def peer(pictures: int, steps: int, mode: str) -> dict:
    """The library's UNet with fused q, k, v, compiled as a whole, in channels_last, and its DDIM scheduler."""
    from diffusers import DDIMScheduler

    unet = peer_unet(8 * SIDE).to(DTYPE, memory_format=torch.channels_last).eval()
    unet.fuse_qkv_projections()
    if mode != "eager":
        unet = torch.compile(unet, mode=mode, fullgraph=True)
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1,
    )  # fmt: skip
    context = torch.randn(2 * pictures, 77, 768, device="cuda", dtype=DTYPE)

    def sample(steps: int):
        scheduler.set_timesteps(steps, device="cuda")
        x = torch.randn(pictures, 4, SIDE, SIDE, device="cuda", dtype=DTYPE)
        for t in scheduler.timesteps:
            null, text = unet(torch.cat([x, x]), t, context, return_dict=False)[0].chunk(2)
            x = scheduler.step(null + CFG * (text - null), t, x, return_dict=False)[0]
        torch.cuda.synchronize()

    started = time.perf_counter()
    sample(5)
    first = time.perf_counter() - started
    sample(5)
    started = time.perf_counter()
    sample(steps)
    step = (time.perf_counter() - started) / steps
    return {"batch": pictures, "steps": steps, "ms_per_step": round(step * 1e3, 3), "mode": mode,
            "evaluations_per_s": round(2 * pictures / step, 1), "first_steps_s": round(first, 2),
            "card": torch.cuda.get_device_name(), "torch": torch.__version__}  # fmt: skip


def main():
    p = parser(__doc__)
    g = p.add_argument_group("work")
    g.add_argument("--pictures", type=int, default=16, help="at once")
    g.add_argument("--steps", type=int, default=200, help="to time")
    g.add_argument("--mode", choices=["default", "reduce-overhead", "max-autotune", "eager"], default="default",
                   help="of torch.compile, for the peer")  # fmt: skip
    g.add_argument("--side", choices=["ours", "peer"], help=argparse.SUPPRESS)  # a process of one side
    args = p.parse_args()
    want_gpu()
    if args.side:
        tune()
        row = ours(args.pictures, args.steps) if args.side == "ours" else peer(args.pictures, args.steps, args.mode)
        return print(json.dumps(row))
    command = [sys.executable, __file__, "--pictures", str(args.pictures), "--steps", str(args.steps),
               "--mode", args.mode, "--side"]  # fmt: skip
    settings = {"pictures": args.pictures, "mode": args.mode}
    race([*command, "ours"], [*command, "peer"], 1, "evaluations_per_s", **settings)


if __name__ == "__main__":
    main()
