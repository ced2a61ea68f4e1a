/* Keys of the page that is open. A key does nothing while the user types in a field. */

import { h } from "./dom.js";

let bindings = new Map();

/** {"j": ["Next rollout", action]}: replaces those of the page before. */
export function setKeys(keys = {}) {
  bindings = new Map(Object.entries(keys));
}

export function listen(always) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if (document.querySelector("dialog[open]")) return;
    const [, action] = bindings.get(event.key) ?? always[event.key] ?? [];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

/** What the keys do, for the help. */
export function keyHelp(always) {
  const rows = [...bindings, ...Object.entries(always)];
  return h(
    "dl.keys",
    rows.map(([key, [label]]) => [h("dt", h("kbd", KEY_NAMES[key] ?? key)), h("dd", label)]),
  );
}

const KEY_NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓" };

function isTyping(target) {
  return target instanceof HTMLElement && target.closest("input, textarea, select, [contenteditable]") !== null;
}
