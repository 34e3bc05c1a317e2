// An episode that another page asks for in the address (#play=...): shown, and played only when a person says so.

import { element } from "./transcript.js";

const byId = (id) => document.getElementById(id);
const MOST_COMMANDS = 200;

/** The order in the address; null where there is none that makes sense. */
function wanted() {
  if (!location.hash.startsWith("#play=")) return null;
  let found;
  try {
    found = JSON.parse(decodeURIComponent(location.hash.slice("#play=".length)));
  } catch {
    return null;
  }
  const { task_id, seed, split, chaos, commands } = found ?? {};
  if (!Number.isSafeInteger(task_id)) return null;
  const order = { task_id };
  if (Number.isSafeInteger(seed) && seed >= 0) order.seed = seed;
  if (split === "train" || split === "heldout") order.split = split;
  if (typeof chaos === "boolean") order.chaos = chaos;
  const texts = Array.isArray(commands) ? commands.filter((one) => typeof one === "string" && one !== "") : [];
  return { order, commands: texts.slice(0, MOST_COMMANDS) };
}

/** Show what the address asks for. `start(order)` begins an episode, `run(command)` returns whether it may go on. */
export function offer(start, run, chaosAllowed) {
  const asked = wanted();
  byId("offer").hidden = asked === null;
  if (asked === null) return;
  const { order, commands } = asked;
  const seed = order.seed === undefined ? "" : `, seed ${order.seed}`;
  const chaos = order.chaos && !chaosAllowed ? " It was played with chaos, which this server does not allow." : "";
  if (!chaosAllowed) delete order.chaos;
  byId("offer-text").textContent = `Task #${order.task_id}${seed}, ${order.split === "heldout" ? "held out, " : ""}${commands.length} ${commands.length === 1 ? "command" : "commands"}.${chaos}`;
  byId("offer-commands").replaceChildren(...commands.map((command) => {
    const item = element("li");
    item.append(element("code", "", command));
    return item;
  }));
  byId("offer-play").hidden = commands.length === 0;
  const taken = () => {
    history.replaceState(null, "", location.pathname);
    byId("offer").hidden = true;
  };
  byId("offer-close").onclick = taken;
  byId("offer-begin").onclick = () => {
    taken();
    start(order);
  };
  byId("offer-play").onclick = async () => {
    taken();
    await start(order);
    for (const command of commands) if (!(await run(command))) break;
  };
  byId(commands.length ? "offer-play" : "offer-begin").focus();
}
