/* The frame: which page the address names, the bar on top, keys that work everywhere. */

import { icon } from "./components/icons.js";
import { openDialog } from "./components/dialog.js";
import { loading, notice, pageHead } from "./components/parts.js";
import { h, replace } from "./lib/dom.js";
import { keyHelp, listen, setKeys } from "./lib/keys.js";
import { go, link, place } from "./lib/router.js";
import { status } from "./lib/status.js";
import { applyTheme, nextTheme, theme } from "./lib/theme.js";

// A pattern's ":" parts are handed to the page by position.
const PAGES = [
  ["", () => import("./pages/runs.js")],
  ["runs", () => import("./pages/runs.js")],
  ["start", () => import("./pages/start.js")],
  ["environments", () => import("./pages/environments.js")],
  ["environments/:", () => import("./pages/environment.js")],
  ["runs/:", () => import("./pages/run.js")],
  ["runs/:/rollouts", () => import("./pages/rollouts.js")],
  ["runs/:/rollouts/:", () => import("./pages/rollout.js")],
  ["runs/:/groups/:", () => import("./pages/group.js")],
  ["runs/:/problems", () => import("./pages/problems.js")],
  ["runs/:/problems/:", () => import("./pages/problem.js")],
  ["runs/:/cheating", () => import("./pages/cheating.js")],
  ["runs/:/evaluations", () => import("./pages/evaluations.js")],
  ["runs/:/rescore", () => import("./pages/rescore.js")],
  ["runs/:/checkpoints", () => import("./pages/checkpoints.js")],
  ["runs/:/logs", () => import("./pages/logs.js")],
  ["runs/:/config", () => import("./pages/config.js")],
];
const SECTIONS = [
  ["runs", "Runs"],
  ["environments", "Environments"],
];
const SECTION_OF = { undefined: "runs", start: "runs" };
const KEYS = {
  "?": ["Show these keys", () => openDialog("Keys", keyHelp(KEYS), [["Close", ""]])],
  g: ["Go to the runs", () => go(["runs"])],
  n: ["Start a new run", () => go(["start"])],
  t: ["Light, dark, or as the system says", () => switchTheme()],
};

const main = document.getElementById("main");
let visit = new AbortController(); // ends when the user leaves the page: its requests and event streams end with it

async function open() {
  visit.abort();
  visit = new AbortController();
  const { signal } = visit;
  const { parts, query } = place();
  const { hash } = location;
  setKeys();
  const wait = setTimeout(() => replace(main, loading()), 150); // a quick page does not flash
  try {
    drawTop(SECTION_OF[parts[0]] ?? parts[0], await status());
    const [load, names] = find(parts);
    const page = await load();
    const nodes = await page.show({ names, query, signal });
    if (!signal.aborted) replace(main, nodes);
  } catch (error) {
    if (!signal.aborted) replace(main, pageHead("This page cannot be shown"), notice("bad", error.message));
  } finally {
    clearTimeout(wait);
    if (!signal.aborted) main.dataset.shown = hash; // tests wait for it
  }
}

function find(parts) {
  for (const [pattern, load] of PAGES) {
    const wanted = pattern.split("/").filter(Boolean);
    if (wanted.length === parts.length && wanted.every((part, i) => part === ":" || part === parts[i])) {
      return [load, parts.filter((_, i) => wanted[i] === ":")];
    }
  }
  throw new Error(`There is no page "${parts.join("/")}".`);
}

function drawTop(current, { can_start }) {
  const sections = can_start ? SECTIONS : SECTIONS.slice(0, 1); // a viewer that starts nothing has only runs
  const links = sections.map(([name, label]) =>
    h("a", { href: link([name]), "aria-current": name === current ? "page" : null }, label),
  );
  replace(
    document.getElementById("top"),
    h("a.brand", { href: link(["runs"]), "aria-label": "Palestra" }, icon("brand", 22), h("span", "Palestra")),
    h("nav", { "aria-label": "Sections" }, links),
    h(
      "button.quiet",
      {
        type: "button",
        id: "theme",
        "aria-label": `Theme: ${theme()}`,
        title: `Theme: ${theme()}`,
        onclick: switchTheme,
      },
      themeIcon(),
    ),
    h(
      "button.quiet",
      { type: "button", "aria-label": "Keys", title: "Keys (?)", onclick: KEYS["?"][1] },
      icon("help", 18),
    ),
  );
}

const themeIcon = () => icon({ auto: "auto", light: "sun", dark: "moon" }[theme()], 18);

function switchTheme() {
  const choice = nextTheme();
  const button = document.getElementById("theme");
  button.setAttribute("aria-label", `Theme: ${choice}`);
  replace(button, themeIcon());
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the page's address
  main.focus();
});
addEventListener("unhandledrejection", (event) => {
  if (event.reason?.name === "AbortError") event.preventDefault(); // the page was left: nobody waits for its requests
});
addEventListener("hashchange", () => {
  open().then(() => scrollTo(0, 0));
});
applyTheme();
listen(KEYS);
open();
