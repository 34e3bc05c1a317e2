// Commands and their answers, as a terminal shows them. All text goes in as text, never as markup, and what nobody would
// see in it is named: who plays a recorded command sees all of it before.

import { shown } from "./dom.js";

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = shown(String(text));
  return made;
}

const LONG = 16;
const signed = (number) => (number >= 0 ? "+" : "−") + Math.abs(number).toFixed(2);
export const percent = (share) => `${Math.round(share * 100)} %`;

const trimmed = (text) => text.replace(/^\n+|\s+$/g, "");

function block(className, text, name) {
  const made = element("pre", className, text);
  made.tabIndex = 0;
  made.setAttribute("aria-label", name);
  return made;
}

function folded(pre) {
  const lines = pre.textContent.split("\n").length;
  if (lines <= LONG) return [pre];
  const button = element("button", "unfold", `Show all ${lines} lines`);
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  pre.classList.add("folded");
  button.addEventListener("click", () => {
    const isFolded = pre.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(!isFolded));
    button.textContent = isFolded ? `Show all ${lines} lines` : "Show less";
  });
  return [pre, button];
}

// The words of a text that hold one of the names are set off from the rest.
export function prose(text, names) {
  const escaped = names.map((name) => name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  if (escaped.length === 0) return [text];
  const word = `[\\w:/.@*-]*(?:${escaped.join("|")})(?:[\\w:/.@*-]*[\\w/*])?`;
  return text.split(new RegExp(`(${word})`)).map((part, index) =>
    index % 2 ? element("code", "name", part) : part);
}

export function entry(step, number, before) {
  const made = element("article", `entry ${step.command_success ? "good" : "bad"}`);
  made.setAttribute("aria-label", `Step ${number}`);
  const line = element("p", "line");
  line.append(element("span", "sigil", "$"), element("code", "typed", step.command));
  made.append(line, meta(step, number, before));
  if (step.hint_text) made.append(block("hint-text", step.hint_text, "Hint"));
  if (step.command_output) made.append(...folded(block("out", trimmed(step.command_output), "Output")));
  if (step.error) made.append(...folded(block("err", trimmed(step.error), "Error")));
  if (!step.hint_text && !step.command_output && !step.error) made.append(element("p", "none", "no output"));
  return made;
}

function meta(step, number, before) {
  const made = element("p", "meta");
  const words = [element("span", "", `step ${number}`)];
  if (step.refusal) words.push(element("span", "refusal", `refused: ${step.refusal}`));
  if (step.reward !== 0) words.push(element("span", step.reward > 0 ? "gain" : "loss", signed(step.reward)));
  if (step.partial_progress > before) words.push(element("span", "gain", `progress ${percent(step.partial_progress)}`));
  words.push(element("span", "", `${step.milliseconds} ms`));
  made.append(...words);
  return made;
}
