"""Text encoders other than CLIP: trained, short, with a cut vocabulary; weights in 8 bits.

pytest tests/test_text.py
"""

import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import micro
from conftest import randomise
from test_data_pipeline import run
from tokenizers import Tokenizer

import sd.encoder
import sd.files
import sd.objective
import sd.optim
import sd.shards
import sd.text
import SD_Convert
import SD_ImageGen
import SD_Model
from sd.errors import InputError
from sd.setup import text_encoder_of
from sd.weights.int8 import FORMAT, KEY, from_int8, to_int8
from sd.weights.read import checkpoint_problem, load_text_encoder, named_text_encoder, open_model
from sd.weights.text import save_int8_folder
from SD_Model import TextEncoder

WORDS = "[PAD] [unused0] [unused1] [UNK] [CLS] [SEP] [MASK] red green blue ##berry cat on black".split()
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789,"]
LENGTH = 16  # of the encoder: positions, and the tokenizer's model_max_length


def make_bert(folder: Path, width: int = 16, **settings) -> Path:
    """A BERT of random weights, as its makers publish it: with pooler and dropout."""
    from transformers import BertConfig, BertModel, BertTokenizer

    words = [*WORDS, *LETTERS, *("##" + c for c in LETTERS)]
    config = BertConfig(vocab_size=len(words), hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=LENGTH, **settings)  # fmt: skip
    torch.manual_seed(0)
    randomise(BertModel(config)).save_pretrained(folder)
    tokenizer = BertTokenizer(vocab={w: i for i, w in enumerate(words)}, model_max_length=LENGTH)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert") / "bert")


@pytest.fixture(scope="module")
def data(tmp_path_factory, bert) -> Path:
    """micro's data, tokenised for `bert` to its full length (things) and to 8 ids (short, of the same latents)."""
    root = micro.make_data(tmp_path_factory.mktemp("bert_data") / "data", {"things": 12, "short": 12}, 4)
    tokenizer = TextEncoder.from_pretrained(str(bert)).tokenizer
    for source, length in (("things", LENGTH), ("short", 8)):
        keys = [f"{source}/00000/{i:09d}" for i in range(16)]
        shutil.rmtree(root / source / "dataset")
        tokenizer.model_max_length = length
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(micro, "LENGTH", length)
            micro.write_dataset(root / source / "dataset", tokenizer, {"train": keys[4:], "val": keys[:4]})
    return root


def train(data: Path, bert: Path, out: Path, *more, expect=0) -> str:
    """Two steps of SD_Train with this text encoder; what it printed."""
    argv = micro.flags(
        data, out, "--text_encoder", bert, "--max_steps", 2, "--val_steps", 2, "--zero_init", "none", *more
    )
    status = micro.status_of(micro.start(argv, output := out.with_suffix(".txt")))
    assert status == expect, output.read_text()[-3000:]
    return output.read_text()


# ----------------------------------------------------------------------------------------------------------------
# Trained
# ----------------------------------------------------------------------------------------------------------------


def step_of(encoder: TextEncoder, seed: int) -> tuple[torch.Tensor, list]:
    """A loss and the gradients of all parameters, in train() mode, with torch's generator at `seed`."""
    torch.manual_seed(0)
    unet = randomise(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"]))
    denoiser = sd.objective.Denoiser(unet, encoder.requires_grad_(True)).train()
    denoiser.zero_grad()
    torch.manual_seed(seed)
    ids = encoder.tokenize(["red cats", "a blueberry on black"])
    loss = denoiser(torch.ones(2, 4, 8, 8), torch.tensor([10, 900]), ids).square().mean()
    loss.backward()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in denoiser.parameters()]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_trained_encoder_draws_nothing_and_is_trained_whole(bert, attention):
    encoder = TextEncoder.from_pretrained(str(bert)).without_head()
    encoder.model.set_attn_implementation(attention)
    (loss, grads), (again, same) = step_of(encoder, 1), step_of(encoder, 2)
    assert torch.equal(loss, again) and all(torch.equal(a, b) for a, b in zip(grads, same))
    sd.optim.check_all_trained([*encoder.parameters()])
    for module in encoder.modules():  # as it was published, it does draw: this test can fail
        module.p = 0.1
    loss, again = step_of(encoder, 1)[0], step_of(encoder, 2)[0]
    assert not torch.equal(loss, again)


def test_a_trained_encoder_is_saved_without_head_and_dropout(bert, tmp_path):
    encoder = TextEncoder.from_pretrained(str(bert))
    whole = encoder.encode(["red cats"])
    assert encoder.model.pooler is not None  # frozen, its weights' hash is as before
    encoder.without_head().save(tmp_path / "saved")
    again = TextEncoder.from_pretrained(str(tmp_path / "saved"))
    encoder.load_state_dict(again.state_dict(), strict=True)
    assert again.model.pooler is None and torch.equal(again.encode(["red cats"]), whole)
    config = again.model.config
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0
    assert not [name for name in again.state_dict() if "pooler" in name]


def test_a_float_attribute_of_an_attention_layer_is_no_dropout_either(tmp_path, small_tokenizer):
    """CLIP's attention hands a number of its own to SDPA."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(vocab_size=len(small_tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                            num_attention_heads=2, attention_dropout=0.5)  # fmt: skip
    encoder = TextEncoder(CLIPTextModel(config).train(), small_tokenizer)
    assert torch.equal(encoder.encode(["red"]), encoder.encode(["red"])) and config.attention_dropout == 0


def test_bert_is_trained_resumed_and_read(data, bert, tmp_path):
    train(data, bert, tmp_path / "run", "--train_text_encoder", "--save_steps", 1)
    train(data, bert, tmp_path / "half", "--train_text_encoder", "--save_steps", 1, "--stop_at", 1)
    for folder in (tmp_path / "half" / "checkpoints" / "step_00000001").glob("text_encoder*"):  # of an older revision
        old = TextEncoder.from_pretrained(str(bert)).model
        new = TextEncoder.from_pretrained(str(folder)).model
        missing = old.load_state_dict(new.state_dict(), strict=False).missing_keys
        assert missing == ["pooler.dense.weight", "pooler.dense.bias"]
        old.save_pretrained(folder)
    (folder.parent / "manifest.json").unlink()
    (folder.parent / "manifest.json").write_text(json.dumps(sd.files.digests(folder.parent)))
    train(data, bert, tmp_path / "half", "--train_text_encoder", "--resume")
    assert micro.differences(tmp_path / "run", tmp_path / "half", False) == []
    last = micro.checkpoints(tmp_path / "run")[-1] / "text_encoder"
    first, last = (TextEncoder.from_pretrained(str(p)) for p in (bert, last))
    for (name, a), (_, b) in zip(first.without_head().named_parameters(), last.named_parameters()):
        assert not torch.equal(a, b), name


# ----------------------------------------------------------------------------------------------------------------
# Texts of fewer ids than the encoder takes
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
def test_a_run_keeps_the_length_of_its_texts(data, bert, tmp_path, trained):
    """Painting, and what is exported, take as many ids as training did: fewer than the encoder would."""
    flags = ["--train_text_encoder"] if trained else []
    train(data, bert, tmp_path / "run", "--data", "short", "--save_steps", 1, "--stop_at", 1, *flags)
    train(data, bert, tmp_path / "run", "--data", "short", "--resume", *flags)
    assert TextEncoder.from_pretrained(str(bert)).max_length == LENGTH  # the folder is as it was
    model = open_model(tmp_path / "run")
    encoder = model.text_encoder()
    assert encoder.max_length == 8 and encoder.encode(["red cats"]).shape == (1, 8, 16)
    assert load_text_encoder(bert, None, model.text_length).max_length == 8  # --text_encoder: it lies elsewhere now
    SD_Convert.main([str(tmp_path / "run"), str(tmp_path / "native"), "--format", "native"])
    assert open_model(tmp_path / "native").text_encoder().max_length == 8


def test_texts_that_do_not_fit_are_refused(data, bert, tmp_path):
    told = train(data, bert, tmp_path / "run", "--data", "short,things", expect=2)
    assert "short/dataset have 8 ids and those of" in told and "things/dataset 16; tokenise" in told
    short = TextEncoder.from_pretrained(str(bert)).shorten(8)
    short.save(tmp_path / "short")
    told = train(data, tmp_path / "short", tmp_path / "run", expect=2)
    assert "have 16 ids, and the text encoder takes 8; tokenise again with --max_length 8" in told
    assert not (tmp_path / "run").exists()
    with pytest.raises(SD_Model.InputError, match="3 to 8"):
        short.shorten(9)


def write_captions(folder: Path, captions: list[str]) -> Path:
    """A tar of pictures with these captions."""
    folder.mkdir(parents=True)
    with sd.shards.ShardWriter(folder / "00000.tar") as shard:
        for i, caption in enumerate(captions):
            shard.add(f"{i:09d}", b"\x89PNG", "png", caption, {})
    return folder


def test_tokenise_max_length(bert, tmp_path):
    captions = ["red cats on black, a cat on red", "blue"]
    images = write_captions(tmp_path / "s" / "images", captions)
    flags = ("--in", images, "--out", tmp_path / "tokens", "--tokenizer", bert, "--max_length")
    assert f"wants 3 to {LENGTH}, which the tokenizer" in run("04_tokenise.py", *flags, LENGTH + 1, status=2)
    run("04_tokenise.py", *flags, 8)
    encoder = TextEncoder.from_pretrained(str(bert)).shorten(8)
    ids = pq.read_table(tmp_path / "tokens" / "00000.parquet")["input_ids"].to_pylist()
    assert ids == encoder.tokenize(captions).tolist() and len(ids[0]) == 8
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    assert manifest["max_length"] == 8 and manifest["truncated"] == 1
    assert manifest["tokenizer_hash"] == sd.text.tokenizer_hash(encoder.tokenizer)


# ----------------------------------------------------------------------------------------------------------------
# A vocabulary cut to the words of the captions (04b)
# ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("source", ["tokens", "dataset", "text file"])
def test_cut_vocabulary_encodes_the_captions_alike(bert, data, tmp_path, source):
    captions = ["red cats, a blueberry", "Blue 17"]
    path = tmp_path / "words.txt"
    if source == "text file":
        path.write_text("\n".join(captions) + "\n\n")
    elif source == "tokens":
        path = tmp_path / "tokens"
        images = write_captions(tmp_path / "s" / "images", captions)
        run("04_tokenise.py", "--in", images, "--out", path, "--tokenizer", bert)
    else:
        path, captions = data / "things" / "dataset", [f"{('red', 'green', 'blue')[i % 3]} {i}" for i in range(12)]
    flags = ("--text_encoder", bert, "--captions", path, "--out", tmp_path / "small")
    told = run("04b_cut_vocabulary.py", *flags)
    before, after = (TextEncoder.from_pretrained(str(p)) for p in (bert, tmp_path / "small"))
    words = [w for w in after.tokenizer.get_vocab() if len(w.removeprefix("##")) > 1 and w[0] != "["]
    assert set(words) == ({"red", "green", "blue"} if source == "dataset" else {"red", "blue", "##berry", "cat"})
    rows, size = len("PAD UNK CLS SEP MASK".split()) + len(words) + 2 * len(LETTERS), before.model.config.vocab_size
    assert after.model.config.vocab_size == len(after.tokenizer) == rows < size
    assert torch.equal(before.encode([*captions, ""]), after.encode([*captions, ""]))
    assert not torch.equal(before.tokenize(captions), after.tokenize(captions))  # of other numbers
    raw = Tokenizer.from_file(str(tmp_path / "small" / "tokenizer.json"))  # as other programs read it
    content = json.loads((tmp_path / "small" / "tokenizer.json").read_text())
    assert all(content["model"]["vocab"][token["content"]] == token["id"] for token in content["added_tokens"])
    raw.enable_padding(length=LENGTH)
    assert [row.ids for row in raw.encode_batch(captions)] == after.tokenize(captions).tolist()
    kept = after.tokenizer.convert_ids_to_tokens(range(rows))
    assert kept == [w for w in before.tokenizer.convert_ids_to_tokens(range(size)) if w in set(kept)]  # the old order
    spelled = after.tokenizer.tokenize("on")
    assert spelled == ["o", "##n"] and before.tokenizer.tokenize("on") == ["on"]
    assert f"{rows} of {size} word pieces serve {16 if source == 'dataset' else 2} captions" in told
    assert "exists already" in run("04b_cut_vocabulary.py", *flags, status=2)


def test_what_cannot_be_cut_is_refused(bert, tmp_path, small_tokenizer):
    (tmp_path / "words.txt").write_text("red\n")
    (tmp_path / "blank.txt").write_text("\n \n")
    clip = SD_Model.PRESETS["micro"]["text"]
    TextEncoder.new(clip, small_tokenizer).save(tmp_path / "clip")

    def told(encoder, captions):
        flags = ("--text_encoder", encoder, "--captions", captions, "--out", tmp_path / "small")
        text = run("04b_cut_vocabulary.py", *flags, status=2)
        assert not list(tmp_path.glob("small*"))
        return text

    assert "of the kind BPE, and WordPiece was wanted" in told(tmp_path / "clip", tmp_path / "words.txt")
    assert "hold no caption" in told(bert, tmp_path / "blank.txt")
    assert "no such file or folder" in told(bert, tmp_path / "absent.txt")
    assert "captions were wanted in" in told(bert, bert)
    broken = tmp_path / "broken"
    shutil.copytree(bert, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    assert "cannot read" in told(broken, tmp_path / "words.txt")


# ----------------------------------------------------------------------------------------------------------------
# Weights in 8 bits
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(data, bert, tmp_path_factory) -> Path:
    """A run of two steps with a trained BERT, whose weights and average differ."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(data, bert, out, "--train_text_encoder", "--lr", 0.05)
    return out


def test_the_small_model_s_own_text_encoder_can_be_trained_with():
    """A run that starts from demo/drawings names the folder of its text encoder, which is in 8 bits."""
    folder = Path(__file__).resolve().parent.parent / "demo" / "drawings"
    found, wanted = (e.model.state_dict() for e in (named_text_encoder(text_encoder_of(str(folder))),
                                                    open_model(folder).text_encoder()))  # fmt: skip
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_int8_keeps_each_weight_to_half_a_step():
    g = torch.Generator().manual_seed(0)
    whole = {"a.weight": torch.randn(5, 3, 3, 3, generator=g) * torch.tensor([1e-3, 1, 50, 0, 1e-42]).view(5, 1, 1, 1),
             "b.weight": torch.randn(7, 4, generator=g), "b.bias": torch.randn(7, generator=g),
             "b.scale": torch.ones(7), "ids": torch.arange(3)}  # fmt: skip
    stored = to_int8("UNet", whole)
    assert stored["a.weight"].dtype == torch.int8 and stored["a.weight"].shape == (5, 3, 3, 3)
    assert stored["a.weight.scale"].shape == (5,) and stored["b.bias"].dtype == torch.float16
    assert stored["a.weight"].abs().amax((1, 2, 3)).tolist()[:4] == [127, 127, 127, 0]  # each row's largest
    read = from_int8("x", stored, {KEY: FORMAT})
    assert read.keys() == whole.keys() and read["a.weight"].dtype == torch.float32
    for name in ("a.weight", "b.weight"):
        step = (whole[name].flatten(1).abs().amax(1) / 127).clamp(min=1e-38)[:, None]
        assert ((read[name] - whole[name]).flatten(1).abs() <= step * (0.5 + 1e-5)).all()
    assert torch.equal(read["b.bias"], whole["b.bias"].half().float()) and torch.equal(read["ids"], whole["ids"])
    with pytest.raises(InputError, match="cannot hold"):
        to_int8("UNet", {"w": torch.full((2, 2), torch.inf)})
    with pytest.raises(InputError, match="cannot hold"):
        to_int8("UNet", {"b": torch.full((2,), 1e5)})
    with pytest.raises(InputError, match="a.weight.scale, fp32 of 5 rows, found none"):
        from_int8("x", {k: t for k, t in stored.items() if k != "a.weight.scale"}, {KEY: FORMAT})
    with pytest.raises(InputError, match="another revision"):
        from_int8("x", stored, {KEY: "int8-rows-2"})


def halves(exact: torch.nn.Module, read: torch.nn.Module):
    """The weights that were read are the exact ones to half a step of their row, and vectors to fp16's rounding."""
    wanted, found = exact.state_dict(), read.state_dict()
    assert wanted.keys() == found.keys()
    for name, a in wanted.items():
        b = found[name]
        step = a.flatten(1).abs().amax(1, keepdim=True) / 127 * (0.5 + 1e-5) if a.dim() > 1 else a.abs()[:, None] / 2048
        assert ((a - b).reshape(len(a), -1).abs() <= step + 1e-7).all() and b.dtype == torch.float32, name
        assert a.dim() < 2 or not torch.equal(a, b) or a.abs().max() == 0, name  # it is rounded


@torch.no_grad()
@pytest.mark.parametrize("decoder_only", [False, True])
def test_int8_folder_paints(trained, tmp_path, decoder_only, capsys):
    small = tmp_path / "small"
    SD_Convert.main([str(trained), str(small), "--dtype", "int8", *["--decoder_only"] * decoder_only])
    exact, model = open_model(trained), open_model(small)
    assert "EMA weights (it has no others)" in model.found and "8 bits" in model.found
    assert not (small / "unet_ema.safetensors").exists() and checkpoint_problem(small) is None
    vae = exact.vae().without_encoder() if decoder_only else exact.vae()
    halves(exact.unet(), model.unet())
    halves(vae, model.vae())
    halves(exact.text_encoder().without_head(), model.text_encoder())
    assert model.text_encoder().model.pooler is None and model.text_encoder().max_length == LENGTH
    halves(exact.text_encoder(), load_text_encoder(small / "text_encoder"))
    for part in ("unet", "vae"):  # reading twice gives the same
        assert SD_Model.weights_hash(getattr(model, part)()) == SD_Model.weights_hash(
            getattr(open_model(small), part)()
        )
    numbers = sum(p.numel() for net in (exact.unet(), vae, exact.text_encoder()) for p in net.parameters())
    bytes_ = sum(f.stat().st_size for f in small.rglob("*.safetensors"))
    assert bytes_ < 1.6 * numbers  # small networks, of many rows; fp32 is 4
    with pytest.raises(SD_Model.InputError, match="no file named"):  # nothing takes whole numbers for weights
        TextEncoder.from_pretrained(str(small / "text_encoder"))

    flags = ["--prompt", "red cats", "--steps", "2", "--out", str(tmp_path / "out.png"), "--device", "cpu"]
    SD_ImageGen.main(["--model", str(small), *flags])
    assert sd.pictures.read_picture(tmp_path / "out.png").shape == (64, 64, 3)
    if decoder_only:
        flags[5] = str(tmp_path / "again.png")
        with pytest.raises(SD_Model.InputError, match="no encoder"):
            SD_ImageGen.main(
                ["--model", str(small), "--init_image", str(tmp_path / "out.png"), "--strength", "1", *flags]
            )
        with pytest.raises(SD_Model.InputError, match="no encoder"):
            sd.encoder.Encoder(model.vae(), torch.device("cpu"), torch.float32)  # before encode_latents writes a file
        with pytest.raises(SD_Model.InputError, match="no encoder"):
            SD_Convert.main([str(small), str(tmp_path / "folder"), "--format", "diffusers"])
        SD_Convert.main([str(small), str(tmp_path / "native"), "--format", "native"])  # on in fp32, without encoder
        assert SD_Model.weights_hash(open_model(tmp_path / "native").vae()) == SD_Model.weights_hash(model.vae())


def test_a_frozen_encoder_travels_in_int8_with_its_length(data, bert, tmp_path):
    train(data, bert, tmp_path / "run", "--data", "short")
    SD_Convert.main([str(tmp_path / "run"), str(tmp_path / "small"), "--dtype", "int8", "--weights", "both"])
    for weights in ("ema", "live"):
        model = open_model(tmp_path / "small", weights)
        halves(open_model(tmp_path / "run", weights).unet(), model.unet())
        assert model.text_encoder().max_length == 8
    halves(TextEncoder.from_pretrained(str(bert)).without_head(), model.text_encoder())


def test_live_and_average_are_both_kept_in_int8(trained, tmp_path):
    SD_Convert.main([str(trained), str(tmp_path / "small"), "--dtype", "int8", "--weights", "both"])
    for weights in ("ema", "live"):
        exact, model = (open_model(path, weights) for path in (trained, tmp_path / "small"))
        halves(exact.unet(), model.unet())
        halves(exact.text_encoder(), model.text_encoder())


def test_clip_in_int8(tmp_path, small_tokenizer):
    encoder = TextEncoder.new(SD_Model.PRESETS["micro"]["text"], small_tokenizer)
    randomise(encoder)
    save_int8_folder(encoder, tmp_path)
    halves(encoder, load_text_encoder(tmp_path))


@pytest.mark.parametrize("flags, words", [
    (("--format", "ldm", "--dtype", "int8"), "--dtype int8 is of this project's own folder"),
    (("--format", "diffusers", "--dtype", "int8"), "--dtype int8 is of this project's own folder"),
    (("--format", "ldm", "--decoder_only"), "--decoder_only is of this project's own folder"),
    ((), "--format wants ldm, diffusers, native"),
])  # fmt: skip
def test_int8_is_for_our_own_folder(trained, tmp_path, flags, words):
    with pytest.raises(InputError, match=words):
        SD_Convert.main([str(trained), str(tmp_path / "out.safetensors"), *flags])
    assert not list(tmp_path.iterdir())


def test_damaged_int8_is_refused(trained, tmp_path):
    SD_Convert.main([str(trained), str(tmp_path / "small"), "--dtype", "int8"])
    file = tmp_path / "small" / "unet.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file(tensors, file)  # the metadata are lost
    with pytest.raises(InputError, match="int8 found"):
        open_model(tmp_path / "small")
    assert "unet.safetensors differs" in checkpoint_problem(tmp_path / "small")
    del tensors["out.2.weight"], tensors["out.2.weight.scale"]
    safetensors.torch.save_file(tensors, file, {KEY: FORMAT})
    with pytest.raises(InputError, match="missing out.2.weight"):
        open_model(tmp_path / "small")


# ----------------------------------------------------------------------------------------------------------------
# Zeros as the null condition
# ----------------------------------------------------------------------------------------------------------------


def test_zeros_stand_for_the_empty_text_alone(bert, small_tokenizer):
    config = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    for encoder in (TextEncoder.from_pretrained(str(bert)), TextEncoder.new(config, small_tokenizer)):
        texts = ["", "red cats", "a"]
        with torch.no_grad():
            before = encoder.encode(texts)
            found = encoder.guide_from_zeros().encode(texts)
            assert before[0].abs().min() > 0 and not found[0].any()
            assert torch.equal(found[1:], before[1:])
            encoder.shorten(4)
            assert not encoder.encode([""]).any() and encoder.encode(["a"]).any()


@pytest.mark.parametrize("trained", [False, True])
def test_training_and_painting_have_the_same_null(data, bert, tmp_path, trained):
    """With every caption dropped, two text encoders give the same losses if zeros stand for them, and only then."""
    other = shutil.copytree(bert, tmp_path / "other")
    weights = safetensors.torch.load_file(other / "model.safetensors")
    safetensors.torch.save_file({k: 2 * t for k, t in weights.items()}, other / "model.safetensors", {"format": "pt"})
    more = ["--drop", 1, *(["--train_text_encoder"] if trained else [])]
    losses = {}
    for name, encoder, null in (("a", bert, "zeros"), ("b", other, "zeros"), ("c", bert, "empty"), ("d", other, None)):
        out = tmp_path / name
        train(data, encoder, out, *more, *(["--null", null] if null else []))
        losses[name] = [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]
        told = json.loads(next(out.glob("checkpoints/*/model.json")).read_text())
        assert told.get("null") == ("zeros" if null == "zeros" else None)
        opened = open_model(out)
        found = opened.text_encoder().encode(["", "red cats"])
        assert bool(found[0].any()) is (null != "zeros") and found[1].any()
        assert ("its null condition is zeros" in opened.found) is (null == "zeros")
    assert losses["a"] == losses["b"] and losses["c"] != losses["d"] and losses["a"] != losses["c"]


def test_what_a_null_of_zeros_cannot_do_is_refused(data, bert, tmp_path):
    assert "wants --drop above 0" in train(data, bert, tmp_path / "a", "--null", "zeros", "--drop", 0, expect=2)
    train(data, bert, tmp_path / "zeros", "--null", "zeros")
    begun = "--init_from", tmp_path / "zeros"
    assert "add --null zeros" in train(data, bert, tmp_path / "b", *begun, expect=2)
    train(data, bert, tmp_path / "c", *begun, "--null", "zeros", "--drop", 0)
    said = train(data, bert, tmp_path / "zeros", "--null", "empty", "--max_steps", 3, "--resume", expect=2)
    assert "cannot change on --resume" in said
    with pytest.raises(InputError, match="use --format native"):
        SD_Convert.main([str(tmp_path / "zeros"), str(tmp_path / "x.safetensors"), "--format", "ldm"])
    assert not (tmp_path / "x.safetensors").exists()
    SD_Convert.main([str(tmp_path / "zeros"), str(tmp_path / "native"), "--format", "native"])
    assert not open_model(tmp_path / "native").text_encoder().encode([""]).any()
