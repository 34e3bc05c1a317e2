// The page: what is played, what is replayed, and the keys.

import { cards } from "./account.js";
import { skipLink } from "./dom.js";
import { readLog } from "./episode_log.js";
import { offer } from "./offer.js";
import { Picker } from "./picker.js";
import { ask, beginSession, sayAway } from "./server.js";
import { themeOf } from "./theme.js";
import { element, entry, percent, prose } from "./transcript.js";

const byId = (id) => document.getElementById(id);
const REPLAY_STEP_MS = 1200;

const page = {
  session: null,
  picker: null,
  live: null, // log of the episode that is played
  replay: null, // log that is replayed instead, and how many of its steps are shown
  at: 0,
  timer: 0,
  working: false,
  history: [],
  place: 0, // in history; its length: the line that is being written
  draft: "",
};

/** Between the tabs of a browser, which share one visitor: a tab that goes tells the others, and they keep the seat. */
const tabs = new BroadcastChannel("playground");

const shownLog = () => page.replay ?? page.live;
const shownSteps = () => (page.replay ? page.at : page.live?.steps.length ?? 0);

// --- what is seen -----------------------------------------------------------------------------------------------

function show() {
  const log = shownLog();
  document.body.dataset.mode = page.replay ? "replay" : log ? "live" : "idle";
  byId("welcome").hidden = log !== null;
  for (const id of ["task", "terminal", "toolbar"]) byId(id).hidden = log === null;
  byId("leave").hidden = page.live === null;
  if (log === null) {
    byId("cards").replaceChildren(element("p", "muted", "What there is in the account will show here."));
    byId("account-note").textContent = "";
    return;
  }
  const count = shownSteps();
  const last = log.steps[count - 1];
  showTask(log);
  showStatus(log, last);
  showEnd(last, count);
  showTranscript(log, count);
  showAccount(log, count);
  showTools(log, last);
  if (page.replay) showReplay(log, count);
}

function showTask(log) {
  const { task_id, difficulty, description, desired_state_spec } = log.task;
  byId("tier").textContent = difficulty;
  byId("tier").className = `tier ${difficulty}`;
  byId("task-id").textContent = `#${task_id}`;
  byId("task-seed").textContent = `seed ${log.seed}`;
  byId("description").replaceChildren(...prose(description, log.names));
  byId("desired").hidden = !desired_state_spec;
  byId("desired-text").replaceChildren(...prose(desired_state_spec ?? "", log.names));
}

function showStatus(log, last) {
  const progress = last?.partial_progress ?? 0;
  byId("progress").value = progress;
  byId("progress-text").textContent = percent(progress);
  byId("score").textContent = (last?.score ?? 0).toFixed(2);
  byId("steps-left").textContent = `${last?.steps_left ?? log.max_steps} of ${log.max_steps}`;
  byId("hints").textContent = String(last?.hints_used ?? 0);
}

function showTranscript(log, count) {
  const transcript = byId("transcript");
  const stays = transcript.log === log ? Math.min(transcript.childElementCount, count) : 0;
  transcript.log = log;
  while (transcript.childElementCount > stays) transcript.lastElementChild.remove();
  for (let index = stays; index < count; index++) {
    transcript.append(entry(log.steps[index], index + 1, log.steps[index - 1]?.partial_progress ?? 0));
  }
  const last = transcript.lastElementChild;
  const tall = last && last.offsetHeight > transcript.clientHeight;
  transcript.scrollTop = tall ? last.offsetTop - transcript.offsetTop : transcript.scrollHeight;
}

function showAccount(log, count) {
  const states = [log.infra_state, ...log.steps.map((step) => step.infra_state)];
  const made = cards(states[count], count > 0 ? states[count - 1] : null);
  if (made.length === 0) made.push(element("p", "muted", "Nothing yet in the services of this task."));
  byId("cards").replaceChildren(...made);
  byId("account-note").textContent = count === 0 ? "at the start" : `after step ${count}`;
}

function showEnd(last, count) {
  const banner = byId("banner");
  banner.hidden = !last?.done;
  if (banner.hidden) return;
  banner.className = last.task_achieved ? "achieved" : "truncated";
  byId("banner-title").textContent = last.task_achieved ? "Achieved" : "Out of steps";
  const steps = count === 1 ? "1 step" : `${count} steps`;
  byId("banner-text").textContent = `${steps}, score ${last.score.toFixed(2)}`;
}

function showTools(log, last) {
  const { levels, factor } = page.session.hint;
  const used = last?.hints_used ?? 0;
  const over = last?.done ?? false;
  byId("hint").textContent = used < levels ? `Hint ${used + 1}/${levels} · score × ${factor}` : "No hints left";
  byId("hint").disabled = page.working || over || used >= levels;
  byId("solution").hidden = !page.session.solutions;
  byId("solution").disabled = over;
  byId("run").disabled = page.working || over;
  byId("prompt").hidden = over;
  byId("replay").disabled = log.steps.length === 0;
}

function showReplay(log, count) {
  byId("replay-at").max = String(log.steps.length);
  byId("replay-at").value = String(count);
  byId("replay-text").textContent = `step ${count} of ${log.steps.length}`;
  byId("replay-back").disabled = count === 0;
  byId("replay-on").disabled = count === log.steps.length;
  byId("replay-play").textContent = page.timer ? "Pause" : "Play";
  byId("replay-play").setAttribute("aria-label", page.timer ? "Pause" : "Play");
}

function tell(text) {
  byId("notice").textContent = text;
}

// --- what is done -----------------------------------------------------------------------------------------------

async function working(action) {
  if (page.working) return;
  page.working = true;
  document.body.setAttribute("aria-busy", "true");
  try {
    tell("");
    await action();
  } catch (problem) {
    tell(problem.message);
    if (problem.code === "NO_SESSION" || problem.code === "CSRF") await begin();
  } finally {
    page.working = false;
    document.body.removeAttribute("aria-busy");
    byId("starting").hidden = true;
    show();
  }
}

function start(order) {
  return working(async () => {
    const seed = byId("seed").value.trim();
    const more = { chaos: page.session.chaos && byId("chaos").checked };
    if (seed !== "") more.seed = Number(seed);
    byId("starting").hidden = false;
    const { log } = await ask("reset", { ...more, ...order });
    closeReplay();
    page.live = log;
    page.picker.show(log.task.task_id);
    document.body.dataset.tasks = "closed";
    byId("command").value = "";
    show();
    byId("command").focus();
  });
}

function again(seed) {
  if (page.live === null) return undefined;
  return start({ task_id: page.live.task.task_id, seed });
}

async function run(command) {
  await working(async () => {
    if (page.live === null || page.live.steps.at(-1)?.done) return;
    const log = page.live;
    document.body.dataset.running = "yes";
    try {
      log.steps.push((await ask("step", { command })).step);
    } finally {
      delete document.body.dataset.running;
    }
  });
  if (page.live?.steps.at(-1)?.done && !page.replay) byId("transcript").focus();
}

/** One command of a recorded episode; whether the next one may follow. */
async function runRecorded(command) {
  const log = page.live;
  if (log.steps.at(-1)?.done) return false;
  const before = log.steps.length;
  await run(command);
  return page.live === log && log.steps.length === before + 1;
}

function offerRecorded() {
  let log = null;
  const begin = async (order) => {
    const before = page.live;
    await start(order);
    log = page.live === before ? null : page.live;
  };
  offer(begin, (command) => (log !== null && page.live === log ? runRecorded(command) : false), page.session.chaos);
}

function submit() {
  const box = byId("command");
  const command = box.value.trim();
  if (command === "" || page.working || page.replay) return;
  if (page.history.at(-1) !== command) page.history.push(command);
  page.place = page.history.length;
  box.value = "";
  fit();
  run(command);
}

function hint() {
  if (page.live && !page.replay && !byId("hint").disabled) run(page.session.hint.command);
}

function solution() {
  return working(async () => {
    const { command, position, total } = await ask("solution");
    if (command === null) {
      tell("every canonical command was run");
      return;
    }
    tell(`canonical command ${position} of ${total}`);
    write(command);
  });
}

function leave() {
  return working(async () => {
    await ask("leave", {});
    closeReplay();
    page.live = null;
    document.body.dataset.tasks = "open";
  });
}

// --- the command line -------------------------------------------------------------------------------------------

function write(text) {
  const box = byId("command");
  box.value = text;
  fit();
  box.focus();
  box.setSelectionRange(text.length, text.length);
}

function fit() {
  const box = byId("command");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function recall(step) {
  const place = page.place + step;
  if (place < 0 || place > page.history.length) return;
  if (page.place === page.history.length) page.draft = byId("command").value;
  page.place = place;
  write(place === page.history.length ? page.draft : page.history[place]);
}

function commandKey(event) {
  if (event.isComposing) return;
  const box = event.target;
  if (event.key === "/" && box.value === "") return event.preventDefault(); // the shortcut that leads here, pressed here
  const above = box.value.slice(0, box.selectionStart).includes("\n");
  const below = box.value.slice(box.selectionEnd).includes("\n");
  if (event.key === "Enter" && !event.shiftKey) submit();
  else if (event.key === "ArrowUp" && !above) recall(-1);
  else if (event.key === "ArrowDown" && !below) recall(1);
  else return;
  event.preventDefault();
}

// --- replay -----------------------------------------------------------------------------------------------------

function openReplay(log, at) {
  if (!log || log.steps.length === 0) return;
  page.replay = log;
  page.at = at;
  show();
  byId("replay-play").focus();
}

function closeReplay() {
  pause();
  page.replay = null;
}

function moveTo(at) {
  page.at = Math.max(0, Math.min(at, page.replay.steps.length));
  if (page.at === page.replay.steps.length) pause();
  show();
}

function pause() {
  clearInterval(page.timer);
  page.timer = 0;
}

function play() {
  if (page.timer) {
    pause();
  } else {
    if (page.at === page.replay.steps.length) page.at = 0;
    page.timer = setInterval(() => moveTo(page.at + 1), REPLAY_STEP_MS);
  }
  show();
}

function endReplay() {
  closeReplay();
  show();
  byId(page.live ? "command" : "search").focus();
}

async function openFile(file) {
  try {
    tell("");
    openReplay(await readLog(file), 0);
  } catch (problem) {
    tell(problem.message);
  }
}

// --- keys -------------------------------------------------------------------------------------------------------

const KEYS = {
  "/": () => byId("command").focus(),
  "?": () => byId("shortcuts").showModal(),
  t: () => {
    document.body.dataset.tasks = "open";
    byId("search").focus();
  },
  n: () => page.picker?.draw(),
  r: () => again(page.live?.seed),
  h: hint,
  p: () => openReplay(page.live, 0),
};
const REPLAY_KEYS = {
  ArrowLeft: () => moveTo(page.at - 1),
  ArrowRight: () => moveTo(page.at + 1),
  Home: () => moveTo(0),
  End: () => moveTo(page.replay.steps.length),
  " ": play,
  Escape: endReplay,
};

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const field = event.target.closest?.("input, textarea, select");
  if (event.key === "Escape" && field) {
    field.blur();
    return;
  }
  const pressable = event.target.closest?.("button, a, summary");
  const taken = field || (pressable && (event.key === " " || event.key === "Enter"));
  const wanted = (page.replay && REPLAY_KEYS[event.key]) || KEYS[event.key];
  if (taken || !wanted) return;
  event.preventDefault();
  wanted();
}

// --- beginning --------------------------------------------------------------------------------------------------

function listen() {
  skipLink();
  const clicks = {
    run: submit,
    hint,
    solution,
    leave,
    restart: () => again(page.live?.seed),
    "new-seed": () => again(Math.floor(Math.random() * 10000)),
    replay: () => openReplay(shownLog(), 0),
    "banner-replay": () => openReplay(shownLog(), 0),
    "banner-next": () => page.picker.draw(),
    "replay-back": () => moveTo(page.at - 1),
    "replay-on": () => moveTo(page.at + 1),
    "replay-play": play,
    "replay-close": endReplay,
    "open-log": () => byId("log-file").click(),
    help: () => byId("shortcuts").showModal(),
    "toggle-tasks": () => {
      document.body.dataset.tasks = document.body.dataset.tasks === "open" ? "closed" : "open";
    },
  };
  for (const [id, action] of Object.entries(clicks)) byId(id).addEventListener("click", action);
  byId("prompt").addEventListener("submit", (event) => event.preventDefault());
  byId("command").addEventListener("keydown", commandKey);
  byId("command").addEventListener("input", fit);
  byId("replay-at").addEventListener("input", (event) => moveTo(Number(event.target.value)));
  byId("log-file").addEventListener("change", (event) => {
    if (event.target.files.length) openFile(event.target.files[0]);
    event.target.value = "";
  });
  byId("login-form").addEventListener("submit", login);
  byId("login").addEventListener("close", () => {
    if (page.session.login) byId("login").showModal();
  });
  document.addEventListener("keydown", key);
  window.addEventListener("pagehide", () => {
    if (page.live === null) return;
    sayAway();
    tabs.postMessage("gone");
  });
  window.addEventListener("pageshow", (event) => event.persisted && page.live && ask("state").catch(() => {}));
  tabs.addEventListener("message", () => page.live && ask("state").catch(() => {}));
  window.addEventListener("hashchange", () => page.session && !page.session.login && offerRecorded());
}

async function login(event) {
  event.preventDefault();
  try {
    await ask("login", { token: byId("token").value });
    byId("token").value = "";
    await begin();
    byId("login").close();
  } catch (problem) {
    byId("login-problem").textContent = problem.message;
  }
}

async function begin() {
  page.session = await beginSession();
  if (page.session.login) {
    byId("login").showModal();
    return;
  }
  page.picker ??= new Picker(page.session.tiers, start);
  byId("chaos-row").hidden = !page.session.chaos;
  const [tasks, state] = await Promise.all([ask("tasks"), ask("state")]);
  page.picker.fill(tasks);
  page.live = state.log;
  if (state.busy) {
    tell(`Somebody else is playing; free in ${Math.ceil(state.free_in_s / 60)} min at the latest. You can replay logs.`);
  }
  if (page.live) {
    page.history = page.live.steps.map((step) => step.command);
    page.place = page.history.length;
    page.picker.show(page.live.task.task_id);
    document.body.dataset.tasks = "closed";
  }
  show();
  offerRecorded();
  document.documentElement.dataset.ready = "yes";
}

themeOf(byId("theme"));
listen();
begin().catch((problem) => tell(problem.message));
