// Runs of one experiment that differ only in their seed: drawn as one line, their mean, with a band.

const PER_RUN = new Set(["seed", "trial_name", "recover_mode"]);
const MAX_OPTIONS = 2;

/** Explanation of runs that are drawn as one. */
export const SEEDS_NOTE =
  "Runs whose options differ in nothing but seed and name are drawn as one: the line is their mean, the band goes from the lowest to the highest of them, both as far as all of them have come. So do the points of held-out evaluations, whose bars are no intervals then.";

/** Each run on its own, as groups of one. */
export const separateGroups = (runs) => runs.map((run, kind) => ({ label: run.name, kind, runs: [run] }));

/** Groups {label, kind, runs} of runs whose options differ only in the seed; `configs` are their options. A run whose
 * options are unknown is a group by itself. */
export function groupBySeeds(runs, configs) {
  const byOptions = new Map();
  runs.forEach((run, at) => {
    const options = Object.entries(configs[at]).filter(([name]) => !PER_RUN.has(name)).sort(([a], [b]) => (a < b ? -1 : 1));
    const key = options.length ? JSON.stringify(options) : `run ${run.number}`;
    if (!byOptions.has(key)) byOptions.set(key, { kind: byOptions.size, runs: [], config: configs[at] });
    byOptions.get(key).runs.push(run);
  });
  const groups = [...byOptions.values()];
  const names = [...new Set(groups.flatMap((one) => Object.keys(one.config)))].filter((name) => !PER_RUN.has(name));
  const differing = names.filter((name) => new Set(groups.map((one) => one.config[name])).size > 1);
  return groups.map(({ kind, runs: members, config }) => ({ label: groupLabel(members, config, differing), kind, runs: members }));
}

function groupLabel(runs, config, differing) {
  if (runs.length === 1) return runs[0].name;
  const options = differing.slice(0, MAX_OPTIONS).map((name) => `${name}=${config[name] ?? "–"}`);
  const more = differing.length > MAX_OPTIONS ? ", …" : "";
  return `${options.join(", ") || config.experiment_name || "mean"}${more} (${runs.length} seeds)`;
}

/** Mean, minimum and maximum of several lines {x, y, steps}, at the steps at which all have a number. */
export function meanLine(lines) {
  const places = lines.map((line) => new Map(line.steps.map((step, at) => [step, at])));
  const mean = { x: [], y: [], low: [], high: [] };
  lines[0].steps.forEach((step) => {
    const at = places.map((one) => one.get(step));
    const values = lines.map((line, index) => line.y[at[index]]);
    if (values.some((value) => typeof value !== "number")) return;
    mean.x.push(average(lines.map((line, index) => line.x[at[index]])));
    mean.y.push(average(values));
    mean.low.push(Math.min(...values));
    mean.high.push(Math.max(...values));
  });
  return mean;
}

/** Mean, minimum and maximum of points {step, x, y} of several runs, at the steps at which all have one. */
export function meanPoints(points) {
  const [first] = points;
  return first.flatMap(({ step }) => {
    const same = points.map((series) => series.find((one) => one.step === step));
    if (same.some((one) => !one)) return [];
    const values = same.map((one) => one.y);
    return [{ x: average(same.map((one) => one.x)), y: average(values), low: Math.min(...values), high: Math.max(...values) }];
  });
}

const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
