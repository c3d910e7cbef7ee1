"""Write and read checkpoints of the training model in DeepSeek's tensor layout.

Names and types are those of DeepSeek-V4's published files: routed experts as packed e2m1 (I8, low
nibble = even input index) with one F8_E8M0 scale per 32 inputs, bf16 elsewhere, fp32 for the
hyper-connections, ``ape``, ``attn_sink`` and the router bias, int64 for ``tid2eid``.

    python3 recipes/export.py --state /tmp/train/state.pt --out DIR
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from train_model import FP4_BLOCK, Model, Shape, fp4_codes

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP32_LEAVES = ("ape", "attn_sink", "bias")
SHARD_BYTES = 14 * 2**20


def pack_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 ``[o, i]`` -> (int8 ``[o, i/2]`` codes, float8_e8m0fnu ``[o, i/32]`` scales)."""
    grid, exponent = fp4_codes(weight.float())
    size = grid.abs().flatten(-2)
    edges = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(_GRID)])
    code = torch.bucketize(size.contiguous(), edges.to(size.device))
    # A negative value that rounded to zero keeps the plain zero code: sign() erased its sign.
    code = code | ((grid.flatten(-2) < 0).to(code.dtype) << 3)
    packed = (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8).view(torch.int8)
    scale = (exponent.squeeze(-1) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return packed, scale


def unpack_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of :func:`pack_fp4`: fp32 ``[o, i]``, exact."""
    byte = packed.view(torch.uint8).long()
    code = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
    grid = torch.tensor(_GRID, device=packed.device)[code & 7]
    grid = torch.where(code & 8 > 0, -grid, grid)
    factor = torch.exp2(scale.view(torch.uint8).float() - 127)
    return grid * factor.repeat_interleave(FP4_BLOCK, -1)


def _keeps_fp32(name: str) -> bool:
    leaf = name.rsplit(".", 1)[-1]
    return leaf in _FP32_LEAVES or leaf.startswith("hc_")


def deepseek_tensors(
    model: Model, *, plain: torch.dtype = torch.bfloat16, fp4: bool = True
) -> dict[str, Tensor]:
    """All tensors of ``model`` on the CPU under DeepSeek's names, in file order.

    ``fp4=False`` writes the experts unpacked in ``plain``, for tools that cannot read e2m1.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        value = tensor.detach()
        if ".experts_w" not in name:
            if value.is_floating_point() and not _keeps_fp32(name):
                value = value.to(plain)
            out[name] = value.cpu().contiguous()
            continue
        stem, leaf = name.rsplit(".experts_", 1)
        parts = (
            {"w1": value.chunk(2, 1)[0], "w3": value.chunk(2, 1)[1]}
            if leaf == "w13"
            else {"w2": value}
        )
        for part, stacked in parts.items():
            codes, scales = pack_fp4(stacked) if fp4 else (stacked.to(plain), None)
            codes = codes.cpu()
            scales = None if scales is None else scales.cpu()
            for e in range(codes.shape[0]):
                key = f"{stem}.experts.{e}.{part}"
                out[f"{key}.weight"] = codes[e].contiguous()
                if scales is not None:
                    out[f"{key}.scale"] = scales[e].contiguous()
    return out


def write_checkpoint(
    model: Model,
    folder: Path,
    *,
    plain: torch.dtype = torch.bfloat16,
    fp4: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write ``config.json``, shards of at most ``shard_bytes`` and their index; return the bytes.

    Raises ValueError for a single tensor larger than a shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    total = 0
    for name, tensor in deepseek_tensors(model, plain=plain, fp4=fp4).items():
        size = tensor.numel() * tensor.element_size()
        if size > shard_bytes:
            raise ValueError(f"{name} takes {size} bytes; a shard may hold {shard_bytes}")
        if size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= size
        total += size
    index: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        index.update(dict.fromkeys(shard, file))
    config = model.shape.to_config()
    if not fp4:
        del config["expert_dtype"]
        config["torch_dtype"] = str(plain).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1) + "\n"
    )
    return total


def read_checkpoint(folder: Path, *, compute: torch.dtype = torch.float32) -> Model:
    """Load a checkpoint written by :func:`write_checkpoint` into a training model.

    Expert weights come back as the exact fp4 values.  Raises KeyError for a missing tensor and
    ValueError for one that the model does not have.
    """
    config = json.loads((folder / "config.json").read_text())
    model = Model(Shape.from_config(config), compute=compute)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        with safe_open(folder / file, framework="pt") as f:
            tensors.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118

    def take(key: str) -> Tensor:
        weight = tensors.pop(f"{key}.weight")
        scale = tensors.pop(f"{key}.scale", None)
        return weight.float() if scale is None else unpack_fp4(weight, scale)

    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        if ".experts_w" not in name:
            state[name] = tensors.pop(name)
            continue
        stem, leaf = name.rsplit(".experts_", 1)
        experts = range(model.shape.n_routed_experts)
        if leaf == "w13":
            rows = [
                torch.cat((take(f"{stem}.experts.{e}.w1"), take(f"{stem}.experts.{e}.w3")))
                for e in experts
            ]
        else:
            rows = [take(f"{stem}.experts.{e}.w2") for e in experts]
        state[name] = torch.stack(rows)
    if tensors:
        raise ValueError(f"unknown tensors in {folder}: {sorted(tensors)[:5]}")
    model.load_state_dict(state)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="state.pt of a training run")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    state = torch.load(args.state, map_location="cpu", weights_only=False)
    model = Model(Shape.from_config(state["config"]))
    model.load_state_dict(state["model"])
    print(f"{write_checkpoint(model, args.out) / 1e6:.2f} MB in {args.out}")


if __name__ == "__main__":
    main()
