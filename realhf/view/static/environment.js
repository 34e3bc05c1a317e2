// What an environment says of a rollout: the state that it left, and how the episode is played again by hand.

import { h, number, table } from "./dom.js";

const LONGEST_ADDRESS = 30000;

const json = (value) => h("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1));
const isMap = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** A view of the environment's state: {title, columns, rows, note} or {title, text}; anything else as JSON. */
function viewOf(view) {
  if (!isMap(view)) return json(view);
  const note = typeof view.note === "string" ? h("p", { class: "muted" }, view.note) : null;
  if (typeof view.text === "string") return h("div", {}, h("pre", {}, view.text), note);
  if (!Array.isArray(view.columns) || !Array.isArray(view.rows)) return json(view);
  const cell = (value) => h("span", { class: "cell-text" }, typeof value === "string" ? value : JSON.stringify(value));
  const rows = view.rows.map((row) => (Array.isArray(row) ? row.map(cell) : [cell(row)]));
  return h("div", {}, table(view.columns.map(String), rows, { class: "view" }), note);
}

/** What an environment says of one turn. */
export function ofTurn(info) {
  if (!isMap(info)) return json(info);
  const shown = (name, value) => (name === "view" ? viewOf(value) : typeof value === "object" && value !== null ? json(value) : number(value));
  return h("dl", { class: "view" }, Object.entries(info).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, shown(name, value)))));
}

/** The last state that the environment described; null when it described none. */
export function stateLeft(play) {
  const view = [play.info, ...(play.turns ?? []).map((turn) => turn.info)].map((info) => (isMap(info) ? info.view : null)).findLast(Boolean);
  if (!view) return null;
  const title = isMap(view) && typeof view.title === "string" ? view.title : "What the environment was like at the end";
  return h("section", { id: "state-left" }, h("h2", {}, title), viewOf(view));
}

/** How a person plays the episode again; null where the environment does not say. Only pages of this machine are linked. */
export function again(play) {
  const replay = isMap(play.info) ? play.info.replay : null;
  if (!isMap(replay) || typeof replay.url !== "string") return null;
  const did = (play.turns ?? []).map((turn) => (isMap(turn.info) ? turn.info.did : null)).filter((one) => typeof one === "string");
  const address = addressOf(replay.url, { ...replay.order, commands: did }) ?? addressOf(replay.url, replay.order);
  if (!address) return null;
  const title = typeof replay.title === "string" ? replay.title : "its own page";
  const start = typeof replay.command === "string" ? h("p", {}, "Start it on this machine, if it is not running: ", h("code", {}, replay.command)) : null;
  const copied = h("span", { class: "muted", role: "status" });
  const copy = async () => {
    const done = await navigator.clipboard?.writeText(did.join("\n")).then(() => "copied", () => "");
    copied.textContent = done || "select the text below and copy it";
  };
  return h(
    "section", { id: "again" }, h("h2", {}, `Play it in the ${title}`), start,
    h("div", { class: "bar" }, h("a", { class: "button", href: address, target: "_blank", rel: "noreferrer" }, `Same task and seed${did.length ? `, ${did.length} ${did.length === 1 ? "command" : "commands"} ready` : ""}`, h("kbd", {}, "p")), did.length ? h("button", { type: "button", onclick: copy }, "Copy the commands") : null, copied),
    did.length ? h("details", {}, h("summary", {}, "The commands"), h("pre", { class: "command" }, did.join("\n"))) : null,
  );
}

function addressOf(url, order) {
  let found;
  try {
    found = new URL(url);
  } catch {
    return null;
  }
  const isHere = found.protocol === "http:" && ["127.0.0.1", "localhost", "[::1]"].includes(found.hostname);
  if (!isHere || !isMap(order)) return null;
  found.hash = `play=${encodeURIComponent(JSON.stringify(order))}`;
  return found.href.length <= LONGEST_ADDRESS ? found.href : null;
}
