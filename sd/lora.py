"""LoRA and LoCon adapters: products of two thin matrices beside frozen weights, and which layers have them.

    y = W x + alpha / rank * up(down(x))        (Hu et al. 2021, arXiv:2106.09685, section 4.1)

`down` is [rank, in], for a convolution [rank, in, kh, kw] with that convolution's stride and padding (LoCon, Yeh et al.
2023, arXiv:2309.14859, section 3); `up` is [out, rank], or [out, rank, 1, 1]. `up` starts at zero, so that training
begins at the base's own predictions.

Wherever an adapter has a name, it is that of its layer here: `unet.` and the layer's name in SD_Model.UNet, or
`text_encoder.` and its name in the transformers model of SD_Model.TextEncoder.
"""

import copy
import math
from typing import NamedTuple

import torch
from torch import nn

from sd.errors import InputError
from SD_Model import CrossAttention, Downsample, FeedForward, ResBlock, SpatialTransformer, TextEncoder, UNet, Upsample

TARGETS = ("attention", "transformer", "all")

PARTS = ("unet", "text_encoder")  # what the first word of an adapter's name may be


class Adapter(NamedTuple):
    """One layer's adapter: fp32 tensors. An adapter as a whole is a dict of these by name."""

    down: torch.Tensor  # [r, in], or of a convolution [r, in, kh, kw]
    up: torch.Tensor  # [out, r], or [out, r, 1, 1]
    alpha: float  # the product counts alpha / r times

    def delta(self) -> torch.Tensor:
        """What it adds to its layer's weight, in that weight's shape."""
        product = self.up.flatten(1) @ self.down.flatten(1)  # [out, in kh kw]
        return (self.alpha / len(self.down) * product).view(len(self.up), *self.down.shape[1:])


def targets(module: nn.Module, which: str, conv: bool) -> list[str]:
    """Names of the layers in a UNet, or a text encoder's transformers model, that have an adapter.

    which: 'attention': q, k, v and the output of self- and cross-attention. 'transformer': the feed-forward layers and
    a UNet's proj_in and proj_out too. 'all': the same, and if conv is true residual blocks (convolutions, projections
    of the time embedding, shortcuts) and the convolutions of down- and upsampling. Never a UNet's first or last
    convolution, its time embedding, or norms.
    """
    if not isinstance(module, UNet):
        linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
        return [n for n in linear if which != "attention" or "attn" in n or "attention" in n]
    layers = []
    for m in module.modules():
        if isinstance(m, CrossAttention):
            layers += [m.to_q, m.to_k, m.to_v, m.to_out[0]]
        if which != "attention":
            if isinstance(m, FeedForward):
                layers += [m.net[0].proj, m.net[2]]
            elif isinstance(m, SpatialTransformer):
                layers += [m.proj_in, m.proj_out]
        if which == "all" and conv:
            if isinstance(m, ResBlock):
                layers += [m.in_layers[2], m.emb_layers[1], m.out_layers[3], m.skip_connection]
            elif isinstance(m, Downsample | Upsample):
                layers += [m.op if isinstance(m, Downsample) else m.conv]
    wanted = {layer for layer in layers if not isinstance(layer, nn.Identity)}
    return [name for name, m in module.named_modules() if m in wanted]


class LowRank(nn.Module):
    """What training has of an adapter: two layers without bias, fp32, and how much their product counts."""

    def __init__(self, base: nn.Linear | nn.Conv2d, rank: int, alpha: float):
        super().__init__()
        how = dict(bias=False, device=base.weight.device, dtype=torch.float32)
        if isinstance(base, nn.Conv2d):
            self.down = nn.Conv2d(
                base.in_channels, rank, base.kernel_size, stride=base.stride, padding=base.padding, **how
            )
            self.up = nn.Conv2d(rank, base.out_channels, 1, **how)
        else:
            self.down = nn.Linear(base.in_features, rank, **how)
            self.up = nn.Linear(rank, base.out_features, **how)
        self.alpha, self.scale = alpha, alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer beside it, [..., in] -> [..., out] or [B, in, H, W] -> [B, out, H', W']."""
        return self.up(self.down(x) * self.scale)


class AdaptedLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.adapter(x)


class AdaptedConv2d(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) + self.adapter(x)


def _text_model(text_encoder: TextEncoder | nn.Module) -> nn.Module:
    return text_encoder.model if isinstance(text_encoder, TextEncoder) else text_encoder


def inject(denoiser: nn.Module, settings: dict):
    """Freeze a Denoiser and give its layers adapters, those of its text encoder too if it has one. They are the
    denoiser's `adapters`, and no part of its UNet, whose names, state and hash stay the base's.

    `down` is drawn from the seed, uniform within 1 / sqrt(fan in), as torch's own layers are (kaiming_uniform with a =
    sqrt 5); `up` is zero. Layers are in the modules' order, so that all processes draw alike.
    """
    draw = torch.Generator().manual_seed(settings["seed"])
    denoiser.requires_grad_(False)
    adapters = nn.ModuleDict()
    for part in PARTS:
        module = getattr(denoiser, part)
        if module is None:
            continue
        module = module if part == "unet" else _text_model(module)
        for name in targets(module, settings["lora_targets"], settings["lora_conv"] is not None):
            layer = module.get_submodule(name)
            wide = isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)
            rank = settings["lora_conv"] if wide else settings["lora"]
            adapter = LowRank(layer, rank, settings["lora_alpha"] * rank / settings["lora"])  # one scale for all
            with torch.no_grad():
                bound = 1 / math.sqrt(adapter.down.weight[0].numel())
                drawn = torch.empty(adapter.down.weight.shape, device="cpu").uniform_(-bound, bound, generator=draw)
                adapter.down.weight.copy_(drawn)
                adapter.up.weight.zero_()
            layer.__dict__["adapter"] = adapter  # the layer calls it; it belongs to the denoiser
            layer.__class__ = AdaptedConv2d if isinstance(layer, nn.Conv2d) else AdaptedLinear
            adapters[_key(f"{part}.{name}")] = adapter
    denoiser.adapters = adapters


def _key(name: str) -> str:
    """A ModuleDict's key may have no dots."""
    return name.replace(".", "/")


def settle_base(denoiser: nn.Module, settings: dict):
    """After the base's weights are loaded: those that products and convolutions multiply with are kept in the dtype
    that autocast would give them, of half the size under bf16. The same numbers come out. Without adapters nothing
    is done."""
    if denoiser.adapters is None or settings["dtype"] != "bf16":
        return
    for part in (denoiser.unet, denoiser.text_encoder):
        for m in part.modules() if part is not None else ():
            if isinstance(m, nn.Linear | nn.Conv2d):
                m.weight.data = m.weight.data.to(torch.bfloat16)


def average_of(denoiser: nn.Module) -> nn.Module:
    """A copy of a Denoiser for the averages of what it trains; what it does not train is shared with it."""
    frozen = {id(p): p for p in denoiser.parameters() if not p.requires_grad}
    return copy.deepcopy(denoiser, frozen).requires_grad_(False).eval()


def adapters_of(denoiser: nn.Module) -> dict[str, Adapter]:
    """By name; the tensors are the denoiser's own, detached."""
    return {
        name.replace("/", "."): Adapter(a.down.weight.detach(), a.up.weight.detach(), a.alpha)
        for name, a in denoiser.adapters.items()
    }


def load_adapters(denoiser: nn.Module, adapters: dict[str, Adapter], source):
    """Into a Denoiser that has such adapters, strictly. InputError, with `source`, if names, shapes or alpha differ."""
    own = adapters_of(denoiser)

    def same(a: Adapter, b: Adapter) -> bool:
        return (
            a.down.shape == b.down.shape and a.up.shape == b.up.shape and math.isclose(a.alpha, b.alpha, rel_tol=1e-5)
        )

    odd = sorted(own.keys() ^ adapters.keys()) + [n for n in own if n in adapters and not same(own[n], adapters[n])]
    if odd:
        raise InputError(f"{source} holds another adapter than this run's: {len(odd)} layers differ, {odd[0]} first")
    for name, adapter in own.items():
        adapter.down.copy_(adapters[name].down)
        adapter.up.copy_(adapters[name].up)


def to_tensors(adapters: dict[str, Adapter]) -> dict[str, torch.Tensor]:
    """The native layout of a file: `<name>.down`, `<name>.up` and `<name>.alpha` (fp32, no dimensions)."""
    return {
        f"{name}.{what}": torch.tensor(x, dtype=torch.float32) if what == "alpha" else x
        for name, adapter in adapters.items()
        for what, x in adapter._asdict().items()
    }


def from_tensors(tensors: dict[str, torch.Tensor], source) -> dict[str, Adapter]:
    """to_tensors() read back, in fp32. InputError, with `source`, for any other content."""
    found = {}
    for key, x in tensors.items():
        name, _, what = key.rpartition(".")
        found.setdefault(name, {})[what] = x.float()
    wanted = set(Adapter._fields)
    if odd := [name for name, parts in found.items() if parts.keys() != wanted or name.split(".")[0] not in PARTS]:
        raise InputError(f"{source} is no adapter of this project: of {odd[0]} it has {sorted(found[odd[0]])}")
    return {n: Adapter(parts["down"], parts["up"], float(parts["alpha"])) for n, parts in found.items()}


def merged(state: dict[str, torch.Tensor], adapters: dict[str, Adapter], part: str) -> dict[str, torch.Tensor]:
    """The weights of a part, 'unet' or 'text_encoder' (names as in the model below it), with their adapters added to
    them, these in fp32. What has no adapter is the same tensor. InputError for an adapter of a layer that is not there.
    """
    result, prefix = dict(state), f"{part}."
    for name, adapter in adapters.items():
        if not name.startswith(prefix):
            continue
        weight, delta = f"{name.removeprefix(prefix)}.weight", adapter.delta()
        if weight not in state or state[weight].shape != delta.shape:
            raise InputError(f"the adapter of {name} is for a weight of {tuple(delta.shape)}, which the model has not")
        result[weight] = state[weight].float() + delta
    return result


def check_flags(settings: dict):
    """Fills in what --lora leaves open. InputError for values that make no adapter."""
    rank, more = settings["lora"], ("lora_alpha", "lora_conv")
    if rank is None:
        if given := [name for name in more if settings[name] is not None]:
            raise InputError(f"--{given[0]} is of an adapter: give --lora RANK too, or drop it")
        return
    for name in ("lora", "lora_conv"):
        if settings[name] is not None and not 1 <= settings[name] <= 4096:
            raise InputError(f"--{name} wants a rank from 1 to 4,096, found {settings[name]}")
    if settings["lora_alpha"] is None:
        settings["lora_alpha"] = float(rank)
    if not 0 < settings["lora_alpha"] < math.inf:
        raise InputError(f"--lora_alpha wants a number above 0, found {settings['lora_alpha']}")
    if settings["lora_targets"] == "all" and settings["lora_conv"] is None:
        settings["lora_conv"] = rank
    if settings["lora_targets"] != "all" and settings["lora_conv"] is not None:
        raise InputError(f"--lora_conv is of --lora_targets all, found {settings['lora_targets']}: change one of them")


def describe(denoiser: nn.Module, settings: dict) -> str:
    """One line on what is trained."""
    numbers = [sum(p.numel() for n, a in denoiser.adapters.items() if n.startswith(part) for p in a.parameters())
               for part in PARTS]  # fmt: skip
    convs = f", of 3x3 convolutions {settings['lora_conv']}" if settings["lora_conv"] else ""
    text = f" and {numbers[1]:,} of the text encoder" if numbers[1] else ""
    on = f"on {len(denoiser.adapters)} layers ({settings['lora_targets']})"
    return (f"adapter: rank {settings['lora']}{convs}, alpha {settings['lora_alpha']:g}, {on}; {numbers[0]:,} "
            f"parameters of the UNet{text} are trained")  # fmt: skip
