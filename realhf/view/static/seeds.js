// Runs of one experiment that differ in nothing but their seed: drawn as one, by their mean and a band.

const OWN = new Set(["seed", "trial_name", "recover_mode"]);
const MOST_SAID = 2;

/** What is said of runs that are drawn as one. */
export const SAID =
  "Runs whose options differ in nothing but seed and name are drawn as one: the line is their mean, the band goes from the lowest to the highest of them, both as far as all of them have come. So do the points of held-out evaluations, whose bars are no intervals then.";

/** Each run on its own, as groups of one. */
export const alone = (runs) => runs.map((run, kind) => ({ label: run.name, kind, runs: [run] }));

/** Groups {label, kind, runs} of runs with the same options but for their seeds; `configs` are their options. A run whose
 * options are not known is alone. */
export function bySeeds(runs, configs) {
  const found = new Map();
  runs.forEach((run, at) => {
    const told = Object.entries(configs[at]).filter(([name]) => !OWN.has(name)).sort(([a], [b]) => (a < b ? -1 : 1));
    const key = told.length ? JSON.stringify(told) : `run ${run.number}`;
    if (!found.has(key)) found.set(key, { kind: found.size, runs: [], config: configs[at] });
    found.get(key).runs.push(run);
  });
  const groups = [...found.values()];
  const names = [...new Set(groups.flatMap((one) => Object.keys(one.config)))].filter((name) => !OWN.has(name));
  const differing = names.filter((name) => new Set(groups.map((one) => one.config[name])).size > 1);
  return groups.map(({ kind, runs: own, config }) => ({ label: labelOf(own, config, differing), kind, runs: own }));
}

function labelOf(runs, config, differing) {
  if (runs.length === 1) return runs[0].name;
  const told = differing.slice(0, MOST_SAID).map((name) => `${name}=${config[name] ?? "–"}`);
  const more = differing.length > MOST_SAID ? ", …" : "";
  return `${told.join(", ") || config.experiment_name || "mean"}${more} (${runs.length} seeds)`;
}

/** The mean of several lines {x, y, steps}, and their lowest and highest: at the steps at which all have a number. */
export function meanOf(lines) {
  const places = lines.map((line) => new Map(line.steps.map((step, at) => [step, at])));
  const mean = { x: [], y: [], low: [], high: [] };
  lines[0].steps.forEach((step) => {
    const at = places.map((one) => one.get(step));
    const values = lines.map((line, own) => line.y[at[own]]);
    if (values.some((value) => typeof value !== "number")) return;
    mean.x.push(average(lines.map((line, own) => line.x[at[own]])));
    mean.y.push(average(values));
    mean.low.push(Math.min(...values));
    mean.high.push(Math.max(...values));
  });
  return mean;
}

/** The mean of points {step, x, y} of several runs, with the lowest and the highest: of the steps at which all have one. */
export function meanOfPoints(points) {
  const [first] = points;
  return first.flatMap(({ step }) => {
    const same = points.map((own) => own.find((one) => one.step === step));
    if (same.some((one) => !one)) return [];
    const values = same.map((one) => one.y);
    return [{ x: average(same.map((one) => one.x)), y: average(values), low: Math.min(...values), high: Math.max(...values) }];
  });
}

const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
