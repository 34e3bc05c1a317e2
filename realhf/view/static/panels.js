// The charts of the overview, and the metrics that they show. Names as in docs/metrics.md.

import { meanLine, meanPoints } from "./seeds.js";

/**
 * Each panel: title, unit, about; `names`, the most important first (a comparison of runs shows the first one that
 * exists), or `start` and `end`: all metrics with this prefix and suffix; `ends` alone: all metrics with this suffix.
 * `share`: in percent. `heldOut`: the number of held-out evaluations that is drawn as points.
 */
export const PANELS = [
  { title: "Reward", names: ["reward/mean", "reward/std"], start: "reward/mean/", heldOut: "reward", about: "mean over the rollouts of a step" },
  { title: "Success", start: "success/", first: "success/overall", heldOut: "success", share: true, from0: true, about: "share of rollouts that reached the goal; points: held-out tasks with 95 % intervals" },
  { title: "Loss", names: ["policy/loss"], ends: "/loss", heldOut: "loss", about: "mean over the updates of a step; points: held-out rows of a file" },
  { title: "Where the time goes", unit: "s", times: true, about: "calls of a step, those that play by environment and generation; what overlaps adds up to more than the step" },
  { title: "Length", unit: "tokens", names: ["length/mean", "length/max"], from0: true },
  { title: "Truncated", share: true, names: ["length/truncated", "length/out_of_turns"], from0: true, about: "rollouts that a limit ended: of tokens, or of turns (rollout.max_turns)" },
  { title: "Entropy", unit: "nats", names: ["policy/entropy", "policy/entropy_exact"], from0: true },
  { title: "Groups with signal", names: ["groups/with_signal", "groups/total"], from0: true, about: "groups whose rollouts differ in reward; the others teach nothing" },
  { title: "Mismatch", unit: "nats", names: ["mismatch/kl", "mismatch/abs_p99"], about: "engine against trainer" },
  { title: "KL from the reference", unit: "nats", names: ["policy/kl_ref"] },
  { title: "Clipped", share: true, names: ["policy/clip_fraction"], from0: true },
  { title: "Gradient norm", names: ["policy/grad_norm"], from0: true },
  { title: "Staleness", unit: "versions", names: ["staleness/mean", "staleness/max"], from0: true },
  { title: "Version that generates", unit: "version", names: ["admission/version"], about: "the lowest one of the generation workers; the trainer's is the number of the step" },
  { title: "Admission and buffer", unit: "samples", names: ["admission/running", "admission/capacity", "admission/staged", "buffer/resident"], from0: true },
  { title: "Occupancy", share: true, names: ["generation/occupancy", "training/occupancy"], from0: true },
  { title: "Throughput", unit: "tokens/s", names: ["throughput/tokens_per_second"], from0: true },
  { title: "Failures", start: "failures/", first: "rollouts/failed", names: ["rollouts/failed"], from0: true, about: "rollouts without a result; they are no zeros" },
  { title: "CPU of the hosts", share: true, start: "host/", end: "/cpu", from0: true, about: "cores that worked, of the whole machine" },
  { title: "Memory of the hosts", share: true, start: "host/", end: "/memory", from0: true, about: "memory in use, of the whole machine" },
  { title: "Critic", names: ["critic/explained_variance", "critic/loss"] },
];

const TIME = /^time\/(?!step$|fetch\/|queue\/|part\/|episode\/)[^/]+$/;

/** Names of the metrics of a panel that a run has. */
export function metricNames(panel, columns) {
  if (panel.times) return Object.keys(columns).filter((name) => TIME.test(name)).flatMap((name) => partsOf(name, columns));
  const listed = (panel.names ?? []).filter((name) => name in columns);
  if (panel.ends) return [...new Set([...listed, ...Object.keys(columns).filter((name) => name.endsWith(panel.ends)).sort()])];
  return panel.start ? [...listed, ...Object.keys(columns).filter((name) => name.startsWith(panel.start) && name.endsWith(panel.end ?? "")).sort()] : listed;
}

/** The time of a call that plays episodes, split into the environment's and the generation's part. */
function partsOf(name, columns) {
  const parts = ["environment", "generation"].map((part) => `time/part/${name.split("/")[1]}/${part}`).filter((part) => part in columns);
  return parts.length ? parts : [name];
}

/** Quantities of the x axis: name, label, the metric whose sum it is, and the amount of the metric in one unit. */
export const ALONG = [["step", "step"], ["hours", "hours", "time/step", 3600], ["tokens", "trained tokens", "batch/tokens", 1]];

/** Positions of the steps of a run on the x axis, and a function for the position of a single step. */
function axisPositions(run, along) {
  const { steps, columns } = run.metrics;
  const [, , name, unit] = ALONG.find(([one]) => one === along) ?? ALONG[0];
  if (!name || !columns[name]) return { x: steps, of: (step) => step };
  let sum = 0;
  const x = columns[name].map((value) => (sum += (typeof value === "number" ? value : 0) / unit));
  return { x, of: (step) => x[steps.findLastIndex((one) => one <= step)] ?? 0 };
}

/** The series and points of a chart of one run, over `along`. */
export function runPanel(panel, run, smooth, along) {
  const { columns } = run.metrics;
  const { x } = axisPositions(run, along);
  const series = metricNames(panel, columns).map((name, kind) => ({ label: shortName(name, panel), x, y: columns[name], kind }));
  const points = positioned(run, panel.heldOut ? heldOutPoints(panel, run, series) : [], along);
  if (!series.length && !points.length) return null;
  if (panel.times) return { ...panel, series, points, stacked: true };
  return { ...panel, series: series.flatMap((line) => smooth(line)), points };
}

/** The series and points of a chart that compares groups of runs: the panel's first metric of each run, or the mean of a
 * group with several runs. */
export function comparisonPanel(panel, groups, smooth, along) {
  const series = [];
  const points = [];
  for (const { label, kind, runs } of groups) {
    const lines = runs.map((run) => comparisonLine(panel, run, along)).filter((line) => line.y).map(smooth);
    if (lines.length === 1) series.push(...lines[0].map((line) => ({ ...line, label, kind })));
    else if (lines.length) series.push(...lines[0].map((line, which) => ({ faint: line.faint, label, kind, ...meanLine(lines.map((line) => line[which])) })));
    const evaluations = panel.heldOut ? runs.map((run) => positioned(run, evaluationPoints(run, panel.heldOut, "overall"), along)).filter((series) => series.length) : [];
    points.push(...(evaluations.length > 1 ? meanPoints(evaluations) : evaluations.flat()).map((one) => ({ ...one, label, kind })));
  }
  return series.length || points.length ? { ...panel, title: panel.times ? "Time of a step" : panel.title, series, points } : null;
}

/** The line of a run in a comparison; without `y` if the run lacks the metric. */
function comparisonLine(panel, run, along) {
  const { columns, steps } = run.metrics;
  const name = panel.times ? "time/step" : panel.first ?? panel.names?.[0];
  return { steps, x: axisPositions(run, along).x, y: columns[name ?? metricNames(panel, columns)[0]] };
}

const positioned = (run, points, along) => points.map((one) => ({ ...one, step: one.x, x: axisPositions(run, along).of(one.x) }));

function heldOutPoints(panel, run, series) {
  const groups = [...new Set(run.evaluations.map((one) => one.group))];
  // Groups that are evaluated and never trained on have colours of their own.
  const labels = panel.heldOut === "success" ? [...new Set([...series.map((line) => line.label), ...groups])] : ["overall"];
  return groups.flatMap((group) => {
    if (!labels.includes(group)) return [];
    return evaluationPoints(run, panel.heldOut, group).map((one) => ({ ...one, label: group, kind: labels.indexOf(group) }));
  });
}

/** The sampling method whose evaluations are shown for a run; the methods are never mixed. */
export const samplingMethod = (run) => (run.evaluations.some((one) => one.way === "sampled") ? "sampled" : run.evaluations[0]?.way ?? "sampled");

function evaluationPoints(run, name, group) {
  const method = samplingMethod(run);
  return run.evaluations
    .filter((one) => one.group === group && one.way === method && typeof one[name] === "number")
    .map((one) => ({
      x: one.step,
      y: one[name],
      low: name === "success" ? one.low : null,
      high: name === "success" ? one.high : null,
    }));
}

function shortName(name, panel) {
  if (panel.ends) return name.slice(0, -panel.ends.length);
  if (name.startsWith("time/part/")) return name.split("/")[3];
  return name.slice(0, name.length - (panel.end ?? "").length).split("/").slice(1).join("/") || name;
}
