/* Light, dark, or as the system says. The choice stays in this browser. */

const KEY = "palestra-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const query = matchMedia("(prefers-color-scheme: dark)");

export const theme = () => localStorage.getItem(KEY) ?? "auto";

export function applyTheme(choice = theme()) {
  const dark = choice === "dark" || (choice === "auto" && query.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  dispatchEvent(new CustomEvent("themechange"));
}

export function nextTheme() {
  const choice = NEXT[theme()];
  localStorage.setItem(KEY, choice);
  applyTheme(choice);
  return choice;
}

/** A colour of the stylesheet by its name, for canvases. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

query.addEventListener("change", () => applyTheme());
