// The runs that the page shows, and the requests that load and refresh them.

export class Gone extends Error {}

let server = null;

const embedded = document.getElementById("answers"); // a report contains the server's answers: {path: answer}
let answers = null;

const decodeBase64 = (base64) => Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
const unpackAnswers = () => new Response(new Blob([decodeBase64(embedded.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"))).json();

/** Response from the answers that a report contains; 404 for an answer that it lacks. */
async function embeddedAnswer(path) {
  const [name, query] = path.split("?");
  const params = new URLSearchParams(query);
  const byPath = await (answers ??= unpackAnswers());
  if (name.endsWith("/search")) return new Response(searchAnswer(byPath[name.replace(/search$/, "rollout")], params.get("text").toLowerCase()));
  const answer = params.has("id") ? byPath[name]?.[params.get("id")] : byPath[name];
  if (answer === undefined) return new Response(JSON.stringify({ detail: "a report holds a part of the rollouts; python -m realhf.view RUN shows all" }), { status: 404 });
  return new Response(typeof answer === "string" ? decodeBase64(answer) : JSON.stringify(answer));
}

/** The search answer of a report, as the lines of JSON that a server streams. */
function searchAnswer(details, needle) {
  const ids = Object.keys(details).filter((id) => JSON.stringify(details[id].play).toLowerCase().includes(needle));
  const count = Object.keys(details).length;
  return `${JSON.stringify({ ids })}\n${JSON.stringify({ done: true, searched: count, of: count })}\n`;
}

/** Fetch a path from the server that served this page. If another server, with other runs under the same numbers, now
 * uses the port, the page is reloaded. */
export async function fetchPath(path, signal) {
  if (embedded) return embeddedAnswer(path);
  const reply = await fetch(path, { signal });
  const name = reply.headers.get("X-Realhf-Server");
  server ??= name;
  if (name === server || name === null) return reply; // a server that is shutting down answers without its name
  location.reload();
  throw new Error("another server has taken its place");
}

async function ask(path, signal) {
  const reply = await fetchPath(path, signal);
  if (reply.ok) return reply;
  const detail = (await reply.json().catch(() => ({}))).detail ?? reply.statusText;
  throw reply.status === 410 ? new Gone(detail) : new Error(detail);
}

export const askJson = async (path, signal) => (await ask(path, signal)).json();

/** A task that runs some time after it was scheduled: once for all calls of `schedule` until then, and never twice at a
 * time. Its errors are dropped: the page reports a server that does not answer elsewhere, and the next run tries again. */
export class DelayedTask {
  constructor(task) {
    this.task = task;
    this.closed = false;
  }

  schedule(ms) {
    if (this.busy) this.pendingMs = ms;
    else if (!this.closed) this.timer ??= setTimeout(() => this.run(), ms);
  }

  async run() {
    this.busy = true;
    try {
      await this.task();
    } catch {
      // see above
    }
    this.busy = false;
    this.timer = null;
    const { pendingMs } = this;
    this.pendingMs = null;
    if (pendingMs !== null && pendingMs !== undefined) this.schedule(pendingMs);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }
}

const ARRAYS = { f64: Float64Array, f32: Float32Array, i32: Int32Array, u32: Uint32Array, u16: Uint16Array, u8: Uint8Array };

/** Header and typed arrays of a packed answer; the arrays are views of its memory. */
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

/** One run, with the parts that were loaded so far. */
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

  /** Load the metrics and evaluations that were added. */
  async refreshMetrics() {
    const before = this.metrics;
    const path = `/api/runs/${this.number}`;
    const more = await askJson(`${path}/metrics?epoch=${before.epoch}&start=${before.steps.length}`);
    if (more.start === 0) {
      this.metrics = more;
    } else {
      const count = before.steps.length;
      before.steps.push(...more.steps);
      for (const name of Object.keys(more.columns)) before.columns[name] ??= new Array(count).fill(null);
      for (const [name, values] of Object.entries(before.columns)) {
        values.push(...(more.columns[name] ?? new Array(more.steps.length).fill(null)));
      }
      before.unreadable = more.unreadable;
    }
    this.evaluations = await askJson(`${path}/evaluations`);
  }

  /** Configuration and origin; loaded once. */
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
    this.knownState = "";
  }

  /** Load the list of runs. */
  async refresh() {
    const list = await askJson("/api/runs");
    this.follow = list.follow;
    this.first ??= list.runs.length ? (list.first ?? 0) : null; // stays, also if another run becomes the newest one
    this.leftOff = { count: list.left_off, one: list.one_left_off };
    for (const about of list.runs) {
      if (this.runs[about.number]) Object.assign(this.runs[about.number], about);
      else this.runs[about.number] = new RunData(about);
    }
  }

  /** Wait for a change of these runs; return the set of changed parts by the number of a run. */
  async changes(numbers, signal) {
    const query = new URLSearchParams(numbers.map((number) => ["run", number]));
    query.set("seen", this.knownState);
    const answer = await askJson(`/api/changes?${query}`, signal);
    const changed = new Map();
    for (const [text, stamps] of Object.entries(answer.runs)) {
      const run = this.runs[Number(text)];
      const parts = Object.keys(stamps).filter((part) => stamps[part] !== run.stamps[part]);
      changed.set(run.number, new Set(parts));
      run.stamps = stamps;
      if (parts.includes("about")) delete run.parts.about;
      if (parts.includes("rollouts")) {
        delete run.parts.table;
        delete run.parts.details;
      }
      Object.assign(run, answer.states[text]);
    }
    this.knownState = answer.seen;
    return changed;
  }
}
