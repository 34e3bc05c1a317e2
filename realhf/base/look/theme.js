// Light, dark, or as the system likes it: chosen by a button, kept by the browser.

const THEMES = ["auto", "light", "dark"];

function set(button, theme) {
  document.documentElement.dataset.theme = theme;
  button.textContent = `Theme: ${theme}`;
  localStorage.setItem("theme", theme);
}

/** Show the theme that was kept, and let a button change it; returns what changes it to the next one. */
export function themeOf(button) {
  const next = () => set(button, THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  const kept = localStorage.getItem("theme");
  set(button, THEMES.includes(kept) ? kept : "auto");
  button.addEventListener("click", next);
  return next;
}
