"""Models made of others: LoRAs added to their weights, and averages of several."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from sd.errors import InputError
from sd.weights.lora import Lora, base_of, delta, read_lora, text_shapes
from sd.weights.read import Model


def split_weight(text: str, flag: str) -> tuple[str, float]:
    """`PATH:WEIGHT` or `PATH` -> path, and its weight, 1 where there is none. InputError for a weight that is none."""
    path, colon, number = text.rpartition(":")
    if not colon or Path(text).expanduser().exists():
        return text, 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not path or not math.isfinite(weight):
        raise InputError(f"{flag} wants PATH or PATH:WEIGHT with a number as the weight, found {text!r}")
    return path, weight


@torch.no_grad()
def with_loras(model: Model, words: list[str], weights: str = "ema") -> tuple[Model, list[tuple[Lora, float]]]:
    """The model with LoRAs (`PATH` or `PATH:WEIGHT`) added to its UNet and text encoder, and these LoRAs.

    All in fp32: each weight W becomes W + sum of weight_i * delta_i(W). The model's other parts, and weights that no
    LoRA names, stay as they are. InputError for LoRAs that do not fit it.
    """
    encoder = model.text_encoder()
    base = base_of(model.unet_config, text_shapes(encoder))
    loras = [(read_lora(path, base, weights), weight) for path, weight in (split_weight(w, "--lora") for w in words)]

    def moved(module: str, tensor: torch.Tensor) -> torch.Tensor:
        """A module's weight with all that is added to it, fp32."""
        tensor, total = tensor.float(), 0
        for lora, weight in loras:
            if module in lora.changes:
                total = total + weight * delta(lora.changes[module], tensor)
        return tensor + total

    changed = {name for lora, _ in loras for name in lora.changes}
    for name in sorted(n for n in changed if n.startswith("text_encoder.")):
        layer = encoder.model.get_submodule(name.partition(".")[2])
        layer.weight.data = moved(name, layer.weight)
    unet = dict(model.tensors())
    for name in sorted(n for n in changed if n.startswith("unet.")):
        key = name.partition(".")[2] + ".weight"
        unet[key] = moved(name, unet[key])
    told = [f"with {lora.found}, weight {weight:g}" for lora, weight in loras]
    found = "\n  ".join([model.found, *told])
    return replace(model, found=found, tensors=lambda: unet, text_encoder=lambda: encoder), loras


@torch.no_grad()
def averaged(models: list[tuple[Model, float]]) -> Model:
    """The weighted mean of models' UNets and text encoders in fp32, weights divided by their sum; whatever else a
    model has is the first one's. InputError for models that are not alike, or weights that have no sum."""
    first, sum_of = models[0][0], sum(weight for _, weight in models)
    if not sum_of > 0:
        raise InputError(f"the weights of an average want a sum above 0, found {sum_of:g}")
    for other, _ in models[1:]:
        for what, a, b in (
            ("a UNet of", first.unet_config, other.unet_config),
            ("a schedule of", first.schedule.config, other.schedule.config),
            ("the null condition", first.null, other.null),
        ):
            if a != b:
                raise InputError(f"an average wants models that are alike, found {what} {a} and one of {b}")

    def mean(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if any(
            s.keys() != states[0].keys() or any(s[k].shape != t.shape for k, t in states[0].items()) for s in states
        ):
            raise InputError("an average wants models that are alike, found text encoders of different sizes")
        shares = [weight / sum_of for _, weight in models]
        return {k: sum(s[k].float() * share for s, share in zip(states, shares)) for k in states[0]}

    unet = mean([model.tensors() for model, _ in models])
    encoders = [model.text_encoder() for model, _ in models]
    text = mean([e.model.state_dict() for e in encoders])
    encoders[0].model.load_state_dict({k: t.to(encoders[0].model.state_dict()[k].dtype) for k, t in text.items()})
    told = [f"{weight:g} x {model.found}" for model, weight in models]
    found = "\n  ".join(["an average, with the VAE and the schedule of the first:", *told])
    return replace(first, found=found, tensors=lambda: unet, text_encoder=lambda: encoders[0])


def cast_error(model: Model, dtype: torch.dtype) -> str:
    """In words, how far the cast to a dtype moves a weight of the UNet or the text encoder at most."""
    tensors = [*model.tensors().items(), *model.text_encoder().model.state_dict().items()]
    errors = [((t.float() - t.to(dtype).float()).abs().max().item(), name) for name, t in tensors]
    error, name = max(errors)
    return f"merged in fp32; the cast to {dtype} moves a weight by at most {error:.1e} ({name})"
