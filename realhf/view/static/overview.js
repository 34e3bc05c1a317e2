// The overview: state and curves of a run, or several runs on the same axes with their differing options.

import { Chart, setCursor, smoothed } from "./chart.js";
import { h, number, percent, renew, table } from "./dom.js";
import { ALONG, PANELS, comparisonPanel, runPanel, samplingMethod } from "./panels.js";
import { SEEDS_NOTE, groupBySeeds, separateGroups } from "./seeds.js";

export async function show(place, context) {
  const page = new Overview(place, context);
  await page.load();
  return page;
}

const NOTHING = { config: {}, origin: {}, passport: "", note: { text: "", tags: [] }, events: [], hosts: {} };

/** The note of a person about a run; null without one. */
function noteOf({ note }, name) {
  if (!note.text && !note.tags.length) return null;
  return h("aside", { class: "note" }, name ? h("b", {}, name) : "", note.tags.map((tag) => h("span", { class: "tag" }, tag)), note.text ? h("p", {}, note.text) : "");
}

/** When something happened to a run, if known. */
const formatTime = ({ at, step }) => (at === null ? (step === null ? "" : `after step ${step}`) : new Date(at * 1000).toLocaleString("en", { dateStyle: "medium", timeStyle: "medium" }));

const PLAY_METRICS = ["reward/mean", "success/overall", "rollouts/played"]; // a run that plays episodes has one of these

/** Why a run has no held-out evaluation. */
function noEvaluationReason(run, config) {
  const counts = ["evaluation.episodes_per_task", "evaluation.greedy_episodes_per_task"].filter((name) => name in config);
  if (counts.length && counts.every((name) => config[name] === "0")) return `switched off (${counts[0]}=0)`;
  if (!["finished", "stopped"].includes(run.state)) return "none yet";
  return PLAY_METRICS.some((name) => name in run.metrics.columns) ? "none was made" : "none: this run plays no episodes";
}

/** The headline numbers of a run: [label, value, note] of each. */
function headlineNumbers(run, config) {
  const { steps, columns } = run.metrics;
  const at = steps.length - 1;
  const value = (name) => columns[name]?.[at];
  const evaluations = run.evaluations.filter((one) => one.way === samplingMethod(run) && one.group === "overall");
  const [first, final] = [evaluations[0], evaluations.at(-1)];
  // Rows of a file have a loss and no success.
  const [heldOut, show] = typeof final?.loss === "number" ? ["loss", number] : ["success", percent];
  const change = first && final && first !== final ? `from ${show(first[heldOut])} ${first.step ? `at step ${first.step}` : "before"}` : "";
  return [
    ["step", number(steps[at] ?? 0), run.state],
    ["reward", number(value("reward/mean")), ""],
    ["success", percent(value("success/overall")), ""],
    [`held-out ${heldOut}`, show(final?.[heldOut]), final ? [`step ${final.step}`, samplingMethod(run) === "sampled" ? "" : samplingMethod(run), change].filter(Boolean).join("; ") : noEvaluationReason(run, config)],
    ["a step takes", value("time/step") === undefined ? "–" : `${number(value("time/step"))} s`, ""],
  ];
}

/** The range of the x axis in the address; null for all of it. */
function parseRange(text) {
  const ends = (text ?? "").split(",").map(Number);
  return ends.length === 2 && ends[0] < ends[1] ? ends : null;
}

/** Make these nodes the children of `place`, in order; nodes that stay are not removed, so they keep the focus. */
function setChildren(place, nodes) {
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
    this.range = parseRange(context.params.get("range"));
    this.zoom = (range) => {
      this.range = range;
      this.saveSettings();
    };
    this.charts = PANELS.map((panel) => ({ panel, chart: new Chart(this.zoom) }));
    this.others = new Map();
    this.pinned = new Map((context.params.get("pins") ?? "").split(",").filter(Boolean).map((name) => [name, this.single(name)]));
    this.keys = [["← →", "in a chart: step back and on, in all charts"], ["s", "more smoothing"], ["x", "over steps, hours or tokens"], ["l", "logarithmic axis"], ["+ − z", "in a chart: zoom in and out, all of it; or drag over a part"], ["Enter", "in a chart: larger"], ["b", "seeds as one: mean and band, or each run"], ["/", "choose metrics"]];
    this.headline = h("div", { class: "cards" });
    this.passport = h("p", { class: "muted", id: "passport" });
    this.note = h("div", { class: "notes" });
    this.smoothing = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: this.weight, id: "smooth" });
    this.smoothing.addEventListener("input", () => this.smooth(Number(this.smoothing.value)));
    this.search = h("input", { type: "search", id: "metric-search", placeholder: "Find a metric, e.g. ratio", "aria-label": "Find a metric", autocomplete: "off" });
    this.search.addEventListener("input", () => this.drawOthers());
    this.otherCharts = h("div", { class: "charts" });
    this.omitted = h("p", { class: "muted" });
    this.pins = h("div", { class: "charts pins" });
    this.all = h("details", { class: "all" }, h("summary", {}, "Every metric"), h("p", { class: "muted" }, "A pinned chart stands before all others, and the address keeps it."), this.search, this.otherCharts);
    this.all.addEventListener("toggle", () => this.drawOthers());
    this.about = h("section", { class: "about" });
    this.evaluations = h("section", {});
    this.over = h("select", { id: "along", onchange: () => this.drawOver(this.over.value) }, ALONG.map(([name, label]) => h("option", { value: name, selected: name === this.along }, label)));
    this.logBox = h("input", { type: "checkbox", id: "log", checked: this.log, onchange: () => this.drawLog(this.logBox.checked) });
    this.seeds = h("input", { type: "checkbox", id: "seeds", checked: this.asOne, onchange: () => this.drawSeeds(this.seeds.checked) });
    this.seedsLabel = h("label", { for: "seeds" }, "Seeds as one");
    this.seedsNote = h("p", { class: "muted", id: "seeds-note" }, SEEDS_NOTE);
    this.wholeButton = h("button", { type: "button", hidden: true, onclick: () => this.zoom(null) }, "All of it", h("kbd", {}, "z"));
    const button = (label, title, does) => h("button", { type: "button", "aria-label": title, title, onclick: does }, label);
    const tools = h("div", { class: "bar" }, h("button", { type: "button", onclick: () => this.openSearch() }, "Choose metrics", h("kbd", {}, "/")), h("label", { for: "smooth" }, "Smoothing"), this.smoothing, h("label", { for: "along" }, "Over"), this.over,
      h("label", { for: "log" }, "Logarithmic"), this.logBox, this.seedsLabel, this.seeds,
      button("+", "Zoom in", () => this.zoomBy(0.5)), button("−", "Zoom out", () => this.zoomBy(2)), this.wholeButton);
    const charts = h("div", { class: "charts" }, this.charts.map((one) => one.chart.node));
    place.append(this.note, this.headline, this.passport, tools, this.seedsNote, this.all, this.pins, charts, this.evaluations, this.about);
  }

  /** The chart of a single metric, which can be pinned. */
  single(name) {
    const pin = h("button", { type: "button", class: "quiet", "aria-pressed": String(this.pinned?.has(name) ?? true), onclick: () => this.pin(name) }, "Pin");
    return { panel: { title: name, names: [name] }, chart: new Chart(this.zoom, pin), pin };
  }

  /** Pin a metric above all panels, or unpin it. */
  pin(name) {
    if (!this.pinned.has(name)) this.pinned.set(name, this.single(name));
    else {
      this.pinned.get(name).chart.close();
      this.pinned.delete(name);
    }
    for (const [chartName, { pin }] of [...this.others, ...this.pinned]) pin.setAttribute("aria-pressed", String(this.pinned.has(chartName)));
    this.saveSettings();
  }

  /** Show all metrics and focus their search field. */
  openSearch() {
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
    await Promise.all([this.loadAbout(), ...metrics]);
    this.draw();
    this.drawAbout();
  }

  async loadAbout() {
    this.abouts = await Promise.all(this.context.runs.map((run) => run.about().catch(() => NOTHING)));
  }

  async update(parts) {
    if (parts.has("metrics") || parts.has("evaluations")) {
      await Promise.all(this.context.runs.map((run) => run.isGone || run.refreshMetrics()));
      this.draw();
    }
    if (parts.has("about")) {
      await this.loadAbout();
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
    else if (event.key === "/") this.openSearch();
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
    this.saveSettings();
  }

  drawLog(log) {
    this.log = this.logBox.checked = log;
    this.saveSettings();
  }

  drawSeeds(asOne) {
    this.asOne = this.seeds.checked = asOne;
    this.saveSettings();
  }

  /** Write the settings of the page into the address, and draw. */
  saveSettings() {
    const { weight, along, log, asOne, range, pinned } = this;
    this.context.go("overview", { smooth: weight, x: along, log: log ? 1 : 0, seeds: asOne ? 1 : 0, ...(range && { range: range.map((end) => Number(end.toPrecision(6))) }), ...(pinned.size && { pins: [...pinned.keys()] }) }, true);
    this.draw();
  }

  smooth(weight) {
    this.weight = weight;
    this.smoothing.value = weight;
    this.saveSettings();
  }

  draw() {
    const { runs } = this.context;
    const groups = groupBySeeds(runs, this.abouts.map((one) => one.config));
    this.seeds.hidden = this.seedsLabel.hidden = groups.length === runs.length;
    this.groups = this.asOne ? groups : separateGroups(runs);
    this.seedsNote.hidden = this.groups.length === runs.length;
    this.drawHeadline();
    this.wholeButton.hidden = !this.range;
    for (const { panel, chart } of this.charts) this.drawPanel(panel, chart);
    setChildren(this.pins, [...this.pinned.values()].map(({ chart }) => chart.node));
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
    const spec = runs.length > 1 ? comparisonPanel(panel, this.groups, line, this.along) : runPanel(panel, runs[0], line, this.along);
    chart.node.hidden = !spec;
    if (spec) chart.draw({ ...spec, along: ALONG.find(([name]) => name === this.along)[1], log: this.log, range: this.range });
  }

  drawHeadline() {
    const { runs } = this.context;
    const numbers = runs.map((run, at) => headlineNumbers(run, this.abouts[at].config));
    const card = ([label, value, note]) => h("div", { class: "card" }, h("span", {}, label), h("b", {}, value), h("small", {}, note));
    const dot = (run) => h("i", { class: `dot k${this.groups.find((group) => group.runs.includes(run)).kind % 8}` });
    const row = (run, at) => [h("span", {}, dot(run), run.name), ...numbers[at].map(([, value, note]) => h("span", {}, value, note ? h("small", {}, note) : ""))];
    const content = runs.length === 1 ? numbers[0].map(card) : table(["run", ...numbers[0].map(([label]) => label)], runs.map(row), { id: "compared" });
    renew(this.headline, h("div", { class: runs.length === 1 ? "cards" : "" }, content));
    const passports = [...new Set(this.abouts.map((about) => about.passport).filter(Boolean))];
    this.passport.hidden = !passports.length;
    this.passport.textContent = `Reward, tried with mutants: ${passports.join("; ")}.`;
  }

  drawEvaluations() {
    const named = (run) => (this.context.runs.length > 1 ? [run.name] : []);
    const rows = this.context.runs.flatMap((run) =>
      run.evaluations.filter((one) => one.way !== "rows").map((one) => [
        ...named(run),
        one.step, one.way, one.group, percent(one.success),
        typeof one.low === "number" ? `${percent(one.low)} to ${percent(one.high)}` : "",
        number(one.reward), number(one.episodes), typeof one.out_of_turns === "number" ? percent(one.out_of_turns) : "", number(one.failed), number(one.version),
      ]),
    );
    const heads = ["step", "sampling", "group", "success", "95 % interval", "reward", "episodes", "out of turns", "failed", "version"];
    if (this.context.runs.length > 1) heads.unshift("run");
    const ofFile = this.context.runs.flatMap((run) =>
      run.evaluations.filter((one) => one.way === "rows").map((one) => [
        ...named(run),
        one.step, number(one.loss), percent(one.token_accuracy), percent(one.reward_accuracy), number(one.reward_margin), number(one.rows),
      ]),
    );
    const headsOfFile = [...heads.slice(0, heads.indexOf("sampling")), "loss", "token accuracy", "reward accuracy", "reward margin", "rows"];
    renew(this.evaluations, h("section", {},
      rows.length ? [h("h2", {}, "Held-out evaluations"), table(heads, rows)] : [],
      ofFile.length ? [h("h2", {}, "Held-out rows"), table(headsOfFile, ofFile)] : [],
    ));
  }

  drawOthers() {
    if (!this.all.open) return;
    const needle = this.search.value.trim().toLowerCase();
    const names = [...new Set(this.context.runs.flatMap((run) => Object.keys(run.metrics.columns)))].sort();
    const shown = names.filter((name) => name.toLowerCase().includes(needle)).slice(0, 60);
    for (const [name, { chart }] of this.others) {
      if (!shown.includes(name)) {
        chart.close();
        this.others.delete(name);
      }
    }
    for (const name of shown) if (!this.others.has(name)) this.others.set(name, this.single(name));
    const omitted = names.filter((name) => name.toLowerCase().includes(needle)).length - shown.length;
    this.omitted.hidden = omitted <= 0;
    this.omitted.textContent = omitted > 0 ? `and ${omitted} more: type more of the name` : "";
    setChildren(this.otherCharts, [...shown.map((name) => this.others.get(name).chart.node), this.omitted]);
    for (const name of shown) this.drawPanel(this.others.get(name).panel, this.others.get(name).chart);
  }

  drawAbout() {
    const { runs } = this.context;
    const { abouts } = this;
    renew(this.note, h("div", { class: "notes" }, runs.map((run, at) => noteOf(abouts[at], runs.length > 1 ? run.name : ""))));
    const parts = [h("h2", {}, runs.length > 1 ? "Differing options" : "Options and origin")];
    if (runs.length > 1) {
      const options = [...new Set(abouts.flatMap((one) => Object.keys(one.config)))];
      const differing = options.filter((name) => new Set(abouts.map((one) => one.config[name])).size > 1);
      const rows = differing.map((name) => [h("code", {}, name), ...abouts.map((one) => one.config[name] ?? "–")]);
      parts.push(rows.length ? table(["option", ...runs.map((run) => run.name)], rows, { id: "difference" }) : h("p", {}, "Their configurations are the same."));
    }
    const several = runs.length > 1;
    const events = runs.flatMap((run, at) => abouts[at].events.map((one) => [...(several ? [run.name] : []), formatTime(one), one.what]));
    if (events.length) parts.unshift(h("h2", {}, "What happened"), table([...(several ? ["run"] : []), "when", "what"], events, { id: "events" }));
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
