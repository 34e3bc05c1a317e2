// The timeline: the spans of every thread of every process, drawn on a canvas.

import { h, number } from "./dom.js";
import { askPacked } from "./store.js";

const KINDS = ["generate", "env", "train", "ref", "weights", "evaluation", "sample", "wait", "other"];
const LANE = 20;
const TOP = 22;
const LABEL = 190;
const STEPS_AT_FIRST = 10;

export async function show(place, context) {
  const page = new Timeline(place, context);
  await page.load();
  return page;
}

const kindOf = (name) => {
  const kind = name.split("/")[0];
  return KINDS.includes(kind) ? kind : "other";
};

class Timeline {
  constructor(place, context) {
    this.context = context;
    this.spans = { epoch: 0, count: 0 };
    this.window = null;
    this.chosen = -1;
    this.keys = [
      ["← →", "earlier, later"], ["+ −", "zoom"], ["0", "everything"], ["↑ ↓", "line"], ["n p", "next, previous span of the line"],
      ["Enter", "to the rollout of the span"],
    ];
    this.canvas = h("canvas", { id: "lanes", tabindex: "0", role: "img", "aria-label": "Spans of every process over time; n and p walk through them" });
    this.status = h("p", { class: "readout", role: "status" });
    this.legend = h("p", { class: "readout" }, KINDS.map((kind) => h("span", { class: "entry" }, h("i", { class: `dot span-${kind}` }), kind)));
    this.frame = h("div", { class: "lanes" }, this.canvas);
    const button = (label, title, does) => h("button", { type: "button", title, onclick: does }, label);
    this.tools = h(
      "div",
      { class: "bar" },
      button("+", "Zoom in", () => this.zoom(0.5)),
      button("−", "Zoom out", () => this.zoom(2)),
      button("Everything", "Show the whole trace", () => this.showAll()),
      h("span", { class: "muted" }, "For Perfetto: ", h("code", {}, "python -m realhf.monitor.trace RUN"), " writes trace.json."),
    );
    place.append(this.tools, this.legend, this.frame, this.status);
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("click", (event) => this.onClick(event));
    this.canvas.addEventListener("dblclick", () => this.open());
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.frame);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
    this.theme = new MutationObserver(this.redraw);
    this.theme.observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  close() {
    this.resized.disconnect();
    this.theme.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
  }

  async load() {
    if (this.context.run.isGone) return this.showStatus("The folder is gone.");
    const before = this.spans;
    const { header, arrays } = await askPacked(`/api/runs/${this.context.run.number}/spans?epoch=${before.epoch}&start=${before.count}`);
    const isReplaced = header.start === 0;
    const joined = {};
    for (const [name, more] of Object.entries(arrays)) {
      joined[name] = isReplaced ? more : concatenate(before[name], more);
    }
    const wasAtEnd = !this.window || this.window.end >= this.end() - 1e-6;
    this.spans = { ...header, ...joined, count: joined.began.length };
    this.arrange();
    if (!this.spans.count) return this.showStatus("Nothing was traced yet (monitor.trace).");
    if (!this.window || isReplaced) this.lastSteps();
    else if (wasAtEnd) {
      const wide = this.window.end - this.window.begin;
      this.window = { begin: this.end() - wide, end: this.end() };
    }
    if (isReplaced) this.chosen = -1;
    this.draw();
    if (this.chosen < 0) this.describeWindow(); // the description of a chosen span stays
  }

  async update(parts) {
    if (parts.has("spans")) await this.load();
  }

  end() {
    return this.last ?? 0;
  }

  /** Sort the lanes by process, and the spans of each by their start. */
  arrange() {
    const { began, seconds, line, processes, lines, count } = this.spans;
    const selected = this.lanes?.[this.lane]; // other lanes may be added above it
    const order = new Map(processes.map((one, at) => [one.pid, at]));
    const names = new Map(processes.map((one) => [one.pid, one.name]));
    this.first = Infinity;
    this.last = -Infinity;
    const spansByLine = lines.map(() => []);
    for (let at = 0; at < count; at++) {
      spansByLine[line[at]].push(at);
      this.first = Math.min(this.first, began[at]);
      this.last = Math.max(this.last, began[at] + seconds[at]);
    }
    this.lanes = lines
      .map((one, at) => ({ process: names.get(one.pid) ?? String(one.pid), place: order.get(one.pid) ?? 1e9, name: one.name, spans: spansByLine[at].sort((a, b) => began[a] - began[b]) }))
      .filter((lane) => lane.spans.length)
      .sort((a, b) => a.place - b.place || a.name.localeCompare(b.name, "en", { numeric: true }));
    const index = selected ? this.lanes.findIndex((lane) => lane.process === selected.process && lane.name === selected.name) : -1;
    this.lane = index >= 0 ? index : Math.min(this.lane ?? 0, Math.max(0, this.lanes.length - 1));
    this.kinds = this.spans.names.map(kindOf);
  }

  lastSteps() {
    const ends = this.spans.steps.map(([at]) => at).sort((a, b) => a - b);
    const begin = ends.length > STEPS_AT_FIRST ? ends[ends.length - 1 - STEPS_AT_FIRST] : this.first;
    this.window = { begin, end: Math.max(this.last, begin + 1e-3) };
  }

  showAll() {
    this.window = { begin: this.first, end: Math.max(this.last, this.first + 1e-3) };
    this.draw();
    this.describeWindow();
  }

  zoom(factor, share = 0.5) {
    const { begin, end } = this.window ?? { begin: 0, end: 1 };
    const middle = begin + (end - begin) * share;
    const wide = Math.max(1e-4, Math.min((end - begin) * factor, 4 * (this.last - this.first)));
    this.window = { begin: middle - wide * share, end: middle + wide * (1 - share) };
    this.draw();
    this.describeWindow();
  }

  pan(share) {
    const wide = this.window.end - this.window.begin;
    this.window = { begin: this.window.begin + share * wide, end: this.window.end + share * wide };
    this.draw();
    this.describeWindow();
  }

  key(event) {
    if (!this.lanes?.length) return false;
    const does = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.showAll(),
      ArrowLeft: () => this.pan(-0.25), ArrowRight: () => this.pan(0.25),
      ArrowUp: () => this.chooseLane(-1), ArrowDown: () => this.chooseLane(1),
      n: () => this.walk(1), p: () => this.walk(-1),
    }[event.key];
    if (does) does();
    else if (event.key === "Enter" && !event.target.closest("button, a")) this.open();
    else return false;
    return true;
  }

  chooseLane(by) {
    this.lane = Math.max(0, Math.min(this.lanes.length - 1, this.lane + by));
    this.chosen = -1;
    this.frame.scrollTop = Math.max(0, TOP + this.lane * LANE - this.frame.clientHeight / 2);
    this.draw();
    const { process, name, spans } = this.lanes[this.lane];
    this.showStatus(`${process}, ${name}: ${spans.length} spans`);
  }

  walk(by) {
    const { began, seconds } = this.spans;
    const spans = this.lanes[this.lane].spans;
    const from = spans.indexOf(this.chosen);
    const next = from >= 0 ? from + by : spans.findIndex((one) => began[one] + seconds[one] >= this.window.begin);
    this.choose(spans[Math.max(0, Math.min(spans.length - 1, next))]);
  }

  choose(span) {
    this.chosen = span;
    const { began, seconds, steps } = this.spans;
    const { begin, end } = this.window;
    if (began[span] < begin || began[span] > end) {
      const wide = Math.max(end - begin, seconds[span] * 1.5);
      this.window = { begin: began[span] - wide / 10, end: began[span] + 0.9 * wide };
    }
    this.draw();
    const { process, name } = this.lanes[this.lane];
    const step = steps.find(([at]) => at >= began[span] + seconds[span] * 0.5)?.[1];
    const sample = this.spans.samples[this.spans.sample[span]];
    const text = `${this.spans.names[this.spans.name[span]]} · ${number(seconds[span])} s · ${process}, ${name}${step ? ` · step ${step}` : ""}`;
    this.status.replaceChildren(text, ...(sample ? [" · ", h("button", { type: "button", onclick: () => this.open() }, `Rollouts of ${sample}`)] : []));
  }

  open() {
    const sample = this.chosen >= 0 ? this.spans.samples[this.spans.sample[this.chosen]] : "";
    if (sample) this.context.go("rollouts", { sample });
  }

  onWheel(event) {
    if (!this.window || (!event.ctrlKey && !event.shiftKey)) return;
    event.preventDefault();
    if (event.shiftKey) return this.pan(Math.sign(event.deltaY + event.deltaX) * 0.15);
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.max(0, (event.offsetX - LABEL) / (this.canvas.clientWidth - LABEL)));
  }

  onClick(event) {
    if (!this.lanes) return;
    const lane = Math.floor((event.offsetY - TOP) / LANE);
    if (lane < 0 || lane >= this.lanes.length) return;
    this.lane = lane;
    const { begin, end } = this.window;
    const time = begin + ((event.offsetX - this.label) / (this.canvas.clientWidth - this.label)) * (end - begin);
    const { began, seconds } = this.spans;
    const slack = ((end - begin) / this.canvas.clientWidth) * 2;
    const hit = this.lanes[lane].spans.findLast((one) => began[one] - slack <= time && began[one] + seconds[one] + slack >= time);
    if (hit === undefined) this.chooseLane(0);
    else this.choose(hit);
  }

  showStatus(text) {
    this.status.textContent = text;
  }

  describeWindow() {
    const { begin, end } = this.window;
    const clock = (at) => new Date((this.spans.base + at) * 1000).toLocaleTimeString("en-GB");
    this.showStatus(`${clock(begin)} to ${clock(end)}, ${number(end - begin)} s, ${this.spans.count.toLocaleString("en")} spans`);
  }

  draw() {
    if (!this.window || !this.lanes) return;
    const scale = devicePixelRatio || 1;
    const width = this.frame.clientWidth;
    const height = TOP + this.lanes.length * LANE + 4;
    this.label = Math.min(LABEL, width * 0.32);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    const look = getComputedStyle(document.documentElement);
    const probe = (name) => resolveColour(look, name, this.frame);
    this.colours = Object.fromEntries(KINDS.map((kind) => [kind, probe(`--span-${kind}`)]));
    this.ink = probe("--ink");
    this.muted = probe("--muted");
    this.rule = probe("--line");
    this.tint = probe("--tint");
    this.drawSteps(pen, width, height);
    this.lanes.forEach((lane, at) => this.drawLane(pen, lane, at, width));
  }

  across(time, width) {
    const { begin, end } = this.window;
    return this.label + ((time - begin) / (end - begin)) * (width - this.label);
  }

  drawSteps(pen, width, height) {
    let free = this.label;
    pen.textAlign = "center";
    for (const [at, step] of this.spans.steps) {
      const x = this.across(at, width);
      if (x < this.label || x > width) continue;
      pen.fillStyle = this.rule;
      pen.fillRect(x, TOP - 6, 1, height);
      if (x < free + 14) continue;
      pen.fillStyle = this.muted;
      pen.fillText(String(step), x, 12);
      free = x + 14;
    }
  }

  drawLane(pen, lane, at, width) {
    const y = TOP + at * LANE;
    const { began, seconds, name } = this.spans;
    if (at === this.lane) {
      pen.fillStyle = this.tint;
      pen.fillRect(0, y, this.label, LANE);
    }
    pen.textAlign = "left";
    pen.fillStyle = at === 0 || this.lanes[at - 1].process !== lane.process ? this.ink : this.muted;
    const label = at === 0 || this.lanes[at - 1].process !== lane.process ? `${lane.process} · ${lane.name}` : lane.name;
    pen.fillText(label, 4, y + 14, this.label - 8);
    let filled = -1;
    for (const span of lane.spans) {
      const left = Math.max(this.across(began[span], width), this.label);
      const right = Math.min(this.across(began[span] + seconds[span], width), width);
      if (right < this.label || left > width || right <= filled - 1) continue;
      pen.fillStyle = this.colours[this.kinds[name[span]]];
      pen.fillRect(left, y + 3, Math.max(1, right - left - 0.5), LANE - 6);
      if (right - left < 1) filled = left + 1;
      if (span === this.chosen) {
        pen.strokeStyle = this.ink;
        pen.lineWidth = 2;
        pen.strokeRect(left, y + 3, Math.max(2, right - left), LANE - 6);
      }
    }
  }
}

/** The current colour of a CSS property; a canvas does not support light-dark(). */
function resolveColour(look, name, place) {
  const probe = h("span", { hidden: true });
  probe.style.color = look.getPropertyValue(name);
  place.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function concatenate(before, more) {
  const joined = new before.constructor(before.length + more.length);
  joined.set(before);
  joined.set(more, before.length);
  return joined;
}
