// Makes elements. Text of a run is only ever set as text, so nothing in it is interpreted.

const SVG = "http://www.w3.org/2000/svg";
const READ_ALOUD = new Set(["title", "aria-label", "placeholder"]);
/** Control characters (but ends of lines and tabs), marks of direction, and what has no width: text could hide or turn
 * around other text with them. What joins letters and emojis stays. */
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\u{e0000}-\u{e007f}]/gu;

/** A text as it is shown: each character that nobody would see is named. */
export const shown = (text) => text.replace(UNSEEN, (one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
const readable = (value) => (typeof value === "string" ? shown(value) : value);

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "text") made.textContent = readable(value);
    else made.setAttribute(name, value === true ? "" : READ_ALOUD.has(name) ? readable(value) : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map(readable));
  return made;
}

/** An HTML element; `on<event>` adds a listener, `text` sets the text. */
export function h(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** An element of SVG. */
export function s(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

export const $ = (id) => document.getElementById(id);

/** A number as a person reads it. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1000 ? value.toFixed(0) : size >= 100 ? value.toFixed(1) : String(Number(value.toPrecision(4)));
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

/** A table whose cells are text or elements. */
export function table(heads, rows, attributes = {}) {
  const cell = (name, content, extra = {}) => h(name, extra, content instanceof Node ? content : String(content ?? ""));
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      attributes,
      h("thead", {}, h("tr", {}, heads.map((head) => cell("th", head, { scope: "col" })))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((content) => cell("td", content))))),
    ),
  );
}

/** Set the text of an element, if it is another one: a screen reader says a status anew whenever it is set. */
export function tell(element, text) {
  const wanted = shown(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Make a part of a page say what a newer one says, in place, so that what has the focus, is selected, scrolled or open
 * stays so. For parts without listeners of their own. */
export function renew(old, made) {
  if (old.isEqualNode(made)) return;
  if (old.nodeName !== made.nodeName) return old.replaceWith(made);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (name !== "open" && !made.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of made.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = value; // a page may forbid the attribute
    else old.setAttribute(name, value);
  }
  const [had, has] = [[...old.childNodes], [...made.childNodes]];
  has.forEach((child, at) => (had[at] ? renew(had[at], child) : old.append(child)));
  for (const child of had.slice(has.length)) child.remove();
}

/** Change parts of a page that scrolls in `frame`. The last of `parts` that begins above the middle of what is seen, which
 * is the one that is read, stays where it is on the screen; at the top of the page none has to. */
export function holdingStill(frame, parts, change) {
  const { top, height } = frame.getBoundingClientRect();
  const held = frame.scrollTop > 0 && parts.findLast((one) => one.getBoundingClientRect().top < top + height / 2);
  const before = held && held.getBoundingClientRect().top;
  frame.style.overflowAnchor = "none"; // the browser would hold another part
  change();
  if (held) frame.scrollTop += held.getBoundingClientRect().top - before;
  frame.style.overflowAnchor = "";
}

/** Let the skip link of a page give the focus to its target and leave the address as it is: it says what is shown. */
export function skipLink() {
  const link = document.querySelector(".skip");
  link.addEventListener("click", (event) => {
    event.preventDefault();
    document.querySelector(link.getAttribute("href")).focus();
  });
}
