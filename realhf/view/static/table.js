// All rollouts of a run as typed arrays, with filters and order.

import { askPacked } from "./store.js";

export const NONE = -1;

/** Filters that compare a column with a number: name in the address, column, and whether it is a lower bound. */
const BOUNDS = [
  ["step_min", "step", true], ["step_max", "step", false], ["reward_min", "reward", true], ["reward_max", "reward", false],
  ["length_min", "length", true], ["length_max", "length", false], ["turns_min", "turns", true], ["turns_max", "turns", false],
  ["staleness_min", "staleness", true], ["mismatch_min", "mismatch", true], ["ratio_min", "ratio_max", true],
  ["clip_min", "clip_fraction", true], ["advantage_min", "advantage", true], ["advantage_max", "advantage", false],
];
const EXACT = ["template", "group", "env", "failure", "sample"];
export const OUTCOMES = [
  ["", "every outcome"], ["success", "success"], ["unsolved", "played, no success"], ["zero", "reward 0, no failure"],
  ["failed", "failure"], ["truncated", "truncated"],
];
export const FILTERS = ["outcome", "split", "task", ...EXACT, ...BOUNDS.map(([name]) => name)];

/** The table of a run; loaded once, and again after changes. */
export async function loadTable(run) {
  for (let tries = 0; tries < 3 && !run.parts.table; tries++) {
    const { rollouts } = run.stamps;
    const { header, arrays } = await askPacked(`/api/runs/${run.number}/rollouts`);
    const table = new Table(header, arrays);
    if (tries < 2 && run.stamps.rollouts !== rollouts) continue; // rollouts were added during the request
    run.parts.table = table;
  }
  return run.parts.table;
}

export class Table {
  constructor(header, arrays) {
    this.count = header.count;
    this.problems = header.problems;
    this.tables = header.tables;
    this.columns = arrays;
  }

  text(name, at) {
    return this.tables[name][this.columns[name][at]];
  }

  id(at) {
    return `${this.text("sample", at)}/${this.columns.row[at]}`;
  }

  /** Number of the rollout with an id; -1 without one. */
  find(id) {
    if (!this.numbers) {
      this.numbers = new Map();
      for (let at = 0; at < this.count; at++) this.numbers.set(this.id(at), at);
    }
    return this.numbers.get(id) ?? -1;
  }

  isEval(at) {
    return this.text("split", at).startsWith("eval");
  }

  /** Numbers of the rollouts that pass all filters (name to text); `ids`: only these, too. */
  filter(filters, ids = null) {
    const tests = this.tests(filters);
    const passing = new Uint32Array(this.count);
    let size = 0;
    next: for (let at = 0; at < this.count; at++) {
      for (const test of tests) if (!test(at)) continue next;
      passing[size++] = at;
    }
    const rows = passing.slice(0, size);
    if (!ids) return rows;
    const allowed = new Set([...ids].map((id) => this.find(id)));
    return rows.filter((at) => allowed.has(at));
  }

  tests(filters) {
    const { columns } = this;
    const tests = [];
    const codes = (name, passes) => {
      const allowed = Uint8Array.from(this.tables[name], (text) => (passes(text) ? 1 : 0));
      const column = columns[name];
      tests.push((at) => allowed[column[at]] === 1);
    };
    for (const name of EXACT) {
      if (filters[name]) codes(name, name === "failure" && filters[name] === "any" ? (text) => text !== "" : (text) => text === filters[name]);
    }
    if (filters.split) codes("split", (text) => text === filters.split || text.startsWith(`${filters.split}/`));
    if (filters.task) {
      const needle = filters.task.toLowerCase();
      codes("task", (text) => text.toLowerCase().includes(needle));
    }
    for (const [name, column, low] of BOUNDS) {
      if (filters[name] === undefined || filters[name] === "") continue;
      const bound = Number(filters[name]);
      const values = columns[column];
      // A comparison with NaN, which stands for no value, is false.
      tests.push(low ? (at) => values[at] >= bound : (at) => values[at] <= bound);
    }
    const failed = Uint8Array.from(this.tables.failure, (text) => (text ? 1 : 0));
    const { failure, success, reward, truncated } = columns;
    const outcome = {
      success: (at) => success[at] === 1,
      unsolved: (at) => success[at] === 0 && !failed[failure[at]],
      zero: (at) => reward[at] === 0 && !failed[failure[at]],
      failed: (at) => failed[failure[at]] === 1,
      truncated: (at) => truncated[at] === 1,
    }[filters.outcome];
    if (outcome) tests.push(outcome);
    return tests;
  }

  /** The same rollouts in the order of a column; those without a value come last. */
  sort(rows, name, descending) {
    const order = this.orderBy(name, descending);
    if (rows.length === this.count) return order;
    const isIncluded = new Uint8Array(this.count);
    for (const at of rows) isIncluded[at] = 1;
    const sorted = new Uint32Array(rows.length);
    let size = 0;
    for (const at of order) if (isIncluded[at]) sorted[size++] = at;
    return sorted;
  }

  /** All rollouts in the order of a column; computed once per column and direction. */
  orderBy(name, descending) {
    this.orders ??= new Map();
    const key = `${name} ${descending}`;
    if (!this.orders.has(key)) {
      const ranks = this.tables[name] ? this.ranks(name) : null;
      const keys = Float64Array.from(this.columns[name], (value) => {
        const one = ranks ? ranks[value] : value;
        return Number.isNaN(one) ? Infinity : descending ? -one : one;
      });
      const order = Uint32Array.from(keys, (_, at) => at);
      this.orders.set(key, order.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b)));
    }
    return this.orders.get(key);
  }

  ranks(name) {
    const texts = this.tables[name];
    const order = texts.map((_, at) => at).sort((a, b) => texts[a].localeCompare(texts[b], "en", { numeric: true }));
    const ranks = new Float64Array(texts.length);
    order.forEach((at, rank) => (ranks[at] = rank));
    return ranks;
  }
}
