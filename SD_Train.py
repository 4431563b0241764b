"""Train the UNet (and, if asked, the text encoder) on cached latents or on pictures, phase after phase.

    python SD_Train.py --phase demo --data_root data --out runs/demo                                   # one device
    torchrun --nproc_per_node=2 SD_Train.py --phase laion_broad --data_root data --out runs/1_broad    # two GPUs
    torchrun --nproc_per_node=2 SD_Train.py --phase laion_hq --data_root data --out runs/2_hq --init_from runs/1_broad
    torchrun ... (the same command) --resume                                                # go on after any stop
    python SD_Train.py --phase finetune --pictures my_cat --init_from model.safetensors --out runs/cat
    python SD_Train.py --phase 1 --data_root data --dry_run                                 # what would be done
    python SD_Train.py --phase 1 --benchmark 200                                            # speed on this card

On several machines, start the same torchrun line on each with --nnodes, --node_rank and --rdzv_endpoint, or one process
a GPU with srun; slurm/train.sbatch is a job that goes on by itself when its time is over.

What is random about a sample (its place in the epoch, noise, timestep, caption drop) is a function of the seed and of
the sample's global position alone, so that ranks x batch x accumulation can be cut in any way, and a run killed at any
moment goes on as if nothing had happened.
"""

import argparse
import gc
import json
import math
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from sd.checkpoints import find_checkpoint
from sd.cli import parser
from sd.data import Batch, Prefetcher, check_seed, make_batch
from sd.device import Place, check_agreement, peak_flops, setup_device, sum_over_ranks, usual_dtype
from sd.errors import InputError, run
from sd.health import Health
from sd.inputs import agreed_flags, agreed_inputs, check_inputs, crc, hash_inputs
from sd.log import Window
from sd.lora import TARGETS, check_flags
from sd.networks import read_overrides, unet_config
from sd.objective import BINS, describe_weights, validate
from sd.online import check_settings, load_pictures, name_vae
from sd.optim import OPTIMIZERS, check_optimizer, clip_limit, ema_decay
from sd.painting import sample_grid, sample_prompts
from sd.plan import Course, Plan, choose_grad_checkpoint, dry_run, fit, make_plan, mean_flops, passes, rank_positions
from sd.run_folder import RunFolder
from sd.setup import (
    Data,
    describe_data,
    fixed_batches,
    fresh_unet,
    load_data,
    load_text_encoder,
    make_denoiser,
    open_trained,
    text_for,
    vae_of_latents,
)
from sd.sharding import check_shard
from sd.slurm import SIGNALS, UNFINISHED
from sd.speed import TRACED, train_benchmark, warm_up_steps
from sd.step import MicroSteps, Update, peak_memory, wrap
from sd.text_cache import cache_texts, check_cache
from SD_Model import PRESETS, NoiseSchedule, count_parameters

# ----------------------------------------------------------------------------------------------------------------
# Phases: how a network is trained. Flags override a row; the row's name or number selects it.
# ----------------------------------------------------------------------------------------------------------------


class Phase(NamedTuple):
    number: int | None  # for --phase NUMBER
    model: str  # preset in SD_Model.PRESETS
    data: str  # sources below --data_root: name[:weight[:cap]], comma-separated; without weights, in proportion
    size: int  # pixels a side; the latents' manifest must agree
    epochs: float  # passes over the mixture
    lr: float  # peak learning rate
    warmup: int  # optimizer steps from 1 % to the peak, before the cosine to 1 %
    drop: float  # share of captions replaced by the empty one
    gamma: float  # Min-SNR gamma; 0: no weighting
    ema: float  # EMA decay, reached by warm-up
    betas: str  # noise schedule
    decay: float  # weight decay; never on biases and norms
    batch: int  # images a GPU and micro-batch
    accumulate: int  # micro-batches a step; the full run's 24 x 2 GPUs x 2 = 96 images a step


FINAL_MIX = "laion_hq:0.37,synthetic:0.44:250000,faces:0.09,fullbody:0.10"

CONSOLIDATE_MIX = "laion_hq:0.6:150000,faces:0.2:50000,fullbody:0.2:58000"

# fmt: off
PHASES = {
    #                    no    model    data             size  epochs  lr     warmup  drop  gamma  ema     betas                decay  batch  acc  # noqa: E501
    "laion_broad": Phase(1,    "sd15",  "laion",          512, 10,     1e-5,   500,   0.05, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "laion_hq":    Phase(2,    "sd15",  "laion_hq",       512,  7,     1e-5,   500,   0.05, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "synthetic":   Phase(3,    "sd15",  "synthetic",      512,  5,     1e-5,   500,   0.05, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "faces":       Phase(4,    "sd15",  "faces",          512,  7,     2e-6,   200,   0.15, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "fullbody":    Phase(5,    "sd15",  "fullbody",       512,  9,     1.5e-6, 150,   0.15, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "consolidate": Phase(6,    "sd15",  CONSOLIDATE_MIX,  512,  4,     1e-6,   100,   0.15, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "final":       Phase(7,    "sd15",  FINAL_MIX,        512,  6,     1e-6,   150,   0.15, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "scratch_256": Phase(None, "sd15",  "laion",          256, 10,     1e-4,  1000,   0.10, 5,     0.9999, "squaredcos_cap_v2", 0.0,   32,   1),  # noqa: E501
    "openmoji":    Phase(None, "small", "openmoji",       128, 400,    3e-4,   500,   0.10, 5,     0.999,  "scaled_linear",     1e-2, 128,   1),  # noqa: E501
    "drawings_128": Phase(None, "small", "drawings",      128, 100,    4e-4,   500,   0.10, 5,     0.999,  "scaled_linear",     1e-2, 256,   1),  # noqa: E501
    "drawings_256": Phase(None, "small", "drawings",      256, 20,     2.5e-4, 200,   0.10, 5,     0.999,  "scaled_linear",     1e-2, 128,   1),  # noqa: E501
    "finetune":    Phase(None, "sd15",  "mine",           512, 10,     2e-6,     0,   0.05, 5,     0.999,  "scaled_linear",     1e-2,   4,   1),  # noqa: E501
    "lora":        Phase(None, "sd15",  "mine",           512, 20,     1e-4,     0,   0.05, 5,     0.999,  "scaled_linear",     1e-2,   4,   1),  # noqa: E501
    "demo":        Phase(None, "tiny",  "shapes",          64, 10,     2e-3,   100,   0.10, 5,     0.99,   "scaled_linear",     1e-2,  32,   1),  # noqa: E501
}

# fmt: on

# Everything else a run is made of. Each has a flag of its name.
DEFAULTS = dict(
    dataset=None, latents=None, data_root="data", dataset_name="dataset", vae=None, text_encoder=None, tokenizer=None,
    train_text_encoder=False, text_lr=0.1, prediction="epsilon", zero_terminal_snr=False, zero_init="all",
    weighting="min_snr", offset_noise=0.0, lr_schedule="cosine", beta1=0.9, beta2=0.999, clip=1.0, adaptive_clip=0.0,
    latent_fraction=1.0, seed=0, max_steps=None, minutes=None, unet=None,
    grad_checkpoint="none", kernels=None, compress_gradients=False, peer_copies=True,
    dtype=None, channels_last=None, save_steps=1000, keep_last=3, keep_every=0,
    val_steps=500, val_images=256, sample_steps=1000, sample_prompts=None, sample_cfg=7.5, log_steps=10,
    max_skipped=10, wandb="auto",
    null="empty",
    optimizer="adamw", weights_dtype="fp32", no_ema=False,
    lora=None, lora_alpha=None, lora_conv=None, lora_targets="transformer",
    pictures=None, captions=None, caption=None, caption_encoding=None, regularise=None, index=None, strict=False,
    where=None, balance=None, val_fraction=None, window=0, images=None,
    crop_scale=None, crop_aspect=None, flip=False, jitter=0.0, workers=None, picture_memory=4.0,
    cache=None, cache_gib=50.0,
    masks=False, mask_floor=0.0,
    cache_text=None, caption_memory=4.0, encode_first=None, ema_on_cpu=False,
    health_steps=200,
    shard=False,
)  # fmt: skip
# What a phase changes of them. These phases go on from a model that is there.
FURTHER = {
    "finetune": dict(lr_schedule="constant"),
    "lora": dict(lr_schedule="constant", lora=16, text_lr=0.5),
}
# What --resume may change; the rest must stay as the run began.
CHANGEABLE = set(
    "dataset latents data_root dataset_name vae text_encoder tokenizer max_steps minutes epochs lr batch accumulate "
    "grad_checkpoint kernels compress_gradients peer_copies dtype channels_last save_steps keep_last keep_every "
    "val_steps val_images sample_steps sample_prompts sample_cfg log_steps max_skipped wandb "
    "pictures captions index strict images workers picture_memory cache cache_gib health_steps "
    "cache_text caption_memory encode_first ema_on_cpu shard".split()
)
TOO_MANY_SKIPPED = (
    "error: {} steps in a row had gradients that are not finite; look for NaN in the latents, lower --lr, or go on "
    "from an older checkpoint with --resume PATH"
)
SAVE_FAILED = "error: the last checkpoint could not be written; free some disk and run again with --resume"


def parse_args(argv=None) -> argparse.Namespace:
    """Flags default to None and override the phase's row (or, on --resume, what the run began with)."""
    p = parser(__doc__, dict.fromkeys(Phase._fields, "the phase's") | DEFAULTS)
    on = dict(action="store_true", default=None)

    g = p.add_argument_group("what to train")
    g.add_argument("--phase", required=True, help=f"row of PHASES, by name or number: {', '.join(PHASES)}")
    g.add_argument("--model", help=f"network preset: {', '.join(PRESETS)}")
    g.add_argument("--unet", nargs="+", metavar="NAME=VALUE", help="change the preset's UNet: fields of UNetConfig, "
                   "as in channels=192,384,576,768 context_dim=384 (default: the preset as it is)")  # fmt: skip
    g.add_argument("--init_from", help="start from these weights: checkpoint, run folder, or any SD 1.x file or folder "
                   "(default: random weights)")  # fmt: skip
    g.add_argument("--init_weights", choices=["same", "ema", "live"], default="same",
                   help="of --init_from: live to live and EMA to EMA, or both from one")  # fmt: skip
    g.add_argument("--text_encoder", help="folder or hub name (default: openai/clip-vit-large-patch14 for sd15; the "
                   "small presets want one named)")  # fmt: skip
    g.add_argument("--tokenizer", help="folder: start a fresh text encoder of the preset's size for this tokenizer "
                   "(default: none)")  # fmt: skip
    g.add_argument("--train_text_encoder", help="train it with the UNet", **on)
    g.add_argument("--text_lr", type=float, help="its learning rate, as a multiple of --lr")
    g.add_argument("--vae", help="for sample grids and --pictures (default: the one that the latents were made with; "
                   "of --pictures that of --init_from, or for sd15 stabilityai/sd-vae-ft-mse)")  # fmt: skip
    g.add_argument("--zero_init", choices=["all", "original", "none"], help="which layers start at zero")

    g = p.add_argument_group("adapters")
    g.add_argument("--lora", type=int, metavar="RANK", help="train a LoRA of this rank on the frozen weights of "
                   "--init_from (default: phase lora 16; elsewhere none, all weights are trained)")  # fmt: skip
    g.add_argument("--lora_alpha", type=float, help="the adapter counts alpha / rank times (default: the rank)")
    g.add_argument("--lora_targets", choices=TARGETS, help="layers that have one: attention; those of the whole "
                   "transformers; all, with residual blocks and samplers (LoCon)")  # fmt: skip
    g.add_argument("--lora_conv", type=int, metavar="RANK", help="rank on 3x3 convolutions, for --lora_targets all; "
                   "its alpha / rank is that of --lora (default: as --lora)")  # fmt: skip

    g = p.add_argument_group("data")
    g.add_argument("--data_root", help="folder of <source>/dataset and <source>/latents_<size>, or else latents")
    g.add_argument("--dataset_name", help="name of the dataset's folder below each source")
    g.add_argument("--data", help="sources below it: name[:weight[:cap]],...")
    g.add_argument("--dataset", help="one dataset folder, instead of --data (default: none)")
    g.add_argument("--latents", help="and its latents (default: none)")
    g.add_argument("--size", type=int, help="pixels a side")
    g.add_argument("--latent_fraction", type=float, help="use this share of the pictures, chosen by hash of the key")

    g = p.add_argument_group("pictures, encoded while training instead of --data")
    g.add_argument("--pictures", metavar="DIR or TARS", help="a folder of pictures, tars ('a/{00000..00999}.tar', a "
                   "glob, a folder), a list with file and caption (.csv, .jsonl, .parquet), or several with commas "
                   "(default: none)")  # fmt: skip
    g.add_argument("--captions", metavar="LIST", help="of a folder's pictures: a list with file and caption (default: "
                   "captions.csv, .jsonl or .parquet in it, else texts beside the pictures)")  # fmt: skip
    g.add_argument("--caption", metavar="TEXT", help="of all, in which {name} and {folder} stand for a picture's "
                   "(default: as --captions says)")  # fmt: skip
    g.add_argument("--caption_encoding", metavar="NAME", help="of captions that are not UTF-8 (default: UTF-8, or "
                   "UTF-16 with its mark)")  # fmt: skip
    g.add_argument("--regularise", metavar="DIR:WEIGHT", help="further pictures, shown WEIGHT times as often as all of "
                   "--pictures, to preserve what the model knows of the class (default: none)")  # fmt: skip
    g.add_argument("--where", metavar="WORDS", help='which of them, as in "pwatermark<=0.5 and original_width>=512" '
                   "(default: all)")  # fmt: skip
    g.add_argument("--balance", metavar="FIELD", help="show every value of this field as often as every other "
                   "(default: every picture)")  # fmt: skip
    g.add_argument("--val_fraction", type=float, help="share held out by hash of the key, at least one picture "
                   "(default: 0.1 of up to 1,000 pictures, else 0.01)")  # fmt: skip
    g.add_argument("--crop_scale", metavar="LOW,HIGH", help="cut out a random part, of this share of the largest one's "
                   "area, as in 0.25,1 (default: the whole middle)")  # fmt: skip
    g.add_argument("--crop_aspect", metavar="LOW,HIGH", help="of its width to its height, as in 0.9,1.1 (default: 1)")
    g.add_argument("--flip", help="mirror half of the showings", **on)
    g.add_argument("--jitter", type=float, help="change brightness, contrast and saturation by up to this share")
    g.add_argument("--masks", help="the loss counts where x.mask.png beside x.png is white, and not where it is black; "
                   "pictures without one count everywhere", **on)  # fmt: skip
    g.add_argument("--mask_floor", type=float, metavar="X", help="weight of what is black in masks, from 0 to 1")
    g.add_argument("--window", type=int, help="tars that are shuffled together, for disks that want to read in one "
                   "place; 0: all")  # fmt: skip
    g.add_argument("--index", metavar="DIR", help="folder of the index (default: .index beside tars and pictures)")
    g.add_argument("--cache", metavar="DIR", help="folder for tars that --pictures names by https://, http:// or "
                   "pipe:COMMAND (default: none)")  # fmt: skip
    g.add_argument("--cache_gib", type=float, metavar="GIB", help="that these may take")
    g.add_argument("--strict", help="refuse tars that are cut or missing, and pictures that cannot be used", **on)
    g.add_argument("--workers", type=int, help="of each process: threads that decode, and processes that index "
                   "(default: as many as cores, up to 16)")  # fmt: skip
    g.add_argument("--picture_memory", type=float, metavar="GIB", help="of latents, or decoded pictures, kept by each "
                   "process")  # fmt: skip

    g = p.add_argument_group("optimisation")
    g.add_argument("--epochs", type=float, help="passes over the data")
    g.add_argument("--max_steps", type=int, help="optimizer steps of the whole run, instead of --epochs; of the two, "
                   "the one given at --resume counts from then on (default: as --epochs says)")  # fmt: skip
    g.add_argument("--minutes", type=float, help="time of training, instead of --epochs: the learning rate follows the "
                   "clock, and a run that goes on counts what it has spent; not exact to the bit "
                   "(default: as --epochs says)")  # fmt: skip
    g.add_argument("--images", type=int, help="pictures to show, instead of --epochs (default: as --epochs says)")
    g.add_argument("--stop_at", type=int, help="save and stop after this step; the schedule stays as planned "
                   "(default: the last step)")  # fmt: skip
    g.add_argument("--batch", type=int, help="images a GPU and micro-batch")
    g.add_argument("--accumulate", type=int, help="micro-batches a step")
    g.add_argument("--lr", type=float, help="peak learning rate")
    g.add_argument("--lr_schedule", choices=["cosine", "linear", "constant"], help="after the warm-up")
    g.add_argument("--warmup", type=int, help="steps from 1 %% of the peak learning rate to the peak")
    g.add_argument("--decay", type=float, help="weight decay, never on biases and norms")
    g.add_argument("--beta1", type=float, help="AdamW's, of the gradient's running mean")
    g.add_argument("--beta2", type=float, help="AdamW's, of its square's")
    g.add_argument("--clip", type=float, help="largest global gradient norm; 0: any")
    g.add_argument("--adaptive_clip", type=float, help="and at most this multiple of the median of the last 100 steps' "
                   "norms, say 3; 0: any")  # fmt: skip
    g.add_argument("--ema", type=float, help="decay of the weights' average")
    g.add_argument("--seed", type=int, help="of weights, order, noise and timesteps, from 0 to 4,294,967,295")

    g = p.add_argument_group("diffusion")
    g.add_argument("--betas", choices=["scaled_linear", "linear", "squaredcos_cap_v2"], help="noise schedule")
    g.add_argument("--prediction", choices=["epsilon", "v"], help="what the UNet predicts")
    g.add_argument("--zero_terminal_snr", help="with --prediction v: the last timestep is pure noise", **on)
    g.add_argument("--weighting", choices=["min_snr", "min_snr_plus_1", "debiased", "none"],
                   help="of the loss over timesteps; with --zero_terminal_snr, whose last timestep min_snr gives no "
                   "weight, the default is min_snr_plus_1")  # fmt: skip
    g.add_argument("--gamma", type=float, help="of min_snr and min_snr_plus_1; 0: no weighting")
    g.add_argument("--offset_noise", type=float, help="standard deviation of a constant noise a channel, say 0.1")
    g.add_argument("--drop", type=float, help="share of captions replaced by the empty one")
    g.add_argument("--null", choices=["empty", "zeros"], help="what stands for the empty caption, in training and in "
                   "guidance: its encoding, or zeros")  # fmt: skip

    g = p.add_argument_group("speed and memory")
    g.add_argument("--device", help="cuda, mps or cpu (default: the best there is)")
    g.add_argument("--dtype", choices=["fp32", "bf16"], help="autocast (default: bf16 on CUDA, fp32 elsewhere)")
    g.add_argument("--grad_checkpoint", choices=["none", "resblocks", "all", "auto"],
                   help="blocks to recompute in backward, to save memory: residual ones, transformers too, or as "
                   "few as fit the card")  # fmt: skip
    g.add_argument("--kernels", help="fused Triton kernels (default: on NVIDIA cards that run them)", **on)
    g.add_argument("--no_kernels", dest="kernels", action="store_false", default=None, help="plain PyTorch instead")
    g.add_argument("--compress_gradients", help="average gradients over GPUs in bf16: half the traffic, rounded", **on)
    g.add_argument("--no_peer_copies", dest="peer_copies", action="store_false", default=None,
                   help="let NCCL share gradients even if GPUs reach each other; all update all weights")  # fmt: skip
    g.add_argument("--channels_last", help="memory format NHWC (default: on CUDA)", **on)
    g.add_argument("--contiguous", dest="channels_last", action="store_false", default=None, help="NCHW instead")

    g = p.add_argument_group("optimizer and its memory")
    g.add_argument("--optimizer", choices=OPTIMIZERS, help="lion wants a third of AdamW's --lr or less. Some "
                   "change other defaults: prodigy --lr 1, lion --beta2 0.99, schedulefree --lr_schedule "
                   "constant")  # fmt: skip
    g.add_argument("--weights_dtype", choices=["fp32", "bf16"], help="of convolutions and products as they are kept; "
                   "bf16 ones are rounded at random after each step")  # fmt: skip
    g.add_argument("--no_ema", help="no average of the weights: the live ones are saved and painted with", **on)
    g.add_argument("--fit", type=float, metavar="GIB", help="make training fit into so many GiB, where no flag says "
                   "otherwise: --cache_text, --encode_first, --no_ema, --grad_checkpoint, --optimizer adamw8bit, "
                   "--weights_dtype bf16, --ema_on_cpu where an EMA is asked for, and smaller micro-batches, in that "
                   "order and no more than needed (default: none of these)")  # fmt: skip

    g = p.add_argument_group("what need not lie on the device")
    g.add_argument("--cache_text", help="encode each caption once, before training, and take the frozen text encoder "
                   "off the device (default: only where --fit chooses it)", **on)  # fmt: skip
    g.add_argument("--no_cache_text", dest="cache_text", action="store_false", default=None, help="encode captions at "
                   "each step, whatever --fit says")  # fmt: skip
    g.add_argument("--caption_memory", type=float, metavar="GIB", help="of the CPU's memory for these, in each process")
    g.add_argument("--encode_first", help="encode all --pictures before training, and take the VAE off the device; "
                   "they must be cut alike each time (default: only where --fit chooses it)", **on)  # fmt: skip
    g.add_argument("--no_encode_first", dest="encode_first", action="store_false", default=None, help="encode each "
                   "when it is due, whatever --fit says")  # fmt: skip
    g.add_argument("--ema_on_cpu", help="keep the average in the CPU's memory: steps are slower by the way there, and "
                   "the live weights are validated and painted with", **on)  # fmt: skip

    g = p.add_argument_group("the run")
    g.add_argument("--out", help="run folder (default: runs/<phase>)")
    g.add_argument("--resume", nargs="?", const="latest", metavar="CHECKPOINT", help="go on from the newest valid "
                   "checkpoint, or from this one, with what the run began with where no flag says otherwise (default: "
                   "begin anew)")  # fmt: skip
    g.add_argument("--save_steps", type=int, help="steps between checkpoints")
    g.add_argument("--keep_last", type=int, help="checkpoints kept; 0: all")
    g.add_argument("--keep_every", type=int, help="and for ever, each of this many steps; 0: none")
    g.add_argument("--val_steps", type=int, help="steps between validations; 0: never")
    g.add_argument("--val_images", type=int, help="pictures of each validation split")
    g.add_argument("--sample_steps", type=int, help="steps between sample grids; 0: never")
    g.add_argument("--sample_prompts", help="file with a prompt a line, or .jsonl (default: eight held-out captions)")
    g.add_argument("--sample_cfg", type=float, help="guidance of the sample grids")
    g.add_argument("--log_steps", type=int, help="steps a line of log.jsonl")
    g.add_argument("--max_skipped", type=int, help="stop after so many non-finite steps in a row")
    g.add_argument("--health_steps", type=int, help="steps a line of health.jsonl, by which SD_Doctor.py judges; 0: "
                   "never")  # fmt: skip
    g.add_argument("--wandb", choices=["auto", "online", "offline", "disabled"],
                   help="Weights & Biases; auto: online with a key, offline without")  # fmt: skip
    g.add_argument("--dry_run", action="store_true", help="print the resolved configuration and plan, and stop")
    g.add_argument("--benchmark", type=int, metavar="STEPS", help="time so many steps, on synthetic latents if no data "
                   "are named, and stop (default: train)")  # fmt: skip
    g.add_argument("--trace", metavar="FILE", help="of --benchmark: write a trace of three more steps, in Chrome's "
                   "format (default: none)")  # fmt: skip

    g = p.add_argument_group("several machines")
    g.add_argument("--requeue_signal", choices=SIGNALS, help="save and stop at this signal too, and end with status "
                   f"{UNFINISHED} when a signal stopped the run, for slurm/train.sbatch (default: none)")  # fmt: skip
    g.add_argument("--shard", help="each process keeps and updates its part of the optimizer's state and of the "
                   "average; checkpoints are the same files. NCCL or gloo shares gradients then, as with "
                   "--no_peer_copies", **on)  # fmt: skip
    g.add_argument("--no_shard", dest="shard", action="store_false", default=None,
                   help="each keeps all, as of a run that began with --shard")  # fmt: skip
    g.add_argument("--timeout", type=float, help="seconds that processes wait for each other (default: 600 with GPUs, "
                   "else 1800)")  # fmt: skip
    return p.parse_args(argv)


def phase_named(name: str) -> str:
    by_number = {str(row.number): key for key, row in PHASES.items() if row.number}
    name = by_number.get(name, name)
    if name not in PHASES:
        raise InputError(f"--phase wants one of {', '.join(PHASES)} or a number from 1 to 7, found {name!r}")
    return name


def resolve(args, saved: dict | None) -> dict:
    """The run's settings: the phase's row and DEFAULTS, or on resume the saved settings; flags on top."""
    phase = phase_named(args.phase)
    row = PHASES[phase]._asdict()
    row.pop("number")
    settings = {"phase": phase} | row | DEFAULTS | FURTHER.get(phase, {}) | (saved or {})
    settings.pop("compile", None)  # of runs that older revisions began
    if saved is not None and saved["phase"] != phase:
        raise InputError(
            f"this run is of phase {saved['phase']}, and --phase {phase} was given; start it in another --out"
        )
    if args.unet is not None:
        args.unet = read_overrides(args.unet)
    for name in settings:
        value = getattr(args, name, None)
        if value is None or name == "phase":
            continue
        if saved is not None and value != settings[name] and name not in CHANGEABLE:
            raise InputError(
                f"--{name} {value} differs from the run's {settings[name]} and cannot change on --resume; drop the "
                "flag, or start a new run with --init_from"
            )
        settings[name] = value
    if settings["model"] not in PRESETS:
        raise InputError(f"--model wants one of {', '.join(PRESETS)}, found {settings['model']!r}")
    unet_config(settings)  # or what is wrong with it
    check_flags(settings)
    if (settings["lora"] or phase in FURTHER) and not (saved or args.init_from or args.benchmark or args.dry_run):
        what = "--lora" if settings["lora"] else f"--phase {phase}"
        raise InputError(
            f"{what} goes on from weights that are there: name a model, an SD 1.x file say, with --init_from"
        )
    ends = ("epochs", "max_steps", "minutes", "images")
    if given := [name for name in ends if getattr(args, name) is not None]:
        if len(given) > 1:
            raise InputError(f"--{given[0]} and --{given[1]} both say how long to train: give one of them")
        settings |= {name: None for name in ends[1:] if name != given[0]}  # of the run's beginning
    if saved is None:  # runs begun before this rule may go on
        check_seed(settings["seed"])
        if settings["zero_terminal_snr"] and args.weighting is None:
            settings["weighting"] = "min_snr_plus_1"
    for name in ("batch", "accumulate", "epochs", "lr", "save_steps", "log_steps", "val_images", "max_skipped"):
        if not 0 < settings[name] < math.inf:
            raise InputError(f"--{name} wants a positive number, found {settings[name]}")
    for name in ("warmup", "decay", "clip", "adaptive_clip", "gamma", "offset_noise", "text_lr", "keep_last",
                 "keep_every", "val_steps", "sample_steps", "health_steps"):  # fmt: skip
        if not 0 <= settings[name] < math.inf:
            raise InputError(f"--{name} wants a number from 0 up, found {settings[name]}")
    for name in ("drop", "ema", "latent_fraction"):
        if not 0 <= settings[name] <= 1:
            raise InputError(f"--{name} wants a number from 0 to 1, found {settings[name]}")
    if not settings["latent_fraction"]:
        raise InputError("--latent_fraction wants a number above 0, found 0: there would be nothing to train on")
    if settings["epochs"] > 1e9:  # whose pictures may be no finite number
        raise InputError(f"--epochs wants a number up to a billion, found {settings['epochs']:g}")
    if not math.isfinite(settings["sample_cfg"]):
        raise InputError(f"--sample_cfg wants a finite number, found {settings['sample_cfg']}")
    for name in ("beta1", "beta2"):
        if not 0 <= settings[name] < 1:
            raise InputError(f"--{name} wants a number from 0 to below 1, found {settings[name]}")
    if settings["minutes"] is not None and not 0 < settings["minutes"] < 1e6:
        raise InputError(f"--minutes wants a positive number, found {settings['minutes']}")
    for name, value in (("max_steps", settings["max_steps"]), ("stop_at", args.stop_at), ("benchmark", args.benchmark),
                        ("images", settings["images"])):  # fmt: skip
        if value is not None and value < 1:
            raise InputError(f"--{name} wants a positive number, found {value}")
    if args.trace and not args.benchmark:
        raise InputError("--trace is of --benchmark's steps: give that flag too")
    if args.trace and not Path(args.trace).absolute().parent.is_dir():
        raise InputError(f"--trace wants a file in a folder that is there, found {args.trace}")
    if settings["zero_terminal_snr"] and settings["prediction"] != "v":
        raise InputError(
            "--zero_terminal_snr wants --prediction v: where no signal is left, the noise says nothing of it"
        )
    if settings["null"] == "zeros" and not (settings["drop"] or saved or args.init_from):
        raise InputError("--null zeros wants --drop above 0: guidance would steer away from what training never saw")
    if (settings["dataset"] is None) != (settings["latents"] is None):
        raise InputError("--dataset and --latents name one source together: give both, or --data_root alone")
    check_cache(settings)
    check_settings(settings, {name for name, value in vars(args).items() if value is not None})
    if settings["dataset"] is not None and args.dataset_name is not None:
        raise InputError("--dataset_name is of sources below --data_root: drop it, or --dataset and --latents")
    return settings


def for_device(settings: dict, device: torch.device) -> dict:
    """The settings with what the device decides where no flag does."""
    settings["dtype"] = settings["dtype"] or usual_dtype(device)
    if settings["channels_last"] is None:
        settings["channels_last"] = device.type == "cuda"
    return settings


def in_words(row: dict, course: Course) -> str:
    """A line of the log, for the progress bar."""
    loss = "none" if row["loss"] is None else f"{row['loss']:.4f}"
    mfu = f", MFU {row['mfu']:.1%}" if "mfu" in row else ""
    wait = f", {row['data_wait']:.0%} of it waiting for data" if row["data_wait"] >= 0.01 else ""
    clock = f"{course.seconds / 60:.1f} of {course.limit / 60:g} minutes, " if course.limit else ""
    return f"{clock}loss {loss}, lr {row['lr']:.1e}, {row['images_per_s']:.1f} img/s{mfu}{wait}"


def resume_command(argv: list[str]) -> str:
    """The command line that goes on with this run."""
    words, dropped = [], False
    for i, word in enumerate(argv):
        flag, equals, _ = word.partition("=")
        takes_value = flag in ("--stop_at", "--resume") and not equals
        if not dropped and flag not in ("--stop_at", "--resume"):
            words.append(word)
        dropped = takes_value and i + 1 < len(argv) and not argv[i + 1].startswith("--")
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    start = ["torchrun", f"--nproc_per_node={processes}"] if processes else ["python"]
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    note = f"   # with the rendezvous flags of before, on each of the {nodes} machines" if nodes > 1 else ""
    return shlex.join([*start, sys.argv[0], *words, "--resume"]) + note


# ----------------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------------


def loader_of(data: Data, plan: Plan, settings: dict, null_ids, encoded, timesteps, place: Place, first: int, end: int):
    """This process's micro-batches of the steps from first to end, made ahead in a thread. encoded: what a batch
    becomes (see cache_texts)."""

    def batch_at(positions: np.ndarray) -> Batch:
        return encoded(make_batch(
            data.train, plan.order, positions, null_ids, settings["drop"], settings["seed"], timesteps,
            settings["offset_noise"],
        ))  # fmt: skip

    cut = settings["batch"], settings["accumulate"], place.rank, place.world
    positions = rank_positions(first, end, plan.global_batch, *cut)
    if settings["pictures"]:
        positions = data.train.ahead(positions, plan.order)
    return Prefetcher(batch_at, positions, place.device)


def stop_on_signals(stop: threading.Event, *signals: signal.Signals):
    """Let these signals set `stop`. The first asks for a save at the next step boundary; later ones change nothing, so
    that none can break the save."""
    for s in signals:
        signal.signal(s, lambda *_: stop.set())


def main(argv=None):
    args, stop = parse_args(argv), threading.Event()
    if args.requeue_signal:  # heard from here on, as it ends a process that does not expect it
        stop_on_signals(stop, signal.Signals[f"SIG{args.requeue_signal}"])
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    disable_progress_bar()  # of transformers, whose bars would break ours
    out = Path(args.out or f"runs/{phase_named(args.phase)}")
    place = setup_device(args.device, args.timeout)
    device, rank, world, local = place
    say = print if place.first else lambda *a, **k: None

    # What to do: the settings, and the checkpoint to go on from.
    checkpoint = find_checkpoint(out, args.resume, say) if args.resume else None
    saved = json.loads((checkpoint / "state.json").read_text()) if checkpoint else None
    settings = for_device(resolve(args, saved and saved["settings"]), device)
    check_optimizer(args, settings, begins=saved is None)
    check_shard(settings)
    check_agreement(agreed_flags(args, settings, saved), device, world)
    schedule = NoiseSchedule(
        settings["betas"], prediction=settings["prediction"], zero_terminal_snr=settings["zero_terminal_snr"]
    )
    say(describe_weights(schedule, settings))

    # Networks, data, and the plan made of both.
    unet = fresh_unet(args, settings, device)
    if args.benchmark and args.data_root is args.dataset is args.data is args.pictures is None:
        denoiser = make_denoiser(unet, None, settings)
        fit(args, settings, denoiser, None, device, True, say)
        unet.set_grad_checkpoint(choose_grad_checkpoint(settings, denoiser, None, device, say))
        return train_benchmark(args.benchmark, settings, denoiser, schedule, place, args.trace)
    if settings["pictures"]:
        name_vae(settings, args.init_from)
    text_encoder = load_text_encoder(settings, checkpoint, args.init_from)
    text_encoder.requires_grad_(settings["train_text_encoder"])
    denoiser = make_denoiser(unet, text_encoder, settings)
    fit(args, settings, denoiser, text_encoder, device, saved is None, say)
    if settings["pictures"]:
        data = load_pictures(settings, text_encoder, place, say, args.dry_run)
    else:
        data = load_data(settings, text_encoder, pretouch=local == 0)
        describe_data(data, settings, say)
    inputs = hash_inputs(data, text_encoder, settings["train_text_encoder"] and not settings["lora"])
    if saved:
        check_inputs(saved, data, inputs, say)
    plan = make_plan(args, settings, data, saved, world, say)
    unet.set_grad_checkpoint(choose_grad_checkpoint(settings, denoiser, text_encoder, device, say))
    text_of, null_ids = text_for(text_encoder, settings, device), text_encoder.tokenize([""])[0].numpy()
    if args.dry_run:
        return dry_run(out, settings, denoiser, text_encoder, plan, data.train, place) if place.first else None
    encoded, text_of = cache_texts(settings, data, null_ids, text_encoder, text_of, device, say)
    shapes, sampled = len(data.train.shapes), (data, plan, settings, null_ids, encoded, schedule.steps, place)
    if args.benchmark:
        steps = args.benchmark + warm_up_steps(args.benchmark, shapes) + (TRACED if args.trace else 0)
        loader = loader_of(*sampled, 0, steps)
        return train_benchmark(args.benchmark, settings, denoiser, schedule, place, args.trace, loader, text_of, shapes)
    vae = vae_of_latents(settings, data.vae) if settings["sample_steps"] or settings["vae"] else None
    prompts = sample_prompts(settings, data.val if len(data.val) else data.train)

    # What training changes, and how a step changes it.
    trained = open_trained(args, settings, denoiser, data, checkpoint, saved, place, say)
    ema, progress = trained.ema, trained.progress
    shown = denoiser if settings["ema_on_cpu"] else ema  # what is validated and painted with here
    text_encoder.eval()
    if world > 1:
        agreed = {"the number of steps": plan.total, "settings": crc(settings)}
        check_agreement(agreed | agreed_inputs(data, inputs, checkpoint, denoiser, ema), device, world)
    update = Update(trained.optimizer, denoiser, ema, settings, world, trained.shard)
    folder = None  # the first process alone writes, and nothing before this line
    if place.first:
        command = resume_command(sys.argv[1:] if argv is None else argv)
        folder = RunFolder(out, settings, checkpoint, trained, plan, data, inputs, schedule, text_encoder, vae, command)
    model = wrap(denoiser, settings, world)
    micro_steps = MicroSteps(model, text_of, schedule, settings, update, device, say, shapes)
    health = Health(folder and folder.log, denoiser, ema, settings, schedule, text_of, data.train, plan,
                    update.shared is not None)  # fmt: skip
    fixed = fixed_batches(data.val, data.train, settings, schedule.steps, say)
    fixed = {split: [encoded(batch) for batch in batches] for split, batches in fixed.items()}
    say(f"settings: {json.dumps(settings)}")
    say(f"{settings['phase']}: {plan.length(settings)} ({world} x {settings['batch']} x {settings['accumulate']}); "
        f"UNet {count_parameters(unet)[1]:,} parameters; "
        f"{device}, {settings['dtype']}; from step {progress.step:,}")  # fmt: skip

    peak = peak_flops(device)
    stop_on_signals(stop, signal.SIGTERM, signal.SIGINT)
    flops = passes(settings) * mean_flops(unet.config, data.train) if peak else None
    loader, course = loader_of(*sampled, plan.first, plan.end), Course(plan, settings, progress.seconds)
    bar = tqdm(total=None if course.limit else plan.total, initial=plan.first, disable=not place.first, unit="step",
               dynamic_ncols=True, mininterval=1.0)  # fmt: skip
    stopping = False
    try:
        while progress.step < plan.end and not course.over(progress.step):
            # One optimizer step: the gradients of the mean loss over the global batch, however it is cut.
            lr = course.lr(progress.step)
            if unet.config.dropout:
                key = [settings["seed"], progress.step, rank]
                torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
            stats = torch.zeros(2 + 2 * BINS, device=device)  # stop flag, time, losses and counts by timestep bin
            for a in range(settings["accumulate"]):
                batch = loader.next()
                progress.window.waited(loader.waited)
                losses = micro_steps(batch, first=a == 0, last=a == settings["accumulate"] - 1)
                bins = F.one_hot(batch.t * BINS // schedule.steps, BINS).float()  # [B, BINS]
                stats[2 : 2 + BINS] += losses @ bins
                stats[2 + BINS :] += bins.sum(dim=0)
                progress.seen += batch.seen
            health.before(progress.step, batch)
            limit = clip_limit(settings, progress.usual_norm())
            norm = update(lr, limit, ema_decay(settings["ema"], progress.updates))
            stats[0], stats[1] = float(stop.is_set()), course.now() if rank == 0 else 0.0
            if world > 1:
                dist.all_reduce(stats)
            norm, (stopping, course.seconds, *sums) = norm.item(), stats.tolist()  # the step's one wait for the device
            if not progress.advance(norm, limit, sums):  # the same on all ranks
                update.skipped()
                say(f"\nwarning: step {progress.step} skipped, its gradients are not finite "
                    f"({progress.skipped} in a row)")  # fmt: skip
            health.after(progress.step, norm, limit, lr)
            micro_steps.end()
            bar.update()
            if progress.skipped >= settings["max_skipped"]:
                raise SystemExit(TOO_MANY_SKIPPED.format(progress.skipped) if place.first else 1)

            # What is due after it: a line of the log, validation, pictures, a checkpoint.
            step = progress.step
            over = course.over(step)
            done = step == plan.end or over or stopping
            progress.seconds = course.seconds if course.limit else None
            logging, saving = step % settings["log_steps"] == 0, done or step % settings["save_steps"] == 0
            validating, painting = (
                settings[n] and (step % settings[n] == 0 or over) for n in ("val_steps", "sample_steps")
            )
            if logging or saving:
                seen = sum_over_ranks(progress.seen, device, world)
            if logging:
                row = progress.window.row(step, plan.global_batch, plan.order.epoch_size, lr) | {"seen": f"{seen:016x}"}
                if peak:
                    row["mfu"] = row["images_per_s"] / world * flops / peak
                bar.set_postfix_str(in_words(row, course))
                if folder:
                    folder.log.write("log.jsonl", row)
                progress.window = Window()
            if validating or painting or saving or step == plan.first + 1:  # where whatever it lacks is seen at once
                update.complete(validating or painting)
            if validating:
                for weights, module in (("live", denoiser), ("ema", shown))[: 1 if shown is denoiser else 2]:
                    for split, part in fixed.items():
                        result = validate(module, settings, part, text_of, schedule, place)
                        if folder:
                            row = {"step": step, "images": step * plan.global_batch, "split": split, "weights": weights}
                            folder.log.write("validation.jsonl", row | result)
            if folder and painting:
                path = out / "samples" / f"step_{step:08d}.png"
                sample_grid(path, shown, text_encoder, vae, schedule, prompts, settings, device)
                folder.log.picture(path, step)
            update.shown()
            if folder and validating:
                folder.report()
            if saving and trained.shard:
                trained.shard.gather(folder)
            if folder and saving:
                folder.save(seen)
            if step == plan.first + 2 and device.type == "cuda":  # Adam's state is there from the first step's end
                say(f"\npeak memory: {peak_memory(update):.2f} GiB")
            if done:
                break
    finally:
        loader.close()
        bar.close()
        if folder:
            folder.saver.wait()
    if folder:
        folder.close()
        if not course.over(progress.step):
            say(f"stopped after step {progress.step:,} of {course.whole}; go on with:\n  {command}")
        elif not folder.saver.failed_last:
            images = progress.step * plan.global_batch
            say(f"done: {progress.step:,} steps, {images:,} images; {out}/checkpoints/step_{progress.step:08d}")
    failed = sum_over_ranks(int(folder is not None and folder.saver.failed_last), device, world)  # all wait here
    if world > 1:
        # DDP goes first. Were it the group's last owner, its destructor would wait, with Python's lock in hand, for
        # gloo's threads, and these sometimes wait for that lock (seen with torch 2.13).
        del model, micro_steps
        gc.collect()
        dist.destroy_process_group()
    if failed:
        raise SystemExit(SAVE_FAILED if folder else 1)
    if args.requeue_signal and stopping and progress.step < plan.end and not course.over(progress.step):
        raise SystemExit(UNFINISHED)


if __name__ == "__main__":
    run(main)
