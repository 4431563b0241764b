"""Benchmarks of training, sampling and encoding."""

import gc
import json
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.distributed as dist

from sd import kernels
from sd.data import Batch
from sd.device import Place, layout, peak_flops
from sd.encoder import Encoder
from sd.fused import FusedUNet
from sd.graphs import Graphed
from sd.lora import average_of, settle_base
from sd.networks import unet_config
from sd.objective import Denoiser
from sd.optim import clip_limit, forget_gradients, make_optimizer
from sd.painting import decode_latents, guided, make_sampler
from sd.plan import count_flops, memory_estimate, passes, unet_flops
from sd.setup import averages_of, memory_format
from sd.sharding import Shard
from sd.shards import ShardWriter
from sd.step import MicroSteps, Update, peak_memory, wrap
from sd.stream import stream
from SD_Model import PRESETS, VAE, NoiseSchedule, TextEncoder


def benchmark_facts(device: torch.device, flops: float) -> dict:
    """What every benchmark's line of JSON ends with: MFU at so many FLOP/s, memory, card and versions."""
    cuda, peak = device.type == "cuda", peak_flops(device)
    return {
        "mfu": round(flops / peak, 4) if peak else None,
        "peak_GiB": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if cuda else None,
        "card": torch.cuda.get_device_name(device) if cuda else device.type,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": kernels.triton and kernels.triton.__version__,
    }


@torch.no_grad()
def sampling_benchmark(unet, vae, context: torch.Tensor, args, shape: tuple[int, int, int], device, dtype) -> dict:
    """Time args.benchmark steps of DDIM under guidance, args.batch pictures at once, and the VAE's decoder."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    started = time.perf_counter()
    call = Graphed(unet) if isinstance(unet, FusedUNet) else unet
    contexts = torch.stack([context] * args.batch)
    x = torch.randn(args.batch, *shape, device=device)
    model = guided(call, contexts, contexts, args.cfg)
    sampler = make_sampler("ddim", NoiseSchedule("scaled_linear"), {})
    sampler(model, x, 5, randn=lambda x: torch.randn_like(x))
    sync()
    first = time.perf_counter() - started
    started = time.perf_counter()
    sampler(model, x, args.benchmark, randn=lambda x: torch.randn_like(x))
    sync()
    step = (time.perf_counter() - started) / args.benchmark
    vae = vae.to(device, dtype, memory_format=layout(device))
    decode_latents(vae, x.cpu(), args.batch, device, dtype)
    started = time.perf_counter()
    for _ in range(3):
        decode_latents(vae, x.cpu(), args.batch, device, dtype)
    decode = (time.perf_counter() - started) / 3 / args.batch
    rate = (2 if args.cfg not in (0, 1) else 1) * args.batch / step
    return {"batch": args.batch, "latent": list(shape), "cfg": args.cfg, "steps": args.benchmark,
            "ms_per_step": round(step * 1e3, 3), "steps_per_s": round(1 / step, 2),
            "evaluations_per_s": round(rate, 1), "decode_ms_per_picture": round(decode * 1e3, 2),
            "first_steps_s": round(first, 2), "dtype": str(dtype).removeprefix("torch."),
            "kernels": call is not unet,
            **benchmark_facts(device, rate * unet_flops(unet.config, shape, len(context)))}  # fmt: skip


PASSES = 5  # of train_benchmark, to tell forward and backward apart
TRACED = 3  # steps in its trace


def warm_up_steps(steps: int, shapes: int) -> int:
    """Of train_benchmark: for each shape of latents, kernels are compiled and algorithms chosen."""
    return min(20, steps) * shapes


class Clock:
    """Points in a device's time, and the milliseconds between them."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, a, b) -> float:
        return a.elapsed_time(b) if self.cuda else (b - a) * 1e3

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()


class TimedSteps:
    """Whole training steps, with points in time between their parts: on a loader's latents and text, or on random ones
    that stay on the device."""

    def __init__(
        self, settings: dict, denoiser: Denoiser, schedule: NoiseSchedule, place: Place, loader, text_of, shapes: int
    ):
        unet, self.settings, self.loader, self.world = unet_config(settings), settings, loader, place.world
        device = place.device
        side, micro = settings["size"] // PRESETS[settings["model"]]["vae"].factor, settings["batch"]
        self.shape = unet.in_channels, side, side
        self.denoiser, self.device, self.clock, self.waited = denoiser, device, Clock(device), 0.0
        settle_base(denoiser, settings)
        denoiser.to(device, memory_format=memory_format(settings)).train()
        ema = denoiser if settings["no_ema"] else average_of(denoiser)
        if settings["ema_on_cpu"]:
            ema.to("cpu")
        optimizer, shard = make_optimizer(denoiser, settings), None
        if settings["shard"] and place.world > 1:
            shard = Shard(optimizer, {} if ema is denoiser else averages_of(denoiser, ema), place)
        self.update = Update(optimizer, denoiser, ema, settings, place.world, shard)
        model = wrap(denoiser, settings, place.world)
        latents, noise = torch.randn(2, micro, *self.shape, device=device)
        text = torch.randn(micro, TextEncoder.MAX_LENGTH, unet.context_dim, device=device)  # instead of ids
        self.random = lambda: Batch(latents, noise, torch.randint(0, schedule.steps, (micro,), device=device), text)
        self.micro_steps = MicroSteps(
            model, text_of or (lambda x: x), schedule, settings, self.update, device, print, shapes
        )

    def step(self) -> tuple:
        """One step; the points at which it began, had its gradients, and ended."""
        begun, accumulate = self.clock.now(), self.settings["accumulate"]
        for a in range(accumulate):
            asked = time.perf_counter()
            self.batch = self.loader.next() if self.loader else self.random()
            self.waited += time.perf_counter() - asked
            self.micro_steps(self.batch, first=a == 0, last=a == accumulate - 1)
        backward_done = self.clock.now()
        self._end()
        return begun, backward_done, self.clock.now()

    def _end(self):
        self.update(self.settings["lr"], clip_limit(self.settings, 0.0), self.settings["ema"]).item()
        self.micro_steps.end()

    def trace(self, path: str | None):
        """Write a trace of TRACED steps in Chrome's format; without a path, this process only takes the steps."""
        with torch.profiler.profile() as profiled:
            for _ in range(TRACED):
                self.step()
            self.clock.wait()
            profiled.add_metadata_json("steps", str(TRACED))
        if path:
            profiled.export_chrome_trace(path)

    def passes(self) -> dict[str, float | None]:
        """Milliseconds of one micro-batch's forward and backward passes, not recorded as graphs, and how much longer
        they take where processes share gradients in them (None for one process). Gives up the graphs."""
        clock, marks, found = self.clock, [], {False: [], True: []}
        self.micro_steps.without_graphs()
        hook = self.denoiser.register_forward_hook(lambda *_: marks.append(clock.now()))
        for i in range(1 + PASSES):
            for last in (False, True) if self.world > 1 else (True,):
                for timed in (False, True):  # the first keeps the device busy, so that the timed one's are queued
                    forget_gradients(self.update.parameters)
                    if self.world > 1:
                        dist.all_reduce(torch.zeros(1, device=self.device))  # all processes begin together
                    marks[:] = [clock.now()]
                    self.micro_steps(self.batch, first=True, last=last and timed)
                if i:  # after one to warm up
                    found[last].append((*marks, clock.now()))
            self._end()
        hook.remove()
        clock.wait()
        alone, shared = found[self.world == 1], found[True]
        forward, backward = (sum(clock.ms(p[j], p[j + 1]) for p in alone) / PASSES for j in (0, 1))
        longer = sum(clock.ms(p[0], p[2]) - clock.ms(q[0], q[2]) for p, q in zip(shared, alone)) / PASSES
        return {"forward": forward, "backward": backward, "sharing": longer if self.world > 1 else None}


def train_benchmark(
    steps: int,
    settings: dict,
    denoiser: Denoiser,
    schedule: NoiseSchedule,
    place: Place,
    trace: str | None,
    loader=None,
    text_of=None,
    shapes: int = 1,
):
    """Time whole training steps, TimedSteps. Prints a JSON line last; its ms are means over the steps after the
    warm-up, parts in the device's time; forward, backward and sharing are told apart afterwards. trace: a file for the
    first rank's trace."""
    device, rank, world, _ = place
    estimate = memory_estimate(settings, denoiser, None, device)["peak"]  # before weights change their dtype
    timed = TimedSteps(settings, denoiser, schedule, place, loader, text_of, shapes)
    clock, started = timed.clock, time.perf_counter()
    timed.step()
    clock.wait()
    first_step = time.perf_counter() - started
    for _ in range(warm_up_steps(steps, shapes) - 1):
        timed.step()
    clock.wait()
    started, timed.waited = time.perf_counter(), 0.0
    points = [timed.step() for _ in range(steps)]
    clock.wait()
    seconds = (time.perf_counter() - started) / steps
    parts = {
        "data_wait": timed.waited / steps * 1e3,
        "forward_backward": sum(clock.ms(a, b) for a, b, _ in points) / steps,
        "optimizer": sum(clock.ms(b, c) for _, b, c in points) / steps,
    }
    peak_gib = round(peak_memory(timed.update), 2) if clock.cuda else None  # of the timed steps, what is shared too
    if trace:
        timed.trace(trace if rank == 0 else None)
    graphs, shared = timed.micro_steps.graphed is not None, timed.update.shared
    parts |= timed.passes()
    if rank == 0:
        rate = settings["batch"] * settings["accumulate"] * world / seconds
        flops = unet_flops(denoiser.unet.config, timed.shape, TextEncoder.MAX_LENGTH)
        told = "model size batch accumulate dtype kernels channels_last grad_checkpoint lora lora_targets".split()
        print(json.dumps({
            "benchmark": "train", **{name: settings[name] for name in told}, "processes": world, "steps": steps,
            "data": "loader" if loader else "synthetic", "shapes": shapes, "graphs": graphs,
            "images_per_s": round(rate, 2), "ms_per_step": round(seconds * 1e3, 2),
            **{f"{name}_ms": None if value is None else round(value, 2) for name, value in parts.items()},
            "first_step_s": round(first_step, 2), "gradients_by": shared and type(shared.way).__name__,
            **benchmark_facts(device, rate / world * passes(settings) * flops), "peak_GiB": peak_gib,
            "estimated_peak_GiB": round(estimate / 2**30, 2), "trained": sum(p.numel() for p in denoiser.trained()),
        }))  # fmt: skip
    if world > 1:
        del timed  # as at the end of training: DDP goes before the group
        gc.collect()
        dist.destroy_process_group()


WARM_UP_S = 3  # of --benchmark


def synthetic_tar(folder: Path, size: int, count: int) -> Path:
    """A tar of smooth random JPEGs, 1.5 x 1.25 times `size`, as photos from the web might be."""
    rng = np.random.default_rng(0)
    with ShardWriter(folder / "00000.tar") as shard:
        for i in range(count):
            coarse = rng.integers(0, 256, (size // 16 + 1, size // 16 + 1, 3), np.uint8)
            picture = cv2.resize(coarse, (size * 3 // 2, size * 5 // 4), interpolation=cv2.INTER_CUBIC)
            picture = cv2.add(picture, rng.integers(0, 24, picture.shape, np.uint8))
            data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 92])[1].tobytes()
            shard.add(f"{i:09d}", data, "jpg", "", {})
    return folder / "00000.tar"


def decode_ms(tar: Path, size: int, batch: int) -> float:
    """To decode and cut out one of this tar's pictures on one core."""
    threads = cv2.getNumThreads()
    cv2.setNumThreads(1)
    for _ in range(2):  # the first reads the file
        begin = time.perf_counter()
        images = sum(len(b.pictures) for b in stream([tar], size, batch, 0))
    seconds = time.perf_counter() - begin
    cv2.setNumThreads(threads)  # as --workers 0 decodes here too
    return 1e3 * seconds / images


def encoding_benchmark(encoder: Encoder, args) -> dict:
    """Sustained images/s over args.benchmark seconds, after a warm-up of WARM_UP_S and at least 5 batches. With
    args.benchmark_decode, workers decode JPEGs beside it, and how many cores that takes at this rate is told."""
    cuda = encoder.device.type == "cuda"
    decode = None

    def random_pictures():
        generator = torch.Generator().manual_seed(0)
        shape = (args.batch, args.size, args.size, 3)
        ring = [torch.randint(256, shape, dtype=torch.uint8, generator=generator) for _ in range(4)]
        ring = [pictures.pin_memory() if cuda else pictures for pictures in ring]
        while True:
            yield from ring

    with tempfile.TemporaryDirectory() as folder:
        if args.benchmark_decode:
            tar = synthetic_tar(Path(folder), args.size, 4 * args.batch)
            decode = decode_ms(tar, args.size, args.batch)
            batches = stream([tar] * 1_000_000, args.size, args.batch, args.workers, pin=cuda)
            pictures = (batch.pictures for batch in batches if len(batch.pictures))
        else:
            pictures = random_pictures()
        begin = time.perf_counter()
        encoder.warm_up(args.size, args.batch)
        start = pending = None
        images = batches = 0
        while True:
            now = time.perf_counter()
            if start is None and batches >= 5 and now - begin >= WARM_UP_S:
                start, images = now, 0
            if start is not None and now - start >= args.benchmark:
                break
            submitted = encoder.submit(next(pictures))
            if pending is not None:
                images += len(encoder.collect(pending)[0])
            pending = submitted
            batches += 1
        if args.benchmark_decode:
            pictures.close()
            del pictures
    rate, config = images / (now - start), encoder.exact.config
    flops = count_flops(lambda pictures: VAE(config).encode(pictures), (1, 3, args.size, args.size))
    return {
        "img_per_s": round(rate, 2),
        "images": images,
        "seconds": round(now - start, 2),
        "warmup_s": round(start - begin, 2),
        "batch": args.batch,
        "size": args.size,
        "dtype": args.dtype,
        "compile": encoder.compiled,
        "decode_workers": args.workers if decode else None,
        "decode_ms_per_picture": round(decode, 2) if decode else None,
        "decode_cores": round(rate * decode / 1e3, 2) if decode else None,
        **benchmark_facts(encoder.device, rate * flops),
    }
