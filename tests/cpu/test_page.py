"""The page at `/`, used as a person uses it: in a browser, with a mouse, with keys alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser_kit import Browser, Page, chromium, running_browser
from server_kit import Live, running, until
from starlette.applications import Starlette
from starlette.testclient import TestClient

from paceline import LLM
from paceline.server import page as pages
from paceline.server.errors import overloaded
from paceline.server.page import FILES, page_routes

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src" / "paceline" / "server" / "static"
PROMPT = "class Stack:\n    def push(self, item):\n"
IDLE = "!document.getElementById('run').disabled"
ORIGINS = ("accepted", "corrected", "bonus", "target", "forced")


# The files, without a browser


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = Starlette(routes=page_routes())
    with TestClient(app) as client:
        yield client


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/{name}"


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_served_under_a_strict_policy(client: TestClient, name: str) -> None:
    answer = client.get(path_of(name))
    assert answer.status_code == 200
    assert answer.content == (STATIC / name).read_bytes()
    assert answer.headers["content-type"] == FILES[name]
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    for kind in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy[kind] == "'self'"
    for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert policy[kind] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("name", FILES)
def test_what_a_browser_has_is_not_sent_again(client: TestClient, name: str) -> None:
    path = path_of(name)
    first = client.get(path)
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = client.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
    assert client.get(path, headers={"if-none-match": '"other"'}).content == first.content
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(first.content))


def test_a_change_of_a_file_changes_its_tag() -> None:
    tags = []
    for body in (b"a", b"b"):
        app = Starlette(routes=[pages._route("page.css", "text/css", body)])
        tags.append(TestClient(app).get("/page.css").headers["etag"])
    assert tags[0] != tags[1]


@pytest.mark.parametrize(
    "path",
    [
        "/index.html",
        "/page.py",
        "/static/page.js",
        "/page.js/",
        "//page.js",
        "/../page.py",
        "/%2e%2e/page.py",
        "/../server/static/page.js",
        "/..%2fpage.py",
        "/..%5cpage.py",
        "/page.js%00",
        "/PAGE.JS",
        "/.",
        "/__pycache__",
        "/favicon.ico",
    ],
)
def test_other_paths_are_not_there(live: Live, path: str) -> None:
    # As it is: other clients would tidy it.
    connection = HTTPConnection("127.0.0.1", live.port, timeout=20)
    with closing(connection):
        connection.request("GET", path)
        assert connection.getresponse().status == 404


def test_it_takes_no_other_method(live: Live) -> None:
    for method in ("POST", "PUT", "DELETE"):
        answer = httpx.request(method, live.url)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_the_files_are_those_there_are_and_name_no_others() -> None:
    assert {path.name for path in STATIC.iterdir()} == set(FILES)
    texts = {name: (STATIC / name).read_text(encoding="utf-8") for name in FILES}
    page = texts["index.html"]
    links = set(re.findall(r'(?:src|href)="([^"#][^"]*)"', page))
    assert links == {*FILES} - {"index.html", "api.js", "steps.js"} | {"openapi.json", "metrics"}
    imports = re.findall(r'from\s+"\./([^"]+)"', texts["page.js"])
    assert set(imports) == {"api.js", "steps.js"}
    for name, text in texts.items():
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(
            r"https?:|//[\w.]+/|url\(|@import|data:", text.replace("^data: ", "")
        ), name
    # What the policy would block, and what could make text into markup.
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>|javascript:", page)
    for name in ("page.js", "api.js", "steps.js", "theme.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", texts[name]
        )


def test_an_installed_package_has_the_files(tmp_path: Path) -> None:
    if find_spec("setuptools") is None:
        pytest.skip("building a wheel needs setuptools")
    script = "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))"
    copy = tmp_path / "source"
    package = copy / "src" / "paceline"
    for path in (ROOT / "src" / "paceline").rglob("*"):
        if path.suffix in (".py", ".html", ".css", ".js", ".svg", ".typed"):
            target = package / path.relative_to(ROOT / "src" / "paceline")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        cwd=copy,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"paceline/server/static/{name}" for name in FILES} <= names


# Colours


def colours() -> dict[str, tuple[str, str]]:
    """Each colour of the sheet, light and dark."""
    sheet = (STATIC / "page.css").read_text(encoding="utf-8")
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", sheet)
    return {name: (light, dark) for name, light, dark in found}


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


TINTS = [*(f"accepted-{at}" for at in range(1, 9)), "corrected", "bonus", "forced"]
TEXTS = [
    *(("ink", ground) for ground in ("paper", "sheet", "faint", *TINTS)),
    *(("soft", ground) for ground in ("paper", "sheet", "faint")),
    ("error", "paper"),
    ("on-fill", "fill"),
    ("paper", "soft"),
]
MARKS = [
    *(("accepted-line", f"accepted-{at}") for at in range(1, 9)),
    *((f"{name}-line", name) for name in ("corrected", "bonus", "forced")),
    ("edge", "paper"),
    ("edge", "sheet"),
    ("focus", "paper"),
    ("focus", "sheet"),
    ("accepted-line", "faint"),
]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_every_text_stands_out_from_its_ground(mode: int) -> None:
    known = colours()
    for text, ground in TEXTS:
        ratio = contrast(known[text][mode], known[ground][mode])
        assert ratio >= 4.5, f"{text} on {ground}: {ratio:.2f}"
    for mark, ground in MARKS:
        least = 1.5 if mark == "accepted-line" and ground != "faint" else 3.0
        ratio = contrast(known[mark][mode], known[ground][mode])
        assert ratio >= least, f"{mark} on {ground}: {ratio:.2f}"
    # Deeper and deeper.
    ramp = [luminance(known[f"accepted-{at}"][mode]) for at in range(1, 9)]
    assert ramp == sorted(ramp, reverse=mode == 0)
    assert len(set(ramp)) == 8


# In a browser


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=2048, max_num_seqs=2, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[Live]:
    with running(llm, pages=page_routes()) as live:
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.skip("no chromium, chromium-browser or google-chrome is on the PATH")
    with running_browser(path) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, live: Live) -> Iterator[Page]:
    page = browser.page()
    opened(page, live)
    yield page
    page.close()
    live.wait_idle()


def opened(page: Page, live: Live) -> None:
    page.go(live.url + "/")
    page.wait("document.getElementById('served').textContent")


def ask(page: Page, prompt: str = PROMPT, *, compare: bool = False, **fields: Any) -> None:
    """Fill the form in, run, and wait for the end."""
    page.fill("#prompt", prompt)
    for name, value in fields.items():
        if name == "drafts":
            slide(page, value)
        else:
            page.fill(f"#{name}", str(value))
    if page.run("document.getElementById('compare').checked") != compare:
        page.click("#compare")
    page.click("#run")
    page.wait(IDLE, 60)


def slide(page: Page, drafts: int) -> None:
    page.run("document.getElementById('drafts').focus()")
    page.press("Home")
    for _ in range(drafts):
        page.press("ArrowRight")


def answered(live: Live, **more: Any) -> dict[str, Any]:
    """What the API says itself."""
    body = {"prompt": PROMPT, "temperature": 0, "seed": 1, "return_pieces": True,
            "return_token_ids": True, **more}  # fmt: skip
    answer: dict[str, Any] = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json()
    assert "error" not in answer
    return answer


def tokens(page: Page) -> list[tuple[str, str, int | None]]:
    """Text, origin and position of each token, by its class."""
    found = page.run(
        "[...document.querySelectorAll('#text .t')].map((t) => [t.textContent, t.className])"
    )
    listed: list[tuple[str, str, int | None]] = []
    for text, names in found:
        classes = names.split()
        (origin,) = set(classes) & set(ORIGINS)
        places = [int(name[1:]) for name in classes if re.fullmatch(r"a\d", name)]
        listed.append((text, origin, places[0] if places else None))
    return listed


def table(page: Page) -> list[list[str]]:
    return page.run(  # type: ignore[no-any-return]
        "[...document.querySelectorAll('#positions tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )


def counted(page: Page) -> dict[str, int]:
    return {origin: int(page.text(f"#count-{origin}")) for origin in ORIGINS}


def percent(part: int, whole: int) -> str:
    return f"{int(100 * part / whole + 0.5)} %" if whole else "–"


def test_a_run_shows_what_the_api_gives(page: Page, live: Live) -> None:
    ask(page, tokens=80, drafts=4, compare=True)
    answer = answered(live, max_tokens=80, num_drafts=4)
    choice, usage = answer["choices"][0], answer["usage"]["speculation"]
    assert page.text("#text") == choice["text"]
    assert page.text("#echo") == PROMPT
    # Origin and place of each token, by the look of it.
    assert tokens(page) == [
        (piece["text"], piece["origin"], piece["position"]) for piece in choice["pieces"]
    ]
    counts = Counter(piece["origin"] for piece in choice["pieces"])
    assert counted(page) == {origin: counts[origin] for origin in ORIGINS}
    assert counts["accepted"] > 10
    assert counts["corrected"] > 1
    assert counts["bonus"] > 1
    # What drafting did.
    assert page.text("#accepted") == str(usage["accepted"])
    assert page.text("#accepted-of") == f"of {usage['drafted']} drafts"
    assert page.text("#length") == f"{usage['mean_acceptance_length']:.2f}"
    steps = counts["corrected"] + counts["bonus"] + counts["target"]
    assert page.text("#per-step") == f"{80 / steps:.2f}"
    assert page.text("#per-step-of") == f"80 tokens in {steps} steps"
    lists = zip(usage["drafted_at"], usage["accepted_at"], usage["reached_at"], strict=True)
    assert table(page) == [
        [
            *map(str, (at, drafted, accepted)),
            percent(accepted, drafted),
            percent(accepted, reached),
        ]
        for at, (drafted, accepted, reached) in enumerate(lists, 1)
    ]
    # Beside a run without.
    rates = [int(page.text(f"#{name}-rate").replace(",", "")) for name in ("on", "off")]
    assert min(rates) > 0
    ratio = float(re.search(r"(\d+\.\d\d) times", page.text("#verdict"))[1])  # type: ignore[index]
    assert ratio == pytest.approx(rates[0] / rates[1], rel=0.02)
    says = (
        "pay here" if ratio > 1.05 else "are slower here" if ratio < 0.95 else "little difference"
    )
    assert says in page.text("#verdict")
    assert page.text("#same") == "The two texts are the same, token for token (80 tokens)."
    assert page.text("#timed").startswith(("Median of ", "One run each"))
    # It is said once and whole, not token by token.
    status = page.text("#status")
    assert status.startswith(f"Done: 80 tokens in {steps} steps. {counts['accepted']} are accepted")
    assert "token for token" in status
    assert page.run("document.querySelector('#status').getAttribute('role')") == "status"
    assert page.run("!document.querySelector('#answer').closest('[aria-live]')")
    # Nothing came from elsewhere, and nothing went wrong.
    assert all(url.startswith(f"{live.url}/") for url in page.asked)
    assert sum(url.endswith("/v1/completions") for url in page.asked) >= 3
    assert page.problems == []


def test_without_drafts_all_tokens_are_the_models(page: Page, live: Live) -> None:
    ask(page, tokens=30, drafts=0)
    assert {origin for _, origin, _ in tokens(page)} == {"target"}
    assert page.text("#text") == answered(live, max_tokens=30)["choices"][0]["text"]
    assert counted(page)["target"] == len(tokens(page))
    assert page.run("document.getElementById('compare').disabled") is True
    assert page.text("#on-name") == "Drafts off"
    assert page.text("#off-rate") == "–"
    # What there is nothing to say of is not there, or says why.
    visible = "(id) => document.getElementById(id).getClientRects().length > 0"
    there = {
        name: page.run(f"({visible})('{name}')")
        for name in ("compare-note", "no-positions", "positions-table", "off-row")
    }
    assert there == {
        "compare-note": True, "no-positions": True, "positions-table": False, "off-row": False,
    }  # fmt: skip
    assert "nothing to compare" in page.text("#compare-note")
    assert (page.text("#length"), page.text("#length-of")) == ("–", "no step had drafts")
    assert page.text("#timed").startswith("The run that is shown")
    assert page.text("#accepted-of") == "of 0 drafts"


def test_automatic_drafts(page: Page, live: Live) -> None:
    page.click("#auto")
    assert page.text("#drafts-shown") == "auto"
    assert page.run("document.getElementById('drafts').disabled") is True
    ask(page, tokens=60)
    answer = answered(live, max_tokens=60, num_drafts=0)
    assert page.text("#text") == answer["choices"][0]["text"]
    assert page.text("#on-name") == "Automatic drafts"
    page.click("#auto")
    assert page.text("#drafts-shown") == "3"


@pytest.mark.parametrize("drafts", [1, 2, 3, 8])
def test_steps_are_told_apart_by_origins(page: Page, live: Live, drafts: int) -> None:
    answer = answered(live, max_tokens=100, num_drafts=drafts)
    pieces = json.dumps(answer["choices"][0]["pieces"])
    told = page.run(
        f"""import("/steps.js").then(({{ Steps }}) => {{
          const steps = new Steps();
          for (const piece of {pieces}) steps.add(piece);
          return {{ ...steps.summary(), steps: steps.list.length }};
        }})"""
    )
    usage = answer["usage"]["speculation"]
    assert told["accepted"] == usage["accepted"]
    assert told["acceptedAt"] == usage["accepted_at"][: len(told["acceptedAt"])]
    assert told["reachedAt"] == usage["reached_at"][: len(told["reachedAt"])]
    assert told["draftSteps"] == answer["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert told["steps"] == told["draftSteps"] + sum(
        piece["origin"] == "target" for piece in answer["choices"][0]["pieces"]
    )


def test_a_step_whose_last_token_has_no_text_ends_all_the_same(page: Page) -> None:
    pieces = [("accepted", 1), ("accepted", 2), ("accepted", 1), ("corrected", None)]
    pieces += [("forced", 1), ("accepted", 2), ("forced", None), ("target", None)]
    listed = json.dumps([{"text": "a", "origin": o, "position": p} for o, p in pieces])
    got = page.run(
        f"""import("/steps.js").then(({{ Steps, firstDifference }}) => {{
          const steps = new Steps();
          const at = {listed}.map((piece) => steps.add(piece));
          const lists = [[[1, 2], [1, 2]], [[1, 2], [1, 3]], [[1], [1, 2]], [[1, 2], []]];
          return [at, lists.map(([one, other]) => firstDifference(one, other))];
        }})"""
    )
    assert got == [[0, 0, 1, 1, 2, 2, 2, 3], [None, 1, 1, 0]]


def test_a_text_that_differs_is_not_called_the_same(page: Page, live: Live) -> None:
    # What comes without drafts is changed on its way to the page.
    page.run(
        """(() => {
          const whole = window.fetch;
          window.fetch = (path, options) => {
            if (options?.body?.includes('"num_drafts":0')) {
              const body = JSON.parse(options.body);
              options = { ...options, body: JSON.stringify({ ...body, prompt: "import re" }) };
            }
            return whole(path, options);
          };
        })()"""
    )
    ask(page, tokens=20, compare=True)
    one = answered(live, max_tokens=20)["choices"][0]["token_ids"]
    other = answered(live, max_tokens=20, prompt="import re")["choices"][0]["token_ids"]
    first = next(at for at in range(20) if one[at] != other[at])
    assert page.text("#same").startswith(f"The two texts differ from token {first + 1} on")


def test_chance_falls_the_same_with_drafts_and_without(page: Page, live: Live) -> None:
    ask(page, tokens=40, temperature=0.9, seed=5, compare=True)
    answer = answered(live, max_tokens=40, temperature=0.9, seed=5, num_drafts=0)
    assert page.text("#text") == answer["choices"][0]["text"]
    assert "the same, token for token" in page.text("#same")


ABOUT = [
    ("DeepseekV4MtpHead, 2 drafts a step", "DeepseekV4MtpHead", 2),
    ("NgramProposer, as many drafts as pay", "NgramProposer", "auto"),
    ("none", "none", 0),
    (None, None, None),
]


def test_what_is_served_is_found_out(page: Page) -> None:
    for shown, drafter, drafts in ABOUT:
        line = "" if shown is None else f'paceline_info{{device="cpu",drafter="{shown}"}} 1.0'
        models = {"data": [{"id": "m", "max_model_len": 99}]}
        found = page.run(
            f"""(async () => {{
              const {{ about }} = await import("/api.js");
              const whole = window.fetch;
              window.fetch = async (path) => new Response(
                path === "metrics" ? {json.dumps(line)} : {json.dumps(json.dumps(models))},
                {{ status: path === "metrics" && !{json.dumps(line)} ? 404 : 200 }},
              );
              try {{ return await about(""); }} finally {{ window.fetch = whole; }}
            }})()"""
        )
        assert found == {"name": "m", "context": 99, "drafter": drafter, "drafts": drafts}


def test_the_command_serves_the_page(browser: Browser) -> None:
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--no-request-log"]
    command += ["--num-drafts", "0", "--max-seq-len", "256", "--num-threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
            assert url is not None
            page = browser.page()
            page.go(url[0] + "/")
            page.wait("document.getElementById('served').textContent")
            shown = "paceline-bundled, 256 tokens of context, no drafter"
            assert page.text("#served") == shown
            assert page.value("#drafts") == "0"
            # What the server cannot do is told beside the field.
            ask(page, tokens=5, drafts=3)
            assert "has no proposer; allowed is 0" in page.text("#drafts-error")
            ask(page, tokens=5, drafts=0)
            assert page.text("#per-step-of") == "5 tokens in 5 steps"
            page.close()
        finally:
            process.terminate()


def test_a_schema_forces_tokens_and_gives_json(page: Page) -> None:
    page.click("#schema-box summary")
    page.click("#schema-example")
    ask(page, "A file: ", tokens=120)
    value = json.loads(page.text("#text"))
    assert set(value) == {"name", "size", "kind", "executable"}
    forced = [text for text, origin, _ in tokens(page) if origin == "forced"]
    assert len(forced) == counted(page)["forced"] > 0
    # Those of them that were drafted are what the two counts of accepted drafts differ by.
    drafted = int(re.search(r"; (\d+) of them drafted", page.text("#forced-drafted"))[1])  # type: ignore[index]
    assert drafted > 0
    accepted = int(page.text("#accepted"))
    assert accepted == counted(page)["accepted"] + drafted
    assert page.text("#accepted-of").endswith(f" drafts; {drafted} of the accepted were forced")
    assert f"{accepted} are accepted drafts, {drafted} of them forced." in page.text("#status")
    assert page.problems == []


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ('{"type": "object"', "This is no JSON"),
        ("[1]", "A schema is a JSON object"),
        ('{"type": "objet"}', "Invalid type: objet"),
    ],
)
def test_a_schema_that_is_wrong_is_told_beside_it(page: Page, schema: str, says: str) -> None:
    page.click("#schema-box summary")
    ask(page, schema=schema)
    assert says in page.text("#schema-error")
    assert page.run("document.getElementById('schema-error').hidden") is False
    assert page.run("document.activeElement.id") == "schema"
    assert page.run("document.activeElement.getAttribute('aria-invalid')") == "true"
    assert page.text("#problem") == ""
    page.click("#schema-clear")
    assert page.run("document.getElementById('schema').hasAttribute('aria-invalid')") is False
    ask(page, tokens=5)
    assert len(tokens(page)) > 0


WRONG = [
    ("tokens", "0", "Tokens must be a whole number, 1 to 2048; “0” is not."),
    ("tokens", "1.5", "Tokens must be a whole number"),
    ("tokens", "", "Tokens must be a whole number"),
    ("temperature", "-1", "Temperature must be a number such as 0.5, 0 or more"),
    ("temperature", "0,5", "Temperature must be a number such as 0.5, 0 or more; “0,5” is not."),
    ("temperature", "1e999", "Temperature must be a number"),
    ("seed", "-1", "Seed must be a whole number, 0 to 9007199254740991"),
    ("seed", "9007199254740993", "Seed must be a whole number, 0 to 9007199254740991"),
    ("prompt", "", "The prompt is empty."),
    ("prompt", "word " * 3000, "model's context is 2048"),
]


def test_a_field_that_is_wrong_is_told_beside_it(page: Page) -> None:
    ask(page, tokens=5)
    assert page.text("#status").startswith("Done: 5 tokens")
    for field, given, says in WRONG:
        right = page.value(f"#{field}")
        page.fill(f"#{field}", given)
        page.click("#run")
        page.wait(IDLE)
        page.wait(f"!document.getElementById('{field}-error').hidden")
        assert says in page.text(f"#{field}-error")
        assert page.text("#status") == ""
        assert page.run("document.activeElement.id") == field
        shown = "[...document.querySelectorAll('.error:not([hidden])')].map((e) => e.textContent)"
        assert [text for text in page.run(shown) if text] == [page.text(f"#{field}-error")]
        page.write(right)


@pytest.mark.parametrize("how", ["button", "key"])
def test_a_run_is_stopped(
    page: Page, live: Live, llm: LLM, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    whole = llm.engine.step

    num_steps = 0

    def slowly() -> Any:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.02)
        return whole()

    monkeypatch.setattr(llm.engine, "step", slowly)
    page.fill("#prompt", PROMPT)
    page.fill("#tokens", "1500")
    page.press("Control+Enter")
    page.wait("document.querySelectorAll('#text .t').length > 3")
    assert page.run("document.getElementById('answer').getAttribute('aria-busy')") == "true"
    # Frames no longer come, so that tokens are there which were not drawn yet.
    drawn = page.run(
        "(() => { window.requestAnimationFrame = () => 1;"
        " return document.querySelectorAll('#text .t').length; })()"
    )
    enough = num_steps + 15
    until(lambda: num_steps > enough)
    if how == "button":
        page.click("#stop")
    else:
        page.press("Escape")
    page.wait(IDLE)
    live.wait_idle()
    assert page.text("#verdict") == "Stopped."
    assert page.text("#status") == f"Stopped after {len(tokens(page))} tokens."
    assert 3 <= drawn < len(tokens(page)) < 1500
    until(lambda: json.loads(live.log.getvalue().splitlines()[-1])["outcome"] == "cancelled")
    assert page.problems == []
    # And it runs again.
    monkeypatch.undo()
    ask(page, tokens=5)
    assert page.text("#per-step-of").startswith("5 tokens")


def test_it_is_used_with_keys_alone(page: Page, live: Live) -> None:
    order = []
    for _ in range(40):
        page.press("Tab")
        name = page.run(
            "document.activeElement.id || document.activeElement.name"
            " || document.activeElement.textContent.trim()"
        )
        if name in order:
            break
        order.append(name)
        if name == "answer":
            break
        # What has the focus shows it, or its label does.
        assert page.run(
            """(() => {
              const at = document.activeElement;
              const shows = (one) => one && getComputedStyle(one).outlineStyle !== "none";
              return shows(at) || shows(at.nextElementSibling) || at.matches(".skip");
            })()"""
        ), name
    assert order == [
        "Skip to the answer", "theme", "prompt", "Script", "Class", "Test", "Prose", "JSON",
        "drafts", "auto", "tokens", "temperature", "seed", "JSON schema", "compare", "run",
        "answer",
    ]  # fmt: skip
    # Back to the number of drafts and on, with Shift: the run, then through its tokens.
    for _ in range(len(order) - 1 - order.index("drafts")):
        page.press("Shift+Tab")
    assert page.run("document.activeElement.id") == "drafts"
    page.press("ArrowRight")
    assert page.text("#drafts-shown") == "4"
    for _ in range(order.index("run") - order.index("drafts")):
        page.press("Tab")
    page.press("Enter")
    page.wait("document.getElementById('same').textContent")
    page.wait(IDLE)
    # Where the focus was, it still is: it followed to Stop and came back.
    assert page.run("document.activeElement.id") == "run"
    while page.run("document.activeElement.id") != "answer":
        page.press("Tab")
    first = tokens(page)[:3]
    for number in range(3):
        page.press("ArrowRight")
        assert page.text("#inspector code") == first[number][0].replace("\n", "↵")
        said = page.text("#inspector")
        if first[number][1] == "accepted":
            assert f"accepted draft, position {first[number][2]}" in said
    page.press("Tab")
    assert page.run("document.activeElement.id") == "step"
    page.press("Home")
    assert page.run("[...document.querySelectorAll('.t.later')].length") == len(tokens(page)) - 1
    assert "the model writes its first token" in page.text("#step-said")
    page.press("ArrowRight")
    assert page.text("#step-said").startswith("Step 2 of ")
    assert page.run("document.activeElement.getAttribute('aria-valuetext')").startswith("Step 2 of")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "play"
    page.press("Space")
    assert page.text("#play") == "Pause"
    page.wait("document.getElementById('step').value > 2")
    page.press("Space")
    assert page.text("#play") == "Replay"


def test_a_token_says_what_it_is(page: Page) -> None:
    ask(page, tokens=40)
    words = {
        "accepted": "accepted draft, position {}",
        "corrected": "in place of a refused draft",
        "bonus": "after drafts that were all accepted",
        "target": "in a step without drafts",
    }
    titles = page.run("[...document.querySelectorAll('#text .t')].map((token) => token.title)")
    for title, (_, origin, position) in zip(titles, tokens(page), strict=True):
        assert words[origin].format(position) in title
    number = next(at for at, token in enumerate(tokens(page)) if token[1] == "bonus")
    x, y = page.run(
        f"""(() => {{
          const token = document.querySelectorAll("#text .t")[{number}];
          token.scrollIntoView({{ block: "center" }});
          const box = token.getClientRects()[0];
          return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
    )
    page.move(x, y)
    page.wait("document.querySelector('#text .here')")
    assert "bonus" in page.text("#inspector")
    # Not by colour alone: the lines below differ in their form.
    forms = {
        origin: page.run(
            f"getComputedStyle(document.querySelector('.legend .{origin}')).textDecorationStyle"
            f" + getComputedStyle(document.querySelector('.legend .{origin}')).textDecorationLine"
        )
        for origin in ORIGINS
    }
    assert len(set(forms.values())) == len(ORIGINS)


def test_no_width_needs_scrolling_to_the_side(page: Page) -> None:
    page.click("#schema-box summary")
    for _ in range(2):
        # 640 is also a window of 1280 at twice the size.
        for width in (320, 400, 640, 768, 1000, 1130, 1600):
            page.resize(width, 640)
            assert page.run("document.documentElement.scrollWidth") <= width
            outside = page.run(
                f"""[...document.querySelectorAll("body *")].filter((one) => {{
                  const box = one.getBoundingClientRect();
                  return box.right > {width} + 0.5 && box.width > 1 && !one.closest("#answer");
                }}).map((one) => one.outerHTML.slice(0, 80))"""
            )
            assert outside == []
            # Nor does a line of the text that has no place to break.
            answer = "document.getElementById('answer')"
            assert page.run(f"{answer}.scrollWidth <= {answer}.clientWidth")
        ask(page, "x = " + "very_long_" * 20, tokens=60, drafts=8)


@pytest.mark.parametrize("width", [320, 360, 640, 1000, 1120, 1280])
def test_the_swatches_of_eight_drafts_keep_to_their_place(page: Page, width: int) -> None:
    slide(page, 8)
    page.resize(width, 900)
    over, widths, gap = page.run(
        """(() => {
          const ramp = document.getElementById("ramp");
          const [place, next] = document.querySelectorAll("#legend li");
          const right = Math.max(...[...ramp.children].map((s) => s.getBoundingClientRect().right));
          const box = next.getBoundingClientRect();
          const beside = box.top < place.getBoundingClientRect().bottom;
          return [
            right - place.getBoundingClientRect().right,
            [...ramp.children].map((s) => s.getBoundingClientRect().width - s.scrollWidth),
            beside ? box.left - right : 99,
          ];
        })()"""
    )
    assert over <= 0.5
    assert len(widths) == 8
    assert min(widths) > -1
    assert gap >= 8


MANY_BYTES = "text = '日本語のテキスト、中文文本"


def test_tokens_without_text_are_counted_and_seen(page: Page, live: Live) -> None:
    ask(page, MANY_BYTES, tokens=40, compare=False)
    answer = answered(live, prompt=MANY_BYTES, max_tokens=40, num_drafts=3)
    choice, usage = answer["choices"][0], answer["usage"]
    assert tokens(page) == [(p["text"], p["origin"], p["position"]) for p in choice["pieces"]]
    bare = [number for number, piece in enumerate(choice["pieces"]) if not piece["text"]]
    assert bare
    number = usage["completion_tokens"]
    steps = sum(piece["position"] is None for piece in choice["pieces"])
    steps += choice["pieces"][-1]["position"] is not None
    assert page.text("#per-step-of") == f"{number} tokens in {steps} steps"
    assert page.text("#per-step") == f"{number / steps:.2f}"
    assert page.text("#accepted") == str(usage["speculation"]["accepted"])
    assert counted(page)["accepted"] == usage["speculation"]["accepted"]
    assert sum(counted(page).values()) == number
    said = f"Done: {number} tokens in {steps} steps. {usage['speculation']['accepted']} are"
    assert page.text("#status").startswith(said)
    # Each has a mark, which is no text, and says so.
    look = page.run(
        """[...document.querySelectorAll("#text .t")].map((t) => [
          t.getBoundingClientRect().width > 0, t.title, getComputedStyle(t, "::before").content])"""
    )
    for at, (seen, title, before) in enumerate(look):
        assert seen or at not in bare
        assert ("no text of its own" in title) == (at in bare)
        assert ("·" in before) == (at in bare)
    page.run("document.getElementById('answer').focus()")
    page.press("ArrowRight")
    for _ in range(bare[0]):
        page.press("ArrowRight")
    assert page.text("#inspector").startswith("This is ")
    assert "no text of its own" in page.text("#inspector")
    page.run("document.getElementById('step').focus()")
    page.press("Home")
    assert page.text("#step-said").startswith(f"Step 1 of {steps}: ")


def test_an_answer_that_ends_at_the_context_says_so(page: Page) -> None:
    assert page.text("#limit") == "Prompt and answer together: at most 2,048 tokens."
    ask(page, tokens=5)
    assert page.text("#ended") == ""
    ask(page, "word " * 2000, tokens=200)
    said = re.fullmatch(
        r"The answer ended after (\d+) tokens?: with the prompt’s ([\d,]+) they fill the context.",
        page.text("#ended"),
    )
    assert said is not None
    assert int(said[1]) == len(tokens(page))
    assert int(said[1]) + int(said[2].replace(",", "")) in (2047, 2048)
    assert page.text("#ended") in page.text("#status")


def test_a_stream_that_fails_is_left(page: Page) -> None:
    got = page.run(
        """(async () => {
          const { complete } = await import("/api.js");
          const whole = window.fetch;
          const said = [];
          for (const data of ['{"error":{"message":"no"}}', "{"]) {
            let left = false;
            const body = new ReadableStream({
              start: (to) => to.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`)),
              cancel() { left = true; },
            });
            window.fetch = async () => new Response(body);
            try {
              for await (const _ of complete({}, { signal: new AbortController().signal }));
            } catch (error) {
              await new Promise((done) => setTimeout(done, 20));
              said.push([error.name, left]);
            }
          }
          window.fetch = whole;
          return said;
        })()"""
    )
    assert got == [["Error", True], ["SyntaxError", True]]


def test_the_pictures_are_of_this_tree(tmp_path: Path) -> None:
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "__init__.py").write_text("")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import take_screenshots as t, subprocess;"
        "start, env = t.python();"
        "subprocess.run([*start, '-c', 'import paceline; print(paceline.__file__)'], env=env)"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / "scripts")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert made.stdout.strip() == str(ROOT / "src" / "paceline" / "__init__.py"), made.stderr


def test_on_a_narrow_screen_a_run_brings_its_text_into_view(page: Page) -> None:
    page.prefer(reduced_motion="reduce")
    page.resize(390, 700)
    page.run("scrollTo(0, 0)")
    ask(page, tokens=20)
    box = "document.getElementById('answer').getBoundingClientRect()"
    assert page.run(f"{box}.bottom > 0 && {box}.top < innerHeight")


def ground(page: Page) -> str:
    return str(page.run("getComputedStyle(document.body).backgroundColor"))


def rgb(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})"


def test_light_and_dark(page: Page, live: Live) -> None:
    light, dark = map(rgb, colours()["paper"])
    page.prefer(color_scheme="light")
    assert ground(page) == light
    page.prefer(color_scheme="dark")
    assert ground(page) == dark
    page.click(".theme label:nth-of-type(2)")
    assert ground(page) == light
    opened(page, live)
    assert ground(page) == light
    assert page.run("document.querySelector('[name=theme]:checked').value") == "light"
    page.prefer(color_scheme="light")
    page.click(".theme label:nth-of-type(3)")
    assert ground(page) == dark
    page.click(".theme label:nth-of-type(1)")
    assert ground(page) == light


def test_nothing_moves_where_that_is_not_wanted(page: Page) -> None:
    seconds = "getComputedStyle(document.querySelector('.bar'), '::before').transitionDuration"
    page.prefer(reduced_motion="no-preference")
    assert page.run(seconds) != "0s"
    page.prefer(reduced_motion="reduce")
    assert page.run(seconds) == "0s"


CONTROLS = {
    *("button", "checkbox", "radio", "slider", "textbox", "link"),
    "DisclosureTriangle",
}


def test_a_screen_reader_is_told_of_everything(page: Page) -> None:
    page.click("#schema-box summary")
    ask(page, tokens=20)
    nodes = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in page.tree()
    ]
    controls = [node for node in nodes if node[0] in CONTROLS]
    assert {role for role, _ in controls} == CONTROLS
    assert [role for role, name in controls if not name] == []
    assert len(controls) >= 24
    roles = {role for role, _ in nodes}
    assert {"banner", "main", "contentinfo", "region", "status", "alert"} <= roles
    assert ("form", "Request") in nodes
    assert [name for role, name in nodes if role == "heading"] == [
        "A text, and the steps it took",
        "Where each token came from",
        "What the drafts earned",
    ]
    assert ("columnheader", "Accepted") in nodes
    assert ("rowheader", "1") in nodes
    assert page.run("document.documentElement.lang") == "en"
    assert page.run("document.title").startswith("Paceline")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_common_checker_finds_nothing(page: Page, scheme: str) -> None:
    found = find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("axe-core-python is not installed")
    script = (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    page.prefer(color_scheme=scheme, reduced_motion="reduce")
    page.click("#schema-box summary")
    ask(page, tokens=60, drafts=8)
    # The policy is the page's; a checker from outside is let in past it.
    page.run(f"{script}; 0")
    broken = page.run(
        """axe.run().then(({ violations }) => violations.map(
          ({ id, nodes }) => [id, nodes.slice(0, 3).map((node) => node.html)]))"""
    )
    assert broken == []


def test_a_server_with_a_key_is_asked_with_it(browser: Browser, llm: LLM) -> None:
    with running(llm, pages=page_routes(), api_keys=("right",)) as live:
        page = browser.page()
        opened(page, live)
        assert page.text("#served") == "This server wants an API key."
        assert page.run("document.getElementById('key').type") == "password"
        ask(page, tokens=5)
        assert page.text("#problem") == "The API key is missing or wrong."
        assert page.run("document.activeElement.id") == "key"
        page.write("wrong")
        page.press("Tab")
        page.wait("document.getElementById('key').getAttribute('aria-invalid') === 'true'")
        page.fill("#key", "right")
        page.press("Tab")
        page.wait("document.getElementById('served').textContent.includes('2,048 tokens')")
        ask(page, tokens=5)
        assert page.text("#problem") == ""
        assert page.text("#per-step-of").startswith("5 tokens")
        # Kept with this tab, and nowhere for longer.
        assert page.run("JSON.stringify({ ...sessionStorage })") == '{"api-key":"right"}'
        assert page.run("JSON.stringify({ ...localStorage })") == "{}"
        assert page.run("document.cookie") == ""
        assert not any("right" in url for url in page.asked)
        page.close()
        page = browser.page()
        opened(page, live)
        assert page.value("#key") == ""
        page.close()


def test_a_server_that_is_busy_or_gone_is_told_in_words(browser: Browser, llm: LLM) -> None:
    page = browser.page()
    with running(llm, pages=page_routes()) as live:
        opened(page, live)

        def full(_: int) -> None:
            raise overloaded(7)

        live.engine.check_room = full  # type: ignore[method-assign]
        ask(page)
        assert page.text("#problem") == "The server has too much to do. Try again in 7 s."
        assert page.run("document.getElementById('problem').getAttribute('role')") == "alert"
    ask(page)
    assert page.text("#problem") == "The server cannot be reached."
    page.close()
