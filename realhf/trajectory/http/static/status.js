// The page that watches the trajectory server: asks for its state once a second. Text of others is set as text alone.

import { Chart } from "./chart.js";
import { $, h, number, skipLink, table, tell } from "./dom.js";
import { themeOf } from "./theme.js";

const PERIOD_MS = 1000;
const REMEMBERED = 121;
const token = new URLSearchParams(location.hash.slice(1)).get("token");
const headers = token ? { Authorization: `Bearer ${token}` } : {};
const past = [];
let exampleShown = "";
const charts = { flow: new Chart(), queue: new Chart() };

const rounded = (value) => (typeof value === "number" ? number(Math.round(value * 100) / 100) : number(value));
const bytes = (value) => (value < 1 << 20 ? `${rounded(value / 1024)} KiB` : `${rounded(value / (1 << 20))} MiB`);
const age = (seconds) => (seconds < 120 ? `${number(Math.round(seconds))} s` : `${number(Math.round(seconds / 60))} min`);
const warned = (text, wrong) => (wrong ? h("span", { class: "warn" }, text) : text);

function remember(data) {
  const served = data.envs.reduce((sum, env) => sum + env.served_sequences, 0);
  const out = (data.counters.formed || 0) * Math.max(0, data.batch_size);
  past.push({ time: data.time, into: data.counters.pushed_sequences || 0, from: Math.max(out, served), groups: data.queue_size });
  if (past.length > REMEMBERED) past.shift();
}

/** Sequences per second between two samples; one entry fewer than there are samples. */
function rate(key) {
  return past.slice(1).map((now, at) => Math.max(0, (now[key] - past[at][key]) / Math.max(0.2, now.time - past[at].time)));
}

function drawCharts(into, from) {
  const x = past.slice(1).map((one) => Math.round(one.time - past.at(-1).time));
  const line = (label, y, kind) => ({ label, x, y, kind });
  const common = { along: "second", from0: true, points: [] };
  charts.flow.draw({ ...common, title: "Sequences a second", unit: "last two minutes", series: [line("in", into, 2), line("out", from, 1)] });
  charts.queue.draw({ ...common, title: "Groups queued", unit: "last two minutes", series: [line("queued", past.slice(1).map((one) => one.groups), 0)] });
}

function card(label, value) {
  return h("div", { class: "card" }, h("span", {}, label), h("b", {}, value));
}

function fill(id, heads, rows) {
  const content = rows.length ? table(heads, rows) : h("p", { class: "muted" }, "none");
  $(id).replaceChildren($(id).firstElementChild, content);
}

function draw(data) {
  remember(data);
  const into = rate("into"), from = rate("from");
  drawCharts(into, from);
  const trainer = data.registered ? (data.started ? "trainer at work" : "trainer registered, has not asked yet") : "no trainer registered";
  tell($("state"), `${data.store}${data.strict ? ", strict" : ""} · epoch ${data.epoch} · ${trainer}`);
  $("cards").replaceChildren(
    card("step", rounded(data.current_step)), card("groups queued", rounded(data.queue_size)),
    card("sequences queued", rounded(data.queued_sequences)), card("held", bytes(data.held_bytes)),
    card("batch size", data.batch_size < 0 ? "–" : rounded(data.batch_size)), card("policy version", rounded(data.policy_version)),
    card("sequences in / s", rounded(into.at(-1) ?? 0)), card("sequences out / s", rounded(from.at(-1) ?? 0)),
  );
  const buffered = new Map(data.buffers.map((buffer) => [buffer.env_id, buffer.groups]));
  fill("envs", ["name", "state", "last seen", "queued groups", "queued sequences", "in mix buffer", "served sequences"], data.envs.map((env) => [
    env.name, warned(env.state, env.state !== "connected"), age(env.last_seen_age_s), rounded(env.queued_groups), rounded(env.queued_sequences),
    rounded(buffered.get(env.env_id) ?? 0), rounded(env.served_sequences),
  ]));
  fill("leases", ["trainer", "step", "groups", "state", "age", "expires in"], data.leases.map((lease) => [
    lease.owner, rounded(lease.step), rounded(lease.groups), lease.state, age(lease.age_s), age(lease.expires_in_s),
  ]));
  fill("quarantine", ["reason", "groups"], Object.entries(data.quarantine).map(([reason, count]) => [warned(reason, true), rounded(count)]));
  drawExample(data.example);
}

function drawExample(example) {
  const place = $("example");
  const exampleText = JSON.stringify(example);
  if (exampleText === exampleShown) return; // unchanged: its texts may have the focus
  exampleShown = exampleText;
  if (!example) return place.replaceChildren(place.firstElementChild, h("p", { class: "muted" }, "none yet"));
  const facts = `environment ${example.env_id ?? "–"} · ${example.size} sequences of ${example.lengths.join(", ")} tokens · ` +
    `scores ${example.scores.join(", ")} · policy version ${example.policy_version}`;
  const texts = example.texts.filter((text) => text !== null).map((text) => h("pre", { tabindex: "0" }, text));
  const none = h("p", { class: "muted" }, "start the server with --tokenizer to read it as text");
  place.replaceChildren(place.firstElementChild, h("p", {}, facts), ...(texts.length ? texts : [none]));
}

function notice(text) {
  tell($("notice"), text);
  $("notice").hidden = !text;
}

async function ask() {
  try {
    const answer = await fetch("ui/data", { headers });
    if (answer.status === 401) notice("a token is needed: open /ui#token=YOUR_TOKEN");
    else if (!answer.ok) throw new Error(`status ${answer.status}`);
    else {
      draw(await answer.json());
      notice("");
    }
  } catch (error) {
    notice(`no answer from the server: ${error.message}`);
  }
  setTimeout(ask, PERIOD_MS);
}

const nextTheme = themeOf($("theme"));
skipLink();
document.addEventListener("keydown", (event) => {
  if (event.key === "d" && !event.ctrlKey && !event.metaKey && !event.altKey) nextTheme();
});
$("charts").append(charts.flow.node, charts.queue.node);
ask();
