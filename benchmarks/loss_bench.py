"""How far training's losses drift apart: the fast path from the plain one, and plain runs from each other.

    python benchmarks/loss_bench.py --steps 200
    python benchmarks/loss_bench.py --model tiny --size 64 --steps 40 --device cpu

Every run starts from the same weights and sees the same pictures, noise and timesteps; plain runs differ only in the
order of their sums: in how many micro-batches make a step (gradients' sums), and on a GPU in the layout of images
(convolutions' sums too, from the first step on). With bf16 there is a plain run in fp32 too (on a GPU with products in
TF32): a path that rounds less has losses nearer to its. Of each pair of runs the last line (JSON) has the mean over the
steps of |a - b| / b, of all steps and of each quarter of them, and the distance of the trained weights relative to the
way they went.
"""

import copy
import itertools
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sd.cli import parser  # noqa: E402
from sd.data import Batch  # noqa: E402
from sd.device import setup_device  # noqa: E402
from sd.errors import InputError, run  # noqa: E402
from sd.fused import apply  # noqa: E402
from sd.kernels import available  # noqa: E402
from sd.objective import Denoiser  # noqa: E402
from sd.optim import ema_decay, lr_at, make_optimizer  # noqa: E402
from sd.step import MicroSteps, Update  # noqa: E402
from SD_Model import PRESETS, NoiseSchedule, TextEncoder, UNet  # noqa: E402
from SD_Train import parse_args, resolve  # noqa: E402


def sampled(net: torch.nn.Module) -> torch.Tensor:
    """Every 997th number of each weight, fp32 on the CPU."""
    return torch.cat([p.detach().flatten()[::997].float().cpu() for p in net.parameters()])


def train(
    start: UNet, settings: dict, memory: torch.memory_format, pictures: int, steps: int, device: torch.device
) -> tuple[list, torch.Tensor]:
    """Each step's mean loss, and a sample of the trained weights."""
    unet, accumulate = copy.deepcopy(start), settings["accumulate"]
    if settings["kernels"]:
        apply(unet)
    denoiser = Denoiser(unet, None).to(device, memory_format=memory).train()
    ema, config = copy.deepcopy(denoiser).requires_grad_(False), unet.config
    update = Update(make_optimizer(denoiser, settings), denoiser, ema, settings, 1)
    schedule = NoiseSchedule(settings["betas"], prediction=settings["prediction"])
    micro_steps = MicroSteps(denoiser, lambda text: text, schedule, settings, update, device, print)
    side = settings["size"] // PRESETS[settings["model"]]["vae"].factor
    draw = torch.Generator().manual_seed(settings["seed"])
    latents = torch.randn(pictures, config.in_channels, side, side, generator=draw)
    text = torch.randn(pictures, TextEncoder.MAX_LENGTH, config.context_dim, generator=draw)
    losses = []
    for step in range(steps):
        i = torch.randint(pictures, (settings["batch"] * accumulate,), generator=draw)
        noise = torch.randn(len(i), *latents.shape[1:], generator=draw)
        t = torch.randint(schedule.steps, (len(i),), generator=draw)
        parts = zip(*(x.to(device).chunk(accumulate) for x in (latents[i], noise, t, text[i])))
        of_step = [micro_steps(Batch(*part), first=a == 0, last=a == accumulate - 1) for a, part in enumerate(parts)]
        lr = lr_at(step, steps, settings)
        update(lr, settings["clip"], ema_decay(settings["ema"], step)).item()
        micro_steps.end()
        losses.append(torch.cat(of_step).mean().item())
    return losses, sampled(denoiser)


def distances(a: list[float], b: list[float]) -> dict:
    apart = torch.tensor([abs(x - y) / y for x, y in zip(a, b)])
    return {"all": apart.mean().item(), "quarters": [part.mean().item() for part in apart.tensor_split(4)]}


def main(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("work")
    g.add_argument("--model", default="sd15", choices=list(PRESETS), help="network preset")
    g.add_argument("--size", type=int, default=128, help="pixels a side")
    g.add_argument("--batch", type=int, default=16, help="images a step")
    g.add_argument("--pictures", type=int, default=64, help="different ones")
    g.add_argument("--steps", type=int, default=200, help="of each run")
    g.add_argument("--lr", type=float, default=1e-4, help="peak learning rate")
    g.add_argument("--seed", type=int, default=0, help="of weights, pictures, noise and timesteps")

    g = p.add_argument_group("runs")
    g.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4], help="micro-batches of the plain runs")
    g.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="autocast")
    g.add_argument("--device", help="cuda, cuda:1, mps or cpu (default: the best there is)")
    args = p.parse_args(argv)
    if args.steps < 4:
        raise InputError(f"--steps must be at least 4, found {args.steps}")
    device, *_ = setup_device(args.device)
    of_kernels = (1, 2) if available(device) else ()
    if bad := [n for n in (*args.splits, *of_kernels) if n < 1 or args.batch % n]:
        raise InputError(f"--batch {args.batch} must be divisible by the numbers of micro-batches, found {bad[0]}")
    flags = ["--phase", "scratch_256", "--model", args.model, "--size", str(args.size), "--lr", str(args.lr),
             "--seed", str(args.seed)]  # fmt: skip
    settings = resolve(parse_args(flags), None) | {"warmup": 20}
    torch.manual_seed(settings["seed"])
    start, runs = UNet(PRESETS[args.model]["unet"], settings["zero_init"]), {}
    usual = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    variants = [(f"plain, {n} micro-batches", n, False, usual, args.dtype) for n in args.splits]
    if device.type == "cuda":
        variants.append(("plain, contiguous", 1, False, torch.contiguous_format, args.dtype))
    if args.dtype != "fp32":
        variants.append(("plain, fp32", 1, False, usual, "fp32"))
    variants += [(f"kernels, {n} micro-batches", n, True, usual, args.dtype) for n in of_kernels]
    for name, count, kernels, memory, dtype in variants:
        how = settings | {"kernels": kernels, "accumulate": count, "batch": args.batch // count, "dtype": dtype}
        runs[name] = train(start, how, memory, args.pictures, args.steps, device)
        print(f"{name}: loss {runs[name][0][0]:.4f} -> {runs[name][0][-1]:.4f}", flush=True)
    before, rows = sampled(start), []
    for a, b in itertools.combinations(runs, 2):
        (losses, weights), (others, other_weights) = runs[a], runs[b]
        apart = (weights - other_weights).norm() / (other_weights - before).norm()
        rows.append({"runs": [a, b], **distances(losses, others), "weights": apart.item()})
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"steps": args.steps, "model": args.model, "dtype": args.dtype, "seed": args.seed, "card": card,
                      "torch": torch.__version__, "pairs": rows}))  # fmt: skip


if __name__ == "__main__":
    run(main)
