"""Our VAE encoding and the diffusers library's, one after the other on one NVIDIA GPU: pictures to means, bf16.

    python benchmarks/encode_bench.py --size 512
    python benchmarks/encode_bench.py --size 256 --batch 64 --seconds 20

Ours is encode_latents.py's own benchmark, from pictures in pinned memory to fp16 latents there. The peer is run
eagerly, in channels_last, on pictures that lie on the GPU in bf16. Random weights; cuDNN's search on both sides. Each
side runs in a process of its own: ours, peer, ours. The last line is JSON with the ratio. The peer needs
`pip install diffusers`.
"""

import argparse
import json
import sys
import time

import torch
from train_bench import race, tune, want_gpu

from sd.cli import parser


def ours(size: int, batch: int, seconds: float) -> dict:
    import SD_Model
    from sd.encoder import Encoder
    from sd.speed import encoding_benchmark

    vae = SD_Model.VAE().eval().requires_grad_(False)
    encoder = Encoder(vae, torch.device("cuda", 0), torch.bfloat16, pad_to=batch)
    settings = argparse.Namespace(
        batch=batch, size=size, benchmark=seconds, benchmark_decode=False, workers=0, dtype="bf16"
    )
    return encoding_benchmark(encoder, settings)


@torch.inference_mode()
def peer(size: int, batch: int, seconds: float) -> dict:
    from diffusers import AutoencoderKL

    with torch.device("cuda"):
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        )  # fmt: skip
        pictures = torch.randn(batch, 3, size, size, dtype=torch.bfloat16)
    vae = vae.to(torch.bfloat16, memory_format=torch.channels_last).eval()
    pictures = pictures.contiguous(memory_format=torch.channels_last)

    def encode(batches: int) -> float:
        started = time.perf_counter()
        for _ in range(batches):
            vae.encode(pictures).latent_dist.mode()  # the mean
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / batches

    encode(5)
    taken = encode(max(5, round(seconds / encode(5))))
    return {"img_per_s": round(batch / taken, 2), "batch": batch, "size": size,
            "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "card": torch.cuda.get_device_name(), "torch": torch.__version__}  # fmt: skip


def main():
    p = parser(__doc__)
    g = p.add_argument_group("work")
    g.add_argument("--size", type=int, default=512, help="pixels a side")
    g.add_argument("--batch", type=int, default=32, help="pictures at once")
    g.add_argument("--seconds", type=float, default=10, help="to time, after the warm-up")
    g.add_argument("--side", choices=["ours", "peer"], help=argparse.SUPPRESS)  # a process of one side
    args = p.parse_args()
    want_gpu()
    if args.side:
        tune()
        side = ours if args.side == "ours" else peer
        return print(json.dumps(side(args.size, args.batch, args.seconds)))
    command = [sys.executable, __file__, "--size", str(args.size), "--batch", str(args.batch),
               "--seconds", str(args.seconds), "--side"]  # fmt: skip
    race([*command, "ours"], [*command, "peer"], 1, "img_per_s", size=args.size, batch=args.batch)


if __name__ == "__main__":
    main()
