// What the origins of tokens say of the steps that made them.

export const MOST_DRAFTS = 8;

/**
 * Tokens told apart by step, and counts over them, as they arrive.
 *
 * A step emits accepted drafts, positions 1 to n, and then one token of the model's own. A block
 * that was cut has none, so a step is over too where a position does not go up.
 */
export class Steps {
  /** Per step: drafts accepted, and the origin of its own token or null. */
  list = [];
  counts = { accepted: 0, corrected: 0, bonus: 0, target: 0, forced: 0 };
  /** Tokens of all origins, those without text included. */
  tokens = 0;
  /** Forced tokens that were drafted: accepted drafts of another name. */
  forcedDrafts = 0;

  /** Count a piece; return the number of its step, from 0. */
  add({ origin, position }) {
    let step = this.list.at(-1);
    if (!step || step.end !== null || (position !== null && position <= step.accepted)) {
      step = { accepted: 0, end: null };
      this.list.push(step);
    }
    if (position === null) step.end = origin;
    else step.accepted = position;
    this.counts[origin] += 1;
    this.tokens += 1;
    if (origin === "forced" && position !== null) this.forcedDrafts += 1;
    return this.list.length - 1;
  }

  /**
   * What drafting did: the counts of the server's usage, as far as the stream tells them.
   *
   * A refused draft shows by the token put in its place; drafts behind it show nowhere, so
   * `drafted` and `draftedAt` are null.
   */
  summary() {
    const acceptedAt = [];
    const reachedAt = [];
    let draftSteps = 0;
    for (const { accepted, end } of this.list) {
      const reached = accepted + (end === "corrected" ? 1 : 0);
      if (reached > 0) draftSteps += 1;
      while (reachedAt.length < reached) {
        reachedAt.push(0);
        acceptedAt.push(0);
      }
      for (let at = 0; at < reached; at += 1) reachedAt[at] += 1;
      for (let at = 0; at < accepted; at += 1) acceptedAt[at] += 1;
    }
    const accepted = acceptedAt.reduce((sum, count) => sum + count, 0);
    return { draftSteps, drafted: null, accepted, draftedAt: null, reachedAt, acceptedAt };
  }
}

/** The same from the last chunk of a stream; null where it does not tell. */
export function told(usage, metrics) {
  const speculation = usage?.speculation;
  const shown = metrics?.speculative_decoding;
  if (!speculation?.reached_at) return null;
  return {
    draftSteps: shown?.num_spec_steps ?? 0,
    drafted: speculation.drafted,
    accepted: speculation.accepted,
    draftedAt: speculation.drafted_at,
    reachedAt: speculation.reached_at,
    acceptedAt: speculation.accepted_at,
  };
}

/** Tokens that a step with drafts yields, the model's own included. */
export function meanLength({ accepted, draftSteps }) {
  return draftSteps ? 1 + accepted / draftSteps : 1;
}

/** What a token is, in words. */
export function describe({ text, origin, position }) {
  const place = position === null ? "" : `, position ${position}`;
  const bare = text === "" ? "; no text of its own" : "";
  return bareWords(origin, position, place) + bare;
}

function bareWords(origin, position, place) {
  return {
    accepted: `accepted draft${place}`,
    corrected: "corrected: the model’s own token in place of a refused draft",
    bonus: "bonus: the model’s own token after drafts that were all accepted",
    target: "the model’s own token, in a step without drafts",
    forced: `forced: the only token the grammar allowed${position === null ? "" : `, drafted${place}`}`,
  }[origin];
}

/** What a step did, in words. */
export function describeStep({ accepted, end }) {
  const drafts = accepted === 1 ? "1 draft accepted" : `${accepted} drafts accepted`;
  switch (end) {
    case "corrected":
      return accepted
        ? `${drafts}; the next was refused and the model put its own token there`
        : "the first draft was refused and the model put its own token there";
    case "bonus":
      return `${drafts}, which is all of them, and one more token of the model’s own`;
    case "target":
      return "no drafts; one token of the model’s own";
    case "forced":
      return `${drafts}, and a token that the grammar forced`;
    default:
      return `${drafts}, and the text ends`;
  }
}

/** Where two lists of ids first differ; null where they are equal. */
export function firstDifference(one, other) {
  const most = Math.max(one.length, other.length);
  for (let at = 0; at < most; at += 1) {
    if (one[at] !== other[at]) return at;
  }
  return null;
}
