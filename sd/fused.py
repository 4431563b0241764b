"""The networks of SD_Model.py, built from fused operations for NVIDIA GPUs.

    fused.apply(unet)           # swaps them in; same parameters, same names, same mathematics. A VAE too
    fused.settle(unet)          # for sampling: the weights stay as they are
    graphs.Graphed(unet)        # the same network as CUDA graphs, for sampling: no time is lost between kernels

The plain network reads and writes each activation for every bias, norm, SiLU, GELU, addition and concatenation, under
autocast often in fp32. Here each such chain is one pass (norms: two), forward and backward, in fp32 inside and in the
activations' dtype outside; sd/fused_ops.py has them.

Products that share an input become one: q, k and v; k and v of the text; all residual blocks' time projections.
Memory is channels_last throughout: [B, C, H, W] lies as [B, H, W, C], so that a feature map is a matrix of pixels.

SD_Model.py is the reference, imports nothing from here, and runs wherever these kernels do not (CPU, MPS, GPUs before
Ampere, machines without Triton, dropout above zero).
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sd.fused_ops import (
    SplitHeads,
    add_bias,
    add_layer_norm,
    convolution,
    group_norm,
    linear_geglu,
    out_dtype,
    product,
    softmax,
    weight_of,
)
from SD_Model import (
    VAE,
    CrossAttention,
    Downsample,
    ResBlock,
    SpatialTransformer,
    TransformerBlock,
    UNet,
    Upsample,
    VAEAttention,
    VAEDownsample,
    VAEResBlock,
    VAEUpsample,
    timestep_embedding,
)


def apply(net: UNet | VAE) -> UNet | VAE:
    """Give a UNet or VAE the fused forward passes below, in place. Parameters, their names and checkpoints stay."""
    fused = {VAEResBlock: FusedVAEResBlock, VAEAttention: FusedVAEAttention, nn.GroupNorm: FusedGroupNorm,
             VAEDownsample: FusedVAEDownsample, VAEUpsample: FusedVAEUpsample}  # fmt: skip
    if isinstance(net, UNet):
        fused = {UNet: FusedUNet, ResBlock: FusedResBlock, SpatialTransformer: FusedSpatialTransformer,
                 Downsample: FusedDownsample, Upsample: FusedUpsample}  # fmt: skip
    if not isinstance(net, UNet) or net.config.dropout == 0:
        for m in net.modules():
            m.__class__ = fused.get(type(m), type(m))
    return net


def multiplied(net: nn.Module) -> list[nn.Parameter]:
    """The trained weights of a network that weight_of() gives to products and convolutions; those of adapters, too."""
    fused = FusedResBlock | FusedSpatialTransformer | FusedDownsample | FusedUpsample
    blocks = [m for m in net.modules() if isinstance(m, fused)]
    layers = [m for block in blocks for m in block.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    adapters = [part for m in layers if hasattr(m, "adapter") for part in (m.adapter.down, m.adapter.up)]
    return [m.weight for m in layers + adapters if m.weight.requires_grad]


def settle(unet: UNet) -> UNet:
    """Of a network whose weights will not change any more: what its products share is joined once, not in each pass."""
    for m in unet.modules():
        m.kept = {}
    return unet


def _once(module: nn.Module, what: str, make) -> torch.Tensor:
    """make(), which depends on the module's weights alone: each time, or after settle() the first time."""
    kept = getattr(module, "kept", None)
    if kept is None:
        return make()
    if what not in kept:
        kept[what] = make()
    return kept[what]


class FusedResBlock(ResBlock):
    """Takes the skip apart from x, and for the time embedding its own projection, conv bias included, [B, out_ch]."""

    def forward(self, x, e, skip=None):
        if self.grad_checkpoint and torch.is_grad_enabled():
            return checkpoint(self._forward, x, e, skip, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, e, skip)

    def _forward(self, x, e, skip=None):
        (norm1, _, conv1), (norm2, _, _, conv2) = self.in_layers, self.out_layers
        x, h = group_norm(x, norm1, silu=True, skip=skip)
        h = convolution(h, conv1)  # [B, out_ch, H, W]
        h = group_norm(h, norm2, silu=True, e=e)[1]
        h = convolution(h, conv2)
        bias, skip = conv2.bias, self.skip_connection
        if not isinstance(skip, nn.Identity):
            x = convolution(x, skip)
            bias = _once(self, "bias", lambda: conv2.bias + skip.bias)
        return add_bias(h, x, bias)


def _attention(attn: CrossAttention, y: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    """CrossAttention without its last bias. y [B, N, C], context [B, M, D] -> [B, N, C]."""
    B, N, C = y.shape
    if context is None:
        joined = attn.to_q, attn.to_k, attn.to_v
        w = _once(attn, "weights", lambda: torch.cat([weight_of(m) for m in joined]))
        q, k, v = SplitHeads.apply(product(y, w, *joined), 3, attn.heads)  # [B, heads, N, d]
    else:
        joined = attn.to_k, attn.to_v
        q = product(y, weight_of(attn.to_q), attn.to_q).view(B, N, attn.heads, -1).transpose(1, 2)
        w = _once(attn, "weights", lambda: torch.cat([weight_of(m) for m in joined]))
        k, v = SplitHeads.apply(product(context, w, *joined), 2, attn.heads)  # [B, heads, M, d]
    h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
    return product(h, weight_of(attn.to_out[0]), attn.to_out[0])


class FusedSpatialTransformer(SpatialTransformer):
    def forward(self, x, context):
        if self.grad_checkpoint and torch.is_grad_enabled():
            return checkpoint(self._forward, x, context, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, context)

    def _forward(self, x, context):
        B, C, H, W = x.shape
        x, h = group_norm(x, self.norm, silu=False)
        h = h.permute(0, 2, 3, 1).reshape(B, H * W, C)  # a view
        a, bias, res = product(h, weight_of(self.proj_in).view(C, C), self.proj_in), self.proj_in.bias, None
        for block in self.transformer_blocks:  # a + bias + res is the block's input
            a, bias, res = self._block(block, a, bias, res, context)
        h = add_bias(a, res, bias)
        h = product(h, weight_of(self.proj_out).view(C, C), self.proj_out)
        return add_bias(h.view(B, H, W, C).permute(0, 3, 1, 2), x, self.proj_out.bias)

    @staticmethod
    def _block(block: TransformerBlock, a, bias, res, context):
        h, y = add_layer_norm(a, bias, res, block.norm1)
        h, y = add_layer_norm(_attention(block.attn1, y, None), block.attn1.to_out[0].bias, h, block.norm2)
        h, y = add_layer_norm(_attention(block.attn2, y, context), block.attn2.to_out[0].bias, h, block.norm3)
        up, down = block.ff.net[0].proj, block.ff.net[2]
        return product(linear_geglu(y, up), weight_of(down), down), down.bias, h


def _conv(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    return add_bias(convolution(x, conv), None, conv.bias)


class FusedDownsample(Downsample):
    def forward(self, x):
        return _conv(self.op, x)


class FusedUpsample(Upsample):
    def forward(self, x, size):
        with torch.autocast("cuda", enabled=False):  # which would copy the pixels in fp32
            x = F.interpolate(x, size=size, mode="nearest")
        return _conv(self.conv, x)


class FusedUNet(UNet):
    """UNet.forward with the time projections of all residual blocks as one product, and skips joined inside norms."""

    def forward(self, latents, timesteps, context):
        dtype = out_dtype(latents)
        emb = self.time_embed(timestep_embedding(timesteps, self.config.channels[0]).to(latents.dtype))  # [B, 4c]
        blocks = [m for m in self.modules() if isinstance(m, ResBlock)]
        w = _once(self, "weights", lambda: torch.cat([weight_of(m.emb_layers[1]) for m in blocks]))
        b = _once(self, "biases", lambda: torch.cat([m.emb_layers[1].bias + m.in_layers[2].bias for m in blocks]))
        projections = [m.emb_layers[1] for m in blocks]
        projected = product(F.silu(emb), w, *projections, bias=b).split([m.out_features for m in projections], dim=1)
        of_block = {m: e.contiguous() for m, e in zip(blocks, projected)}
        context = context.to(dtype)  # once, and not for each product

        h, skips = latents.contiguous(memory_format=torch.channels_last), []
        for layers in self.input_blocks:
            h = self._run(layers, h, of_block, context)
            skips.append(h)
        h = self._run(self.middle_block, h, of_block, context)
        for layers in self.output_blocks:
            skip = skips.pop()
            h = self._run(layers, h, of_block, context, skips[-1].shape[-2:] if skips else None, skip)
        h = group_norm(h, self.out[0], silu=True)[1]
        return self.out[2](h)

    @staticmethod
    def _run(layers, h, of_block, context, size=None, skip=None):
        for layer in layers:
            if isinstance(layer, ResBlock):
                h, skip = layer(h, of_block[layer], skip), None
            elif isinstance(layer, SpatialTransformer):
                h = layer(h, context)
            elif isinstance(layer, Upsample):
                h = layer(h, size)
            else:
                h = layer(h)
        return h


class FusedGroupNorm(nn.GroupNorm):
    def forward(self, x):
        return group_norm(x, self, silu=False)[1]


class FusedVAEDownsample(VAEDownsample):
    def forward(self, x):
        return _conv(self.conv, F.pad(x, (0, 1, 0, 1)))


class FusedVAEUpsample(VAEUpsample):
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):  # as in FusedUpsample
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return _conv(self.conv, x)


class FusedVAEAttention(VAEAttention):
    """As products with the whole matrix of weights between them, a few pictures at a time: torch has no fused attention
    for Hopper with a head as wide as this one, and the one it has takes 2.5 times as long."""

    SCORES = 1 << 28  # numbers at a time

    def forward(self, x):
        B, C, H, W = x.shape
        N = H * W
        if torch.is_grad_enabled() or N * N > self.SCORES:
            return super().forward(x)
        x, h = group_norm(x, self.norm, silu=False)
        h = h.permute(0, 2, 3, 1).reshape(B, N, C)  # a view
        q, k, v = (F.linear(h, f.weight.view(C, C), f.bias) for f in (self.q, self.k, self.v))
        parts = zip(*(y.split(self.SCORES // (N * N)) for y in (q, k, v)))
        h = torch.cat([torch.bmm(softmax(_scores(a, b), C**-0.5, c.dtype), c) for a, b, c in parts])
        h = F.linear(h, self.proj_out.weight.view(C, C))
        return add_bias(h.view(B, H, W, C).permute(0, 3, 1, 2), x, self.proj_out.bias)


def _scores(q, k) -> torch.Tensor:
    """q k^T of [B, N, C], [B, M, C] -> fp32 [B, N, M]."""
    if q.is_cuda and q.dtype != torch.float32:
        return torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(q.float(), k.float().transpose(1, 2))


class FusedVAEResBlock(VAEResBlock):
    def forward(self, x):
        x, h = group_norm(x, self.norm1, silu=True)
        h = F.conv2d(h, self.conv1.weight, padding=1)  # [B, out_ch, H, W]
        h = group_norm(h, self.norm2, silu=True, e=self.conv1.bias.expand(len(h), -1).contiguous())[1]
        h = F.conv2d(h, self.conv2.weight, padding=1)
        bias = self.conv2.bias
        if not isinstance(self.nin_shortcut, nn.Identity):
            x = F.conv2d(x, self.nin_shortcut.weight)
            bias = bias + self.nin_shortcut.bias
        return add_bias(h, x, bias)
