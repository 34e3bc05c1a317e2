// What the page knows of the runs, and how it learns more of them.

export class Gone extends Error {}

let server = null;

const kept = document.getElementById("answers"); // a report has what a server would answer: {path: answer}
let answers = null;

const bytesOf = (base64) => Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
const unpacked = () => new Response(new Blob([bytesOf(kept.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"))).json();

/** What a report has in place of a server's answer; 404 for what was not kept. */
async function keptAnswer(path) {
  const [name, query] = path.split("?");
  const params = new URLSearchParams(query);
  const known = await (answers ??= unpacked());
  if (name.endsWith("/search")) return new Response(searched(known[name.replace(/search$/, "rollout")], params.get("text").toLowerCase()));
  const found = params.has("id") ? known[name]?.[params.get("id")] : known[name];
  if (found === undefined) return new Response(JSON.stringify({ detail: "a report holds a part of the rollouts; python -m realhf.view RUN shows all" }), { status: 404 });
  return new Response(typeof found === "string" ? bytesOf(found) : JSON.stringify(found));
}

function searched(details, wanted) {
  const ids = Object.keys(details).filter((id) => JSON.stringify(details[id].play).toLowerCase().includes(wanted));
  const count = Object.keys(details).length;
  return `${JSON.stringify({ ids })}\n${JSON.stringify({ done: true, searched: count, of: count })}\n`;
}

/** Fetch from the server that this page is of. Another one on its port has other runs under the same numbers: the page
 * begins anew then, and mixes nothing. */
export async function reach(path, signal) {
  if (kept) return keptAnswer(path);
  const reply = await fetch(path, { signal });
  const told = reply.headers.get("X-Realhf-Server");
  server ??= told;
  if (told === server || told === null) return reply; // a server that is about to end answers without its name
  location.reload();
  throw new Error("another server has taken its place");
}

async function ask(path, signal) {
  const reply = await reach(path, signal);
  if (reply.ok) return reply;
  const detail = (await reply.json().catch(() => ({}))).detail ?? reply.statusText;
  throw reply.status === 410 ? new Gone(detail) : new Error(detail);
}

export const askJson = async (path, signal) => (await ask(path, signal)).json();

/** Does something a while after it was asked to: once for all that ask meanwhile, and never twice at a time. A server
 * that has ended is told of elsewhere, so what fails is left to the next time. */
export class Later {
  constructor(does) {
    this.does = does;
    this.over = false;
  }

  ask(ms) {
    if (this.busy) this.missed = ms;
    else if (!this.over) this.waits ??= setTimeout(() => this.run(), ms);
  }

  async run() {
    this.busy = true;
    try {
      await this.does();
    } catch {
      // see above
    }
    this.busy = false;
    this.waits = null;
    const { missed } = this;
    this.missed = null;
    if (missed !== null && missed !== undefined) this.ask(missed);
  }

  close() {
    this.over = true;
    clearTimeout(this.waits);
  }
}

const ARRAYS = { f64: Float64Array, f32: Float32Array, i32: Int32Array, u32: Uint32Array, u16: Uint16Array, u8: Uint8Array };

/** Header and typed arrays of a packed answer; the arrays look into its memory and copy nothing. */
export async function askPacked(path) {
  const buffer = await (await ask(path)).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = {};
  for (const [name, place] of Object.entries(header.arrays)) {
    arrays[name] = new ARRAYS[place.kind](buffer, 4 + length + place.offset, place.length);
  }
  return { header, arrays };
}

/** One run: the parts that were asked for, kept and added to. */
export class RunData {
  constructor(about) {
    Object.assign(this, about);
    this.stamps = {};
    this.parts = {};
    this.metrics = { epoch: 0, steps: [], columns: {}, unreadable: 0 };
    this.evaluations = [];
  }

  get isGone() {
    return this.state === "gone";
  }

  /** Ask for metrics and evaluations that were added. */
  async refreshMetrics() {
    const known = this.metrics;
    const path = `/api/runs/${this.number}`;
    const more = await askJson(`${path}/metrics?epoch=${known.epoch}&start=${known.steps.length}`);
    if (more.start === 0) {
      this.metrics = more;
    } else {
      const before = known.steps.length;
      known.steps.push(...more.steps);
      for (const name of Object.keys(more.columns)) known.columns[name] ??= new Array(before).fill(null);
      for (const [name, values] of Object.entries(known.columns)) {
        values.push(...(more.columns[name] ?? new Array(more.steps.length).fill(null)));
      }
      known.unreadable = more.unreadable;
    }
    this.evaluations = await askJson(`${path}/evaluations`);
  }

  /** Configuration and origin, asked for once. */
  async about() {
    this.parts.about ??= await askJson(`/api/runs/${this.number}/about`);
    return this.parts.about;
  }
}

export class Store {
  constructor() {
    this.runs = [];
    this.leftOff = { count: 0, one: "" };
    this.first = null; // the run that is opened where the address names none
    this.follow = false;
    this.seen = "";
  }

  /** Learn which runs there are. */
  async refresh() {
    const found = await askJson("/api/runs");
    this.follow = found.follow;
    this.first ??= found.runs.length ? (found.first ?? 0) : null; // another run may be newer later: the page stays
    this.leftOff = { count: found.left_off, one: found.one_left_off };
    for (const about of found.runs) {
      if (this.runs[about.number]) Object.assign(this.runs[about.number], about);
      else this.runs[about.number] = new RunData(about);
    }
  }

  /** Wait for a change of these runs; returns for each number of a run the set of its parts that changed. */
  async changes(numbers, signal) {
    const query = new URLSearchParams(numbers.map((one) => ["run", one]));
    query.set("seen", this.seen);
    const found = await askJson(`/api/changes?${query}`, signal);
    const changed = new Map();
    for (const [text, stamps] of Object.entries(found.runs)) {
      const run = this.runs[Number(text)];
      const parts = Object.keys(stamps).filter((part) => stamps[part] !== run.stamps[part]);
      changed.set(run.number, new Set(parts));
      run.stamps = stamps;
      if (parts.includes("about")) delete run.parts.about;
      if (parts.includes("rollouts")) {
        delete run.parts.table;
        delete run.parts.details;
      }
      Object.assign(run, found.states[text]);
    }
    this.seen = found.seen;
    return changed;
  }
}
