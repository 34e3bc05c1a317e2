// The table of all recorded rollouts: filters, order, full-text search. Only visible rows are drawn.

import { h, number, renew, tell } from "./dom.js";
import { DelayedTask, fetchPath } from "./store.js";
import { FILTERS, NONE, OUTCOMES, loadTable } from "./table.js";

const ROW = 30;
const SPARE_ROWS = 6;
const COLUMNS = [
  ["step", "step"], ["split", "split"], ["task", "task"], ["group", "group"], ["outcome", "outcome", "success"], ["reward", "reward"],
  ["advantage", "advantage"], ["length", "tokens"], ["turns", "turns"], ["version", "version"], ["staleness", "stale"], ["mismatch", "mismatch"],
];
const FIELDS = [
  ["step_min", "step from"], ["step_max", "to"], ["reward_min", "reward from"], ["reward_max", "to"], ["length_min", "tokens from"],
  ["length_max", "to"], ["staleness_min", "stale from"], ["mismatch_min", "mismatch from"], ["clip_min", "clipped from"],
];

export async function show(place, context) {
  const page = new Rollouts(place, context);
  await page.load();
  return page;
}

/** The rollouts that the list page showed last, for the pages that walk through them. */
export const lastList = { run: -1, ids: [] };

/** The outcome of a rollout in a word; a failure is not a reward of zero. */
export function outcome(table, at) {
  const failure = table.text("failure", at);
  if (failure) return `failure: ${failure}`;
  if (table.columns.success[at]) return "success";
  return table.columns.truncated[at] ? "truncated" : "no success";
}

export const outcomeClass = (text) => (text.startsWith("failure") ? "failed" : text === "success" ? "good" : text === "truncated" ? "cut" : "");

class Rollouts {
  constructor(place, context) {
    this.context = context;
    this.filters = Object.fromEntries(FILTERS.map((name) => [name, context.params.get(name) ?? ""]));
    this.sort = COLUMNS.some(([name]) => name === context.params.get("sort")) ? context.params.get("sort") : "step";
    this.descending = context.params.get("order") !== "up";
    this.text = context.params.get("text") ?? "";
    this.matches = null;
    this.filledChoices = {};
    this.at = 0;
    this.later = new DelayedTask(() => this.reload());
    this.keys = [
      ["↑ ↓ PgUp PgDn", "row"], ["Home End", "first, last"], ["Enter", "open the rollout"], ["f", "failures alone"], ["z", "zero rewards without failures"],
      ["/", "search the texts"], ["x", "without filters"], ["o", "order by the next column"], ["u", "the other way round"],
    ];
    this.build(place);
  }

  build(place) {
    const field = (name, attributes) => h("input", { id: `f-${name}`, value: this.filters[name], autocomplete: "off", oninput: (event) => this.set(name, event.target.value), ...attributes });
    const choice = (name, options) => h("select", { id: `f-${name}`, "aria-label": name, onchange: (event) => this.set(name, event.target.value) }, options);
    this.outcomes = choice("outcome", OUTCOMES.map(([value, text]) => h("option", { value, selected: value === this.filters.outcome }, text)));
    this.splits = choice("split", []);
    this.groups = choice("group", []);
    this.failures = choice("failure", []);
    this.search = h("input", { type: "search", id: "search", value: this.text, placeholder: "Search the conversations, Enter", "aria-label": "Search the conversations", autocomplete: "off" });
    this.search.addEventListener("keydown", (event) => event.key === "Enter" && this.searchTexts(this.search.value));
    this.search.addEventListener("search", () => this.search.value || this.searchTexts(""));
    const bounds = FIELDS.map(([name, label]) => h("label", { class: "bound" }, h("span", {}, label), field(name, { type: "number", step: "any" })));
    const task = field("task", { type: "search", placeholder: "Task", "aria-label": "Task" });
    this.more = h("details", { class: "more" }, h("summary", {}, "Bounds"), h("div", { class: "bounds" }, bounds));
    this.more.open = FIELDS.some(([name]) => this.filters[name]);
    this.countLine = h("p", { class: "readout", role: "status", id: "count" });
    this.problems = h("p", { class: "problem" });
    this.head = h("div", { class: "head-row", role: "group", "aria-label": "Order" });
    this.heads = COLUMNS.map(([name]) => h("button", { type: "button", class: `cell ${name}`, onclick: () => this.orderBy(name) }));
    this.head.append(...this.heads);
    this.rows = h("div", { class: "rows" });
    this.body = h("div", { class: "body", tabindex: "0", role: "grid", id: "grid", "aria-label": "Rollouts; arrows move, Enter opens" }, this.rows);
    this.body.addEventListener("scroll", () => this.drawRows());
    this.rows.addEventListener("click", (event) => this.click(Math.floor((event.clientY - this.rows.getBoundingClientRect().top) / ROW)));
    this.resized = new ResizeObserver(() => this.drawRows());
    this.resized.observe(this.body);
    const tools = h("div", { class: "filters" }, this.search, this.outcomes, this.failures, this.splits, this.groups, task, h("button", { type: "button", onclick: () => this.clear() }, "No filters"));
    place.append(tools, this.more, this.countLine, this.problems, h("div", { class: "grid-frame" }, this.head, this.body));
  }

  close() {
    this.resized.disconnect();
    this.later.close();
    this.stopSearch();
  }

  async load() {
    const began = performance.now();
    this.table = await loadTable(this.context.run);
    this.fillChoices();
    this.problems.textContent = this.table.problems.join(" ");
    this.apply();
    if (this.text) this.searchTexts(this.text);
    document.documentElement.dataset.tableMs = (performance.now() - began).toFixed(1);
    this.body.focus({ preventScroll: true });
  }

  /** Schedule a reload after new rollouts; a table that takes long is loaded less often. */
  async update(parts) {
    if (!parts.has("rollouts")) return;
    const spent = Number(document.documentElement.dataset.tableMs ?? 0);
    this.later.schedule(Math.min(10_000, 5 * spent));
  }

  async reload() {
    delete this.context.run.parts.table;
    const table = await loadTable(this.context.run);
    if (this.later.closed) return;
    this.applyKeepingPlace(() => {
      this.table = table;
      this.fillChoices();
      tell(this.problems, this.table.problems.join(" "));
    });
  }

  /** Rebuild the list after a change. If the reader has scrolled down, the row and its position on the screen stay; at the
   * top, new rows appear. */
  applyKeepingPlace(change = () => {}) {
    const { scrollTop } = this.body;
    const [first, last] = [Math.floor(scrollTop / ROW), Math.floor((scrollTop + this.body.clientHeight) / ROW)];
    const anchor = this.at >= first && this.at < last ? this.at : first;
    const idAt = (place) => (this.order.length ? this.table.id(this.order[Math.min(place, this.order.length - 1)]) : "");
    const [chosenId, anchorId] = this.at || scrollTop ? [idAt(this.at), idAt(anchor)] : ["", ""];
    change();
    this.apply(chosenId);
    const now = anchorId ? this.order.indexOf(this.table.find(anchorId)) : -1;
    if (now >= 0) this.body.scrollTop = scrollTop + (now - anchor) * ROW;
    this.drawRows();
  }

  fillChoices() {
    const fill = (place, name, first) => {
      const texts = [...this.table.tables[name]].filter(Boolean).sort();
      const options = [...first, ...texts.map((text) => [text, text])];
      const optionsText = JSON.stringify(options);
      if (this.filledChoices[name] === optionsText) return; // unchanged: a person may be choosing
      this.filledChoices[name] = optionsText;
      place.replaceChildren(...options.map(([value, text]) => h("option", { value, selected: value === this.filters[name] }, text)));
    };
    fill(this.splits, "split", [["", "training and evaluations"], ...(this.table.tables.split.some((one) => one.startsWith("eval/")) ? [["eval", "all evaluations"]] : [])]);
    fill(this.groups, "group", [["", "every group"]]);
    fill(this.failures, "failure", [["", "failed or not"], ["any", "every failure"]]);
  }

  set(name, value) {
    this.filters[name] = value;
    this.apply();
  }

  clear() {
    for (const name of FILTERS) this.filters[name] = "";
    for (const one of document.querySelectorAll(".filters select, .filters input, .bounds input")) one.value = "";
    this.searchTexts("");
    this.apply();
  }

  apply(keep = "") {
    const began = performance.now();
    const passing = this.table.filter(this.filters, this.matches);
    const name = COLUMNS.find(([column]) => column === this.sort)?.[2] ?? this.sort;
    this.order = this.table.sort(passing, name, this.descending);
    this.at = keep ? Math.max(0, this.order.indexOf(this.table.find(keep))) : 0;
    this.drawHead();
    this.rows.style.height = `${this.order.length * ROW}px`;
    if (!keep) this.body.scrollTop = 0;
    this.drawRows();
    const spent = performance.now() - began;
    document.documentElement.dataset.filterMs = spent.toFixed(1);
    this.drawCount(spent);
    const active = Object.entries(this.filters).filter(([, value]) => value !== "");
    this.context.go("rollouts", { ...Object.fromEntries(active), ...(this.text ? { text: this.text } : {}), sort: this.sort, order: this.descending ? "down" : "up" }, true);
    this.body.setAttribute("aria-rowcount", this.order.length);
    lastList.run = this.context.run.number;
    lastList.table = this.table;
    lastList.order = this.order;
  }

  drawCount(spent) {
    const { columns, tables } = this.table;
    const count = columns.branch.reduce((sum, branch) => sum + !branch, 0);
    let shown = 0, failed = 0, zero = 0, good = 0;
    for (const at of this.order) {
      if (columns.branch[at]) continue;
      shown++;
      if (tables.failure[columns.failure[at]]) failed++;
      else if (columns.success[at]) good++;
      else if (columns.reward[at] === 0) zero++;
    }
    const part = (text) => h("span", { class: "entry" }, text);
    const only = ["template", "sample", "env"].filter((name) => this.filters[name]).map((name) => part(`${name} ${this.filters[name]}`)); // filters without a field
    renew(this.countLine, h("p", { class: "readout", role: "status", id: "count" },
      h("b", {}, `${shown.toLocaleString("en")} of ${count.toLocaleString("en")} rollouts`), ...only,
      this.order.length > shown ? part(`${(this.order.length - shown).toLocaleString("en")} further conversations of them`) : "",
      part(`${good.toLocaleString("en")} succeeded`), part(`${zero.toLocaleString("en")} played with reward 0`), part(`${failed.toLocaleString("en")} failed`),
      h("span", { class: "muted", title: "filter and order" }, `${spent.toFixed(0)} ms`), h("span", { id: "searched", class: "muted" }, this.searched ?? ""),
    ));
  }

  drawHead() {
    COLUMNS.forEach(([name, label], at) => {
      const isCurrent = name === this.sort;
      this.heads[at].textContent = isCurrent ? `${label} ${this.descending ? "↓" : "↑"}` : label;
      this.heads[at].setAttribute("aria-label", `order by ${label}${isCurrent ? `, ${this.descending ? "descending" : "ascending"} now` : ""}`);
    });
  }

  orderBy(name) {
    this.descending = this.sort === name ? !this.descending : true;
    this.sort = name;
    this.apply();
  }

  drawRows() {
    if (!this.order) return;
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - SPARE_ROWS);
    const last = Math.min(this.order.length, first + Math.ceil(this.body.clientHeight / ROW) + 2 * SPARE_ROWS);
    const rows = h("div", { class: "rows" });
    rows.style.height = this.rows.style.height;
    for (let place = first; place < last; place++) rows.append(this.row(place));
    renew(this.rows, rows); // in place, because a mouse button may be pressed on a row
    const active = this.rows.querySelector("[aria-selected=true]");
    this.body.setAttribute("aria-activedescendant", active ? active.id : "");
  }

  row(place) {
    const at = this.order[place];
    const { columns } = this.table;
    const outcomeText = outcome(this.table, at);
    const value = (name, none = "–") => (Number.isNaN(columns[name][at]) || columns[name][at] === NONE ? none : number(columns[name][at]));
    const texts = {
      step: String(columns.step[at]), split: this.table.text("split", at), task: this.table.text("task", at), group: this.table.text("group", at), outcome: outcomeText,
      reward: value("reward"), advantage: Number.isNaN(columns.advantage[at]) ? "–" : number(columns.advantage[at]), length: String(columns.length[at]), turns: String(columns.turns[at]),
      version: value("version"), staleness: value("staleness"), mismatch: value("mismatch"),
    };
    const line = h("div", { class: `row ${outcomeClass(outcomeText)}`, role: "row", id: `row-${place}`, "aria-rowindex": place + 1, "aria-label": `step ${texts.step}, ${texts.split}, ${texts.task}: ${outcomeText}, reward ${texts.reward}, ${texts.length} tokens`, "aria-selected": place === this.at ? "true" : "false" },
      COLUMNS.map(([name]) => h("span", { class: `cell ${name}`, role: "gridcell", title: name === "task" ? texts.task : null }, texts[name])));
    line.style.top = `${place * ROW}px`;
    return line;
  }

  click(place) {
    if (place === this.at) return this.open();
    this.move(place);
  }

  move(place) {
    this.at = Math.max(0, Math.min(this.order.length - 1, place));
    const top = this.at * ROW;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    else if (top + ROW > this.body.scrollTop + this.body.clientHeight) this.body.scrollTop = top + ROW - this.body.clientHeight;
    this.drawRows();
  }

  open() {
    if (this.order.length) this.context.go("rollout", { id: this.table.id(this.order[this.at]) });
  }

  key(event) {
    if (!this.order) return false;
    const screen = Math.max(1, Math.floor(this.body.clientHeight / ROW) - 1);
    const action = {
      ArrowDown: () => this.move(this.at + 1), ArrowUp: () => this.move(this.at - 1), j: () => this.move(this.at + 1), k: () => this.move(this.at - 1),
      PageDown: () => this.move(this.at + screen), PageUp: () => this.move(this.at - screen), Home: () => this.move(0), End: () => this.move(this.order.length - 1),
      f: () => this.toggle("failed"), z: () => this.toggle("zero"), x: () => this.clear(), "/": () => this.search.focus(),
      o: () => this.orderBy(COLUMNS[(COLUMNS.findIndex(([name]) => name === this.sort) + 1) % COLUMNS.length][0]), u: () => this.orderBy(this.sort),
    }[event.key];
    if (action) action();
    else if (event.key === "Enter" && !event.target.closest("button, a, summary")) this.open();
    else return false;
    return true;
  }

  toggle(value) {
    this.outcomes.value = this.filters.outcome === value ? "" : value;
    this.set("outcome", this.outcomes.value);
  }

  stopSearch() {
    this.searching?.abort();
    this.searching = null;
  }

  /** Ask the server which rollouts contain a text; results are shown as they arrive. */
  async searchTexts(text) {
    this.stopSearch();
    this.text = text;
    this.matches = text ? new Set() : null;
    this.searched = text ? "searching…" : "";
    this.search.value = text;
    this.apply();
    if (!text) return;
    const request = (this.searching = new AbortController());
    try {
      const reply = await fetchPath(`/api/runs/${this.context.run.number}/search?${new URLSearchParams({ text })}`, request.signal);
      if (!reply.ok) throw new Error(reply.statusText);
      await this.readResults(reply.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch (error) {
      if (request.signal.aborted) return;
      this.searched = `the search ended: ${error.message}`;
    }
    this.applyKeepingPlace();
    const { activeElement } = document;
    const waits = activeElement === document.body || (activeElement === this.search && this.search.value === text);
    if (waits) this.body.focus({ preventScroll: true }); // the focus stays if the reader has moved it
  }

  async readResults(reader) {
    let remainder = "";
    let drawnAt = performance.now();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (remainder + value).split("\n");
      remainder = lines.pop();
      for (const line of lines) {
        const one = JSON.parse(line);
        if (one.ids) for (const id of one.ids) this.matches.add(id);
        else this.searched = `${this.matches.size.toLocaleString("en")} hold the text; ${one.done ? "all" : `the time was over after ${one.searched.toLocaleString("en")}`} of ${one.of.toLocaleString("en")} looked through`;
      }
      if (performance.now() - drawnAt > 500) {
        this.applyKeepingPlace();
        drawnAt = performance.now();
      }
    }
  }
}
