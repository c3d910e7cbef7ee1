// The server, asked as any client asks it.

/** What went wrong, in words for people; `status` is 0 where no answer came. */
export class ApiError extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const { status } = response;
  let said = null;
  try {
    said = (await response.json()).error;
  } catch {
    // A proxy's page; the status says enough.
  }
  let message = said?.message ?? `The server answered with status ${status}.`;
  if (status === 401) message = "The API key is missing or wrong.";
  if (status === 429) {
    const seconds = response.headers.get("retry-after");
    message = "The server has too much to do.";
    message += seconds ? ` Try again in ${seconds} s.` : " Try again later.";
  }
  return new ApiError(status, message, said?.param ?? null);
}

/** The model: its name, its context, what drafts and how many by default (null: not known). */
export async function about(key) {
  const models = await (await ask("v1/models", { headers: headers(key) })).json();
  const model = models.data[0];
  const found = { name: model.id, context: model.max_model_len, drafter: null, drafts: null };
  let exposed = "";
  try {
    exposed = await (await ask("metrics", { headers: headers(key) })).text();
  } catch {
    return found;
  }
  const drafter = /^paceline_info\{.*?drafter="([^"]*)"/m.exec(exposed)?.[1];
  if (drafter === undefined) return found;
  found.drafter = drafter.split(",")[0];
  const drafts = /, (\d) drafts a step$/.exec(drafter);
  if (drafter === "none") found.drafts = 0;
  else found.drafts = drafts ? Number(drafts[1]) : "auto";
  return found;
}

/**
 * The events of a streamed completion, as documents.
 *
 * Throws ApiError where the server refuses or fails, and AbortError where `signal` ends it.
 */
export async function* complete(body, { key, signal }) {
  const response = await ask("v1/completions", {
    method: "POST",
    headers: { ...headers(key), "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let over = false;
  try {
    for (;;) {
      let read;
      try {
        read = await reader.read();
      } catch (error) {
        if (signal.aborted || error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection broke off.");
      }
      if (read.done) break;
      const parts = (rest + read.value).split("\n\n");
      rest = parts.pop();
      const events = [];
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") over = true;
        else events.push(JSON.parse(data));
      }
      for (const event of events) {
        if (event.error) throw new ApiError(500, `The server failed: ${event.error.message}`);
      }
      // Together, since they came together: whoever takes the time does it once.
      if (events.length) yield events;
    }
  } finally {
    // Left early, the answer would go on to be sent; the reason it was left is the one to tell.
    reader.cancel().catch(() => {});
  }
  if (!over) throw new ApiError(0, "The answer broke off.");
}
