// The overview: what a run is, its curves, and several runs on the same axes with what they were told differently.

import { Chart, setCursor, smoothed } from "./chart.js";
import { h, number, percent, renew, table } from "./dom.js";
import { ALONG, PANELS, panelOfRun, panelOfRuns, wayOf } from "./panels.js";
import { SAID, alone, bySeeds } from "./seeds.js";

export async function show(place, context) {
  const page = new Overview(place, context);
  await page.load();
  return page;
}

const NOTHING = { config: {}, origin: {}, passport: "", note: { text: "", tags: [] }, events: [], hosts: {} };

/** What a person has written about a run, if anything. */
function noteOf({ note }, name) {
  if (!note.text && !note.tags.length) return null;
  return h("aside", { class: "note" }, name ? h("b", {}, name) : "", note.tags.map((tag) => h("span", { class: "tag" }, tag)), note.text ? h("p", {}, note.text) : "");
}

/** When something happened to a run, as far as it is known. */
const whenOf = ({ at, step }) => (at === null ? (step === null ? "" : `after step ${step}`) : new Date(at * 1000).toLocaleString("en", { dateStyle: "medium", timeStyle: "medium" }));

const PLAYED = ["reward/mean", "success/overall", "rollouts/played"]; // a run that plays episodes has one of these

/** Why a run has no held-out evaluation. */
function whyNone(run, config) {
  const counts = ["evaluation.episodes_per_task", "evaluation.greedy_episodes_per_task"].filter((name) => name in config);
  if (counts.length && counts.every((name) => config[name] === "0")) return `switched off (${counts[0]}=0)`;
  if (!["finished", "stopped"].includes(run.state)) return "none yet";
  return PLAYED.some((name) => name in run.metrics.columns) ? "none was made" : "none: this run plays no episodes";
}

/** What is said of a run at a glance: [label, value, note] of each figure. */
function figuresOf(run, config) {
  const { steps, columns } = run.metrics;
  const at = steps.length - 1;
  const value = (name) => columns[name]?.[at];
  const held = run.evaluations.filter((one) => one.way === wayOf(run) && one.group === "overall");
  const [first, final] = [held[0], held.at(-1)];
  const change = first && final && first !== final ? `from ${percent(first.success)} ${first.step ? `at step ${first.step}` : "before"}` : "";
  return [
    ["step", number(steps[at] ?? 0), run.state],
    ["reward", number(value("reward/mean")), ""],
    ["success", percent(value("success/overall")), ""],
    ["held-out success", percent(final?.success), final ? [`step ${final.step}`, wayOf(run) === "sampled" ? "" : wayOf(run), change].filter(Boolean).join("; ") : whyNone(run, config)],
    ["a step takes", value("time/step") === undefined ? "–" : `${number(value("time/step"))} s`, ""],
  ];
}

/** The part of x that an address names; null for all of it. */
function rangeOf(text) {
  const ends = (text ?? "").split(",").map(Number);
  return ends.length === 2 && ends[0] < ends[1] ? ends : null;
}

/** Let a place hold these nodes. Those that stay may have the focus. */
function inOrder(place, nodes) {
  for (const old of [...place.children]) if (!nodes.includes(old)) old.remove();
  nodes.forEach((node, at) => {
    if (place.children[at] !== node) place.insertBefore(node, place.children[at] ?? null);
  });
}

class Overview {
  constructor(place, context) {
    this.context = context;
    this.weight = Number(context.params.get("smooth") ?? 0);
    this.along = ALONG.some(([name]) => name === context.params.get("x")) ? context.params.get("x") : "step";
    this.log = context.params.get("log") === "1";
    this.asOne = context.params.get("seeds") !== "0";
    this.abouts = context.runs.map(() => NOTHING);
    this.range = rangeOf(context.params.get("range"));
    this.zoom = (range) => {
      this.range = range;
      this.keep();
    };
    this.charts = PANELS.map((panel) => ({ panel, chart: new Chart(this.zoom) }));
    this.others = new Map();
    this.pinned = new Map((context.params.get("pins") ?? "").split(",").filter(Boolean).map((name) => [name, this.single(name)]));
    this.keys = [["← →", "in a chart: step back and on, in all charts"], ["s", "more smoothing"], ["x", "over steps, hours or tokens"], ["l", "logarithmic axis"], ["+ − z", "in a chart: zoom in and out, all of it; or drag over a part"], ["Enter", "in a chart: larger"], ["b", "seeds as one: mean and band, or each run"], ["/", "choose metrics"]];
    this.figures = h("div", { class: "cards" });
    this.proved = h("p", { class: "muted", id: "passport" });
    this.note = h("div", { class: "notes" });
    this.smoothing = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: this.weight, id: "smooth" });
    this.smoothing.addEventListener("input", () => this.smooth(Number(this.smoothing.value)));
    this.search = h("input", { type: "search", id: "metric-search", placeholder: "Find a metric, e.g. ratio", "aria-label": "Find a metric", autocomplete: "off" });
    this.search.addEventListener("input", () => this.drawOthers());
    this.rest = h("div", { class: "charts" });
    this.left = h("p", { class: "muted" });
    this.pins = h("div", { class: "charts pins" });
    this.all = h("details", { class: "all" }, h("summary", {}, "Every metric"), h("p", { class: "muted" }, "A pinned chart stands before all others, and the address keeps it."), this.search, this.rest);
    this.all.addEventListener("toggle", () => this.drawOthers());
    this.about = h("section", { class: "about" });
    this.evaluated = h("section", {});
    this.over = h("select", { id: "along", onchange: () => this.drawOver(this.over.value) }, ALONG.map(([name, label]) => h("option", { value: name, selected: name === this.along }, label)));
    this.logged = h("input", { type: "checkbox", id: "log", checked: this.log, onchange: () => this.drawLog(this.logged.checked) });
    this.seeds = h("input", { type: "checkbox", id: "seeds", checked: this.asOne, onchange: () => this.drawSeeds(this.seeds.checked) });
    this.seedsLabel = h("label", { for: "seeds" }, "Seeds as one");
    this.seedsSaid = h("p", { class: "muted", id: "seeds-said" }, SAID);
    this.whole = h("button", { type: "button", hidden: true, onclick: () => this.zoom(null) }, "All of it", h("kbd", {}, "z"));
    const button = (label, title, does) => h("button", { type: "button", "aria-label": title, title, onclick: does }, label);
    const tools = h("div", { class: "bar" }, h("button", { type: "button", onclick: () => this.find() }, "Choose metrics", h("kbd", {}, "/")), h("label", { for: "smooth" }, "Smoothing"), this.smoothing, h("label", { for: "along" }, "Over"), this.over,
      h("label", { for: "log" }, "Logarithmic"), this.logged, this.seedsLabel, this.seeds,
      button("+", "Zoom in", () => this.zoomBy(0.5)), button("−", "Zoom out", () => this.zoomBy(2)), this.whole);
    const charts = h("div", { class: "charts" }, this.charts.map((one) => one.chart.node));
    place.append(this.note, this.figures, this.proved, tools, this.seedsSaid, this.all, this.pins, charts, this.evaluated, this.about);
  }

  /** The chart of a metric alone, which can be pinned. */
  single(name) {
    const pin = h("button", { type: "button", class: "quiet", "aria-pressed": String(this.pinned?.has(name) ?? true), onclick: () => this.pin(name) }, "Pin");
    return { panel: { title: name, names: [name] }, chart: new Chart(this.zoom, pin), pin };
  }

  /** Put a metric before all panels, or away from there. */
  pin(name) {
    if (!this.pinned.has(name)) this.pinned.set(name, this.single(name));
    else {
      this.pinned.get(name).chart.close();
      this.pinned.delete(name);
    }
    for (const [own, { pin }] of [...this.others, ...this.pinned]) pin.setAttribute("aria-pressed", String(this.pinned.has(own)));
    this.keep();
  }

  /** Show all metrics, and let them be searched. */
  find() {
    this.all.open = true;
    this.drawOthers();
    this.search.focus();
  }

  zoomBy(factor) {
    const wide = ({ chart: { node, extent } }) => (node.hidden || !extent ? 0 : extent.whole[1] - extent.whole[0]);
    this.charts.reduce((best, one) => (wide(one) > wide(best) ? one : best)).chart.zoomBy(factor);
  }

  async load() {
    const metrics = this.context.runs.map((run) => run.isGone || run.refreshMetrics());
    await Promise.all([this.learnAbout(), ...metrics]);
    this.draw();
    this.drawAbout();
  }

  async learnAbout() {
    this.abouts = await Promise.all(this.context.runs.map((run) => run.about().catch(() => NOTHING)));
  }

  async update(parts) {
    if (parts.has("metrics") || parts.has("evaluations")) {
      await Promise.all(this.context.runs.map((run) => run.isGone || run.refreshMetrics()));
      this.draw();
    }
    if (parts.has("about")) {
      await this.learnAbout();
      this.draw();
      this.drawAbout();
    }
  }

  close() {
    for (const { chart } of [...this.charts, ...this.others.values(), ...this.pinned.values()]) chart.close();
    setCursor(null);
  }

  key(event) {
    if (event.key === "s") this.smooth(this.weight >= 0.9 ? 0 : Number((this.weight + 0.3).toFixed(2)));
    else if (event.key === "/") this.find();
    else if (event.key === "x") this.drawOver(ALONG[(ALONG.findIndex(([name]) => name === this.along) + 1) % ALONG.length][0]);
    else if (event.key === "l") this.drawLog(!this.log);
    else if (event.key === "z") this.zoom(null);
    else if (event.key === "b" && !this.seeds.hidden) this.drawSeeds(!this.asOne);
    else return false;
    return true;
  }

  drawOver(along) {
    this.along = this.over.value = along;
    this.range = null; // hours are no steps
    setCursor(null);
    this.keep();
  }

  drawLog(log) {
    this.log = this.logged.checked = log;
    this.keep();
  }

  drawSeeds(asOne) {
    this.asOne = this.seeds.checked = asOne;
    this.keep();
  }

  /** The address names what is shown. */
  keep() {
    const { weight, along, log, asOne, range, pinned } = this;
    this.context.go("overview", { smooth: weight, x: along, log: log ? 1 : 0, seeds: asOne ? 1 : 0, ...(range && { range: range.map((end) => Number(end.toPrecision(6))) }), ...(pinned.size && { pins: [...pinned.keys()] }) }, true);
    this.draw();
  }

  smooth(weight) {
    this.weight = weight;
    this.smoothing.value = weight;
    this.keep();
  }

  draw() {
    const { runs } = this.context;
    const groups = bySeeds(runs, this.abouts.map((one) => one.config));
    this.seeds.hidden = this.seedsLabel.hidden = groups.length === runs.length;
    this.groups = this.asOne ? groups : alone(runs);
    this.seedsSaid.hidden = this.groups.length === runs.length;
    this.drawFigures();
    this.whole.hidden = !this.range;
    for (const { panel, chart } of this.charts) this.drawPanel(panel, chart);
    inOrder(this.pins, [...this.pinned.values()].map(({ chart }) => chart.node));
    for (const { panel, chart } of this.pinned.values()) this.drawPanel(panel, chart);
    this.drawEvaluations();
    if (this.all.open) this.drawOthers();
    const unreadable = runs.filter((run) => run.metrics.unreadable).map((run) => `${run.name}: ${run.metrics.unreadable}`);
    this.context.notice(unreadable.length ? `Lines of metrics.jsonl that make no sense are left out. ${unreadable.join(", ")}` : "");
  }

  drawPanel(panel, chart) {
    const { runs } = this.context;
    const line = (one) =>
      this.weight ? [{ ...one, faint: true, label: one.label }, { ...one, y: smoothed(one.y, this.weight) }] : [one];
    const spec = runs.length > 1 ? panelOfRuns(panel, this.groups, line, this.along) : panelOfRun(panel, runs[0], line, this.along);
    chart.node.hidden = !spec;
    if (spec) chart.draw({ ...spec, along: ALONG.find(([name]) => name === this.along)[1], log: this.log, range: this.range });
  }

  drawFigures() {
    const { runs } = this.context;
    const found = runs.map((run, at) => figuresOf(run, this.abouts[at].config));
    const card = ([label, value, note]) => h("div", { class: "card" }, h("span", {}, label), h("b", {}, value), h("small", {}, note));
    const dot = (run) => h("i", { class: `dot k${this.groups.find((group) => group.runs.includes(run)).kind % 8}` });
    const row = (run, at) => [h("span", {}, dot(run), run.name), ...found[at].map(([, value, note]) => h("span", {}, value, note ? h("small", {}, note) : ""))];
    const made = runs.length === 1 ? found[0].map(card) : table(["run", ...found[0].map(([label]) => label)], runs.map(row), { id: "compared" });
    renew(this.figures, h("div", { class: runs.length === 1 ? "cards" : "" }, made));
    const passports = [...new Set(this.abouts.map((about) => about.passport).filter(Boolean))];
    this.proved.hidden = !passports.length;
    this.proved.textContent = `Reward, tried with mutants: ${passports.join("; ")}.`;
  }

  drawEvaluations() {
    const rows = this.context.runs.flatMap((run) =>
      run.evaluations.map((one) => [
        ...(this.context.runs.length > 1 ? [run.name] : []),
        one.step, one.way, one.group, percent(one.success),
        typeof one.low === "number" ? `${percent(one.low)} to ${percent(one.high)}` : "",
        number(one.reward), number(one.episodes), typeof one.out_of_turns === "number" ? percent(one.out_of_turns) : "", number(one.failed), number(one.version),
      ]),
    );
    const heads = ["step", "sampling", "group", "success", "95 % interval", "reward", "episodes", "out of turns", "failed", "version"];
    if (this.context.runs.length > 1) heads.unshift("run");
    renew(this.evaluated, h("section", {}, rows.length ? [h("h2", {}, "Held-out evaluations"), table(heads, rows)] : []));
  }

  drawOthers() {
    if (!this.all.open) return;
    const wanted = this.search.value.trim().toLowerCase();
    const names = [...new Set(this.context.runs.flatMap((run) => Object.keys(run.metrics.columns)))].sort();
    const shown = names.filter((name) => name.toLowerCase().includes(wanted)).slice(0, 60);
    for (const [name, { chart }] of this.others) {
      if (!shown.includes(name)) {
        chart.close();
        this.others.delete(name);
      }
    }
    for (const name of shown) if (!this.others.has(name)) this.others.set(name, this.single(name));
    const left = names.filter((name) => name.toLowerCase().includes(wanted)).length - shown.length;
    this.left.hidden = left <= 0;
    this.left.textContent = left > 0 ? `and ${left} more: say more of the name` : "";
    inOrder(this.rest, [...shown.map((name) => this.others.get(name).chart.node), this.left]);
    for (const name of shown) this.drawPanel(this.others.get(name).panel, this.others.get(name).chart);
  }

  drawAbout() {
    const { runs } = this.context;
    const { abouts } = this;
    renew(this.note, h("div", { class: "notes" }, runs.map((run, at) => noteOf(abouts[at], runs.length > 1 ? run.name : ""))));
    const parts = [h("h2", {}, runs.length > 1 ? "What they were told differently" : "What it was started with")];
    if (runs.length > 1) {
      const options = [...new Set(abouts.flatMap((one) => Object.keys(one.config)))];
      const differing = options.filter((name) => new Set(abouts.map((one) => one.config[name])).size > 1);
      const rows = differing.map((name) => [h("code", {}, name), ...abouts.map((one) => one.config[name] ?? "–")]);
      parts.push(rows.length ? table(["option", ...runs.map((run) => run.name)], rows, { id: "difference" }) : h("p", {}, "Their configurations are the same."));
    }
    const several = runs.length > 1;
    const happened = runs.flatMap((run, at) => abouts[at].events.map((one) => [...(several ? [run.name] : []), whenOf(one), one.what]));
    if (happened.length) parts.unshift(h("h2", {}, "What happened"), table([...(several ? ["run"] : []), "when", "what"], happened, { id: "events" }));
    const hosts = runs.flatMap((run, at) => Object.entries(abouts[at].hosts).map(([host, processes]) => [...(several ? [run.name] : []), host, processes.join(", ")]));
    if (hosts.length) parts.unshift(h("h2", {}, "Hosts"), table([...(several ? ["run"] : []), "host", "processes"], hosts, { id: "hosts" }));
    runs.forEach((run, at) => {
      const { origin, config } = abouts[at];
      if (origin.command) parts.push(h("pre", { class: "command" }, origin.command));
      const commit = origin.commit ? `Commit ${origin.commit.slice(0, 12)}${origin.modified ? " with changes" : ""}, Python ${origin.python}` : "";
      const packages = Object.entries(origin.packages ?? {});
      parts.push(
        h("p", { class: "muted" }, `${run.folder}. ${commit}`),
        packages.length ? h("details", {}, h("summary", {}, `Packages of ${run.name}`), table(["package", "version"], packages)) : "",
        h("details", {}, h("summary", {}, `Configuration of ${run.name}`), table(["option", "value"], Object.entries(config).map(([name, value]) => [h("code", {}, name), value]))),
      );
    });
    renew(this.about, h("section", { class: "about" }, parts));
  }
}
