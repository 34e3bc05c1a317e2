// What an environment recorded about a rollout: its final state, and how to play the episode again by hand.

import { h, number, table } from "./dom.js";

const MAX_ADDRESS_CHARS = 30000;

const json = (value) => h("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1));
const isMap = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** A view of the environment's state: {title, columns, rows, note} or {title, text}; anything else as JSON. */
function stateView(view) {
  if (!isMap(view)) return json(view);
  const note = typeof view.note === "string" ? h("p", { class: "muted" }, view.note) : null;
  if (typeof view.text === "string") return h("div", {}, h("pre", {}, view.text), note);
  if (!Array.isArray(view.columns) || !Array.isArray(view.rows)) return json(view);
  const cell = (value) => h("span", { class: "cell-text" }, typeof value === "string" ? value : JSON.stringify(value));
  const rows = view.rows.map((row) => (Array.isArray(row) ? row.map(cell) : [cell(row)]));
  return h("div", {}, table(view.columns.map(String), rows, { class: "view" }), note);
}

/** What an environment recorded about one turn. */
export function turnView(info) {
  if (!isMap(info)) return json(info);
  const format = (name, value) => (name === "view" ? stateView(value) : typeof value === "object" && value !== null ? json(value) : number(value));
  return h("dl", { class: "view" }, Object.entries(info).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, format(name, value)))));
}

/** The last state that the environment described; null if there is none. */
export function finalState(play) {
  const view = [play.info, ...(play.turns ?? []).map((turn) => turn.info)].map((info) => (isMap(info) ? info.view : null)).findLast(Boolean);
  if (!view) return null;
  const title = isMap(view) && typeof view.title === "string" ? view.title : "What the environment was like at the end";
  return h("section", { id: "state-left" }, h("h2", {}, title), stateView(view));
}

/** How a person plays the episode again; null if the environment does not record it. Only pages of this machine are linked. */
export function replaySection(play) {
  const replay = isMap(play.info) ? play.info.replay : null;
  if (!isMap(replay) || typeof replay.url !== "string") return null;
  const commands = (play.turns ?? []).map((turn) => (isMap(turn.info) ? turn.info.did : null)).filter((one) => typeof one === "string");
  const address = replayAddress(replay.url, { ...replay.order, commands }) ?? replayAddress(replay.url, replay.order);
  if (!address) return null;
  const title = typeof replay.title === "string" ? replay.title : "its own page";
  const start = typeof replay.command === "string" ? h("p", {}, "Start it on this machine, if it is not running: ", h("code", {}, replay.command)) : null;
  const copyStatus = h("span", { class: "muted", role: "status" });
  const copy = async () => {
    const result = await navigator.clipboard?.writeText(commands.join("\n")).then(() => "copied", () => "");
    copyStatus.textContent = result || "select the text below and copy it";
  };
  return h(
    "section", { id: "again" }, h("h2", {}, `Play it in the ${title}`), start,
    h("div", { class: "bar" }, h("a", { class: "button", href: address, target: "_blank", rel: "noreferrer" }, `Same task and seed${commands.length ? `, ${commands.length} ${commands.length === 1 ? "command" : "commands"} ready` : ""}`, h("kbd", {}, "p")), commands.length ? h("button", { type: "button", onclick: copy }, "Copy the commands") : null, copyStatus),
    commands.length ? h("details", {}, h("summary", {}, "The commands"), h("pre", { class: "command" }, commands.join("\n"))) : null,
  );
}

function replayAddress(url, order) {
  let address;
  try {
    address = new URL(url);
  } catch {
    return null;
  }
  const isHere = address.protocol === "http:" && ["127.0.0.1", "localhost", "[::1]"].includes(address.hostname);
  if (!isHere || !isMap(order)) return null;
  address.hash = `play=${encodeURIComponent(JSON.stringify(order))}`;
  return address.href.length <= MAX_ADDRESS_CHARS ? address.href : null;
}
