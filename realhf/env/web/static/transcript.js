// Commands and their answers, as a terminal shows them. All text goes in as text, never as markup.

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const signed = (number) => (number >= 0 ? "+" : "−") + Math.abs(number).toFixed(2);
export const percent = (share) => `${Math.round(share * 100)} %`;

function block(className, text, name) {
  const made = element("pre", className, text);
  made.tabIndex = 0;
  made.setAttribute("aria-label", name);
  return made;
}

export function entry(step, number, before) {
  const made = element("article", `entry ${step.command_success ? "good" : "bad"}`);
  made.setAttribute("aria-label", `Step ${number}`);
  const line = element("p", "line");
  line.append(element("span", "sigil", "$"), element("code", "typed", step.command));
  made.append(line);
  if (step.hint_text) made.append(block("hint-text", step.hint_text, "Hint"));
  if (step.command_output) made.append(block("out", step.command_output, "Output"));
  if (step.error) made.append(block("err", step.error, "Error"));
  if (!step.hint_text && !step.command_output && !step.error) made.append(element("p", "none", "no output"));
  made.append(meta(step, number, before));
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
