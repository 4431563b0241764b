"""The peer's fine-tuning steps on one GPU: the diffusers library's SD 1.5 UNet, whole or with the PEFT library's LoRA.

    python benchmarks/finetune_peer.py --work lora --batch 1 4 16 --how eager
    python benchmarks/finetune_peer.py --work finetune --batch 4 --how reduce-overhead --steps 100

Random weights, latents and text of 512 px, bf16 autocast. LoRA: rank 16 on attention and feed-forward layers, adapters
in fp32 beside weights in bf16, fused AdamW, no average. Whole: fp32 weights, fused AdamW, and a foreach EMA of all. A
line of JSON a batch. benchmarks/finetune_bench.py runs this beside ours; it needs `pip install diffusers peft`.
"""

import json
import time

import torch
import torch.nn.functional as F
from train_bench import peer_unet, tune, want_gpu

from sd.cli import parser

RANK = 16

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]

MODES = ["default", "reduce-overhead", "max-autotune-no-cudagraphs"]  # of torch.compile

TINY = dict(
    block_out_channels=(32, 64), layers_per_block=1, attention_head_dim=4, cross_attention_dim=32, norm_num_groups=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)  # fmt: skip


def tuned_unet(work: str, device: torch.device, trial: bool):
    """The peer's network, with its adapters if `work` is lora: only these are trained then."""
    unet = peer_unet(512, device, **(TINY if trial else {}))
    if work == "lora":
        from peft import LoraConfig

        unet = unet.to(torch.bfloat16).requires_grad_(False)
        unet.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=TARGETS))
        for p in unet.parameters():
            if p.requires_grad:
                p.data = p.data.float()
    return unet.train()


def tuning_step(unet, work: str, batch: int, how: str, device: torch.device):
    """One training step as a function without arguments."""
    side, width = (8 if unet.config.cross_attention_dim < 768 else 64), unet.config.cross_attention_dim
    latents, text = torch.randn(batch, 4, side, side, device=device), torch.randn(batch, 77, width, device=device)
    weights = [p for p in unet.parameters() if p.requires_grad]
    averages = [p.detach().clone() for p in weights] if work == "finetune" else []
    optimizer = torch.optim.AdamW(weights, lr=1e-5, weight_decay=1e-2, fused=True)
    net = torch.compile(unet, mode=how, dynamic=False) if how in MODES else unet

    def step():
        if how == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (batch,), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            predicted = net(latents + noise, t, text).sample
        F.mse_loss(predicted.float(), noise).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if averages:
            torch._foreach_lerp_(averages, [p.detach() for p in weights], 1e-3)

    return step


def timed(step, batch: int, steps: int, device: torch.device) -> dict:
    """Sustained rate over the steps, after ten to warm up, and the peak of memory, which building the network is not
    counted in."""
    cuda = device.type == "cuda"
    sync = torch.cuda.synchronize if cuda else lambda: None
    started = time.perf_counter()
    step()
    sync()
    first = time.perf_counter() - started
    for _ in range(min(9, steps)):
        step()
    sync()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    sync()
    seconds = (time.perf_counter() - started) / steps
    return {
        "images_per_s": round(batch / seconds, 2),
        "ms_per_step": round(seconds * 1e3, 2),
        "first_step_s": round(first, 1),
        "steps": steps,
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "reserved_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else None,
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
    }


def main():
    p = parser(__doc__)
    g = p.add_argument_group("work")
    g.add_argument("--work", choices=["lora", "finetune"], default="lora", help="what is trained: a LoRA, or all")
    g.add_argument("--batch", type=int, nargs="+", default=[4], help="images a step; several one after the other")
    g.add_argument("--steps", type=int, default=50, help="to time, of each")
    g.add_argument("--how", choices=["eager", "checkpointed", *MODES], default="eager", help="as it is, recomputing "
                   "activations, or by torch.compile in this mode")  # fmt: skip
    g.add_argument("--channels_last", action="store_true", help="memory format NHWC (without it NCHW)")
    g.add_argument("--trial", action="store_true", help="a tiny network on the CPU, to see that this runs")
    args = p.parse_args()
    if not args.trial:
        want_gpu()
    tune()
    import diffusers

    device = torch.device("cpu" if args.trial else "cuda")
    unet = tuned_unet(args.work, device, args.trial)
    if args.channels_last:
        unet = unet.to(memory_format=torch.channels_last)
    if args.how == "checkpointed":
        unet.enable_gradient_checkpointing()
    trained = sum(p.numel() for p in unet.parameters() if p.requires_grad)
    about = {"work": args.work, "how": args.how, "trained": trained, "diffusers": diffusers.__version__}
    for batch in args.batch:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step = tuning_step(unet, args.work, batch, args.how, device)
        print(json.dumps(about | {"batch": batch} | timed(step, batch, args.steps, device)), flush=True)
        del step


if __name__ == "__main__":
    main()
