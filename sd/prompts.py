r"""Prompts: files of them, the syntax of weights, and how long ones are cut into chunks.

The syntax is A1111's: `(word:1.3)` weighs a word 1.3, `(word)` 1.1 and `[word]` 1/1.1, nested brackets multiply,
`\(`, `\)`, `\[`, `\]` and `\\` stand for the characters themselves, and `BREAK` ends the chunk. A bracket that is not
closed reaches to the end of the prompt; a backslash before anything else is dropped.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch

from sd.errors import InputError
from sd.usertext import read_user_text, user_lines

SEEDS = 2**32  # torch's CPU generator reads 32 bits of a seed: larger ones would repeat the noise of smaller ones
LONG_PROMPTS = ("padded", "a1111", "comfyui")  # see docs/PAINTING.md
COMMA_REACH = 20  # a1111: a chunk may end at a comma among its last 20 tokens
WHOLE_SEGMENT = 8  # comfyui: a weighted segment of fewer tokens is not cut

Parsed = tuple[tuple[tuple[str, float], ...], ...]  # what stands between the BREAKs, each as (text, weight)


# ----------------------------------------------------------------------------------------------------------------
# Prompt files
# ----------------------------------------------------------------------------------------------------------------


def check_text(text, where: str, name: str):
    """InputError unless it is text that can be tokenised and written to a file."""
    if not isinstance(text, str):
        raise InputError(f"{where}: `{name}` wants text, found {json.dumps(text)[:80]}")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise InputError(f"{where}: `{name}` wants text in UTF-8 without zero bytes, found {ascii(text)[:80]}")


def check_seed(seed, where: str, name: str = "seed"):
    """InputError unless it is a whole number of the range that CPU generators tell apart."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        hint = "; a larger seed draws what its remainder by 2^32 draws" if type(seed) is int and seed >= SEEDS else ""
        raise InputError(f"{where}: {name} wants a whole number from 0 to {SEEDS - 1}, found {seed!r}{hint}")


def read_prompts(path: str | Path) -> list[dict]:
    """The rows of a prompt file, each {prompt, where} and, from .jsonl, negative and seed where the row has them.

    .jsonl (and .ndjson) has a JSON object a line, whose other keys are left alone; any other text file has a prompt a
    line. Blank lines are skipped. `where` names file and line. InputError names the first line that is wrong.
    """
    kind = Path(path).suffix.lower()
    if kind in (".json", ".csv", ".tsv", ".parquet"):
        raise InputError(f"{path}: prompts are read from .txt, one a line, or .jsonl, one object a line, not {kind}")
    rows = []
    for number, line in enumerate(user_lines(read_user_text(path)), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        if kind not in (".jsonl", ".ndjson"):
            row = {"prompt": line.strip()}
        else:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise InputError(f"{where} wants a JSON object such as {{'prompt': 'a cat'}} ({e})") from None
            if not isinstance(row, dict) or "prompt" not in row:
                raise InputError(f"{where} wants a JSON object with `prompt`, found {line.strip()[:80]}")
            row = {k: row[k] for k in ("prompt", "negative", "seed") if k in row}
        for name in ("prompt", "negative"):
            check_text(row.get(name, ""), where, name)
        if "seed" in row:
            check_seed(row["seed"], where)
        rows.append(row | {"where": where})
    if not rows:
        raise InputError(f"{path} wants at least one prompt, and it has none")
    return rows


# ----------------------------------------------------------------------------------------------------------------
# Weights
# ----------------------------------------------------------------------------------------------------------------

TOKEN = re.compile(r":\s*(?P<weight>[+-]?[.\d]+)\s*\)|(?P<run>[^\\()\[\]:]+)|\\[\\()\[\]]?|.", re.DOTALL)
BREAK = re.compile(r"\s*\bBREAK\b\s*")


def parse_prompt(prompt: str) -> Parsed:
    """Texts with their weights, by chunk-ending BREAK; neighbours of one weight are joined. InputError for a weight
    that is no number. A prompt without syntax is one text of weight 1, unchanged."""
    pieces: list[list] = []  # [text, weight], text None for BREAK
    round_open, square_open = [], []  # where in pieces they were opened

    def scale(start: int, factor: float):
        for piece in pieces[start:]:
            piece[1] *= factor

    for match in TOKEN.finditer(prompt):
        text = match[0]
        if match["weight"] is not None and round_open:
            try:
                scale(round_open.pop(), float(match["weight"]))
            except ValueError:
                raise InputError(f"a weight such as (word:1.3) was wanted, found {text!r} in {prompt[:80]!r}") from None
        elif text == "(":
            round_open.append(len(pieces))
        elif text == "[":
            square_open.append(len(pieces))
        elif text == ")" and round_open:
            scale(round_open.pop(), 1.1)
        elif text == "]" and square_open:
            scale(square_open.pop(), 1 / 1.1)
        elif text[0] == "\\":
            pieces.append([text[1:], 1.0])
        else:
            for i, part in enumerate(BREAK.split(text) if match["run"] else [text]):
                pieces += [[None, 1.0]] * (i > 0) + [[part, 1.0]] * bool(part)
    for start in round_open:
        scale(start, 1.1)
    for start in square_open:
        scale(start, 1 / 1.1)
    if not all(np.isfinite(weight) for _, weight in pieces):
        raise InputError(f"weights of a prompt want finite numbers, found larger ones in {prompt[:80]!r}")
    parts: list[list] = [[]]
    for text, weight in pieces:
        if text is None:
            parts.append([])
        elif parts[-1] and parts[-1][-1][1] == weight:
            parts[-1][-1] = (parts[-1][-1][0] + text, weight)
        else:
            parts[-1].append((text, weight))
    return tuple(tuple(part) for part in parts)


def unparsed(prompt: str) -> Parsed:
    """The prompt as one text of weight 1, whatever it contains."""
    return (((prompt, 1.0),) if prompt else (),)


def weigh(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Token states [chunks, T, D] times weights [chunks, T], each chunk then scaled back to its mean before.

    The formula is A1111's 'Original' emphasis, for one prompt at a time. Chunks whose weights are all 1 are unchanged.
    A mean that is lost in rounding, as after a final norm without biases, is no measure: it is then left as it comes.
    """
    if bool((weights == 1).all()):
        return states
    exact = states.float()
    weighted = exact * weights.to(exact)[:, :, None]
    before, after = (x.mean((1, 2), keepdim=True) for x in (exact, weighted))  # [chunks, 1, 1]
    lost = torch.minimum(before.abs(), after.abs()) <= 1e-4 * exact.square().mean((1, 2), keepdim=True).sqrt()
    scale = torch.where(lost, 1.0, before / after)
    plain = (weights == 1).all(1).to(states.device)[:, None, None]
    return torch.where(plain, states, (weighted * scale).to(states.dtype))


# ----------------------------------------------------------------------------------------------------------------
# Chunks
# ----------------------------------------------------------------------------------------------------------------


def cut_chunks(parts: list[list[tuple[list[int], float]]], room: int, rule: str, comma: int | None) -> list[list]:
    """Token ids by part and segment, with weights -> chunks of at most `room` pairs (id, weight), by a rule of
    LONG_PROMPTS. comma: the id of a comma that stands alone."""
    chunks, chunk = [], []
    for k, part in enumerate(parts):
        if k > 0:  # BREAK
            chunks.append(chunk)
            chunk = []
        for ids, weight in part:
            if rule == "comfyui" and len(ids) < WHOLE_SEGMENT and room < len(chunk) + len(ids):
                chunks.append(chunk)
                chunk = []
            for token in ids:
                if len(chunk) == room:
                    end = room
                    if rule == "a1111" and token != comma:
                        commas = [i for i, (other, _) in enumerate(chunk) if other == comma]
                        if commas and room - commas[-1] <= COMMA_REACH:
                            end = commas[-1] + 1
                    chunks.append(chunk[:end])
                    chunk = chunk[end:]
                chunk.append((token, weight))
    return [*chunks, chunk] if chunk or not chunks else chunks


def prompt_chunks(text_encoder, prompt: str | Parsed, rule: str = "padded") -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [chunks, max_length] and weights fp32 of the same shape, 1 for start, end and padding.

    prompt: plain text, or what parse_prompt gave. A text that fits into one chunk has the ids that
    TextEncoder.tokenize gives it.
    """
    tokenizer, length = text_encoder.tokenizer, text_encoder.max_length
    parts = unparsed(prompt) if isinstance(prompt, str) else prompt
    start, *_, end = tokenizer("", verbose=False)["input_ids"]
    split = [[(tokenizer(text, verbose=False)["input_ids"][1:-1], weight) for text, weight in part] for part in parts]
    comma = tokenizer.get_vocab().get(",</w>") if rule == "a1111" else None
    ids, weights = [], []
    for chunk in cut_chunks(split, length - 2, rule, comma):
        padding = length - 2 - len(chunk)
        ids.append([start, *(token for token, _ in chunk), end] + [tokenizer.pad_token_id] * padding)
        weights.append([1.0, *(weight for _, weight in chunk), 1.0] + [1.0] * padding)
    return torch.tensor(ids, dtype=torch.long), torch.tensor(weights)


# ----------------------------------------------------------------------------------------------------------------
# What other programs would read in a prompt
# ----------------------------------------------------------------------------------------------------------------

FOREIGN = {  # what A1111 would do with it: painted here as the words that stand there
    "AND (several prompts at once)": re.compile(r"\bAND\b"),
    "[from:to:when] (a prompt that changes)": re.compile(r"(?<!\\)\[[^\[\]]*:\s*[\d.]+\s*\]"),
    "[a|b] (words that alternate)": re.compile(r"(?<!\\)\[[^\[\]]*\|[^\[\]]*\]"),
    "<name:…> (further networks)": re.compile(r"<(?!lora:|lyco:)\w+:[^<>]+>"),
}
LORA_SYNTAX = re.compile(r"\s*<(?:lora|lyco):([^<>:]+)(?::([^<>]*))?>")  # of A1111: name, and weight


def foreign_syntax(prompt: str) -> list[str]:
    """Names of A1111's further syntax in a prompt, which is painted as plain words here."""
    return [name for name, pattern in FOREIGN.items() if pattern.search(prompt)]


def check_loras(prompt: str):
    """InputError for A1111's syntax of LoRAs, which names no file."""
    if found := LORA_SYNTAX.search(prompt):
        weight = f":{found[2].split(':')[0]}" if found[2] else ""
        raise InputError(f"{found[0].strip()} is not known here: give that LoRA as --lora PATH{weight} and cut it out")


def escape(text: str) -> str:
    r"""With a backslash before each ( ) [ ] and \."""
    return re.sub(r"([\\()\[\]])", r"\\\1", text)


def a1111_prompt(prompt: str, plain: bool = False) -> str:
    """The prompt as A1111 has to read it to paint the same words with the same weights; as it stands, where possible.

    plain: the prompt was painted without syntax. AND and, if plain, BREAK become lower case, which CLIP's tokenizer
    does not tell apart, as does a line that begins with `Negative prompt:`.
    """
    parsed = unparsed(prompt) if plain else parse_prompt(prompt)
    brackets = re.search(r"[(\[]", prompt)
    if plain or re.search(r"\[[^\]]*[:|]", prompt) or (brackets and len(parsed) > 1):

        def written(text: str, weight: float) -> str:
            return escape(text) if weight == 1 else f"({escape(text)}:{np.format_float_positional(weight, trim='-')})"

        prompt = " BREAK ".join("".join(written(*segment) for segment in part) for part in parsed)
    words = "AND|BREAK" if plain else "AND"
    prompt = re.sub(rf"\b({words})\b", lambda match: match[0].lower(), prompt)
    prompt = re.sub(r"<(?=\w+:[^<>]+>)", "< ", prompt)
    prompt = re.sub(r"\r\n|\r", "\n", prompt)
    return re.sub(r"(?m)^(\s*)Negative prompt:", r"\1negative prompt:", prompt)
