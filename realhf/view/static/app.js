// The frame: which page is shown, of which runs, keys, theme, and the request that waits for changes.

import { $, h } from "./dom.js";
import { Store } from "./store.js";
import { themeOf } from "./theme.js";
import * as advisories from "./advisories.js";
import * as overview from "./overview.js";
import * as rollout from "./rollout.js";
import * as rollouts from "./rollouts.js";
import * as tasks from "./tasks.js";
import * as timeline from "./timeline.js";
import * as tokens from "./tokens.js";

const PAGES = [
  { name: "overview", title: "Overview", module: overview },
  { name: "advisories", title: "Advisories", module: advisories },
  { name: "timeline", title: "Timeline", module: timeline },
  { name: "rollouts", title: "Rollouts", module: rollouts },
  { name: "rollout", title: "Rollout", module: rollout },
  { name: "tokens", title: "Tokens", module: tokens },
  { name: "tasks", title: "Tasks", module: tasks },
];
const RETRY_MS = 2000;
const MOST_COMPARED = 8;
const store = new Store();
let shown = null;
let turn = 0;
let waiting = new AbortController();

function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const params = new URLSearchParams(query);
  const page = PAGES.find((one) => one.name === path) ?? PAGES[0];
  const numbers = (params.get("runs") ?? "").split(",").filter(Boolean).map(Number);
  const known = [...new Set(numbers)].filter((one) => store.runs[one]).slice(0, MOST_COMPARED);
  return { page, params, runs: known.length ? known : store.runs.length ? [0] : [] };
}

/** Go to a page; `params` become part of the address, so that Back and a copied link lead to the same view. */
function go(name, params = {}, replace = false) {
  const query = new URLSearchParams({ runs: address().runs.join(","), ...params });
  if (replace && address().page.name !== name) return; // the answer came when another page was already open
  const hash = `#/${name}?${query}`;
  if (replace) history.replaceState(null, "", hash);
  else location.hash = hash;
}

function drawFrame() {
  const { page, runs } = address();
  const run = store.runs[runs[0]];
  $("title").textContent = run ? run.name : "realhf view";
  document.title = run ? `${run.name} · ${page.title}` : "realhf view";
  const others = runs.length > 1 ? ` Compared with ${runs.length - 1} more.` : "";
  $("state").textContent = run ? run.text + others : "";
  $("state").dataset.state = run?.state ?? "";
  $("pages").replaceChildren(
    ...PAGES.map((one, at) =>
      h(
        "a",
        { href: `#/${one.name}?runs=${runs.join(",")}`, "aria-current": one === page ? "page" : null },
        one.title,
        h("kbd", { "aria-hidden": "true" }, String(at + 1)),
      ),
    ),
  );
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

async function showPage() {
  const mine = ++turn;
  const { page, params, runs } = address();
  shown?.close?.();
  shown = null;
  drawFrame();
  const place = h("div", { class: `page ${page.name}` });
  $("page").replaceChildren(place);
  document.documentElement.dataset.page = "";
  if (!runs.length) return place.append(h("p", {}, "There are no runs here."));
  const unseen = runs.filter((one) => !Object.keys(store.runs[one].stamps).length);
  if (unseen.length) await learn(runs);
  if (mine !== turn) return;
  const context = { store, params, runs: runs.map((one) => store.runs[one]), run: store.runs[runs[0]], go, notice };
  try {
    const made = await page.module.show(place, context);
    if (mine !== turn) return made?.close?.();
    shown = made;
    document.documentElement.dataset.page = page.name;
  } catch (error) {
    if (mine === turn) place.append(h("p", { class: "problem" }, `This cannot be shown: ${error.message}`));
  }
}

/** Learn the present state of runs that were not looked at before, and wait for theirs from now on. */
async function learn(runs) {
  store.seen = "";
  await store.changes(runs).catch((error) => notice(`The server does not answer: ${error.message}`));
  waiting.abort();
}

async function followChanges() {
  while (store.follow) {
    const { runs } = address();
    waiting = new AbortController();
    try {
      const changed = await store.changes(runs, waiting.signal);
      notice("");
      drawFrame();
      const parts = new Set([...changed.entries()].filter(([one]) => !store.runs[one].isGone).flatMap(([, set]) => [...set]));
      if (parts.size) await shown?.update?.(parts);
    } catch (error) {
      if (error.name === "AbortError") continue;
      notice(`The server does not answer (${error.message}). What was loaded stays; trying again.`);
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }
}

const KEYS = {
  c: () => openRuns(),
  "?": () => openKeys(),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const inField = event.target.closest("input, select, textarea");
  if (event.key === "Escape" && inField) return inField.blur();
  if (inField) return;
  const page = PAGES[Number(event.key) - 1];
  if (/^[1-9]$/.test(event.key) && page) go(page.name);
  else if (KEYS[event.key]) KEYS[event.key]();
  else if (!shown?.key?.(event)) return;
  event.preventDefault();
}

function openKeys() {
  const rows = [
    ["1–" + PAGES.length, "pages"],
    ["c", "choose runs"],
    ["d", "theme"],
    ["Tab, Enter", "from one control to the next; open"],
    ["Esc", "out of a field"],
    ...(shown?.keys ?? []),
  ];
  $("keys-list").replaceChildren(...rows.map(([key, does]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, does))));
  $("keys").showModal();
}

async function openRuns() {
  await store.refresh().catch(() => {});
  const chosen = new Set(address().runs);
  const line = (run) =>
    h(
      "li",
      { "data-name": run.name.toLowerCase() },
      h(
        "label",
        {},
        h("input", { type: "checkbox", value: run.number, checked: chosen.has(run.number) }),
        h("span", {}, run.name),
        h("span", { class: "muted" }, `${run.state}, ${run.steps} steps`),
      ),
    );
  $("runs-list").replaceChildren(...store.runs.map(line));
  $("runs-search").value = "";
  $("runs").showModal();
}

function chooseRuns() {
  const boxes = [...$("runs-list").querySelectorAll("input:checked")].map((one) => one.value);
  if (boxes.length) go(address().page.name, { runs: boxes.slice(0, MOST_COMPARED).join(",") });
}

async function main() {
  KEYS.d = themeOf($("theme"));
  $("help").addEventListener("click", openKeys);
  $("choose").addEventListener("click", openRuns);
  $("runs").addEventListener("close", chooseRuns);
  $("runs-search").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const line of $("runs-list").children) line.hidden = !line.dataset.name.includes(wanted);
  });
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", showPage);
  try {
    await store.refresh();
    await showPage();
  } catch (error) {
    notice(`The server does not answer: ${error.message}`);
    return;
  }
  document.documentElement.dataset.ready = "yes";
  followChanges();
}

main();
