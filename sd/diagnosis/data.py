"""Rules on pictures, latents, captions and ids, which need no network but the VAE."""

import hashlib
from collections import Counter

import numpy as np
import torch

from sd.diagnosis.case import Case
from sd.diagnosis.findings import BROKEN, LOOK, NOT_JUDGED, WELL, Finding, graded
from sd.diagnosis.statistics import association, nearest
from sd.errors import InputError
from sd.text import tokenize
from SD_Model import count_parameters, weights_hash

FEW = 100  # pictures, below which captions are not judged


def check_data(case: Case, deep: bool) -> list[Finding]:
    if case.splits is None:
        return [Finding("data", "data", NOT_JUDGED, case.missing["data"])]
    train, held_out = case.splits
    index, latents = case.latents(0)
    found = [latent_scale(latents), latents_finite(case, index, latents), duplicates(latents), alike(latents)]
    held = case.latents(1)
    if held is not None:
        found.append(leak(latents, held[1], len(train) > len(latents)))
    captions = train.captions.take(index.tolist()).to_pylist()
    ids = train.token_ids(index)
    found += [captions_empty(captions), captions_equal(captions), captions_cut(ids)]
    if len(set(captions)) > 1:
        found.append(captions_match(ids, latents))
    found += [tokens_match(case, captions, ids), right_vae(case, latents, deep), waits(case)]
    return [f for f in found if f is not None]


def latent_scale(latents: np.ndarray) -> Finding:
    finite = latents[np.isfinite(latents).all(axis=(1, 2, 3))]
    std = float(finite.std()) if len(finite) else float("nan")
    ratio = max(std, 1 / std) if std > 0 else float("nan")
    words = f"standard deviation of {len(latents):,} pictures' latents {std:.3g}, which should be near 1: off by a "
    return graded("data", "latent scale", ratio, 1.35, 2.5, words + f"factor of {ratio:.3g}",
                  "encode the latents again with encode_latents.py: they are not scaled, or scaled twice, or of a VAE "
                  "whose scaling_factor is wrong", std=std)  # fmt: skip


def latents_finite(case: Case, index: np.ndarray, latents: np.ndarray) -> Finding:
    train = case.splits[0]
    bad = [train.keys[int(i)].as_py() for i in index[~np.isfinite(latents).all(axis=(1, 2, 3))]]
    bad += [k for row in case.health for k in row.get("latents_not_finite", []) if k not in bad]
    if bad:
        words = f"{len(bad)} latents hold NaN or infinity: {', '.join(bad[:5])}"
        return Finding("data", "latents finite", BROKEN, words, "encode these pictures again, or leave them out",
                       {"keys": bad[:20]})  # fmt: skip
    return Finding("data", "latents finite", WELL, f"all numbers of {len(latents):,} pictures are finite")


def digests_of(latents: np.ndarray) -> list[bytes]:
    return [hashlib.blake2b(np.ascontiguousarray(x), digest_size=12).digest() for x in latents]


def duplicates(latents: np.ndarray) -> Finding:
    counts = Counter(digests_of(latents))
    share = 1 - len(counts) / len(latents)
    return graded("data", "duplicates", share, 0.05, 0.3, f"{share:.1%} of {len(latents):,} training pictures are "
                  f"there already, to the bit (one {max(counts.values())} times)",
                  "remove them (02_filter.py drops duplicates): what comes often is learned by heart")  # fmt: skip


def alike(latents: np.ndarray) -> Finding:
    """Pictures that are nearly another's, by the distance of latents; of those that are the same to the bit, one."""
    finite = latents[np.isfinite(latents).all(axis=(1, 2, 3))]
    x = np.unique(finite.reshape(len(finite), -1), axis=0).astype(np.float64)
    if len(x) < 16:
        return Finding("data", "near duplicates", NOT_JUDGED, f"{len(x)} different pictures are fewer than 16")
    near = nearest(x, x, itself=False) < 0.05 * x.std()
    share = float(near.mean())
    return graded("data", "near duplicates", share, 0.3, 0.6, f"{share:.1%} of {len(x):,} training pictures lie within "
                  "5 % of the latents' standard deviation of another", "remove them: with hardly different pictures "
                  "there is one to learn")  # fmt: skip


def leak(latents: np.ndarray, held: np.ndarray, sampled: bool) -> Finding:
    known = set(digests_of(latents))
    share = float(np.mean([d in known for d in digests_of(held)]))
    of = f"a sample of {len(latents):,}" if sampled else "the"
    return graded("data", "held-out pictures", share, 0.01, 0.2, f"{share:.1%} of {len(held):,} held-out pictures are "
                  f"among {of} training pictures", "split the data again after duplicates are dropped: a held-out loss "
                  "on pictures that are trained on says nothing")  # fmt: skip


def captions_empty(captions: list[str]) -> Finding:
    share = float(np.mean([not c.strip() for c in captions]))
    return graded("data", "captions empty", share, 0.2, 0.8, f"{share:.1%} of {len(captions):,} captions are empty",
                  "look at the .txt of the tars and at 04_tokenise.py's column of captions")  # fmt: skip


def captions_equal(captions: list[str]) -> Finding:
    text, n = Counter(captions).most_common(1)[0]
    if len(captions) < FEW:
        return Finding("data", "captions differ", NOT_JUDGED, f"{len(captions)} captions are fewer than {FEW}")
    share = n / len(captions)
    return graded("data", "captions differ", share, 0.6, 0.95, f"{share:.1%} of {len(captions):,} captions are "
                  f"{text[:60]!r}", "give the pictures captions of their own: one that all have teaches "
                  "nothing")  # fmt: skip


def captions_cut(ids: np.ndarray) -> Finding:
    """A row that is full has its end at the last place, and no padding before it."""
    full = float(np.mean((ids[:, -2] != ids[:, -1]) & (ids[:, -2] != 0)))
    return graded("data", "captions cut", full, 0.1, 0.5, f"{full:.1%} of {len(ids):,} captions fill all "
                  f"{ids.shape[1]} ids, and are cut or nearly so", "tokenise again with a larger --max_length, or "
                  "with shorter captions: what stands behind the cut is never seen")  # fmt: skip


def captions_match(ids: np.ndarray, latents: np.ndarray) -> Finding:
    """By a permutation test between which tokens a caption has and what its picture is like in quarters."""
    if len(ids) < FEW:
        return Finding("data", "captions match", NOT_JUDGED, f"{len(ids)} pictures are fewer than {FEW}")
    finite = np.isfinite(latents).all(axis=(1, 2, 3))
    ids, latents = ids[finite], latents[finite]
    tokens = [t for t in np.unique(ids) if 0.01 < (ids == t).any(axis=1).mean() < 0.99]
    shares = [abs((ids == t).any(axis=1).mean() - 0.5) for t in tokens]
    tokens = [tokens[i] for i in np.argsort(shares)[:64]]
    has = np.stack([(ids == t).any(axis=1) for t in tokens], axis=1) if tokens else np.zeros((len(ids), 0))
    n, z, h, w = latents.shape
    rows, columns = np.arange(h) * 2 // h, np.arange(w) * 2 // w
    parts = [latents[:, :, rows == i][:, :, :, columns == j].mean(axis=(2, 3)) for i in range(2) for j in range(2)]
    if not tokens:
        return Finding("data", "captions match", LOOK, "no word stands in 1 to 99 % of the captions",
                       "look at the captions: words that come again and again are what is learned first")  # fmt: skip
    strength = association(has, np.concatenate(parts, axis=1))
    return graded("data", "captions match", strength, 5, 3, f"words and pictures go together, {strength:.1f} standard "
                  f"deviations above captions dealt out at random ({n:,} pictures)",
                  "look whether each caption still stands beside its own picture: an index that is off by a row, or "
                  "sorted otherwise, does this", above=False)  # fmt: skip


def tokens_match(case: Case, captions: list[str], ids: np.ndarray) -> Finding:
    encoder = case.text_encoder
    if encoder is None:
        return Finding("data", "tokenizer", NOT_JUDGED, case.missing["text encoder"])
    some = slice(0, 256)
    mine = tokenize(encoder.tokenizer, captions[some])
    length = min(mine.shape[1], ids.shape[1])
    share = float(np.mean((mine[:, : length - 1] != ids[some, : length - 1]).any(axis=1)))
    return graded("data", "tokenizer", share, 0.005, 0.05, f"the model's tokenizer gives other ids than the data set's "
                  f"to {share:.1%} of {len(mine)} captions", "tokenise again with the model's tokenizer (04, "
                  "05)")  # fmt: skip


@torch.no_grad()
def right_vae(case: Case, latents: np.ndarray, deep: bool) -> Finding | None:
    """Latents that are decoded and encoded again come back by their own VAE, and by no other."""
    vae = case.vae
    if vae is None:
        return Finding("data", "VAE", NOT_JUDGED, case.missing["VAE"])
    advice = "encode the latents with the VAE that you train and paint with, or name theirs with --vae"
    told = {m["vae"]["hash"] for m in case.manifests}
    if told and weights_hash(vae) not in told:
        return Finding("data", "VAE", BROKEN, "the latents say that they were made with another VAE than this", advice)
    if count_parameters(vae)[1] > 20e6 and not deep and case.device.type == "cpu":
        return Finding("data", "VAE", NOT_JUDGED, "it is large: --deep decodes and encodes some latents with it")
    try:
        vae.check_whole()
    except InputError:
        return Finding("data", "VAE", NOT_JUDGED, "it has no encoder")
    z = torch.from_numpy(latents[np.isfinite(latents).all(axis=(1, 2, 3))][:: max(1, len(latents) // 8)][:8])
    if not len(z):
        return None
    vae = vae.to(case.device)
    back = torch.cat([vae.encode(vae.decode(x).clamp(-1, 1)) for x in z.to(case.device).split(1)]).cpu()
    error = float((back - z).square().mean() / z.var())
    return graded("data", "VAE", error, 0.25, 0.6, f"{len(z)} latents that were decoded and encoded again are off by "
                  f"{error:.1%} of their variance", advice)  # fmt: skip


def waits(case: Case) -> Finding | None:
    rows = case.log[len(case.log) // 4 :]
    shares = [r["data_wait"] for r in rows if isinstance(r.get("data_wait"), float)]
    if not shares:
        return None
    share = float(np.median(shares))
    return graded("data", "data wait", share, 0.3, 0.7, f"training waits for data {share:.0%} of the time (median of "
                  f"{len(shares)} lines)", "put the latents on a faster disk, in packed shards, or into memory; see "
                  "benchmarks/loader_bench.py")  # fmt: skip
