// The page: reads the form, runs requests one after the other, and shows what came.

import { about, ApiError, complete } from "./api.js";
import { describe, describeStep, firstDifference, meanLength, MOST_DRAFTS, Steps, told }
  from "./steps.js";

const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 20 },
    size: { type: "integer", minimum: 0, maximum: 100000 },
    kind: { enum: ["text", "image", "archive"] },
    executable: { type: "boolean" },
  },
  required: ["name", "size", "kind", "executable"],
  additionalProperties: false,
};
const SCHEMA_TEXT = JSON.stringify(SCHEMA, null, 2);
const EXAMPLES = [
  ["Script", "import argparse\n\ndef main():\n    parser = argparse.ArgumentParser("],
  ["Class", 'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n'],
  ["Test", "import unittest\n\nclass TestShop(unittest.TestCase):\n    def setUp(self):\n"],
  ["Prose", "The with statement is used to"],
  ["JSON", "Return a file as JSON.\n", SCHEMA_TEXT],
];
const HINT = document.getElementById("inspector").textContent;
const REPLAY_MS = 220;
/** Ratios nearer to 1 than this are called equal; short runs tell no more. */
const CLOSE = 0.05;
/** Pairs of runs that are timed: as many as fit into this time, but one at least. */
const TIMED_MS = 3000;
const MOST_PAIRS = 5;

const byId = (id) => document.getElementById(id);
const form = byId("form");
const keyField = byId("key");
const answer = byId("answer");
const text = byId("text");
const stepSlider = byId("step");

/** What runs, or null. */
let running = null;
/** Pieces of the text that is shown, each with its element and its step. */
let shown = [];
let steps = new Steps();
let context = null;

// Numbers

const count = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fixed = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const plural = (number, word) => `${count.format(number)} ${word}${number === 1 ? "" : "s"}`;
const say = (id, words) => {
  byId(id).textContent = words;
};

// Appearance

for (const radio of document.querySelectorAll('[name="theme"]')) {
  radio.checked = radio.value === (document.documentElement.dataset.theme ?? "auto");
  radio.addEventListener("change", () => {
    if (radio.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = radio.value;
    try {
      localStorage.setItem("theme", radio.value);
    } catch {
      // Nothing may be stored here; the choice lasts as long as the page.
    }
  });
}

// The key: this tab's, and gone with it

function rememberKey(key) {
  try {
    if (key) sessionStorage.setItem("api-key", key);
    else sessionStorage.removeItem("api-key");
  } catch {
    // As above.
  }
}

function askForKey() {
  byId("keybox").hidden = false;
}

// What is served

async function introduce() {
  let found;
  try {
    found = await about(keyField.value);
  } catch (error) {
    if (error.status === 401) {
      askForKey();
      say("served", "This server wants an API key.");
      if (keyField.value) setError("key", error.message);
    } else {
      say("served", error.message);
    }
    return;
  }
  setError("key", "");
  context = found.context;
  say("limit", `Prompt and answer together: at most ${count.format(context)} tokens.`);
  byId("limit").hidden = false;
  const drafter = { null: "", none: ", no drafter" }[found.drafter] ?? `, drafts by ${found.drafter}`;
  say("served", `${found.name}, ${count.format(context)} tokens of context${drafter}`);
  if (found.drafts === "auto") byId("auto").checked = true;
  else if (found.drafts !== null) byId("drafts").value = String(found.drafts);
  showDrafts();
}

// The form

function drafts() {
  return byId("auto").checked ? "auto" : Number(byId("drafts").value);
}

function draftsName(number) {
  if (number === "auto") return "Automatic drafts";
  return number === 0 ? "Drafts off" : plural(number, "draft");
}

function showDrafts() {
  const number = drafts();
  byId("drafts").disabled = number === "auto";
  say("drafts-shown", number === "auto" ? "auto" : String(number));
  byId("compare").disabled = number === 0;
  byId("compare-note").hidden = number !== 0;
  // What is shown belongs to the run that made it.
  if (running || shown.length) return;
  nameRuns(number);
  showRamp(number);
  showPositions(steps.summary(), number);
}

function nameRuns(number) {
  say("on-name", draftsName(number));
  byId("off-row").hidden = number === 0;
}

function setError(id, message) {
  const field = byId(id);
  const line = byId(`${id}-error`) ?? byId("problem");
  line.textContent = message;
  if (line.id !== "problem") line.hidden = !message;
  field.toggleAttribute("aria-invalid", Boolean(message));
  if (message) field.setAttribute("aria-invalid", "true");
}

const FIELDS = ["prompt", "drafts", "tokens", "temperature", "seed", "schema"];

function clearErrors() {
  for (const id of FIELDS) setError(id, "");
  keyField.removeAttribute("aria-invalid");
  say("problem", "");
  // Of the run before.
  say("status", "");
}

/** Show a field's error beside it, and go there. */
function blame(id, message) {
  setError(id, message);
  if (id === "schema") byId("schema-box").open = true;
  byId(id).focus();
}

class FieldError extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

function number(id, what, { low, high = Infinity, whole = false }) {
  const given = byId(id).value.trim();
  // `Number` alone takes more, such as 0x10.
  const value = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(given) ? Number(given) : NaN;
  const right = Number.isFinite(value) && value >= low && value <= high;
  if (!right || (whole && !Number.isSafeInteger(value))) {
    const upTo = high === Infinity ? "or more" : `to ${high}`;
    const kind = whole ? "a whole number" : "a number such as 0.5";
    throw new FieldError(id, `${what} must be ${kind}, ${low} ${upTo}; “${given}” is not.`);
  }
  return value;
}

function readForm() {
  const prompt = byId("prompt").value;
  if (!prompt) throw new FieldError("prompt", "The prompt is empty.");
  const body = {
    prompt,
    num_drafts: drafts(),
    max_tokens: number("tokens", "Tokens", { low: 1, high: context ?? Infinity, whole: true }),
    temperature: number("temperature", "Temperature", { low: 0 }),
    seed: number("seed", "Seed", { low: 0, high: Number.MAX_SAFE_INTEGER, whole: true }),
    stream: true,
    stream_options: { include_usage: true },
    return_pieces: true,
    return_token_ids: true,
  };
  const schema = byId("schema").value.trim();
  if (schema) {
    let parsed;
    try {
      parsed = JSON.parse(schema);
    } catch (error) {
      throw new FieldError("schema", `This is no JSON: ${error.message}`);
    }
    if (parsed === null || typeof parsed !== "object" || Array.isArray(parsed)) {
      throw new FieldError("schema", "A schema is a JSON object.");
    }
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed } };
  }
  return body;
}

/** The field that a parameter of the API is, or null. */
const FIELD_OF = {
  prompt: "prompt",
  num_drafts: "drafts",
  max_tokens: "tokens",
  temperature: "temperature",
  seed: "seed",
  response_format: "schema",
  json_schema: "schema",
};

function tell(error) {
  if (error instanceof FieldError) {
    blame(error.id, error.message);
    return;
  }
  if (error.status === 401) askForKey();
  // Some refusals name the field in their message only.
  const param = error.param ?? /json_schema|num_drafts/.exec(error.message)?.[0];
  const field = error.status === 400 ? FIELD_OF[param] : undefined;
  if (field) blame(field, error.message);
  else say("problem", error.message);
  if (error.status === 401) keyField.focus();
}

// One request

/**
 * Run a request to its end.
 *
 * Returns its ids, its usage, why it ended, and tokens per second from the first event to the last that held
 * tokens (null: too short to tell). `onPieces` gets the pieces as they come, one per token, and
 * with them the rate so far.
 */
async function run(body, signal, onPieces) {
  const ids = [];
  let usage = null;
  let metrics = null;
  let first = null;
  let rate = null;
  let reason = null;
  for await (const events of complete(body, { key: keyField.value, signal })) {
    const now = performance.now();
    const before = ids.length;
    const pieces = [];
    for (const event of events) {
      usage = event.usage ?? usage;
      metrics = event.metrics ?? metrics;
      for (const choice of event.choices) {
        ids.push(...choice.token_ids);
        pieces.push(...choice.pieces);
        reason = choice.finish_reason ?? reason;
      }
    }
    if (ids.length > before) {
      if (first === null) first = { time: now, tokens: ids.length };
      else if (now > first.time) rate = (1000 * (ids.length - first.tokens)) / (now - first.time);
    }
    onPieces(pieces, rate);
  }
  return { ids, usage, metrics, rate, reason };
}

async function start() {
  if (running) return;
  stopReplay();
  clearErrors();
  let body;
  try {
    body = readForm();
  } catch (error) {
    tell(error);
    return;
  }
  running = new AbortController();
  const { signal } = running;
  setRunning(true);
  const compares = byId("compare").checked && body.num_drafts !== 0;
  clear(body);
  bringIntoView();
  say("status", `Running, ${draftsName(body.num_drafts).toLowerCase()}.`);
  let on = null;
  try {
    on = await run(body, signal, (...came) => take(body.num_drafts, ...came));
    finish(on, body);
    if (compares) {
      say("verdict", "Timing the same with drafts on and off …");
      compare(on, await time(body, signal), body);
    }
    say("status", summed(on, compares));
  } catch (error) {
    if (signal.aborted) stopped(on);
    else if (error instanceof ApiError) {
      say("verdict", "");
      say("status", "");
      tell(error);
    } else throw error;
  } finally {
    draw();
    running = null;
    setRunning(false);
    endReplay();
    showDrafts();
  }
}

/**
 * Time a request with its drafts and without, in turn and not drawn: the browser may share the
 * model's cores, and drawing would slow the one run that is shown.
 *
 * Returns median rates (null: too short to tell), the number of runs of each, and the ids of a
 * run without drafts.
 */
async function time(body, signal) {
  const pairs = [];
  const end = performance.now() + TIMED_MS;
  let ids;
  do {
    const on = await run(body, signal, () => {});
    const off = await run({ ...body, num_drafts: 0 }, signal, () => {});
    pairs.push({ on: on.rate, off: off.rate });
    ids = off.ids;
  } while (pairs.length < MOST_PAIRS && performance.now() < end);
  const known = pairs.every(({ on, off }) => on !== null && off !== null);
  const median = (name) => {
    const sorted = pairs.map((pair) => pair[name]).sort((one, other) => one - other);
    const middle = (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
    return known ? middle : null;
  };
  return { on: median("on"), off: median("off"), runs: pairs.length, ids };
}

function stop() {
  running?.abort();
}

function stopped(on) {
  // What came and waits for the next frame is counted too.
  draw();
  say("verdict", on ? "Stopped before the comparison was over." : "Stopped.");
  say("status", `Stopped after ${plural(steps.tokens, "token")}.`);
}

function setRunning(is) {
  const from = is ? byId("run") : byId("stop");
  const to = is ? byId("stop") : byId("run");
  to.disabled = false;
  // A button that is turned off would take the focus with it.
  if (document.activeElement === from) to.focus({ preventScroll: true });
  from.disabled = true;
  answer.setAttribute("aria-busy", String(is));
}

// The text

let waiting = [];
let frame = 0;
/** The number of the token that is looked at, or null. */
let here = null;
let drawnDrafts = 0;
let rateSoFar = null;

function clear(body) {
  steps = new Steps();
  shown = [];
  waiting = [];
  rateSoFar = null;
  text.replaceChildren();
  byId("echo").textContent = body.prompt;
  byId("empty").hidden = true;
  here = null;
  say("inspector", HINT);
  stepSlider.value = "0";
  stepSlider.disabled = true;
  byId("play").disabled = true;
  for (const id of ["length", "per-step", "accepted", "on-rate", "off-rate"]) say(id, "–");
  for (const id of ["per-step-of", "accepted-of", "timed", "verdict", "same", "step-said", "ended",
    "forced-drafted"]) {
    say(id, "");
  }
  setBar("on-bar", 0);
  setBar("off-bar", 0);
  nameRuns(body.num_drafts);
  showRamp(body.num_drafts);
  showCounts(steps.summary(), body.num_drafts);
}

/** On a narrow screen the text lies below the form. */
function bringIntoView() {
  const { top, bottom } = answer.getBoundingClientRect();
  if (bottom > 0 && top < window.innerHeight - 100) return;
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  byId("answer-title").scrollIntoView({ behavior: still ? "instant" : "smooth" });
}

function take(number, pieces, rate) {
  waiting.push(...pieces);
  rateSoFar = rate;
  drawnDrafts = number;
  // At most once a frame: the browser and the model may share the same cores.
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    draw();
  });
}

function draw() {
  if (!waiting.length) return;
  const atEnd = answer.scrollTop + answer.clientHeight >= answer.scrollHeight - 40;
  const added = document.createDocumentFragment();
  for (const piece of waiting) {
    const step = steps.add(piece);
    const element = document.createElement("span");
    element.className = `t ${piece.origin}`;
    if (piece.origin === "accepted") element.classList.add(`a${piece.position}`);
    if (piece.text === "") element.classList.add("bare");
    if (piece.text.startsWith("\n")) element.classList.add("line");
    element.title = `${describe(piece)} (step ${step + 1})`;
    element.textContent = piece.text;
    element.dataset.at = String(shown.length);
    shown.push({ ...piece, element, step });
    added.append(element);
  }
  waiting = [];
  text.append(added);
  if (atEnd) answer.scrollTop = answer.scrollHeight;
  if (rateSoFar !== null) say("on-rate", count.format(rateSoFar));
  showCounts(steps.summary(), drawnDrafts);
}

function showCounts(summary, number) {
  for (const [origin, tokens] of Object.entries(steps.counts)) {
    say(`count-${origin}`, count.format(tokens));
  }
  const { tokens, forcedDrafts } = steps;
  say("forced-drafted", forcedDrafts ? `; ${count.format(forcedDrafts)} of them drafted` : "");
  if (steps.list.length) {
    const drafted = summary.draftSteps > 0;
    say("length", drafted ? fixed.format(meanLength(summary)) : "–");
    say("length-of", drafted ? "tokens a step with drafts" : "no step had drafts");
    say("per-step", fixed.format(tokens / steps.list.length));
    say("per-step-of", `${plural(tokens, "token")} in ${plural(steps.list.length, "step")}`);
    say("accepted", count.format(summary.accepted));
    const parts = summary.drafted === null ? [] : [`of ${plural(summary.drafted, "draft")}`];
    if (forcedDrafts) parts.push(`${count.format(forcedDrafts)} of the accepted were forced`);
    say("accepted-of", parts.join("; "));
  }
  showPositions(summary, number);
}

function showRamp(number) {
  const most = number === "auto" ? MOST_DRAFTS : Math.max(number, 1);
  const swatches = Array.from({ length: most }, (_, at) => {
    const swatch = document.createElement("span");
    swatch.className = `t accepted a${at + 1}`;
    swatch.textContent = String(at + 1);
    return swatch;
  });
  byId("ramp").replaceChildren(...swatches);
}

function showPositions({ draftSteps, draftedAt, reachedAt, acceptedAt }, number) {
  const seen = Math.max(reachedAt.length, draftedAt?.length ?? 0);
  const most = number === "auto" ? seen : Math.max(number, seen);
  const body = byId("positions");
  byId("positions-table").hidden = number === 0;
  byId("no-positions").hidden = number !== 0;
  while (body.rows.length > Math.max(most, 1)) body.deleteRow(-1);
  while (body.rows.length < Math.max(most, 1)) addPosition(body);
  for (const [at, row] of [...body.rows].entries()) {
    const accepted = acceptedAt[at] ?? 0;
    const reached = reachedAt[at] ?? 0;
    // Until the server has told the drafts of each position: the steps with drafts.
    const drafted = draftedAt ? (draftedAt[at] ?? 0) : draftSteps;
    row.cells[1].textContent = draftedAt ? count.format(drafted) : "–";
    row.cells[2].textContent = draftSteps ? count.format(accepted) : "–";
    const [bar, share] = row.cells[3].firstChild.children;
    bar.style.setProperty("--part", drafted ? accepted / drafted : 0);
    share.textContent = percent(accepted, drafted);
    row.cells[4].textContent = percent(accepted, reached);
  }
}

function addPosition(body) {
  const row = body.insertRow();
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = String(body.rows.length);
  row.append(head);
  for (let cell = 0; cell < 4; cell += 1) row.insertCell();
  const both = document.createElement("div");
  both.className = "share";
  const bar = document.createElement("span");
  bar.className = "bar";
  bar.ariaHidden = "true";
  both.append(bar, document.createElement("span"));
  row.cells[3].append(both);
}

function finish(on, body) {
  draw();
  showCounts(told(on.usage, on.metrics) ?? steps.summary(), body.num_drafts);
  say("on-rate", rateName(on.rate));
  setBar("on-bar", on.rate === null ? 0 : 1);
  say("timed", "The run that is shown, from its first token to its last, drawn as it came.");
  // The server shortens an answer to what the context has room for.
  if (on.reason === "length" && on.ids.length < body.max_tokens) {
    say("ended", `The answer ended after ${plural(on.ids.length, "token")}: with the prompt’s ` +
      `${count.format(on.usage.prompt_tokens)} they fill the context.`);
  }
}

function rateName(rate) {
  return rate === null ? "too short to tell" : count.format(rate);
}

function setBar(id, part) {
  byId(id).style.setProperty("--part", part);
}

function compare(shownRun, timed, body) {
  const most = Math.max(timed.on, timed.off);
  for (const name of ["on", "off"]) {
    say(`${name}-rate`, rateName(timed[name]));
    setBar(`${name}-bar`, most ? timed[name] / most : 0);
  }
  const runs = timed.runs === 1 ? "One run each" : `Median of ${timed.runs} runs each, in turn`;
  say("timed", `${runs}, from the first token to the last, not drawn.`);
  say("verdict", verdict(timed));
  const { ids } = shownRun;
  const at = firstDifference(ids, timed.ids);
  if (at === null) {
    say("same", `The two texts are the same, token for token (${plural(ids.length, "token")}).`);
    return;
  }
  const why = body.temperature > 0
    ? "a server that accepts drafts by rejection keeps the odds and not the tokens."
    : "where a device rounds by the number of rows, near ties may fall differently.";
  say("same", `The two texts differ from token ${at + 1} on: ${why}`);
}

function verdict({ on, off }) {
  if (on === null) return "The text is too short to compare the rates.";
  const ratio = on / off;
  const times = `${fixed.format(ratio)} times as fast as without`;
  if (ratio > 1 + CLOSE) return `Drafts pay here: ${times}.`;
  if (ratio < 1 - CLOSE) {
    return `Drafts are slower here: ${times}. Checking several tokens in a step costs this ` +
      "machine more than the steps it saves.";
  }
  return `Drafts make little difference here: ${times}.`;
}

function summed(on, compared) {
  const { forcedDrafts } = steps;
  const forced = forcedDrafts ? `, ${count.format(forcedDrafts)} of them forced` : "";
  const parts = [
    `Done: ${plural(steps.tokens, "token")} in ${plural(steps.list.length, "step")}.`,
    `${count.format(steps.summary().accepted)} are accepted drafts${forced}.`,
    byId("ended").textContent,
  ];
  if (compared) parts.push(byId("verdict").textContent, byId("same").textContent);
  return parts.filter(Boolean).join(" ");
}

// One token

function inspect(at) {
  if (here !== null) shown[here]?.element.classList.remove("here");
  here = at;
  const piece = shown[at];
  if (!piece) return;
  piece.element.classList.add("here");
  const quoted = document.createElement("code");
  quoted.textContent = piece.text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
  const words = ` is ${{ accepted: "an " }[piece.origin] ?? ""}${describe(piece)} (step ${piece.step + 1}).`;
  if (piece.text === "") byId("inspector").replaceChildren(`This${words}`);
  else byId("inspector").replaceChildren("“", quoted, `”${words}`);
}

text.addEventListener("pointerover", ({ target }) => {
  if (target.dataset.at !== undefined) inspect(Number(target.dataset.at));
});

answer.addEventListener("keydown", (event) => {
  if (!shown.length || event.ctrlKey || event.metaKey || event.altKey) return;
  const last = shown.length - 1;
  const to = {
    ArrowLeft: here === null ? 0 : Math.max(0, here - 1),
    ArrowRight: here === null ? 0 : Math.min(last, here + 1),
    Home: 0,
    End: last,
  }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  inspect(to);
  shown[to].element.scrollIntoView({ block: "nearest" });
});

// Step by step

let timer = 0;

function endReplay() {
  const last = steps.list.length - 1;
  if (last < 0) return;
  stepSlider.max = String(last);
  stepSlider.value = String(last);
  stepSlider.disabled = false;
  byId("play").disabled = false;
  say("step-said", "Move the slider to go through the text step by step.");
}

function showStep(step) {
  const isLast = step === steps.list.length - 1;
  for (const piece of shown) {
    piece.element.classList.toggle("later", piece.step > step);
    piece.element.classList.toggle("now", piece.step === step);
  }
  const of = `Step ${step + 1} of ${steps.list.length}`;
  const said = step === 0 && steps.list[0].end === "target"
    ? "the prompt is read, and the model writes its first token"
    : describeStep(steps.list[step]);
  say("step-said", `${of}: ${said}.${isLast ? " This is the last." : ""}`);
  stepSlider.setAttribute("aria-valuetext", `${of}: ${said}`);
  shown.findLast((piece) => piece.step === step)?.element.scrollIntoView({ block: "nearest" });
}

function stopReplay() {
  clearInterval(timer);
  timer = 0;
  say("play", "Replay");
}

stepSlider.addEventListener("input", () => {
  stopReplay();
  showStep(Number(stepSlider.value));
});

byId("play").addEventListener("click", () => {
  if (timer) {
    stopReplay();
    return;
  }
  say("play", "Pause");
  const last = steps.list.length - 1;
  let step = Number(stepSlider.value) >= last ? 0 : Number(stepSlider.value);
  const show = () => {
    stepSlider.value = String(step);
    showStep(step);
    if (step >= last) stopReplay();
    step += 1;
  };
  timer = setInterval(show, REPLAY_MS);
  show();
});

// What is pressed

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    start();
  } else if (event.key === "Escape" && running) {
    event.preventDefault();
    stop();
  }
});
byId("drafts").addEventListener("input", showDrafts);
byId("auto").addEventListener("change", showDrafts);
keyField.addEventListener("change", () => {
  rememberKey(keyField.value);
  introduce();
});

for (const [name, prompt, schema] of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.addEventListener("click", () => {
    byId("prompt").value = prompt;
    // A schema that somebody wrote stays.
    const written = byId("schema").value;
    if (schema || written === SCHEMA_TEXT) byId("schema").value = schema ?? "";
    byId("schema-box").open = Boolean(byId("schema").value);
    byId("prompt").focus();
  });
  byId("examples").append(button);
}
byId("schema-example").addEventListener("click", () => {
  byId("schema").value = SCHEMA_TEXT;
  setError("schema", "");
});
byId("schema-clear").addEventListener("click", () => {
  byId("schema").value = "";
  setError("schema", "");
});

byId("prompt").value = EXAMPLES[0][1];
try {
  keyField.value = sessionStorage.getItem("api-key") ?? "";
} catch {
  // As above.
}
if (keyField.value) askForKey();
showDrafts();
introduce();
