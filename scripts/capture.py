"""Draw what `paceline generate` shows on a terminal, drafts tinted, as docs/demo.svg.

python scripts/capture.py [--prompt TEXT] [--max-tokens N]
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console
from rich.text import Text

from paceline import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "import argparse\n\ndef main():\n    parser = argparse.ArgumentParser("


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=140)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "demo.svg")
    args = parser.parse_args()
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    line = Text(args.prompt, style="bold")
    with LLM() as llm:
        for chunk in llm.stream(args.prompt, SamplingParams(max_tokens=args.max_tokens)):
            for text, drafted in chunk.pieces:
                line.append(text, style="green" if drafted else "")
            result = chunk.result
    console.print(line)
    stats = result.speculation
    console.print(
        f"\n{result.usage.completion_tokens} tokens, {stats.mean_acceptance_length:.2f} per step, "
        f"{stats.num_accepted} of {stats.num_drafted} drafts accepted; green: accepted drafts",
        style="dim",
    )
    console.save_svg(str(args.out), title="paceline generate", unique_id="paceline")


if __name__ == "__main__":
    main()
