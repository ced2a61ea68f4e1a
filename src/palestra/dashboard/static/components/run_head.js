/* The head of every page of a run: its name and state, what can be done with it, and the tabs. */

import { get, send } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { go, link, refresh } from "../lib/router.js";
import { confirmed, run as runAction, toast } from "./dialog.js";
import { pageHead, statusPill } from "./parts.js";

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

/** The path of a route of one run. */
export const runPath = (id, ...rest) => ["runs", id, ...rest].map((part) => encodeURIComponent(part)).join("/");

export const getRun = (id, signal) => get(runPath(id), {}, signal);

/** `onChange` is called with the run's new summary after stop and resume. */
export function runHead(run, tab, { onChange = refresh } = {}) {
  const head = pageHead(run.name, {
    crumbs: [["Runs", link(["runs"])]],
    lead: h(
      "span.row",
      statusPill(run.state),
      h("span", run.environment),
      h("code", run.model),
      run.source !== "palestra" && h("span.pill", run.source),
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
      name === "cheating" && run.alarms ? [" ", h("span.pill.bad", String(run.alarms))] : null,
    ),
  );
  return [head, h("nav.tabs", { "aria-label": "Pages of this run" }, tabs)];
}

export function runActions(run, onChange) {
  const post = (name, message) => (event) =>
    runAction(event.currentTarget, async () => {
      const answer = await send(runPath(run.id, name));
      toast(message);
      onChange(answer.run);
    });
  const remove = async (event) => {
    const button = event.currentTarget;
    if (
      !(await confirmed(
        `Delete ${run.name}?`,
        `This removes its folder with all rollouts and checkpoints: ${run.folder}`,
        "Delete",
      ))
    )
      return;
    await runAction(button, async () => {
      await send(runPath(run.id), {}, "DELETE");
      toast(`Deleted ${run.name}.`);
      go(["runs"]);
    });
  };
  const buttons = {
    stop: () =>
      h(
        "button",
        { type: "button", onclick: post("stop", "Stopping: the step that is under way is finished first.") },
        "Stop",
      ),
    resume: () =>
      h(
        "button.primary",
        { type: "button", onclick: post("resume", "Going on from the newest checkpoint.") },
        "Resume",
      ),
    chat: () => h("a.button", { href: link(["chat"], { run: run.id }) }, "Chat"),
    delete: () => h("button.danger", { type: "button", onclick: remove }, "Delete"),
  };
  return Object.keys(buttons)
    .filter((name) => run.actions.includes(name))
    .map((name) => buttons[name]());
}
