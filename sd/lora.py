"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

from typing import NamedTuple

import torch


class Adapter(NamedTuple):
    """What is added to one weight W [out, in] or [out, in, kh, kw]: alpha / r * up down, r = down.shape[0].

    A LoRA is a dict of these by module: `unet.` and a name in SD_Model.UNet, or `text_encoder.` and a name below
    TextEncoder.model.
    """

    down: torch.Tensor  # [r, in], of a convolution [r, in, kh, kw]
    up: torch.Tensor  # [out, r], of a convolution [out, r, 1, 1]
    alpha: float
