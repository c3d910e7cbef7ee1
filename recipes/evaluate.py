"""Measure an exported checkpoint on the held-out text: loss, draft agreement, cost of fp4.

    python3 recipes/evaluate.py --checkpoint DIR --data .train

All figures are teacher-forced: the text, not the model's own output, is the context.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import export
import torch
import torch.nn.functional as F
from tokenizer import read_tokens
from torch import Tensor
from train_model import Model

MANIFEST = Path(__file__).resolve().parent / "corpus_manifest.json"
# The corpus recipe appends the held-out documents class by class, in this order.
KINDS = ("code", "manual", "dictionary", "chat")
DEPTH = 3


def heldout_classes(data: Path, manifest: Path = MANIFEST) -> dict[str, Tensor]:
    """Held-out tokens per class as int64, split at the counts of the corpus manifest.

    Raises ValueError if a split does not fall between two documents.
    """
    tokens = torch.frombuffer(read_tokens(data / "heldout.bin"), dtype=torch.uint16).long()
    counts = json.loads(manifest.read_text(encoding="utf-8"))["heldout_tokens"]["by_kind"]
    if sum(counts.values()) != tokens.numel() or set(counts) - set(KINDS):
        raise ValueError(f"{data} holds {tokens.numel()} tokens, the manifest lists {counts}")
    out, start = {}, 0
    for kind in KINDS:
        size = counts.get(kind, 0)
        if size:
            out[kind] = tokens[start : start + size]
            if (out[kind][0].item(), out[kind][-1].item()) != (0, 1):
                raise ValueError(f"class {kind} does not begin and end with whole documents")
        start += size
    return out


@torch.no_grad()
def evaluate_tokens(
    model: Model, tokens: Tensor, *, length: int = 1024, batch: int = 16, depth: int = DEPTH
) -> dict[str, Any]:
    """Loss and draft figures of ``model`` on one token sequence, cut into rows of ``length``.

    A draft of depth j is right "by the model" when its argmax is the trunk's own, and "by the
    text" when it is the text's next token.  ``chain`` is the share of positions at which depths
    1..j all agree with the trunk one after the other, the figure that bounds greedy acceptance.
    """
    device = model.head.weight.device
    rows = (tokens.numel() - 2) // length
    if rows < 1:
        length, rows = tokens.numel() - 2, 1
    nll = torch.zeros((), dtype=torch.float64)
    right = count = 0
    sums = torch.zeros(depth, 4, dtype=torch.float64)
    span = torch.arange(length + 2)
    for first in range(0, rows, batch):
        starts = torch.arange(first, min(first + batch, rows)) * length
        part = tokens[starts[:, None] + span].to(device)
        inputs, following, after = part[:, :length], part[:, 1:-1], part[:, 2:]
        streams, _, _ = model.trunk(inputs)
        logits = model.logits(streams)
        nll += F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum").cpu()
        trunk = logits.argmax(-1)
        right += int((trunk == following).sum())
        count += following.numel()
        outs, _ = model.drafts(streams, following, depth)
        alive = torch.ones_like(trunk, dtype=torch.bool)[:, :-depth]
        for j, out in enumerate(outs):
            logits = model.logits(out, mtp=True)
            draft = logits.argmax(-1)
            loss = F.cross_entropy(logits.transpose(1, 2), after, reduction="none")
            # Row i drafts the token at i + 2, which the trunk predicts in its row i + 1.
            agree = draft[:, :-1] == trunk[:, 1:]
            alive = alive & agree[:, j : j + alive.shape[1]]
            sums[j, 0] += agree[:, j:].double().mean().cpu() * len(starts)
            sums[j, 1] += (draft == after)[:, j:].double().mean().cpu() * len(starts)
            sums[j, 2] += loss[:, j:].double().mean().cpu() * len(starts)
            sums[j, 3] += alive.double().mean().cpu() * len(starts)
    drafts = [
        {
            "depth": j + 1,
            "agrees_with_model": round(float(sums[j, 0]) / rows, 4),
            "agrees_with_text": round(float(sums[j, 1]) / rows, 4),
            "loss": round(float(sums[j, 2]) / rows, 4),
            "chain": round(float(sums[j, 3]) / rows, 4),
        }
        for j in range(depth)
    ]
    return {
        "tokens": count,
        "loss": round(float(nll) / count, 4),
        "accuracy": round(right / count, 4),
        "drafts": drafts,
    }


def evaluate_folder(
    checkpoint: Path,
    data: Path,
    *,
    device: str = "cuda",
    master: Model | None = None,
    manifest: Path = MANIFEST,
    length: int = 1024,
    batch: int = 16,
) -> dict[str, Any]:
    """Evaluate a written checkpoint per held-out class.

    With ``master`` (the model it was written from, unrounded weights) the result also tells what
    fp4 experts and bf16 tensors cost, in nats per token over all classes.
    """
    compute = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = export.read_checkpoint(checkpoint, compute=compute).to(device)
    if master is not None:
        master.compile_parts(False)
        grouped = master.layers[0].ffn.grouped
        model.use(grouped=grouped, fused_sinkhorn=master.layers[0].fused_sinkhorn)
    classes = heldout_classes(data, manifest)
    result: dict[str, Any] = {"length": length, "classes": {}}
    for kind, tokens in classes.items():
        result["classes"][kind] = evaluate_tokens(model, tokens, length=length, batch=batch)
    total = sum(row["tokens"] for row in result["classes"].values())

    def mean(rows: dict[str, Any]) -> float:
        return sum(row["loss"] * row["tokens"] for row in rows.values()) / total

    summary: dict[str, Any] = {
        "loss": {kind: row["loss"] for kind, row in result["classes"].items()},
        "agree": {
            kind: [d["agrees_with_model"] for d in row["drafts"]]
            for kind, row in result["classes"].items()
        },
        "loss_all": round(mean(result["classes"]), 4),
    }
    if master is not None:
        master.quantise = False
        plain = {
            kind: evaluate_tokens(master, tokens, length=length, batch=batch, depth=1)
            for kind, tokens in classes.items()
        }
        result["unrounded_loss"] = {kind: row["loss"] for kind, row in plain.items()}
        summary["fp4_cost_nats"] = round(mean(result["classes"]) - mean(plain), 5)
    result["summary"] = summary
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with heldout.bin")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args()
    result = evaluate_folder(
        args.checkpoint, args.data, device=args.device, length=args.length, batch=args.batch
    )
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
