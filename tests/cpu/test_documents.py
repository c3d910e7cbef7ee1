"""What the documents name is there: methods of the contract, tests, files, links, modules."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paceline.draft import DraftProposer

ROOT = Path(__file__).parents[2]
PROPOSER = ROOT / "docs" / "proposer.md"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
SOURCE = ROOT / "src" / "paceline"

PAGES = [
    ROOT / "README.md",
    ARCHITECTURE,
    ROOT / "CHANGELOG.md",
    SOURCE / "bundled" / "MODEL_CARD.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "recipes").glob("*.md")),
]

PAGE_TYPES = [
    "BufferArena",
    "DeepseekV4MtpHead",
    "DeepseekV4MtpModule",
    "DeepseekV4MtpProposerState",
    "DenseWeight",
    "DevicePtr",
    "DraftBinding",
    "DraftProposer",
    "DraftRunner",
    "Error",
    "ForwardContext",
    "GpuBackend",
    "ModelConfig",
    "ModelLevers",
    "ProposerState",
    "Result",
    "--dflash",
    "--max-seq-len",
    "EP_CMD_MTP_PROPOSE",
    "body",
    "kv_cache",
    "mtp_ep_propose_enabled",
    "mtp_kv_exact",
    "mtp_prefill_hidden",
]
"""Types, settings and other names of the Rust page."""

PAGE_METHODS = {
    "new": "module embed_tokens lm_head config gpu mtp_vocab_size max_seq_len",
    "alloc_state_inner": "gpu",
    "alloc_state": "gpu",
    "propose": "last_token target_hidden position num_drafts state ctx stream draft_embed_target "
    "grammar_bitmask target_hidden_stack",
    "after_verify": "num_accepted state stream",
    "free_state": "gpu state",
    "alloc_state_for": "gpu budget_tokens",
    "block_gamma": "",
    "prefill_hidden_rows": "max_seq_len",
    "needs_comm": "",
    "prefill_uses_shared_buffers": "",
    "drafter_rows": "state",
    "last_pair_key": "state",
    "take_drafter_kv": "state",
    "install_drafter_kv": "state blocks rows last_pair_key",
    "free_drafter_kv": "blocks",
    "catchup_drafter": "tokens hiddens row_base pos_base state ctx stream",
    "propose_batch": "last_tokens target_hiddens positions num_drafts states ctx stream out_conf",
    "propose_batch_max": "buffers config",
    "catchup_batch": "tokens hiddens first_pos states ctx stream",
    "prefill_drafter": "prompt_tokens hiddens state ctx stream",
    "read_deferred_draft_token": "gpu",
    "circuit_draft": "config levers",
    "set_circuit_draft": "runner",
}
"""Methods of the Rust page and their parameters."""

NAMESPACES = [
    "paceline",
    "paceline.cache.drafter",
    "paceline.config",
    "paceline.draft",
    "paceline.draft.proposer",
    "paceline.engine.ranks",
    "paceline.engine.sequence",
    "paceline.models.deepseek_v4.mtp",
    "paceline.models.step",
    "paceline.ops.dense",
    "paceline.types",
]


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def section(page: Path, title: str) -> str:
    parts = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert title in titles, f"{page.name} has no section {title!r}"
    return titles[title]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the tables' rows, headings and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not set("".join(cells)) <= set("-: "):
            yield cells


def coded(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


# The contract


def method_sections() -> dict[str, tuple[str, str]]:
    parts = re.split(r"^### `(\w+)([^`]*)`$", section(PROPOSER, "Method by method"), flags=re.M)
    assert parts[0].strip()
    names, arguments, bodies = parts[1::3], parts[2::3], parts[3::3]
    assert len(set(names)) == len(names)
    return {n: (a, b) for n, a, b in zip(names, arguments, bodies, strict=True)}


def test_every_method_of_the_contract_has_its_section_and_nothing_else_has() -> None:
    assert set(method_sections()) == public(DraftProposer)


def test_sections_state_the_arguments_there_are() -> None:
    for name, (arguments, _) in method_sections().items():
        member = getattr(DraftProposer, name)
        if callable(member):
            there = [p for p in inspect.signature(member).parameters if p != "self"]
            assert arguments == f"({', '.join(there)})", name
        else:
            assert not arguments, name


def test_sections_say_when_what_by_default_and_what_shows_it() -> None:
    for name, (_, body) in method_sections().items():
        assert re.search(r"\*\*(Called|Read)\*\*", body), name
        for part in ("Declines", "V4 head", "Shown by"):
            assert f"**{part}**" in body, f"{name}: {part}"
        assert named_tests(body.split("**Shown by**")[1]), name


def asked_by_the_engine() -> set[str]:
    """Names of the contract that the engine's side reads off a proposer."""
    found = set()
    trees: list[ast.AST] = []
    for module in ("drafting", "engine", "ranks"):
        read = ast.parse((SOURCE / "engine" / f"{module}.py").read_text(encoding="utf-8"))
        # Of the ranks only the choice is the engine's; the rest makes the same calls elsewhere.
        of_ranks = [n for n in read.body if isinstance(n, ast.FunctionDef) and n.name == "lead"]
        trees += of_ranks if module == "ranks" else [read]
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                of = node.value
                holder = of.id if isinstance(of, ast.Name) else getattr(of, "attr", "")
                if holder == "proposer":
                    found.add(node.attr)
    return found & public(DraftProposer)


def test_the_timeline_has_every_call_of_the_engine_and_no_other() -> None:
    timeline = section(PROPOSER, "When what is called")
    named = {re.match(r"\w*", code)[0] for code in coded(timeline)}  # type: ignore[index]
    assert named & public(DraftProposer) == asked_by_the_engine()


def test_every_method_is_asked_for_somewhere() -> None:
    # The budget is always known, so a state without one is never asked for.
    assert public(DraftProposer) - asked_by_the_engine() == {"alloc_state"}


# The table from the Rust page


def names_here() -> dict[str, str | None]:
    table: dict[str, str | None] = {}
    for rust, here, _ in rows(section(PROPOSER, "Names of the Rust page")):
        if rust == "Rust":
            continue
        (name,) = coded(rust)
        assert name not in table, f"{name} stands twice"
        table[name] = None if here == "None" else coded(here)[0]
    return table


def is_there(name: str) -> bool:
    """Whether Class, Class.member or Class.method(parameter) exists."""
    path, _, argument = name.removesuffix(")").partition("(")
    first, *rest = path.split(".")
    found: Any = None
    for module in NAMESPACES:
        found = getattr(import_module(module), first, None)
        if found is not None:
            break
    for part in rest:
        if part in getattr(found, "__dataclass_fields__", {}):
            return not argument
        found = getattr(found, part, None) if hasattr(found, part) else _ABSENT
    if found is None and not rest:
        return False
    if found is _ABSENT:
        return False
    return not argument or argument in inspect.signature(found).parameters


_ABSENT = object()


def test_every_name_of_the_page_is_there_or_said_to_be_missing() -> None:
    table = names_here()
    page = list(PAGE_TYPES)
    for method, parameters in PAGE_METHODS.items():
        page += [method, *(f"{method}({name})" for name in parameters.split())]
    assert set(table) == set(page)
    assert [here for here in table.values() if here is not None and not is_there(here)] == []


def test_every_method_of_the_page_keeps_its_name() -> None:
    table = names_here()
    of_the_head = ("new", "alloc_state_inner")
    for name in PAGE_METHODS:
        owner = "DeepseekV4MtpHead" if name in of_the_head else "DraftProposer"
        assert table[name] == f"{owner}.{name}"


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("DraftProposer", True),
        ("DraftProposer.block_gamma", True),
        ("DraftProposer.propose(state)", True),
        ("DraftRequest.position", True),
        ("DraftProposer.propose(stream)", False),
        ("DraftProposer.gone", False),
        ("DraftRequest.gone", False),
        ("Gone", False),
    ],
)
def test_a_name_that_is_not_there_is_seen(name: str, there: bool) -> None:
    assert is_there(name) is there


# Tests, links and files


def named_tests(text: str) -> list[tuple[str, str, str]]:
    """(folder or "", file, function or "") of every test a text names."""
    found = re.findall(r"(?:tests/)?((?:cpu|gpu)/)?(test_\w+\.py)(?:::(test_\w+))?", text)
    return [(folder.strip("/"), file, function) for folder, file, function in found]


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = []
    for folder, file, function in named_tests(text):
        path = ROOT / "tests" / (folder or "cpu") / file
        if not path.is_file() or (function and function not in functions(path)):
            missing.append(f"{folder}/{file}::{function}")
    assert missing == []
    # A name without its file could not be found again.
    files = {file.removesuffix(".py") for _, file, _ in named_tests(text)}
    bare = {name for name in re.findall(r"(?<!::)\btest_\w+\b", text) if name not in files}
    assert bare == set()


def anchors(page: Path) -> set[str]:
    """What GitHub makes of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = []
    for code in coded(page.read_text(encoding="utf-8")):
        path = code.split("::")[0]
        whole = r"(docs|src|tests|examples|scripts|benchmarks|recipes)/[\w./-]+"
        if re.fullmatch(whole, path) and not (ROOT / path).exists():
            missing.append(code)
    assert missing == []


# The map


def mapped() -> dict[str, set[str]]:
    """Words of the code map, by the line's first one."""
    block = re.search(r"```\n(.*?)```", section(ARCHITECTURE, "Code map"), re.DOTALL)
    assert block is not None
    lines: dict[str, set[str]] = {}
    heads: list[str] = []
    for line in block[1].splitlines():
        if not line.startswith(" "):
            head, _, line = line.partition("  ")
            heads = [name.strip() for name in head.split(",")]
        for name in heads:
            lines.setdefault(name.rstrip("/"), set()).update(re.findall(r"[\w]+", line))
    return lines


def test_the_map_has_every_part_of_the_package() -> None:
    lines = mapped()
    parts = {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"__pycache__"}
    parts |= {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert set(lines) == parts


@pytest.mark.parametrize("package", ["engine", "draft", "cache", "sampling", "text"])
def test_the_map_names_every_module(package: str) -> None:
    words = mapped()[package]
    modules = {path.stem for path in (SOURCE / package).glob("*.py")} - {"__init__"}
    # A part of a module, as verify_device is one of verify, goes without saying.
    assert {name for name in modules if not {name, name.split("_")[0]} & words} == set()


def test_every_invariant_says_what_enforces_it() -> None:
    table = list(rows(section(ARCHITECTURE, "Invariants")))
    assert table[0] == ["invariant", "enforced by"]
    assert len(table) > 20
    for invariant, by in table[1:]:
        assert named_tests(by) or "make check" in by, invariant
