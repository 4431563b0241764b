"""What a network predicts, as files of other programs say it: names of tensors, metadata, a .yaml beside the file.

A fact is (prediction, zero_terminal_snr, where): 'epsilon', 'v' or None; True, False or None; who says so.
"""

from pathlib import Path

from sd.errors import InputError
from SD_Model import UNetConfig, VAEConfig

MARKERS = ("v_pred", "ztsnr")  # empty tensors, by which ComfyUI and others know such models
WORDS = {"epsilon": "epsilon", "eps": "epsilon", "noise": "epsilon", "v": "v", "v_prediction": "v", "vpred": "v",
         "v-prediction": "v", "v_pred": "v", "velocity": "v"}  # fmt: skip


def from_tensors(names) -> list[tuple]:
    """Facts from the names of a file's tensors."""
    found = [name for name in MARKERS if name in names]
    if not found:
        return []
    return [("v" if "v_pred" in found else None, True if "ztsnr" in found else None, " and ".join(found))]


def from_metadata(metadata: dict[str, str]) -> list[tuple]:
    """Facts from a .safetensors file's metadata: modelspec's two spellings, and what kohya's scripts note."""
    facts = []
    for key in ("modelspec.prediction_type", "modelspec.predict_key"):
        if word := WORDS.get(str(metadata.get(key, "")).strip().lower()):
            facts.append((word, None, key))
    flag = {"true": True, "false": False}
    if (v := flag.get(str(metadata.get("ss_v_parameterization")).lower())) is not None:
        facts.append(("v" if v else "epsilon", None, "ss_v_parameterization"))
    if (zero := flag.get(str(metadata.get("ss_zero_terminal_snr")).lower())) is not None:
        facts.append((None, zero, "ss_zero_terminal_snr"))
    return facts


def beside(path: Path) -> Path:
    """The .yaml that A1111 and the original code take for this file's configuration."""
    return path.with_suffix(".yaml")


def from_yaml(path: Path) -> tuple[list[tuple], dict, str]:
    """(facts, schedule settings, a remark or "") of the original code's .yaml beside a weight file; parsed alone."""
    file = beside(path)
    if not file.is_file():
        return [], {}, ""
    import yaml

    try:
        if file.stat().st_size > 1_000_000:
            raise ValueError("larger than 1 MB")
        params = yaml.safe_load(file.read_text(encoding="utf-8"))["model"]["params"]
        word = params.get("parameterization", "eps")  # the original code's default
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as e:
        return [], {}, f"{file.name} beside it was not used: no configuration of the original code ({type(e).__name__})"
    if word not in ("eps", "v"):
        raise InputError(f"{file} wants parameterization eps or v, found {word!r}; give --prediction and remove it")
    names = {"linear_start": "beta_start", "linear_end": "beta_end", "timesteps": "steps"}
    kinds = {"beta_start": float, "beta_end": float, "steps": int}
    settings = {ours: params[theirs] for theirs, ours in names.items() if theirs in params}
    settings = {k: v for k, v in settings.items() if type(v) is kinds[k] and v > 0}
    return [({"eps": "epsilon", "v": "v"}[word], None, file.name)], settings, ""


def settle(facts: list[tuple], prediction: str | None, zero_terminal_snr: bool | None, source) -> tuple[dict, str]:
    """What holds, the first of `facts` unless a flag says otherwise: ({prediction, zero_terminal_snr}, a sentence).

    InputError where the file contradicts itself so that no schedule is left (zero terminal SNR with epsilon).
    """
    if prediction not in (None, "epsilon", "v"):
        raise InputError(f"--prediction wants epsilon or v, found {prediction!r}")
    told = [(p, where) for p, _, where in facts if p is not None]
    zeros = [(z, where) for _, z, where in facts if z is not None]
    what, why = (prediction, "--prediction") if prediction is not None else (told or [(None, "")])[0]
    zero, zero_why = (zeros or [(False, "")])[0]
    if zero_terminal_snr is not None:
        zero, zero_why = zero_terminal_snr, "--zero_terminal_snr"
    remarks = []
    if what is None:
        what, why = (
            ("v", f"{zero_why}, which wants it") if zero else ("epsilon", "assumed; --prediction says otherwise")
        )
    if zero and what == "epsilon":
        if prediction is None or zero_terminal_snr is not None:
            raise InputError(
                f"{source} has zero terminal SNR by {zero_why} and predicts epsilon by {why}, which cannot both be; "
                f"give --prediction v, or --no-zero_terminal_snr"
            )
        zero, remarks = False, ["without the zero terminal SNR that the file has"]
    remarks += [f"although {where} says {p}" for p, where in told if p != what]
    remarks += [f"although {where} says {'zero' if z else 'no zero'} terminal SNR" for z, where in zeros if z != zero]
    reasons = why if not zero or zero_why in why else f"{why}; {zero_why}"
    sentence = f"predicts {what}{' with zero terminal SNR' if zero else ''} ({reasons})"
    return {"prediction": what, "zero_terminal_snr": zero}, ", ".join([sentence, *remarks])


def original_yaml(unet: UNetConfig, vae: VAEConfig, schedule: dict) -> str:
    """The original code's configuration of these networks, which A1111 and Forge read beside a .safetensors file."""
    import yaml

    width = unet.channels[0]
    values = {
        "parameterization": {"epsilon": "eps", "v": "v"}[schedule["prediction"]],
        "linear_start": schedule["beta_start"],
        "linear_end": schedule["beta_end"],
        "timesteps": schedule["steps"],
        "num_timesteps_cond": 1,
        "first_stage_key": "jpg",
        "cond_stage_key": "txt",
        "conditioning_key": "crossattn",
        "cond_stage_trainable": False,
        "image_size": 64,
        "channels": unet.in_channels,
        "scale_factor": vae.scaling_factor,
        "use_ema": False,
        "unet_config": {
            "target": "ldm.modules.diffusionmodules.openaimodel.UNetModel",
            "params": {
                "image_size": 32,
                "in_channels": unet.in_channels,
                "out_channels": unet.out_channels,
                "model_channels": width,
                "channel_mult": [c / width if c % width else c // width for c in unet.channels],
                "num_res_blocks": unet.num_res_blocks,
                "attention_resolutions": [2**i for i, a in enumerate(unet.attention) if a],  # as strides
                "num_heads": unet.num_heads,
                "use_spatial_transformer": True,
                "transformer_depth": 1,
                "context_dim": unet.context_dim,
                "use_checkpoint": False,
                "legacy": False,
            },
        },
        "first_stage_config": {
            "target": "ldm.models.autoencoder.AutoencoderKL",
            "params": {
                "embed_dim": vae.latent_channels,
                "ddconfig": {
                    "double_z": True,
                    "z_channels": vae.latent_channels,
                    "resolution": 256,
                    "in_channels": 3,
                    "out_ch": 3,
                    "ch": vae.channels[0],
                    "ch_mult": [c // vae.channels[0] for c in vae.channels],
                    "num_res_blocks": vae.num_res_blocks,
                    "attn_resolutions": [],
                    "dropout": 0.0,
                },
                "lossconfig": {"target": "torch.nn.Identity"},
            },
        },
        "cond_stage_config": {"target": "ldm.modules.encoders.modules.FrozenCLIPEmbedder"},
    }
    target = "ldm.models.diffusion.ddpm.LatentDiffusion"
    return yaml.safe_dump({"model": {"target": target, "params": values}}, sort_keys=False)
