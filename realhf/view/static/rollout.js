// One rollout: its conversation turn by turn, what the environment said of it, and its group beside it.

import { $, h, holdingStill, number, renew, shown, table } from "./dom.js";
import { again, ofTurn, stateLeft } from "./environment.js";
import { askJson, Gone, Later } from "./store.js";
import { tableOf } from "./table.js";
import { outcomeClass, walked } from "./rollouts.js";

const LONG = 4000;
const MOST_TURNS = 400;
const WAIT_MS = 500;

export async function show(place, context) {
  const page = new Rollout(place, context);
  await page.load();
  return page;
}

/** The id that the address names, or else the newest rollout that passes the first of these tests that any passes. */
export async function idFor(context, ...tests) {
  const id = context.params.get("id");
  if (id) return id;
  const all = await tableOf(context.run);
  for (const passes of tests) {
    for (let at = all.count - 1; at >= 0; at--) if (passes(all, at)) return all.id(at);
  }
  return null;
}

/** Index lines and records of a rollout; asked for once, and again after the rollouts have changed. */
export async function detail(run, id) {
  const known = (run.parts.details ??= new Map());
  if (!known.has(id)) {
    if (known.size > 24) known.clear();
    known.set(id, await askJson(`/api/runs/${run.number}/rollout?${new URLSearchParams({ id })}`));
  }
  return known.get(id);
}

/** What is known of a rollout now; null where that is what was found before. Its records are read again only when a line
 * of the index has changed, or one of them could not be read. */
export async function changed({ run, notice }, found) {
  const unread = found.play.problem ?? found.train?.problem;
  const query = new URLSearchParams({ id: found.id, seen: unread ? "" : found.stamp });
  const now = await askJson(`/api/runs/${run.number}/rollout?${query}`).catch((error) => {
    if (!(error instanceof TypeError || error instanceof Gone)) notice(`${found.id} cannot be read anew: ${error.message}. What was loaded stays.`);
    throw error;
  });
  const same = now.same || (now.stamp === found.stamp && unread === (now.play.problem ?? now.train?.problem));
  (run.parts.details ??= new Map()).set(found.id, same ? found : now);
  return same ? null : now;
}

/** The id of the rollout `by` places further in the list that the list page showed last. */
export function neighbour(context, id, by) {
  if (walked.run !== context.run.number || !walked.table) return null;
  const at = walked.order.indexOf(walked.table.find(id));
  const next = walked.order[at + by];
  return at < 0 || next === undefined ? null : walked.table.id(next);
}

class Rollout {
  constructor(place, context) {
    this.context = context;
    this.place = place;
    this.later = new Later(() => this.again());
    this.keys = [
      ["j k", "next, previous turn"], ["[ ]", "previous, next rollout of the group"], ["← →", "previous, next rollout of the list"],
      ["g", "group side by side"], ["t", "its tokens"], ["e", "the state that it left"], ["p", "play it again"], ["b", "back to the list"],
    ];
  }

  async load() {
    this.id = await idFor(this.context, (all, at) => all.columns.kept[at] && !all.isEval(at), (all, at) => all.columns.kept[at]);
    if (!this.id) return this.place.replaceChildren(h("p", {}, "No rollout was kept yet (monitor.rollouts)."));
    this.found = await detail(this.context.run, this.id);
    this.turn = -1;
    this.beside = this.context.params.get("beside") ?? "";
    this.other = this.beside && this.beside !== this.id ? await detail(this.context.run, this.beside) : null;
    this.draw();
  }

  draw() {
    const { found, other } = this;
    this.talk = h("div", { class: other ? "talks two" : "talks" }, column(found), other ? column(other) : null);
    this.facts = facts(found);
    this.group = this.groupTable();
    this.place.replaceChildren(this.title(), this.facts, this.group, rewards(found) ?? "", h("h2", {}, other ? `Beside ${this.beside}` : "Conversation"), this.talk, stateLeft(found.play) ?? "", again(found.play) ?? "", rest(found));
    if (other) align(this.talk);
  }

  /** It may have been trained meanwhile, and its group may have grown. */
  async update(parts) {
    if (parts.has("rollouts")) this.later.ask(WAIT_MS);
  }

  async again() {
    if (!this.found) return this.load();
    const now = await changed(this.context, this.found);
    const other = this.other && (await changed(this.context, this.other));
    if (this.later.over) return;
    const playedAnew = (now && !samePlay(now, this.found)) || (other && !samePlay(other, this.other));
    this.found = now ?? this.found;
    this.other = other ?? this.other;
    if (playedAnew) {
      const { scrollTop } = $("page");
      this.draw();
      $("page").scrollTop = scrollTop;
    } else if (now) {
      holdingStill($("page"), [this.facts, this.group, this.talk], () => {
        renew(this.facts, facts(now));
        renew(this.group, this.groupTable());
      });
    }
  }

  close() {
    this.later.close();
  }

  title() {
    const link = (label, key, does) => h("button", { type: "button", onclick: does }, label, h("kbd", {}, key));
    return h("div", { class: "bar" }, h("h2", { class: "id" }, this.id), link("Tokens", "t", () => this.tokens()), link("Group side by side", "g", () => this.compare()), link("List", "b", () => this.list()));
  }

  groupTable() {
    const rows = this.found.group.map((one) => {
      const name = h("a", { href: this.link(one.id), "aria-current": one.id === this.id ? "true" : null }, one.id.split("/").pop());
      const ended = endOf(one);
      const row = [name, h("span", { class: `tag ${outcomeClass(ended)}` }, ended), number(one.reward), number(one.train?.advantage), one.length ?? 0, one.turns ?? 0, number(one.train?.ratio_max), number(one.train?.clip_fraction), number(one.train?.staleness)];
      return row;
    });
    const made = table(["row", "outcome", "reward", "advantage", "tokens", "turns", "largest ratio", "clipped", "stale"], rows, { id: "group" });
    return h("section", {}, h("h2", {}, `Its group: ${rows.length} ${rows.length === 1 ? "rollout" : "rollouts"} of ${this.id.slice(0, this.id.lastIndexOf("/"))}`), made);
  }

  link(id, more = {}) {
    return `#/rollout?${new URLSearchParams({ runs: this.context.runs.map((run) => run.number).join(","), id, ...more })}`;
  }

  key(event) {
    if (!this.found) return false;
    const does = {
      j: () => this.move(1), k: () => this.move(-1), "]": () => this.sibling(1), "[": () => this.sibling(-1),
      ArrowRight: () => this.step(1), ArrowLeft: () => this.step(-1), g: () => this.compare(), t: () => this.tokens(), b: () => this.list(),
      e: () => this.toState(), p: () => this.place.querySelector("#again a")?.focus(),
    }[event.key];
    if (does) does();
    return !!does;
  }

  move(by) {
    const turns = [...this.talk.querySelectorAll(".talk:first-child .turn")];
    if (!turns.length) return;
    this.turn = Math.max(0, Math.min(turns.length - 1, this.turn + by));
    turns[this.turn].focus();
    turns[this.turn].scrollIntoView({ block: "nearest" });
  }

  siblingId(from, by) {
    const ids = this.found.group.map((one) => one.id);
    return ids[(ids.indexOf(from) + by + ids.length) % ids.length] ?? null;
  }

  sibling(by) {
    const next = this.siblingId(this.beside || this.id, by);
    if (next) this.context.go("rollout", this.beside ? { id: this.id, beside: next } : { id: next });
  }

  step(by) {
    const next = neighbour(this.context, this.id, by);
    if (next) this.context.go("rollout", { id: next });
  }

  compare() {
    if (this.beside) return this.context.go("rollout", { id: this.id });
    const next = this.siblingId(this.id, 1);
    if (next && next !== this.id) this.context.go("rollout", { id: this.id, beside: next });
    else this.context.notice("This group has one rollout alone.");
  }

  toState() {
    const left = this.place.querySelector("#state-left");
    if (left) left.scrollIntoView({ block: "start" });
    else this.context.notice("The environment of this rollout describes no state.");
  }

  tokens() {
    this.context.go("tokens", { id: this.id });
  }

  list() {
    this.context.go("rollouts");
  }
}

const samePlay = (one, other) => JSON.stringify([one.line, one.play]) === JSON.stringify([other.line, other.play]);

function endOf(line) {
  if (line.failure) return `failure: ${line.failure}`;
  return line.success ? "success" : line.truncated ? "truncated" : "no success";
}

function facts({ line, train_line: trained, step, play }) {
  const ended = endOf(line);
  const fact = (name, value) => (value === undefined || value === null || value === "" ? null : h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  return h(
    "dl", { class: "facts" },
    fact("outcome", h("span", { class: `tag ${outcomeClass(ended)}` }, ended)), fact("reward", number(line.reward)), fact("task", line.task), fact("group", line.group), fact("environment", line.env),
    fact("split", line.split ?? "train"), fact("step", String(step)), fact("played by version", line.version), fact("trained at version", trained?.version), fact("staleness", trained?.staleness),
    fact("advantage", trained ? number(trained.advantage) : null), fact("tokens", line.length ?? 0), fact("turns", line.turns ?? 0), fact("seconds", line.seconds ? number(line.seconds) : null),
    fact("seed", play.seed), fact("ended", play.status), fact("attempt", line.attempt || null), fact("message", play.message), fact("record", play.problem),
  );
}

function rewards({ play }) {
  const parts = [...Object.entries(play.rewards ?? {}).map((one) => ["reward", ...one]), ...Object.entries(play.metrics ?? {}).map((one) => ["metric", ...one])];
  return parts.length ? h("details", {}, h("summary", {}, "Parts of the reward and metrics"), table(["", "name", "value"], parts.map(([kind, name, value]) => [kind, name, number(value)]))) : null;
}

function rest({ play }) {
  const left = Object.fromEntries(["sampling", "tools", "info", "timings"].filter((name) => play[name] && Object.keys(play[name]).length).map((name) => [name, play[name]]));
  return h("section", {}, Object.entries(left).map(([name, value]) => h("details", {}, h("summary", {}, { sampling: "How it was sampled", tools: "Tools", info: "What the environment said of it", timings: "Timings" }[name]), json(value))));
}

const json = (value) => h("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1));

/** A conversation. A very long one shows its beginning and its end. */
function column(found) {
  const { play, id, line } = found;
  const talk = h("section", { class: "talk", "aria-label": `Conversation of ${id}` }, h("p", { class: "muted" }, `${id} · ${endOf(line)} · reward ${number(line.reward)}`));
  if (play.problem) talk.append(h("p", { class: "problem" }, play.problem));
  const messages = play.messages ?? [];
  const half = MOST_TURNS / 2;
  messages.forEach((message, at) => {
    if (messages.length > MOST_TURNS && at >= half && at < messages.length - half) {
      if (at === half) talk.append(h("p", { class: "muted" }, `${messages.length - MOST_TURNS} messages in the middle are not shown.`));
      return;
    }
    talk.append(block(message, play.turns ?? []));
  });
  return talk;
}

function block(message, turns) {
  const own = message.turn !== undefined ? turns[message.turn] : null;
  const made = h("article", { class: own ? "message turn" : "message", "data-role": message.role, "data-turn": message.turn, tabindex: own ? "0" : null });
  const head = [h("b", {}, own ? `turn ${message.turn + 1}` : message.role)];
  if (own) {
    head.push(h("span", { class: own.reward ? "gain" : "muted" }, `reward ${number(own.reward)}`));
    if (own.version) head.push(h("span", { class: "muted" }, own.version[0] === own.version[1] ? `version ${own.version[0]}` : `versions ${own.version.join(" to ")}`));
    if (own.n_tokens !== undefined) head.push(h("span", { class: "muted" }, `${own.n_tokens} tokens`));
  }
  made.append(h("header", {}, head));
  if (message.reasoning) made.append(h("details", { class: "reasoning" }, h("summary", {}, "reasoning"), long(message.reasoning)));
  if (message.content && message.content.length) made.append(typeof message.content === "string" ? long(message.content) : json(message.content));
  for (const call of message.tool_calls ?? []) made.append(toolCall(call));
  if (message.text) made.append(h("details", {}, h("summary", {}, "as it was said"), long(message.text)));
  if (own?.info && Object.keys(own.info).length) made.append(h("details", { class: "view" }, h("summary", {}, "the environment's view"), ofTurn(own.info)));
  for (const [name, value] of Object.entries({ ...own?.rewards, ...own?.metrics })) made.append(h("span", { class: "entry muted" }, `${name} ${number(value)} `));
  return made;
}

function toolCall(call) {
  const given = call.arguments ?? call.function?.arguments ?? {};
  const values = typeof given === "object" && given !== null ? Object.values(given) : [given];
  const text = values.length === 1 && typeof values[0] === "string" ? values[0] : typeof given === "string" ? given : JSON.stringify(given, null, 1);
  return h("div", { class: call.problem ? "call bad" : "call" }, h("b", {}, call.name ?? call.function?.name ?? "tool"), h("code", {}, text), call.problem ? h("p", { class: "problem" }, call.problem) : null);
}

function long(text) {
  if (typeof text !== "string") return json(text);
  if (text.length <= LONG) return h("pre", {}, text);
  const made = h("pre", {}, text.slice(0, LONG));
  const whole = () => {
    made.textContent = shown(text);
    more.remove();
    made.tabIndex = -1;
    made.focus();
  };
  const more = h("button", { type: "button", onclick: whole }, `${(text.length - LONG).toLocaleString("en")} more characters`);
  return h("div", {}, made, more);
}

/** Put the turns with the same number at the same height. */
function align(talks) {
  const [left, right] = talks.children;
  for (const turn of left.querySelectorAll(".turn")) {
    const other = right.querySelector(`.turn[data-turn="${turn.dataset.turn}"]`);
    if (!other) continue;
    const by = turn.getBoundingClientRect().top - other.getBoundingClientRect().top;
    if (by > 0) other.style.marginTop = `${by + 8}px`;
    else if (by < 0) turn.style.marginTop = `${8 - by}px`;
  }
}
