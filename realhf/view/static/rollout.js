// One rollout: its conversation turn by turn, what the environment recorded about it, and its group.

import { $, h, holdingStill, number, renew, shown, table } from "./dom.js";
import { finalState, replaySection, turnView } from "./environment.js";
import { askJson, DelayedTask, Gone } from "./store.js";
import { loadTable } from "./table.js";
import { lastList, outcomeClass } from "./rollouts.js";

const LONG_TEXT = 4000;
const MAX_MESSAGES = 400;
const WAIT_MS = 500;

export async function show(place, context) {
  const page = new Rollout(place, context);
  await page.load();
  return page;
}

/** The id in the address; without one, the newest rollout that passes the first of these tests that any rollout passes. */
export async function chooseId(context, ...tests) {
  const id = context.params.get("id");
  if (id) return id;
  const all = await loadTable(context.run);
  for (const passes of tests) {
    for (let at = all.count - 1; at >= 0; at--) if (passes(all, at)) return all.id(at);
  }
  return null;
}

/** Index lines and records of a rollout; loaded once, and again after the rollouts have changed. */
export async function loadRollout(run, id) {
  const cache = (run.parts.details ??= new Map());
  if (!cache.has(id)) {
    if (cache.size > 24) cache.clear();
    cache.set(id, await askJson(`/api/runs/${run.number}/rollout?${new URLSearchParams({ id })}`));
  }
  return cache.get(id);
}

/** The present data of a rollout; null if it equals `before`. Its records are read again only if a line of the index has
 * changed, or if one of them could not be read before. */
export async function loadChange({ run, notice }, before) {
  const unread = before.play.problem ?? before.train?.problem;
  const query = new URLSearchParams({ id: before.id, seen: unread ? "" : before.stamp });
  const now = await askJson(`/api/runs/${run.number}/rollout?${query}`).catch((error) => {
    if (!(error instanceof TypeError || error instanceof Gone)) notice(`${before.id} cannot be reloaded: ${error.message}. The page shows the data loaded before.`);
    throw error;
  });
  const same = now.same || (now.stamp === before.stamp && unread === (now.play.problem ?? now.train?.problem));
  (run.parts.details ??= new Map()).set(before.id, same ? before : now);
  return same ? null : now;
}

/** The id of the rollout `by` positions further in the list that the list page showed last. */
export function neighbour(context, id, by) {
  if (lastList.run !== context.run.number || !lastList.table) return null;
  const at = lastList.order.indexOf(lastList.table.find(id));
  const next = lastList.order[at + by];
  return at < 0 || next === undefined ? null : lastList.table.id(next);
}

class Rollout {
  constructor(place, context) {
    this.context = context;
    this.place = place;
    this.later = new DelayedTask(() => this.refresh());
    this.keys = [
      ["j k", "next, previous turn"], ["[ ]", "previous, next rollout of the group"], ["← →", "previous, next rollout of the list"],
      ["g", "group side by side"], ["t", "its tokens"], ["e", "the state that it left"], ["p", "play it again"], ["b", "back to the list"],
    ];
  }

  async load() {
    this.id = await chooseId(this.context, (all, at) => all.columns.kept[at] && !all.isEval(at), (all, at) => all.columns.kept[at]);
    if (!this.id) return this.place.replaceChildren(h("p", {}, "No rollout was kept yet (monitor.rollouts)."));
    this.record = await loadRollout(this.context.run, this.id);
    this.turn = -1;
    this.otherId = this.context.params.get("beside") ?? "";
    this.other = this.otherId && this.otherId !== this.id ? await loadRollout(this.context.run, this.otherId) : null;
    this.draw();
  }

  draw() {
    const { record, other } = this;
    this.talk = h("div", { class: other ? "talks two" : "talks" }, column(record), other ? column(other) : null);
    this.facts = facts(record);
    this.group = this.groupTable();
    this.place.replaceChildren(this.title(), this.facts, this.group, rewards(record) ?? "", h("h2", {}, other ? `Beside ${this.otherId}` : "Conversation"), this.talk, finalState(record.play) ?? "", replaySection(record.play) ?? "", otherDetails(record));
    if (other) align(this.talk);
  }

  /** Reload the rollout: it may have been trained by now, and its group may have grown. */
  async update(parts) {
    if (parts.has("rollouts")) this.later.schedule(WAIT_MS);
  }

  async refresh() {
    if (!this.record) return this.load();
    const now = await loadChange(this.context, this.record);
    const other = this.other && (await loadChange(this.context, this.other));
    if (this.later.closed) return;
    const hasNewPlay = (now && !samePlay(now, this.record)) || (other && !samePlay(other, this.other));
    this.record = now ?? this.record;
    this.other = other ?? this.other;
    if (hasNewPlay) {
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
    const rows = this.record.group.map((one) => {
      const name = h("a", { href: this.link(one.id), "aria-current": one.id === this.id ? "true" : null }, one.id.split("/").pop());
      const ended = outcomeOf(one);
      const row = [name, h("span", { class: `tag ${outcomeClass(ended)}` }, ended), number(one.reward), number(one.train?.advantage), one.length ?? 0, one.turns ?? 0, number(one.train?.ratio_max), number(one.train?.clip_fraction), number(one.train?.staleness)];
      return row;
    });
    const groupTable = table(["row", "outcome", "reward", "advantage", "tokens", "turns", "largest ratio", "clipped", "stale"], rows, { id: "group" });
    return h("section", {}, h("h2", {}, `Its group: ${rows.length} ${rows.length === 1 ? "rollout" : "rollouts"} of ${this.id.slice(0, this.id.lastIndexOf("/"))}`), groupTable);
  }

  link(id, more = {}) {
    return `#/rollout?${new URLSearchParams({ runs: this.context.runs.map((run) => run.number).join(","), id, ...more })}`;
  }

  key(event) {
    if (!this.record) return false;
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
    const ids = this.record.group.map((one) => one.id);
    return ids[(ids.indexOf(from) + by + ids.length) % ids.length] ?? null;
  }

  sibling(by) {
    const next = this.siblingId(this.otherId || this.id, by);
    if (next) this.context.go("rollout", this.otherId ? { id: this.id, beside: next } : { id: next });
  }

  step(by) {
    const next = neighbour(this.context, this.id, by);
    if (next) this.context.go("rollout", { id: next });
  }

  compare() {
    if (this.otherId) return this.context.go("rollout", { id: this.id });
    const next = this.siblingId(this.id, 1);
    if (next && next !== this.id) this.context.go("rollout", { id: this.id, beside: next });
    else this.context.notice("This group has one rollout alone.");
  }

  toState() {
    const section = this.place.querySelector("#state-left");
    if (section) section.scrollIntoView({ block: "start" });
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

function outcomeOf(line) {
  if (line.failure) return `failure: ${line.failure}`;
  return line.success ? "success" : line.truncated ? "truncated" : "no success";
}

function facts({ line, train_line: trained, step, play }) {
  const ended = outcomeOf(line);
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

function otherDetails({ play }) {
  const details = Object.fromEntries(["sampling", "tools", "info", "timings"].filter((name) => play[name] && Object.keys(play[name]).length).map((name) => [name, play[name]]));
  return h("section", {}, Object.entries(details).map(([name, value]) => h("details", {}, h("summary", {}, { sampling: "How it was sampled", tools: "Tools", info: "Environment info", timings: "Timings" }[name]), json(value))));
}

const json = (value) => h("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1));

/** A conversation. A very long one shows its beginning and its end. */
function column(record) {
  const { play, id, line } = record;
  const talk = h("section", { class: "talk", "aria-label": `Conversation of ${id}` }, h("p", { class: "muted" }, `${id} · ${outcomeOf(line)} · reward ${number(line.reward)}`));
  if (play.problem) talk.append(h("p", { class: "problem" }, play.problem));
  const messages = play.messages ?? [];
  const half = MAX_MESSAGES / 2;
  messages.forEach((message, at) => {
    if (messages.length > MAX_MESSAGES && at >= half && at < messages.length - half) {
      if (at === half) talk.append(h("p", { class: "muted" }, `${messages.length - MAX_MESSAGES} messages in the middle are not shown.`));
      return;
    }
    talk.append(messageBlock(message, play.turns ?? []));
  });
  return talk;
}

function messageBlock(message, turns) {
  const turn = message.turn !== undefined ? turns[message.turn] : null;
  const article = h("article", { class: turn ? "message turn" : "message", "data-role": message.role, "data-turn": message.turn, tabindex: turn ? "0" : null });
  const head = [h("b", {}, turn ? `turn ${message.turn + 1}` : message.role)];
  if (turn) {
    head.push(h("span", { class: turn.reward ? "gain" : "muted" }, `reward ${number(turn.reward)}`));
    if (turn.version) head.push(h("span", { class: "muted" }, turn.version[0] === turn.version[1] ? `version ${turn.version[0]}` : `versions ${turn.version.join(" to ")}`));
    if (turn.n_tokens !== undefined) head.push(h("span", { class: "muted" }, `${turn.n_tokens} tokens`));
  }
  article.append(h("header", {}, head));
  if (message.reasoning) article.append(h("details", { class: "reasoning" }, h("summary", {}, "reasoning"), collapsibleText(message.reasoning)));
  if (message.content && message.content.length) article.append(typeof message.content === "string" ? collapsibleText(message.content) : json(message.content));
  for (const call of message.tool_calls ?? []) article.append(toolCall(call));
  if (message.text) article.append(h("details", {}, h("summary", {}, "raw text"), collapsibleText(message.text)));
  if (turn?.info && Object.keys(turn.info).length) article.append(h("details", { class: "view" }, h("summary", {}, "the environment's view"), turnView(turn.info)));
  for (const [name, value] of Object.entries({ ...turn?.rewards, ...turn?.metrics })) article.append(h("span", { class: "entry muted" }, `${name} ${number(value)} `));
  return article;
}

function toolCall(call) {
  const args = call.arguments ?? call.function?.arguments ?? {};
  const values = typeof args === "object" && args !== null ? Object.values(args) : [args];
  const text = values.length === 1 && typeof values[0] === "string" ? values[0] : typeof args === "string" ? args : JSON.stringify(args, null, 1);
  return h("div", { class: call.problem ? "call bad" : "call" }, h("b", {}, call.name ?? call.function?.name ?? "tool"), h("code", {}, text), call.problem ? h("p", { class: "problem" }, call.problem) : null);
}

function collapsibleText(text) {
  if (typeof text !== "string") return json(text);
  if (text.length <= LONG_TEXT) return h("pre", {}, text);
  const pre = h("pre", {}, text.slice(0, LONG_TEXT));
  const showAll = () => {
    pre.textContent = shown(text);
    more.remove();
    pre.tabIndex = -1;
    pre.focus();
  };
  const more = h("button", { type: "button", onclick: showAll }, `${(text.length - LONG_TEXT).toLocaleString("en")} more characters`);
  return h("div", {}, pre, more);
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
