"""Convert a DeepSeek-V4 checkpoint to two GGUF files with the converter of a llama.cpp checkout.

    python benchmarks/llamacpp.py convert --llama-cpp CHECKOUT CHECKPOINT --out DIR

writes ``DIR/trunk.gguf`` and ``DIR/mtp.gguf``. The converter itself is llama.cpp's and runs from
its checkout; this script only tells it which pre-tokenizer an own vocabulary was trained with,
since it knows tokenizers by a hash of their output and stops at one it has not met.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

PRE_TOKENIZER = "deepseek-v3"
PARTS = {"trunk": "--no-mtp", "mtp": "--mtp"}


def convert_part(checkout: Path, checkpoint: Path, out: Path, part: str, pre: str) -> None:
    """Run the checkout's converter for one part in this process."""
    script = checkout / "convert_hf_to_gguf.py"
    if not script.is_file():
        raise SystemExit(f"{checkout} has no convert_hf_to_gguf.py; give a llama.cpp checkout")
    sys.path[:0] = [str(checkout), str(checkout / "gguf-py")]
    converter = importlib.import_module("convert_hf_to_gguf")
    base = importlib.import_module("conversion.base").TextModel
    base.get_vocab_base_pre = lambda self, tokenizer: pre
    sys.argv = [str(script), str(checkpoint), "--outfile", str(out), PARTS[part]]
    converter.main()


def convert(checkout: Path, checkpoint: Path, out: Path, pre: str = PRE_TOKENIZER) -> list[Path]:
    """Write both parts, each by a process of its own: the converter keeps state in its classes.

    Returns:
        The files, trunk first.

    Raises:
        subprocess.CalledProcessError: the converter failed; its output says why.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for part in PARTS:
        file = out / f"{part}.gguf"
        command = [sys.executable, __file__, "part", "--llama-cpp", str(checkout), str(checkpoint)]
        command += ["--out", str(file), "--part", part, "--pre", pre]
        subprocess.run(command, check=True)
        files.append(file)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("convert", "part"):
        sub = verbs.add_parser(verb)
        sub.add_argument("checkpoint", type=Path)
        sub.add_argument("--llama-cpp", type=Path, required=True, help="a llama.cpp checkout")
        sub.add_argument("--out", type=Path, required=True, help="folder (part: file) to write")
        sub.add_argument("--pre", default=PRE_TOKENIZER, help="pre-tokenizer, llama.cpp's name")
        if verb == "part":
            sub.add_argument("--part", choices=list(PARTS), required=True)
    args = parser.parse_args()
    checkout, checkpoint = args.llama_cpp.resolve(), args.checkpoint.resolve()
    if args.verb == "part":
        convert_part(checkout, checkpoint, args.out.resolve(), args.part, args.pre)
        return
    for file in convert(checkout, checkpoint, args.out.resolve(), args.pre):
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
