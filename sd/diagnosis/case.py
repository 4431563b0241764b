"""What there is to look at: a run's settings and logs, its data, its model; each may be missing."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from sd.data import LatentStore, Split, parse_sources
from sd.errors import InputError, short
from sd.files import read_json
from sd.log import read_rows
from sd.weights.read import (
    Model,
    checkpoint_folders,
    checkpoint_problem,
    load_text_encoder,
    load_vae,
    null_of,
    open_model,
)
from SD_Model import TextEncoder

LOOKED_AT = 2048  # pictures of each split


@dataclass
class Case:
    """A patient. Parts are read when they are asked for; None, with the reason in `missing`, where they cannot be."""

    source: str
    run: Path | None = None  # the folder with log.jsonl
    checkpoint: Path | None = None  # the newest whole one, or the named one
    damaged: dict[str, str] = field(default_factory=dict)  # checkpoints that are not whole, and why
    settings: dict = field(default_factory=dict)
    state: dict = field(default_factory=dict)  # the checkpoint's state.json
    log: list[dict] = field(default_factory=list)
    validation: list[dict] = field(default_factory=list)
    health: list[dict] = field(default_factory=list)
    vae_name: str | None = None
    text_name: str | None = None
    missing: dict[str, str] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def _try(self, what: str, make):
        try:
            return make()
        except (InputError, OSError, ValueError, KeyError, TypeError) as e:
            if what not in self.missing:
                self.missing[what] = short(e)
            return None

    @cached_property
    def model(self) -> Model | None:
        """With the EMA weights, with which one paints."""
        return self._try("model", lambda: open_model(self.checkpoint or self.source))

    @cached_property
    def live(self) -> Model | None:
        """With the live weights, where there are two kinds."""
        return self._try("model", lambda: open_model(self.checkpoint or self.source, weights="live"))

    @cached_property
    def splits(self) -> tuple[Split, Split] | None:
        """Training and held-out pictures."""

        def read():
            if "data_root" not in self.settings:
                raise InputError("no data set is known: name one with --dataset and --latents")
            if self.settings.get("pictures") and self.settings.get("dataset") is None:
                raise InputError(f"the run encoded its pictures ({self.settings['pictures']}) while it trained")
            if self.settings.get("pictures"):
                raise InputError("this run encodes its pictures while it trains: give --dataset and --latents")
            sources = parse_sources(self.settings)
            stores = [LatentStore(s.latents, False) for s in sources]
            train = Split(sources, stores, "train", self.settings.get("latent_fraction", 1.0))
            if not len(train):
                raise InputError("no training picture has a latent")
            return train, Split([s._replace(cap=None) for s in sources], stores, "val", 1.0)

        return self._try("data", read)

    @cached_property
    def manifests(self) -> list[dict]:
        """Of the latents of each source."""
        if self.splits is None:
            return []
        files = [s.latents / "manifest.json" for s in parse_sources(self.settings)]
        return [read_json(file) for file in files if file.is_file()]

    def latents(self, split: int, count: int = LOOKED_AT) -> tuple[np.ndarray, np.ndarray] | None:
        """Evenly spaced pictures of a split (0: training, 1: held out) whose latents have the first one's shape: their
        indices, and means fp32 [N, z, h, w]. None without data."""
        if self.splits is None or not len(self.splits[split]):
            return None
        own = self.splits[split]
        index = np.unique(np.linspace(0, len(own) - 1, min(count, len(own))).astype(int))
        index = index[own.shape[index] == own.shape[index[0]]]
        stored = own.latents(index)
        return index, stored[:, : stored.shape[1] // 2] if own.moments else stored

    @cached_property
    def text_encoder(self) -> TextEncoder | None:
        def read():
            if self.text_name:
                given = load_text_encoder(self.text_name)
                return null_of(given, self.model.null) if self.model else given
            if self.model is None:
                raise InputError(self.missing["model"])
            encoder = self.model.text_encoder()
            length = self.splits[0].ids.shape[1] if self.splits else encoder.max_length
            return encoder.shorten(length) if length < encoder.max_length else encoder

        return self._try("text encoder", read)

    @cached_property
    def vae(self):
        def read():
            if self.vae_name:
                return load_vae(self.vae_name)
            if self.manifests:
                return load_vae(self.manifests[0]["vae"]["name"])
            if self.model is None:
                raise InputError(self.missing["model"])
            return self.model.vae()

        return self._try("VAE", read)

    @property
    def steps(self) -> int:
        """Taken so far."""
        return self.state.get("step") or (self.log[-1]["step"] if self.log else 0)

    @property
    def planned(self) -> int | None:
        """Steps of the whole run, as far as settings and log tell."""
        if self.settings.get("max_steps"):
            return self.settings["max_steps"]
        epochs, last = self.settings.get("epochs"), self.log[-1] if self.log else {}
        if self.settings.get("minutes") or not epochs or not last.get("epoch"):
            return None
        return round(epochs * last["step"] / last["epoch"])


def open_case(source: str, changes: dict) -> Case:
    """A run folder, a checkpoint of one, or any other model. changes: settings that flags replace. InputError if there
    is nothing of the kind."""
    path = Path(source)
    case = Case(source)
    if (path / "checkpoints").is_dir() or (path / "log.jsonl").is_file():
        case.run = path
        for folder in checkpoint_folders(path):
            if problem := checkpoint_problem(folder, skip=("optimizer.pt",)):
                case.damaged[folder.name] = problem
            elif case.checkpoint is None:
                case.checkpoint = folder
        if case.checkpoint is None:
            case.missing["model"] = "no checkpoint is whole" if case.damaged else "no checkpoint was written yet"
    elif (path / "model.json").is_file():
        case.checkpoint = path
        if problem := checkpoint_problem(path, skip=("optimizer.pt",)) if (path / "manifest.json").is_file() else None:
            case.damaged[path.name] = problem
        if path.parent.name == "checkpoints":
            case.run = path.parent.parent
    else:
        open_model(source)  # or what is wrong with it
    if case.checkpoint is not None and (case.checkpoint / "state.json").is_file():
        case.state = read_json(case.checkpoint / "state.json")
        case.settings = dict(case.state.get("settings", {}))
    if case.run is not None:
        if not case.settings and (case.run / "config.json").is_file():
            case.settings = read_json(case.run / "config.json")
        case.log, case.validation = read_rows(case.run / "log.jsonl"), read_rows(case.run / "validation.jsonl")
        case.health = read_rows(case.run / "health.jsonl")
        if not case.log and case.checkpoint is None and not case.settings:
            raise InputError(f"{source} was to be a run or a model, and holds neither a log nor a checkpoint")
    if given := {k: v for k, v in changes.items() if v is not None}:
        base = {"data_root": "data", "dataset": None, "latents": None, "data": ""}
        case.settings = base | case.settings | {"pictures": None} | given
    return case


def schedule_files(source: str) -> list[tuple[Path, dict]]:
    """scheduler_config.json files of a diffusers folder, and what they say."""
    found = []
    for path in (Path(source) / "scheduler" / "scheduler_config.json", Path(source) / "scheduler_config.json"):
        if path.is_file():
            found.append((path, json.loads(path.read_text())))
    return found
