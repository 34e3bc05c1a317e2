// Light, dark, or as the system likes it: chosen by a button, kept by the browser.

const THEMES = ["auto", "light", "dark"];

function set(button, theme) {
  document.documentElement.dataset.theme = theme;
  button.textContent = `Theme: ${theme}`;
  keep(theme);
}

/** Keep a theme in the browser, and return the one that is kept; a page in a frame may be denied that. */
function keep(theme) {
  try {
    if (theme) localStorage.setItem("theme", theme);
    return localStorage.getItem("theme");
  } catch {
    return theme;
  }
}

/** Show the theme that was kept, and let a button change it; returns what changes it to the next one. */
export function themeOf(button) {
  const next = () => set(button, THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  const kept = keep();
  set(button, THEMES.includes(kept) ? kept : "auto");
  button.addEventListener("click", next);
  return next;
}
