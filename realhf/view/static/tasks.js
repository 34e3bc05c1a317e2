// The success of every task over time: hard, learned and forgotten tasks. A task is a template of the curriculum; its
// instances are shown on a click.

import { h, percent, renew, s } from "./dom.js";
import { DelayedTask } from "./store.js";
import { loadTable } from "./table.js";

const BINS = 16;
const RECENT = 0.25;
const LEARNED = 0.5;
const FORGOTTEN = 0.25;
const MIN_EPISODES = 3;
const ORDERS = [
  ["hardest", "hardest first"], ["learned", "newly solved first"], ["forgotten", "forgotten first"], ["name", "by name"], ["most", "most played first"],
];
const SHOWN = 500;
const INSTANCES = 200;
const WAIT_MS = 1000;

export async function show(place, context) {
  const page = new Tasks(place, context);
  await page.load();
  return page;
}

class Tasks {
  constructor(place, context) {
    this.context = context;
    this.later = new DelayedTask(() => this.reload());
    this.keys = [["o", "another order"], ["/", "find a task"], ["e", "evaluations or training"], ["Tab, Enter", "to a task's rollouts, or its instances"]];
    this.order = h("select", { id: "order", "aria-label": "Order", onchange: () => this.draw() }, ORDERS.map(([value, text]) => h("option", { value, selected: value === context.params.get("order") }, text)));
    this.part = h("select", { id: "part", "aria-label": "Which rollouts", onchange: () => this.count() }, h("option", { value: "train" }, "training"), h("option", { value: "eval" }, "evaluations"));
    this.search = h("input", { type: "search", id: "task-search", placeholder: "Find a task", "aria-label": "Find a task", autocomplete: "off", oninput: () => this.draw() });
    this.open = new Set();
    this.status = h("p", { class: "readout", role: "status" });
    this.rows = h("tbody");
    const heads = ["task", "instances", "group", "success over time", "first", "lately", "change", "played", "failed", ""];
    const scroller = h("div", { class: "scroll" }, h("table", { id: "tasks" }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), this.rows));
    place.append(h("div", { class: "bar tasks-bar" }, this.search, this.order, this.part), this.status, scroller);
  }

  async load() {
    this.table = await loadTable(this.context.run);
    this.count();
  }

  async update(parts) {
    if (parts.has("rollouts")) this.later.schedule(WAIT_MS);
  }

  async reload() {
    delete this.context.run.parts.table;
    await this.load();
  }

  close() {
    this.later.close();
  }

  /** Count the successes of every task in equal parts of the steps; failures are counted separately. */
  count() {
    const { columns, tables, count } = this.table;
    const isWantedSplit = Uint8Array.from(tables.split, (text) => (text.startsWith("eval") === (this.part.value === "eval") ? 1 : 0));
    let low = Infinity, high = -Infinity;
    for (let at = 0; at < count; at++) {
      if (!isWantedSplit[columns.split[at]]) continue;
      low = Math.min(low, columns.step[at]);
      high = Math.max(high, columns.step[at]);
    }
    const wide = Math.max(1, high - low + 1);
    const tasks = tables.template.map((name) => ({ name, group: "", played: 0, failed: 0, instances: new Map(), good: new Uint32Array(BINS), all: new Uint32Array(BINS) }));
    for (let at = 0; at < count; at++) {
      if (!isWantedSplit[columns.split[at]] || columns.branch[at]) continue; // a branch belongs to the same rollout
      const task = tasks[columns.template[at]];
      const name = tables.task[columns.task[at]];
      if (!task.instances.has(name)) task.instances.set(name, { name, played: 0, failed: 0, good: 0 });
      const instance = task.instances.get(name);
      instance.played++;
      task.group = tables.group[columns.group[at]];
      task.played++;
      if (tables.failure[columns.failure[at]]) {
        task.failed++;
        instance.failed++;
        continue;
      }
      const bin = Math.floor(((columns.step[at] - low) / wide) * BINS);
      task.all[bin]++;
      task.good[bin] += columns.success[at];
      instance.good += columns.success[at];
    }
    this.tasks = tasks.filter((task) => task.played).map(judgeTask);
    this.draw();
  }

  draw() {
    const needle = this.search.value.trim().toLowerCase();
    const matching = this.tasks.filter((task) => [task.name, ...task.instances.keys()].some((name) => name.toLowerCase().includes(needle))).sort(comparator(this.order.value));
    const learned = this.tasks.filter((task) => task.note === "newly solved").length;
    const forgotten = this.tasks.filter((task) => task.note === "forgotten").length;
    const never = this.tasks.filter((task) => task.note === "never solved").length;
    this.status.textContent = `${this.tasks.length} tasks: ${learned} newly solved, ${forgotten} forgotten, ${never} never solved${matching.length > SHOWN ? `; the first ${SHOWN} are shown` : ""}`;
    const focusedPlace = this.rows.contains(document.activeElement) ? document.activeElement.dataset.place : null;
    renew(this.rows, h("tbody", {}, matching.slice(0, SHOWN).flatMap((task) => [this.row(task), ...(this.open.has(task.name) ? this.instances(task) : [])])));
    // The focused task may have moved to another row.
    if (focusedPlace) [...this.rows.querySelectorAll("[data-place]")].find((one) => one.dataset.place === focusedPlace)?.focus({ preventScroll: true });
  }

  row(task) {
    const cells = [
      this.link("template", task.name), this.toggle(task), task.group, spark(task), percent(task.first), percent(task.lately),
      task.first === null || task.lately === null ? "–" : `${task.lately >= task.first ? "+" : "−"}${(100 * Math.abs(task.lately - task.first)).toFixed(0)}`,
      String(task.played), String(task.failed), h("span", { class: `tag ${task.note === "newly solved" ? "good" : task.note ? "failed" : ""}` }, task.note),
    ];
    return h("tr", {}, cells.map((cell) => h("td", {}, cell)));
  }

  /** To the rollouts of a template, or of a task. */
  link(kind, name) {
    const query = new URLSearchParams({ runs: this.context.runs.map((run) => run.number).join(","), [kind]: name, split: this.part.value });
    return h("a", { href: `#/rollouts?${query}`, "data-place": `${kind} ${name}` }, name || "(no name)");
  }

  toggle(task) {
    const { size } = task.instances;
    if (size === 1 && task.instances.has(task.name)) return "";
    const toggle = () => {
      if (!this.open.delete(task.name)) this.open.add(task.name);
      this.draw();
    };
    return h("button", { type: "button", class: "instances", "data-place": `open ${task.name}`, "aria-expanded": String(this.open.has(task.name)), "aria-label": `${size} instances of ${task.name}`, onclick: toggle }, String(size));
  }

  instances(task) {
    const successRate = (one) => (one.played > one.failed ? one.good / (one.played - one.failed) : null);
    const all = [...task.instances.values()].sort((a, b) => (successRate(a) ?? 2) - (successRate(b) ?? 2) || b.played - a.played);
    const rows = all.slice(0, INSTANCES).map((one) => [this.link("task", one.name), "", "", "", "", percent(successRate(one)), "", String(one.played), String(one.failed), ""]);
    if (all.length > INSTANCES) rows.push([`and ${all.length - INSTANCES} more`, "", "", "", "", "", "", "", "", ""]);
    return rows.map((cells) => h("tr", { class: "instance" }, cells.map((cell) => h("td", {}, cell))));
  }

  key(event) {
    if (event.key === "o") {
      this.order.selectedIndex = (this.order.selectedIndex + 1) % ORDERS.length;
      this.draw();
    } else if (event.key === "e") {
      this.part.selectedIndex = 1 - this.part.selectedIndex;
      this.count();
    } else if (event.key === "/") this.search.focus();
    else return false;
    return true;
  }
}

function rate(task, from, to) {
  let good = 0, all = 0;
  for (let bin = Math.floor(from * BINS); bin < Math.ceil(to * BINS); bin++) {
    good += task.good[bin];
    all += task.all[bin];
  }
  return { share: all ? good / all : null, all };
}

function judgeTask(task) {
  const first = rate(task, 0, RECENT), lately = rate(task, 1 - RECENT, 1), whole = rate(task, 0, 1);
  let best = 0;
  for (let at = 0; at + RECENT <= 1; at += RECENT) best = Math.max(best, rate(task, at, at + RECENT).share ?? 0);
  let note = "";
  if (whole.all >= MIN_EPISODES && whole.share === 0) note = "never solved";
  else if (lately.all >= MIN_EPISODES && first.all >= MIN_EPISODES) {
    if (first.share <= 0.1 && lately.share >= LEARNED) note = "newly solved";
    else if (best - lately.share >= FORGOTTEN && lately.share < LEARNED && best >= LEARNED) note = "forgotten";
  }
  return { ...task, first: first.share, lately: lately.share, whole: whole.share, note };
}

function comparator(name) {
  const last = (task) => task.lately ?? task.whole ?? 2;
  const notes = (note) => (a, b) => (b.note === note) - (a.note === note) || last(a) - last(b);
  return {
    hardest: (a, b) => last(a) - last(b) || b.played - a.played, learned: notes("newly solved"), forgotten: notes("forgotten"),
    name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }), most: (a, b) => b.played - a.played,
  }[name];
}

function spark(task) {
  const bars = [];
  for (let bin = 0; bin < BINS; bin++) {
    if (!task.all[bin]) continue;
    const tall = (22 * task.good[bin]) / task.all[bin];
    bars.push(s("rect", { x: bin * 7, y: 23 - tall, width: 6, height: tall + 1, class: "bar-good" }));
  }
  return s("svg", { class: "spark", viewBox: `0 0 ${BINS * 7} 24`, role: "img", "aria-label": `success over time, from ${percent(task.first)} to ${percent(task.lately)}` }, s("line", { x1: 0, x2: BINS * 7, y1: 23.5, y2: 23.5, class: "grid" }), ...bars);
}
