// Curves over the steps: several series on one pair of axes, points with intervals, stacked areas, a shared cursor.

import { h, number, s, shown } from "./dom.js";

const WIDTH = 560;
const HEIGHT = 210;
const INSET = { left: 54, right: 12, top: 10, bottom: 24 };
const MOST_POINTS = 700;
const LEAST_DRAG = 8;
const listeners = new Set();
let cursor = null;

/** Set the step that all charts mark and read out; null for none. */
export function setCursor(step) {
  cursor = step;
  for (const one of listeners) one();
}

/** A running mean that leans on the past by `weight` (0 to below 1), the start corrected for having none. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let whole = 0;
  return values.map((value) => {
    if (typeof value !== "number") return value;
    mean = weight * mean + (1 - weight) * value;
    whole = weight * whole + (1 - weight);
    return mean / whole;
  });
}

/**
 * A chart. `spec`: {title, unit, about, series: [{label, x, y, low, high, kind}], points: [{label, x, y, low, high,
 * kind}], stacked, from0, along, log, range}; `kind` is the number of a colour, `along` the word for x (step), `log` a logarithmic
 * axis, which leaves out what is not positive, `range` the part of x that is drawn. `y` may hold null and texts (no
 * number), which are left out; with `low` and `high` of each `y` there is a band behind the curve. `zoom`, if given, is called with the part of x that was dragged over; null for all of it.
 */
export class Chart {
  constructor(zoom = null) {
    this.zoom = zoom;
    this.spec = { title: "", series: [], points: [] };
    this.heading = h("h3");
    this.readout = h("p", { class: "readout" });
    this.drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    this.node = h("figure", { class: "chart", tabindex: "0" }, this.heading, this.drawing, this.readout);
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    // All charts follow one cursor; the one in which it is moved reads its values out.
    this.node.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.node.addEventListener("blur", () => this.readout.removeAttribute("aria-live"));
    this.drawing.addEventListener("pointermove", (event) => this.onPointer(event));
    this.drawing.addEventListener("pointerleave", () => setCursor(null));
    if (zoom) this.zoomable();
    this.onCursor = () => this.drawCursor();
    listeners.add(this.onCursor);
  }

  zoomable() {
    let from = null;
    this.drawing.addEventListener("pointerdown", (event) => {
      from = event.button === 0 && this.places ? event : null;
    });
    this.drawing.addEventListener("pointerup", (event) => {
      if (from && Math.abs(event.clientX - from.clientX) >= LEAST_DRAG) this.zoom([this.placeOf(from), this.placeOf(event)].sort((a, b) => a - b));
      from = null;
    });
    this.drawing.addEventListener("dblclick", () => this.zoom(null));
  }

  close() {
    listeners.delete(this.onCursor);
  }

  draw(spec) {
    this.spec = spec;
    this.heading.replaceChildren(shown(spec.title), ...(spec.unit ? [h("span", { class: "muted" }, spec.unit)] : []));
    if (spec.about) this.heading.title = spec.about;
    const drawn = spec.log && !spec.stacked;
    const series = spec.series.map((line) => part(line, spec.range, drawn));
    const points = (spec.points ?? []).filter((one) => within(one.x, spec.range) && (!drawn || one.y > 0));
    const lines = spec.stacked ? stack(series) : series;
    const places = extent(lines, points, (spec.stacked || spec.from0) && !drawn, drawn);
    this.places = places;
    this.drawing.replaceChildren();
    this.node.setAttribute("aria-label", `${spec.title}; arrows move the cursor`);
    this.drawing.setAttribute("aria-label", `${spec.title}, over: ${spec.along ?? "step"}`);
    if (!places) {
      this.drawing.append(s("text", { x: WIDTH / 2, y: HEIGHT / 2, class: "none" }, "no values yet"));
      this.readout.replaceChildren();
      return;
    }
    this.drawing.append(...axes(places));
    for (const line of lines) {
      if (line.low && !line.faint) this.drawing.append(s("path", { d: area({ ...line, y: line.high, below: line.low }, places), class: `band k${line.kind % 8}` }));
    }
    for (const line of lines) {
      if (line.below) this.drawing.append(s("path", { d: area(line, places), class: `fill k${line.kind % 8}` }));
      else this.drawing.append(...curve(line, places));
    }
    for (const point of points) this.drawing.append(...whisker(point, places));
    this.mark = s("line", { y1: INSET.top, y2: HEIGHT - INSET.bottom, class: "mark", visibility: "hidden" });
    this.drawing.append(this.mark);
    this.drawCursor();
  }

  /** The steps that a cursor may stand on, in order. */
  steps() {
    const all = new Set([...this.spec.series.flatMap((one) => one.x), ...(this.spec.points ?? []).map((one) => one.x)]);
    return [...all].filter((x) => within(x, this.spec.range)).sort((a, b) => a - b);
  }

  onKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!move || !this.places) return;
    const steps = this.steps();
    const at = cursor === null ? (move > 0 ? -1 : steps.length) : steps.findIndex((step) => step >= cursor);
    setCursor(steps[Math.max(0, Math.min(steps.length - 1, (at < 0 ? steps.length : at) + move))]);
    event.preventDefault();
  }

  onPointer(event) {
    if (!this.places) return;
    const wanted = this.placeOf(event);
    const steps = this.steps();
    setCursor(steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0]));
  }

  placeOf(event) {
    const box = this.drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    return this.places.left + ((x - INSET.left) / (WIDTH - INSET.left - INSET.right)) * this.places.wide;
  }

  drawCursor() {
    if (!this.places) return;
    const shown = cursor !== null && cursor >= this.places.left && cursor <= this.places.left + this.places.wide;
    this.mark.setAttribute("visibility", shown ? "visible" : "hidden");
    if (shown) {
      this.mark.setAttribute("x1", across(cursor, this.places));
      this.mark.setAttribute("x2", across(cursor, this.places));
    }
    const held = (this.spec.points ?? []).filter((one) => one.x === cursor);
    const labels = this.spec.series.filter((line) => !line.faint).map((line) => {
      const at = shown ? line.x.indexOf(cursor) : line.y.findLastIndex((value) => value !== null);
      return entry(line, line.y[at] ?? null, line.low ? [line.low[at], line.high[at]] : null);
    });
    labels.push(...held.map((one) => entry({ ...one, label: `${one.label}, held out` }, one.y)));
    this.readout.replaceChildren(h("span", { class: "muted" }, shown ? `${this.spec.along ?? "step"} ${number(cursor)}` : "last"), ...labels);
  }
}

const within = (x, range) => !range || (x >= range[0] && x <= range[1]);

/** What is drawn of a series. */
function part(line, range, log) {
  if (!range && !log) return line;
  const kept = line.x.map((_, at) => at).filter((at) => within(line.x[at], range));
  const value = (y) => (log && typeof y === "number" && y <= 0 ? null : y);
  const band = line.low ? { low: kept.map((at) => line.low[at]), high: kept.map((at) => line.high[at]) } : {};
  return { ...line, ...band, x: kept.map((at) => line.x[at]), y: kept.map((at) => value(line.y[at])) };
}

function entry(line, value, band = null) {
  const spread = band && band[0] !== undefined ? ` ${number(band[0])} to ${number(band[1])}` : "";
  return h("span", { class: "entry" }, h("i", { class: `dot k${line.kind % 8}` }), `${line.label} `, h("b", {}, number(value)), spread);
}

function stack(series) {
  const below = new Map();
  return series.map((line) => {
    const low = line.x.map((step) => below.get(step) ?? 0);
    const high = line.y.map((value, at) => low[at] + (typeof value === "number" ? value : 0));
    line.x.forEach((step, at) => below.set(step, high[at]));
    return { ...line, y: high, below: low };
  });
}

function extent(lines, points, from0, log) {
  let left = Infinity, right = -Infinity, low = from0 ? 0 : Infinity, high = from0 ? 0 : -Infinity;
  const take = (x, y) => {
    if (typeof y !== "number" || (log && y <= 0)) return;
    left = Math.min(left, x);
    right = Math.max(right, x);
    low = Math.min(low, y);
    high = Math.max(high, y);
  };
  for (const line of lines) for (const ys of [line.y, line.low ?? [], line.high ?? []]) line.x.forEach((x, at) => take(x, ys[at]));
  for (const one of points) for (const y of [one.low, one.y, one.high]) take(one.x, y);
  if (left > right) return null;
  if (log) {
    const [least, most] = [Math.log10(low), Math.log10(high)];
    const spare = (most - least) * 0.05 || 0.2;
    return { left, wide: right - left || 1, low: least - spare, tall: most - least + 2 * spare, log };
  }
  const spare = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
  const bottom = from0 && low === 0 ? 0 : low - spare;
  return { left, wide: right - left || 1, low: bottom, tall: high + spare - bottom };
}

const across = (x, p) => INSET.left + ((x - p.left) / p.wide) * (WIDTH - INSET.left - INSET.right);
const down = (y, p) => HEIGHT - INSET.bottom - (((p.log ? Math.log10(Math.max(y, 1e-300)) : y) - p.low) / p.tall) * (HEIGHT - INSET.top - INSET.bottom);

function ticks(low, wide, most, whole) {
  const rough = wide / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= low + wide + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

/** Powers of ten; where there are fewer than two, what a linear axis would have. */
function logTicks(p) {
  const [low, high] = [10 ** p.low, 10 ** (p.low + p.tall)];
  const every = Math.max(1, Math.ceil(p.tall / 5));
  const powers = [];
  for (let power = Math.floor(p.low); power <= p.low + p.tall; power += every) powers.push(10 ** power);
  const found = powers.filter((y) => y >= low && y <= high);
  return found.length > 1 ? found : ticks(low, high - low, 4, false);
}

function axes(p) {
  const parts = [];
  for (const y of p.log ? logTicks(p) : ticks(p.low, p.tall, 4, false)) {
    parts.push(s("line", { x1: INSET.left, x2: WIDTH - INSET.right, y1: down(y, p), y2: down(y, p), class: "grid" }));
    parts.push(s("text", { x: INSET.left - 6, y: down(y, p) + 4, class: "tick left" }, number(y)));
  }
  for (const x of ticks(p.left, p.wide, 6, p.wide >= 6)) {
    parts.push(s("text", { x: across(x, p), y: HEIGHT - 6, class: "tick" }, number(x)));
  }
  return parts;
}

function thinned(line) {
  const size = line.x.length;
  if (size <= 2 * MOST_POINTS) return Array.from({ length: size }, (_, at) => at);
  const kept = [];
  for (let part = 0; part < MOST_POINTS; part++) {
    const from = Math.floor((part * size) / MOST_POINTS), to = Math.floor(((part + 1) * size) / MOST_POINTS);
    let low = -1, high = -1;
    for (let at = from; at < to; at++) {
      if (typeof line.y[at] !== "number") continue; // a gap is no 0
      if (low < 0 || line.y[at] < line.y[low]) low = at;
      if (high < 0 || line.y[at] > line.y[high]) high = at;
    }
    if (low < 0) kept.push(from);
    else kept.push(Math.min(low, high), ...(low === high ? [] : [Math.max(low, high)]));
  }
  return kept;
}

function curve(line, p) {
  let path = "";
  let pen = "M";
  const lone = [];
  const kept = thinned(line);
  const has = (place) => place >= 0 && place < kept.length && typeof line.y[kept[place]] === "number";
  kept.forEach((at, place) => {
    if (!has(place)) {
      pen = "M";
      return;
    }
    path += `${pen}${across(line.x[at], p).toFixed(1)},${down(line.y[at], p).toFixed(1)}`;
    pen = "L";
    // A value between gaps has no line: a metric of every eighth step would be drawn as nothing.
    if (!has(place - 1) && !has(place + 1)) lone.push(s("circle", { cx: across(line.x[at], p), cy: down(line.y[at], p), r: 3, class: `point k${line.kind % 8}` }));
  });
  return [s("path", { d: path, class: `curve k${line.kind % 8}${line.faint ? " faint" : ""}${line.dashed ? " dashed" : ""}` }), ...lone];
}

function area(line, p) {
  const kept = thinned(line);
  const edge = (y) => Math.min(HEIGHT - INSET.bottom, down(y, p)).toFixed(1); // of a logarithmic axis 0 is far below
  const top = kept.map((at) => `${across(line.x[at], p).toFixed(1)},${edge(line.y[at])}`);
  const bottom = kept.map((at) => `${across(line.x[at], p).toFixed(1)},${edge(line.below[at])}`).reverse();
  return `M${[...top, ...bottom].join("L")}Z`;
}

function whisker(point, p) {
  if (typeof point.y !== "number") return [];
  const x = across(point.x, p);
  const parts = [];
  if (typeof point.low === "number" && typeof point.high === "number") {
    parts.push(s("line", { x1: x, x2: x, y1: down(point.low, p), y2: down(point.high, p), class: `whisker k${point.kind % 8}` }));
  }
  parts.push(s("circle", { cx: x, cy: down(point.y, p), r: 3.5, class: `point k${point.kind % 8}` }));
  return parts;
}
