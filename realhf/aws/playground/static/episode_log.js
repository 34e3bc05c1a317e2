// A log that comes from a file: checked, and reduced to what the page shows.

const FORMAT = "realhf-episode-1";
const LARGEST = 16 << 20;

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);
const object = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? value : {});

export async function readLog(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} is larger than ${LARGEST >> 20} MiB`);
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON`);
  }
  if (object(data).format !== FORMAT || !Array.isArray(data.steps)) {
    throw new Error(`${file.name} is not an episode log of the playground`);
  }
  const task = object(data.task);
  return {
    task: {
      task_id: number(task.task_id),
      difficulty: text(task.difficulty),
      description: text(task.description),
      desired_state_spec: text(task.desired_state_spec),
    },
    seed: number(data.seed),
    names: (Array.isArray(data.names) ? data.names : []).map(text).filter(Boolean),
    max_steps: number(data.max_steps),
    infra_state: infra(data.infra_state),
    steps: data.steps.map(step),
  };
}

function step(found) {
  const data = object(found);
  const numbers = ["reward", "score", "milliseconds", "partial_progress", "hints_used", "steps_left"];
  const texts = ["command", "command_output", "error", "refusal", "hint_text"];
  const flags = ["command_success", "task_achieved", "truncated", "done"];
  return Object.fromEntries([
    ...numbers.map((key) => [key, number(data[key])]),
    ...texts.map((key) => [key, text(data[key])]),
    ...flags.map((key) => [key, data[key] === true]),
    ["infra_state", infra(data.infra_state)],
  ]);
}

function infra(found) {
  const listed = (kinds) => Object.entries(object(kinds)).filter(([, names]) => Array.isArray(names))
    .map(([kind, names]) => [kind, names.map(String)]);
  return Object.fromEntries(Object.entries(object(found)).map(([service, kinds]) =>
    [service, Object.fromEntries(listed(kinds))]));
}
