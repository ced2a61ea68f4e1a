/* What can be done with a run: stop, resume, delete; those that are possible now. */

import { address, runPath, send } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { go } from "../lib/router.js";
import { icon } from "./icons.js";
import { confirmed, openDialog, run as runAction, toast } from "./dialog.js";

/** `onChange` gets the run's new summary. */
export function runActions(run, onChange) {
  const change = async (name, body, message) => {
    const answer = await send(runPath(run.id, name), body);
    toast(message);
    onChange(answer.run);
  };
  const stop = () => change("stop", {}, "Stopping: the step in progress is finished first.");
  const resume = async () => {
    const body = run.state === "completed" ? await moreSteps(run) : {};
    if (body) await change("resume", body, "Going on from the newest checkpoint.");
  };
  const remove = async () => {
    const sentence = `This removes its folder with all rollouts and checkpoints: ${run.folder}`;
    if (!(await confirmed(`Delete ${run.name}?`, sentence, "Delete"))) return;
    await send(runPath(run.id), {}, "DELETE");
    toast(`Deleted ${run.name}.`);
    go(["runs"]);
  };
  const button = (label, action, kind = "") => {
    const onclick = (event) => runAction(event.currentTarget, action);
    return h(`button${kind}`, { type: "button", onclick }, label);
  };
  const buttons = {
    stop: () => button("Stop", stop),
    resume: () => (run.state === "completed" ? button("Train on", resume) : button("Resume", resume, ".primary")),
    delete: () => button("Delete", remove, ".danger"),
  };
  const page = h("a.button", { href: address(`${runPath(run.id)}/export.html`), download: "" }, icon("download"), "Run as HTML");
  const possible = Object.keys(buttons).filter((name) => run.actions.includes(name));
  return [page, ...possible.map((name) => buttons[name]())];
}

/** A run that has all its steps goes on only if it is given more. */
async function moreSteps(run) {
  const steps = h("input", { id: "more-steps", type: "number", min: run.step + 1, value: 2 * run.step });
  const field = h("div.field", h("label", { for: "more-steps" }, "Steps in total"), steps);
  const choices = [
    ["Cancel", ""],
    ["Train on", "yes", "primary"],
  ];
  const answer = await openDialog(`Train ${run.name} on`, field, choices);
  return answer === "yes" ? { max_steps: Number(steps.value) } : null;
}
