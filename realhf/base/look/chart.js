// Curves over the steps, drawn by uPlot: several series on one pair of axes, bands, points with intervals, stacked areas,
// a shared cursor. uPlot is a plain script that the page loads before its modules.

import { h, number, percent, shown } from "./dom.js";

const { uPlot } = window;
const TALL = 196;
const TALLER = 420;
const LEAST_DRAG = 8;
const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
const charts = new Set();
let cursor = null;

/** Set the step that all charts mark and read out; null for none. */
export function setCursor(step) {
  cursor = step;
  for (const one of charts) one.drawCursor();
}

const repaint = () => charts.forEach((one) => one.plot?.redraw(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["data-theme"] });

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
 * A chart. `spec`: {title, unit, about, series: [{label, x, y, low, high, kind, faint}], points: [{label, x, y, low, high,
 * kind}], stacked, from0, share, along, log, range}; `share`: values are shares of one, shown in percent; `kind` is the number of a colour, `along` the word for x (step), `log` a logarithmic
 * axis, which leaves out what is not positive, `range` the part of x that is drawn. `y` may hold null, where there is no
 * value and the curve goes on, and texts (no number), where it breaks; with `low` and `high` of each `y` there is a band
 * behind the curve. `zoom`, if given, is called with the part of x that was dragged over; null for all of it. `tools` are
 * buttons beside the title.
 */
export class Chart {
  constructor(zoom = null, ...tools) {
    this.zoom = zoom;
    this.spec = { title: "", series: [], points: [] };
    this.heading = h("h3");
    this.readout = h("p", { class: "readout" });
    this.place = h("div", { class: "plot", role: "img" });
    this.none = h("p", { class: "none" }, "no values yet");
    this.larger = h("button", { type: "button", class: "quiet", "aria-label": "Larger", title: "Larger (Enter)", "aria-pressed": "false", onclick: () => this.enlarge() }, "⤢");
    this.node = h("figure", { class: "chart", tabindex: "0" }, h("div", { class: "chart-head" }, this.heading, tools, this.larger), this.place, this.none, this.readout);
    this.node.chart = this;
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    // All charts follow one cursor; the one in which it is moved reads its values out.
    this.node.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.node.addEventListener("blur", () => this.readout.removeAttribute("aria-live"));
    this.resized = new ResizeObserver(() => this.paint());
    this.resized.observe(this.place);
    charts.add(this);
  }

  close() {
    charts.delete(this);
    this.resized.disconnect();
    this.plot?.destroy();
  }

  draw(spec) {
    this.spec = spec;
    this.heading.replaceChildren(shown(spec.title), ...(spec.unit ? [h("span", { class: "muted" }, spec.unit)] : []));
    if (spec.about) this.heading.title = spec.about;
    this.node.setAttribute("aria-label", `${spec.title}; arrows move the cursor`);
    this.place.setAttribute("aria-label", `${spec.title}, over: ${spec.along ?? "step"}`);
    this.log = Boolean(spec.log && !spec.stacked);
    this.columns = columnsOf(spec, this.log);
    const points = (spec.points ?? []).map((one) => one.x);
    const tables = [...this.columns.map((one) => [one.x, one.y]), ...(points.length ? [[points]] : [])];
    this.data = tables.length ? uPlot.join(tables) : [[]];
    this.extent = this.extentOf();
    this.place.hidden = !this.extent;
    this.none.hidden = Boolean(this.extent);
    this.paint();
  }

  /** Draw what `draw` was given, in the size that the chart has; nothing where it is not seen. */
  paint() {
    const width = this.place.clientWidth;
    if (!width || !this.extent) return this.drawCursor();
    const size = { width, height: this.node.classList.contains("wide") ? TALLER : TALL };
    const { spec } = this;
    const whole = (spec.along ?? "step") === "step" && this.extent.x[1] - this.extent.x[0] >= 2;
    const form = JSON.stringify([this.log, whole, this.extent.only, spec.share, this.columns.map((one) => [one.role, one.kind, one.faint, one.over])]);
    if (form !== this.form) {
      this.form = form;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(size, whole), this.data, this.place);
    } else {
      if (size.width !== this.plot.width || size.height !== this.plot.height) this.plot.setSize(size);
      this.plot.setData(this.data);
    }
    this.drawCursor();
  }

  options(size, whole) {
    const drawn = this.columns.map((one) => one.role === "curve" && !one.faint);
    const { only } = this.extent;
    const alone = only !== null && { splits: () => [only], filter: (_, splits) => splits };
    const axis = { stroke: this.colour("--muted"), font: "12px system-ui, sans-serif", ticks: { show: false }, values: (_, splits) => splits.map((one) => (one === null ? "" : number(one))) };
    const grid = { stroke: this.colour("--line"), width: 1 };
    return {
      ...size,
      legend: { show: false },
      padding: [8, 14, 0, 0],
      scales: { x: { time: false, range: () => this.extent.x }, y: { distr: this.log ? 3 : 1, range: () => this.extent.y } },
      axes: [{ ...axis, size: 28, gap: 6, space: 52, incrs: whole ? WHOLE : undefined, grid: { show: false }, ...alone }, { ...axis, ...(this.spec.share && { values: (_, splits) => splits.map((one) => (one === null ? "" : shareOf(one))) }), size: 56, gap: 6, space: 36, grid, ...(this.log && { splits: (_, at, low, high) => logTicks(low, high), filter: (_, splits) => splits }) }],
      series: [{}, ...this.columns.map((one, at) => this.seriesOf(one, at))],
      bands: this.columns.flatMap(({ over, kind, role }, at) => (over === null ? [] : [{ series: [at + 1, over + 1], fill: this.colour(`--k${kind % 8}`, role === "curve" ? 0.7 : 0.18) }])),
      cursor: {
        y: false,
        move: (u, left, top) => (left < 0 ? [left, top] : [u.valToPos(u.data[0][u.posToIdx(left)], "x"), top]),
        points: { size: 7, show: (_, at) => drawn[at - 1] },
        drag: { x: Boolean(this.zoom), y: false, setScale: false, dist: LEAST_DRAG },
        bind: { dblclick: () => () => this.zoom?.(null) },
      },
      hooks: {
        draw: [(u) => this.drawPoints(u)],
        setCursor: [(u) => this.onPointer(u)],
        setSelect: [(u) => this.onSelect(u)],
      },
    };
  }

  seriesOf({ role, kind, faint }, at) {
    const colour = this.colour(`--k${kind % 8}`, faint ? 0.3 : 1);
    const curve = role === "curve";
    const fill = this.spec.stacked && at === 0 ? this.colour(`--k${kind % 8}`, 0.7) : undefined;
    return { stroke: colour, width: curve ? (faint ? 1.2 : 2) : 0, fill, fillTo: 0, points: curve ? { show: true, size: 6, fill: colour, filter: (u, own) => lone(u.data[own]) } : { show: false } };
  }

  /** What gives a colour of the page to a canvas, which knows no variables, at the time of drawing. */
  colour(name, alpha = 1) {
    return () => {
      this.place.style.color = `var(${name})`;
      const [red, green, blue] = getComputedStyle(this.place).color.match(/[\d.]+/g);
      return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
    };
  }

  /** Follow the pointer. What moves the cursor of the plot otherwise, such as new data, has no event. */
  onPointer({ cursor: own, data }) {
    if (!own.event) return;
    own.event = null;
    setCursor(own.left >= 0 ? (data[0][own.idx] ?? null) : null);
  }

  onSelect(u) {
    const { left, width } = u.select;
    if (width < LEAST_DRAG) return;
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }

  /** Zoom by a factor, about the cursor if it is seen. */
  zoomBy(factor) {
    if (!this.zoom || !this.extent) return;
    const { whole, x } = this.extent;
    const middle = cursor !== null && within(cursor, x) ? cursor : (x[0] + x[1]) / 2;
    const wide = (x[1] - x[0]) * factor;
    const begin = Math.max(whole[0], Math.min(middle - wide / 2, whole[1] - wide));
    this.zoom(wide >= whole[1] - whole[0] ? null : [begin, begin + wide]);
  }

  enlarge() {
    const wide = this.node.classList.toggle("wide");
    this.larger.setAttribute("aria-pressed", String(wide));
    this.paint();
    this.node.scrollIntoView({ block: "nearest" });
  }

  onKey(event) {
    if (event.target !== this.node || event.ctrlKey || event.metaKey || event.altKey) return;
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move) this.moveCursor(move);
    else if (event.key === "Enter") this.enlarge();
    else if (event.key === "+" || event.key === "=") this.zoomBy(0.5);
    else if (event.key === "-") this.zoomBy(2);
    else return;
    event.preventDefault();
  }

  moveCursor(by) {
    if (!this.extent) return;
    const steps = this.data[0].filter((x) => within(x, this.extent.x));
    const at = cursor === null ? (by > 0 ? -1 : steps.length) : steps.findIndex((step) => step >= cursor);
    setCursor(steps[Math.max(0, Math.min(steps.length - 1, (at < 0 ? steps.length : at) + by))]);
  }

  drawCursor() {
    if (!this.extent) return this.readout.replaceChildren();
    const hasCursor = cursor !== null && within(cursor, this.extent.x);
    this.plot?.setCursor({ left: hasCursor ? this.plot.valToPos(cursor, "x") : -10, top: hasCursor ? 0 : -10 }, false);
    const entries = this.spec.series.filter((line) => !line.faint).map((line) => {
      const at = hasCursor ? placeBefore(line, cursor) : line.y.findLastIndex((value) => value !== null);
      return entry(line, line.y[at] ?? null, line.low ? [line.low[at], line.high[at]] : null, this.spec.share);
    });
    const points = hasCursor ? (this.spec.points ?? []).filter((one) => one.x === cursor) : [];
    entries.push(...points.map((one) => entry({ ...one, label: `${one.label}, held out` }, one.y, null, this.spec.share)));
    this.readout.replaceChildren(h("span", { class: "muted" }, hasCursor ? `${this.spec.along ?? "step"} ${number(cursor)}` : "last"), ...entries);
  }

  /** Draw held-out points with their intervals over the curves. */
  drawPoints({ ctx, valToPos }) {
    ctx.save();
    const ratio = devicePixelRatio;
    for (const { x, y, low, high, kind } of this.visiblePoints()) {
      const [across, down] = [valToPos(x, "x", true), valToPos(y, "y", true)];
      ctx.strokeStyle = ctx.fillStyle = this.colour(`--k${kind % 8}`)();
      ctx.lineWidth = 2 * ratio;
      ctx.beginPath();
      for (const end of [low, high]) if (typeof end === "number" && !(this.log && end <= 0)) (ctx.moveTo(across, down), ctx.lineTo(across, valToPos(end, "y", true)));
      ctx.stroke();
      ctx.beginPath();
      ctx.arc(across, down, 3.5 * ratio, 0, 2 * Math.PI);
      ctx.fill();
      ctx.lineWidth = ratio;
      ctx.strokeStyle = this.colour("--surface")();
      ctx.stroke();
    }
    ctx.restore();
  }

  visiblePoints() {
    return (this.spec.points ?? []).filter(({ x, y }) => within(x, this.spec.range) && typeof y === "number" && !(this.log && y <= 0));
  }

  /** The axes {x, y, whole, only}, `whole` being x without zoom and `only` the one place that has anything, null where
   * there are several; null where there is nothing to draw. */
  extentOf() {
    const { spec, data } = this;
    const points = this.visiblePoints();
    const [xs, ...ys] = data;
    const has = (_, at) => ys.some((y) => typeof y[at] === "number");
    const ends = [xs.findIndex(has), xs.findLastIndex(has)].filter((at) => at >= 0).map((at) => xs[at]);
    const all = [...ends, ...(spec.points ?? []).map((one) => one.x)];
    if (!all.length) return null;
    const whole = [Math.min(...all), Math.max(...all)];
    const from0 = (spec.stacked || spec.from0) && !this.log;
    let [low, high] = from0 ? [0, 0] : [Infinity, -Infinity];
    const take = (y) => {
      if (typeof y !== "number" || (this.log && y <= LOWEST)) return;
      low = Math.min(low, y);
      high = Math.max(high, y);
    };
    for (let at = 0; at < xs.length; at++) if (within(xs[at], spec.range)) for (const y of ys) take(y[at]);
    points.forEach((one) => [one.low, one.y, one.high].forEach(take));
    if (low > high) return null;
    const only = !spec.range && whole[0] === whole[1] ? whole[0] : null; // between -0.4 and 0.4 there is no step
    const x = spec.range ?? (whole[0] < whole[1] ? whole : [whole[0] - 0.5, whole[1] + 0.5]);
    if (this.log) {
      const spare = (high / low) ** 0.05 > 1 ? (high / low) ** 0.05 : 1.5;
      return { x, whole, only, y: [low / spare, high * spare] };
    }
    if (low === 0 && high === 0) return { x, whole, only, y: [0, 1] };
    const spare = (high - low) * 0.05 || Math.abs(high) * 0.05;
    return { x, whole, only, y: [from0 && low === 0 ? 0 : low - spare, high + spare] };
  }
}

/** Powers of ten on a logarithmic axis; where there are fewer than two, their multiples, or what a linear axis would have. */
function logTicks(low, high) {
  const [least, most] = [Math.floor(Math.log10(low)), Math.floor(Math.log10(high))];
  const powers = Array.from({ length: most - least + 1 }, (_, at) => 10 ** (least + at));
  for (const multiples of [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const ticks = powers.flatMap((power) => multiples.map((one) => Number((one * power).toPrecision(3)))).filter((y) => y >= low && y <= high);
    const every = Math.ceil(ticks.length / 6);
    if (ticks.length > 1) return ticks.filter((_, at) => at % every === 0);
  }
  return [0.1, 0.5, 0.9].map((share) => Number((low + share * (high - low)).toPrecision(4)));
}

const LOWEST = 1e-300; // of a logarithmic axis 0 is far below
const within = (x, range) => !range || (x >= range[0] && x <= range[1]);

/** The columns of a plot {x, y, kind, faint, role, over}, `over` being the number of the column down to which it is filled. */
function columnsOf(spec, log) {
  const columns = [];
  const add = (line, y, role, over = null) => columns.push({ x: line.x, y: y.map((value) => drawable(value, log, role)), kind: line.kind, faint: Boolean(line.faint), role, over }) - 1;
  if (spec.stacked) {
    stack(spec.series).forEach((line, at) => add(line, line.y, "curve", at ? at - 1 : null));
    return columns;
  }
  for (const line of spec.series) if (line.low && !line.faint) add(line, line.high, "edge", add(line, line.low, "edge"));
  for (const line of spec.series) add(line, line.y, "curve");
  return columns;
}

/** A value as uPlot knows it: undefined where the curve goes on without one, null where it breaks. */
function drawable(value, log, role) {
  if (typeof value !== "number") return value === null || value === undefined ? undefined : null;
  return log && value <= 0 ? (role === "edge" ? LOWEST : null) : value;
}

/** Places of values that have no neighbour to draw a line to. */
function lone(values) {
  const known = values.map((_, at) => at).filter((at) => values[at] !== undefined);
  const breaks = (at) => at === undefined || values[at] === null;
  return known.filter((at, place) => values[at] !== null && breaks(known[place - 1]) && breaks(known[place + 1]));
}

/** Where a line is at x: at the last of its places up to there that has a value or breaks. */
function placeBefore(line, x) {
  let [at, end] = [0, line.x.length];
  if (end === 0 || x > line.x[end - 1]) return -1;
  while (at < end) {
    const middle = (at + end) >> 1;
    if (line.x[middle] <= x) at = middle + 1;
    else end = middle;
  }
  while (--at > 0 && (line.y[at] ?? null) === null);
  return at;
}

/** A share at an axis, in percent and as short as possible. */
const shareOf = (value) => `${number(Number((100 * value).toPrecision(6)))} %`;

function entry(line, value, band = null, share = false) {
  const format = (one) => (share && typeof one === "number" ? percent(one) : number(one));
  const spread = band && band[0] !== undefined ? ` ${format(band[0])} to ${format(band[1])}` : "";
  return h("span", { class: "entry" }, h("i", { class: `dot k${line.kind % 8}` }), `${line.label} `, h("b", {}, format(value)), spread);
}

function stack(series) {
  const below = new Map();
  return series.map((line) => {
    const y = line.x.map((step, at) => (below.get(step) ?? 0) + (typeof line.y[at] === "number" ? line.y[at] : 0));
    line.x.forEach((step, at) => below.set(step, y[at]));
    return { ...line, y };
  });
}
