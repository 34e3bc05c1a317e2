// Light, dark, or as the system likes it: selected by a button and stored in the browser.

const THEMES = ["auto", "light", "dark"];

function set(button, theme) {
  document.documentElement.dataset.theme = theme;
  button.textContent = `Theme: ${theme}`;
  keep(theme);
}

/** Store a theme in the browser, and return the stored one; a page in a frame may be denied access. */
function keep(theme) {
  try {
    if (theme) localStorage.setItem("theme", theme);
    return localStorage.getItem("theme");
  } catch {
    return theme;
  }
}

/** Apply the stored theme, and let a button change it. Return a function that switches to the next theme. */
export function themeOf(button) {
  const next = () => set(button, THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  const stored = keep();
  set(button, THEMES.includes(stored) ? stored : "auto");
  button.addEventListener("click", next);
  return next;
}
