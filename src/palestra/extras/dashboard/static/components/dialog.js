/* Questions, help and short messages. */

import { h } from "../lib/dom.js";

/** Opens a dialog; resolves to the value of the button that closed it, or "" for Escape. */
export function openDialog(title, body, buttons) {
  return new Promise((resolve) => {
    const id = `dialog-${Date.now()}`;
    const actions = buttons.map(([label, value, kind = ""]) =>
      h(`button${kind && "." + kind}`, { type: "button", onclick: () => dialog.close(value) }, label),
    );
    const dialog = h("dialog", { "aria-labelledby": id }, h("h2", { id }, title), body, h("div.actions", actions));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Whether the user agrees. */
export async function confirmed(title, sentence, action, kind = "danger") {
  const answer = await openDialog(title, h("p", sentence), [
    ["Cancel", ""],
    [action, "yes", kind],
  ]);
  return answer === "yes";
}

export function toast(message, kind = "") {
  const element = h(`div.toast${kind && "." + kind}`, message);
  document.getElementById("toasts").append(element);
  setTimeout(() => element.remove(), kind === "bad" ? 9000 : 4000);
}

/** Runs an action of a button: the button rests meanwhile, and an error is told. */
export async function run(button, action) {
  button.disabled = true;
  try {
    return await action();
  } catch (error) {
    toast(error.message, "bad");
  } finally {
    button.disabled = false;
  }
}
