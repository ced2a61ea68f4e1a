/* The head of every page of a run: its name and state, what can be done with it, and the tabs. */

import { get, runPath } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { link, refresh } from "../lib/router.js";
import { pageHead, statusPill } from "./parts.js";
import { runActions } from "./run_actions.js";

const TABS = [
  ["", "Overview"],
  ["rollouts", "Rollouts"],
  ["problems", "Problems"],
  ["cheating", "Is it cheating?"],
  ["evaluations", "Evaluations"],
  ["rescore", "Re-score"],
  ["checkpoints", "Checkpoints"],
  ["logs", "Logs"],
  ["config", "Config"],
];

export const getRun = (id, signal) => get(runPath(id), {}, signal);

/** `onChange` is called with the run's new summary after stop and resume. */
export function runHead(run, tab, { onChange = refresh } = {}) {
  const head = pageHead(run.name, {
    crumbs: [["Runs", link(["runs"])]],
    lead: h(
      "span.row",
      statusPill(run.state),
      h("span", run.environment),
      run.model && h("code", run.model),
      h("span.soft.mono", run.id),
    ),
    actions: runActions(run, onChange),
  });
  if (run.reason) head.querySelector(".lead").append(h("p.bad.small.break", run.reason));
  const tabs = TABS.map(([name, label]) =>
    h(
      "a",
      { href: link(["runs", run.id, ...(name ? [name] : [])]), "aria-current": name === tab ? "page" : null },
      label,
      name === "cheating" && run.alarms?.length ? [" ", h("span.pill.bad", run.alarms.length)] : null,
    ),
  );
  const nav = h("nav.tabs", { "aria-label": "Pages of this run" }, tabs);
  requestAnimationFrame(() => showCurrent(nav)); // when it is on the page
  return [head, nav];
}

/** On a phone the tabs are wider than the screen. */
function showCurrent(nav) {
  const current = nav.querySelector("[aria-current]");
  if (current) nav.scrollLeft = current.offsetLeft - (nav.clientWidth - current.offsetWidth) / 2;
}
